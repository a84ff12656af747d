"""
What a person does to a job. Each act is guarded by the row's version that the person looked at,
and leaves an ``Operation`` that says who and why.

cancel, hold, unhold, retry, limit, purge change the row, decide says how a step of it ended;
reclaim, send_again, put_back, free, forget and uncache heal what has drifted from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import F
from django.utils.translation import gettext as _

from dedupjobs import controls, dispatch, invalidation, lifecycle, locks, signals
from dedupjobs.clock import DbNow
from dedupjobs.dispatch import Delivery
from dedupjobs.exceptions import StaleVersion
from dedupjobs.lifecycle import Change, Lost
from dedupjobs.locks import Grip
from dedupjobs.models import FINAL, WAITING, Operation, ProcessedJob, Status

DROPPED = "a waiting rerun was dropped"
HIGHEST_LIMIT = 1_000_000


def cancel(row: ProcessedJob, *, by: str, reason: str = "") -> Status:
    """
    Cancel a waiting or held job at once, and free its key, lock and message.

    A RUNNING job is asked to stop, and does so at its next check, or when its attempt ends
    without a success; the answer is RUNNING then.
    """
    newest = lifecycle.jobs().filter(pk=row.pk).values_list("queue", "dispatch_id").first()
    status = _act("cancel", row, by, reason, _arrow("cancel", row, by, reason))
    if status == Status.CANCELLED:
        _after_commit(lambda: _free(row.pk, newest))
    return status


def hold(row: ProcessedJob, *, by: str, reason: str = "") -> Status:
    """Keep a waiting job from running until ``unhold``; a RUNNING one is asked to stop there."""
    return _act("hold", row, by, reason, _arrow("hold", row, by, reason))


def unhold(row: ProcessedJob, *, by: str, reason: str = "") -> Status:
    """Let a held job run now, with fresh budgets."""
    return _send(_act("unhold", row, by, reason, _arrow("unhold", row, by, reason)), row)


def retry(row: ProcessedJob, *, by: str, reason: str = "") -> Status:
    """Run a dead, cancelled or waiting job now, in the same generation, with fresh budgets."""
    return _send(_act("retry", row, by, reason, _arrow("retry", row, by, reason)), row)


def limit(row: ProcessedJob, *, by: str, reason: str = "", limit: int) -> Status:
    """Let this job fail up to ``limit`` times, more than its decorator or an earlier limit says."""
    if not raises(row, limit):
        raise StaleVersion(_no_raise(row))
    return _act("limit", row, by, reason, _arrow("limit", row, by, reason, limit))


def purge(row: ProcessedJob, *, by: str, reason: str = "") -> bool:
    """
    Remove a final row and its attempts; while its key is held, a tombstone stays.

    Return whether the row is gone: then its records are, too.
    """
    _check_by("purge", by)
    with transaction.atomic(using=lifecycle.alias()):
        pruned = lifecycle.purge(row.pk, row.version)
        if pruned is None:
            raise StaleVersion(why_not("purge", row))
        if pruned.tombstones:
            record("purge", row, Status(row.status), by=by, reason=reason).save(
                using=lifecycle.alias(), force_insert=True
            )
    tell("purge", row, Status(row.status), by)
    return bool(pruned.deleted)


# ---- one row of many


def move(
    action: str, row: ProcessedJob, *, by: str, reason: str, limit: int | None = None
) -> Status | None:
    """Make an action's change and no record of it; None: it does not apply, or no more."""
    if action == "purge":
        pruned = lifecycle.purge(row.pk, row.version)
        return Status(row.status) if pruned else None
    return _arrow(action, row, by, reason, limit)()


def alike(
    action: str, rows: Sequence[ProcessedJob], limit: int | None = None
) -> dict[tuple[str, int], list[ProcessedJob]]:
    """Return the rows to which one statement does what their arrows would, by what they share."""
    found: dict[tuple[str, int], list[ProcessedJob]] = {}
    if action in _ALIKE:
        for row in rows:
            fits = limit is None or raises(row, limit)
            if fits and row.rerun_args is None and applies(action, row):
                found.setdefault((row.status, row.version), []).append(row)
    return found


def move_alike(
    action: str, rows: Sequence[ProcessedJob], *, by: str, reason: str, limit: int | None = None
) -> Status:
    """
    Make an action's change to rows that are ``alike``, in one statement, and no record of it.

    Raises StaleVersion if one of them has moved on: the caller rolls back.
    """
    pks, first = [row.pk for row in rows], rows[0]
    if _ALIKE[action](pks, first, _words(by, reason), limit or 0) != len(pks):
        raise StaleVersion(f"{action}: of {len(pks)} rows some have changed")
    status = Status(first.status)
    return status if status == Status.RUNNING else _AFTER.get(action, status)


def _words(by: str, reason: str) -> str:
    return f"by {by}: {reason}" if reason else f"by {by}"


_ALIKE: dict[str, Callable[[list[int], ProcessedJob, str, int], int]] = {
    "cancel": lambda pks, row, words, _most: lifecycle.cancel_alike(
        pks, row.version, f"cancelled {words}"
    ),
    "hold": lambda pks, row, words, _most: lifecycle.hold_alike(pks, row.version, f"held {words}"),
    "unhold": lambda pks, row, _words, _most: lifecycle.unhold_alike(pks, row.version),
    "retry": lambda pks, row, _words, _most: lifecycle.retry_alike(pks, row.version),
    "limit": lambda pks, row, _words, most: lifecycle.limit_alike(
        pks, row.version, most, row.status
    ),
}
_AFTER = {
    "cancel": Status.CANCELLED,
    "hold": Status.HELD,
    "unhold": Status.PENDING,
    "retry": Status.PENDING,
}


def record(
    action: str,
    row: ProcessedJob,
    after: Status,
    *,
    by: str,
    reason: str,
    at: datetime | None = None,
) -> Operation:
    """Return the unsaved record of a change; ``at``: where many rows share one moment."""
    return Operation(
        job_id=row.pk,
        action=action,
        by=by[:200],
        reason=_named(row, reason) if action == "cancel" else reason,
        before=row.status,
        after=after,
        at=at or DbNow(),
    )


def record_alike(rows: Sequence[ProcessedJob], like: Operation) -> None:
    """Save the records of one change of many rows by one statement; ``like``: one of them."""
    lifecycle.insert_for_each(
        lifecycle.jobs().filter(pk__in=[row.pk for row in rows]).order_by("pk"),
        Operation,
        job=F("pk"),
        action=like.action,
        by=like.by,
        reason=like.reason,
        before=like.before,
        after=like.after,
        at=like.at,
        bulk=like.bulk_id,
    )


def tell(action: str, row: ProcessedJob, after: Status, by: str) -> None:
    """Say after the commit what was done."""
    tell_all(action, [(row, after)], by)


def tell_all(action: str, done: Sequence[tuple[ProcessedJob, Status]], by: str) -> None:
    """Say after the commit what was done to many rows; the changes of one job in one go."""
    changes: dict[str, list[Change]] = {}
    for row, after in done:
        change = Change.of(row, after, version=row.version + 1)
        changes.setdefault(row.name, []).append(change)

    def say() -> None:
        for row, after in done:
            facts: dict[str, Any] = {"job_pk": row.pk, "action": action, "by": by, "after": after}
            signals.tell(signals.operated, row.name, **facts)
        for name, theirs in changes.items():
            signals.tell(signals.job_changed, name, changes=theirs)

    if done:
        _after_commit(say)


def free_message(row: ProcessedJob) -> None:
    """Free the message and the lock of a job that was cancelled, after the commit."""
    _after_commit(lambda: _free(row.pk, (row.queue, row.dispatch_id)))


def why_not(action: str, row: ProcessedJob, limit: int | None = None) -> str:
    """Return why an action changed nothing."""
    if limit is not None and not raises(row, limit):
        return _no_raise(row)
    now = lifecycle.jobs().filter(pk=row.pk).first()
    facts = {"action": action, "pk": row.pk, "then": row.status, "now": now and now.status}
    if now is None:
        words = _("%(action)s: row %(pk)s is gone")
    elif now.version != row.version:
        words = _(
            "%(action)s: row %(pk)s has changed since it was looked at (then %(then)s, now "
            "%(now)s); look again"
        )
    elif now.is_tombstone:
        words = _("%(action)s: row %(pk)s has lost its arguments by pruning; enqueue it again")
    else:
        words = _("%(action)s: row %(pk)s is %(now)s, which %(action)s does not apply to")
    return words % facts


# ---- healing


def reclaim(
    row: ProcessedJob, *, seen: datetime, still: float, by: str, reason: str = ""
) -> Status | None:
    """
    Take the job of an attempt whose lease has expired, as the coordinator would.

    ``seen``: the beat that the person looked at. ``still``: for how many seconds it stood still
    by another clock than the database's; less than a third of the lease is not enough.
    """
    open_one = lifecycle.attempts().filter(job_id=row.pk, outcome=None).last()
    if open_one is None:
        words = _("reclaim: row %(pk)s has no open attempt any more")
        raise StaleVersion(words % {"pk": row.pk})
    needed = (open_one.lease_until - open_one.beat_at).total_seconds() / 3
    if still < needed:
        words = _(
            "reclaim: the last beat was watched for %(still)s s only; look again in %(left)s s"
        )
        raise StaleVersion(words % {"still": int(still), "left": math.ceil(needed - still)})
    lost: list[Lost | None] = []

    def arrow() -> Status | None:
        words = f"lost: taken by {by}"
        if not lifecycle.jobs().filter(pk=row.pk, version=row.version).exists():
            return None
        lost.append(lifecycle.reclaim(open_one.pk, beat_at=seen, ahead_of=None, reason=words))
        return lost[0].status if lost[0] else None

    after = _act("reclaim", row, by, reason, arrow)
    locks.release(row.pk, open_one.owner)
    return after


def send_again(row: ProcessedJob, *, by: str, reason: str = "") -> Status:
    """Give a waiting, due row a new message; the old one, if it still comes, is dropped."""
    sent: list[str] = []

    def arrow() -> Status | None:
        sent_as = lifecycle.mark_sent(row.pk, row.version, row.dispatch_id)
        if sent_as is None:
            return None
        sent.append(sent_as)
        return Status(row.status)

    after = _act("send again", row, by, reason, arrow)
    dispatch.push_on_commit([Delivery.of(row, sent[0])])
    if row.dispatch_id:
        _after_commit(lambda: _remove(row.queue, row.dispatch_id or ""))
    return after


def decide(
    row: ProcessedJob, name: str, *, result: str | None, by: str, reason: str = ""
) -> Status:
    """
    Note of a step in doubt that it was done, or not; the job stays as it is.

    ``result``: what the step will answer, as JSON; None: it was not done, and will be run.
    """
    found = _("done") if result is not None else _("not done")
    words = f"{found} {_words(by, reason)}"

    def arrow() -> Status | None:
        return lifecycle.decide_step(row.pk, row.version, name, result=result, words=words)

    told = f"{name}: {found}; {reason}".removesuffix("; ")
    try:
        return _act("step", row, by, told, arrow)
    except StaleVersion as error:
        if not _is_as_seen(row):
            raise
        words = _("row %(pk)s has no step %(name)s in doubt that could be decided now")
        raise StaleVersion(words % {"pk": row.pk, "name": repr(name)}) from error


def put_back(row: ProcessedJob, *, by: str, reason: str = "") -> Status:
    """Give the lock to the attempt that runs, for what is left of its lease."""
    attempt: Any = (
        lifecycle.attempts()
        .filter(job_id=row.pk, outcome=None)
        .annotate(db_now=DbNow())
        .filter(lease_until__gt=DbNow())
        .last()
    )

    def arrow() -> Status | None:
        if attempt is None or not _is_as_seen(row):
            return None
        left = (attempt.lease_until - attempt.db_now).total_seconds()
        return _reached(row, locks.replace(row.pk, attempt.owner, ttl=left))

    return _act("put back", row, by, reason, arrow)


def free(row: ProcessedJob, *, owner: str, by: str, reason: str = "") -> Status:
    """Free the lock that ``owner`` has left behind; one that changed hands is left alone."""
    at_work = lifecycle.attempts().filter(job_id=row.pk, outcome=None, owner=owner)

    def arrow() -> Status | None:
        if not _is_as_seen(row) or at_work.exists():
            return None
        return _reached(row, locks.release(row.pk, owner))

    return _act("free lock", row, by, reason, arrow)


def forget(row: ProcessedJob, *, by: str, reason: str = "") -> Status:
    """Remove what RQ keeps of a message that this row does not wait for; raises RedisError."""

    def arrow() -> Status | None:
        if not _is_as_seen(row) or not row.dispatch_id or _is_waited_for(row.dispatch_id):
            return None
        dispatch.forget(row.queue, row.dispatch_id)
        return Status(row.status)

    return _act("forget", row, by, reason, arrow)


def uncache(row: ProcessedJob, *, by: str, reason: str = "") -> Status:
    """Make all processes forget what the status cache says of this row."""

    def arrow() -> Status | None:
        if not _is_as_seen(row):
            return None
        changes = [Change.of(row, row.status, version=row.version + 1)]
        reached = invalidation.announce(changes, patient=True)
        return _reached(row, Grip.UNREACHABLE if reached.owed else Grip.HELD)

    return _act("uncache", row, by, reason, arrow)


def raises(row: ProcessedJob, limit: int) -> bool:
    """Return whether ``limit`` is more than the job may fail at present."""
    return limit > limit_of(row)


def limit_of(row: ProcessedJob) -> int:
    """Return how often a job may fail."""
    return row.max_attempts or controls.known().options_of(row.name).max_attempts


def _no_raise(row: ProcessedJob) -> str:
    words = _("limit: row %(pk)s may fail %(limit)s times already")
    return words % {"pk": row.pk, "limit": limit_of(row)}


FROM: dict[str, tuple[Status, ...]] = {
    "retry": (Status.DEAD, Status.CANCELLED, Status.RETRYING, Status.HELD),
    "cancel": (*WAITING, Status.HELD, Status.RUNNING),
    "hold": (*WAITING, Status.RUNNING),
    "unhold": (Status.HELD,),
    "limit": (*WAITING, Status.RUNNING, Status.HELD, Status.DEAD),
    "purge": FINAL,
}
"""The statuses that an action makes sense for."""


def applies(action: str, row: ProcessedJob) -> bool:
    """Return whether an action makes sense for a row in its present state."""
    if row.status not in FROM[action]:
        return False
    if action in ("retry", "unhold", "purge"):
        return not row.is_tombstone
    asked = {"cancel": row.cancel_requested, "hold": row.hold_requested}
    return row.status != Status.RUNNING or not asked.get(action, False)


def orphans(rows: Sequence[ProcessedJob]) -> dict[int, str]:
    """Return by row the owner of a lock that nobody is at work under; raises what Redis raises."""
    found = locks.seen([row.pk for row in rows])
    mine = lifecycle.attempts().filter(
        job_id__in=found, owner__in=[s.owner for s in found.values()]
    )
    working = set(mine.filter(outcome=None).values_list("job_id", flat=True))
    # After a failure the lock stays until the retry is due.
    paused = lifecycle.jobs().filter(status=Status.RETRYING, run_after__gt=DbNow())
    working |= set(mine.filter(job__in=paused).values_list("job_id", flat=True))
    return {pk: lock.owner for pk, lock in found.items() if pk not in working}


# ---- how


def _arrow(
    action: str, row: ProcessedJob, by: str, reason: str, most: int | None = None
) -> Callable[[], Status | None]:
    pk, version, words = row.pk, row.version, _words(by, reason)
    match action:
        case "cancel":
            return lambda: lifecycle.cancel(pk, version, f"cancelled {words}")
        case "hold":
            return lambda: lifecycle.hold(pk, version, f"held {words}")
        case "unhold":
            return lambda: lifecycle.unhold(pk, version)
        case "retry":
            return lambda: lifecycle.retry(pk, version)
        case "limit" if most and 0 < most <= HIGHEST_LIMIT:
            return lambda: lifecycle.limit(pk, version, most) if raises(row, most) else None
    raise ValueError(f"{action!r} with limit {most!r} is no action")


def _act(
    action: str, row: ProcessedJob, by: str, reason: str, arrow: Callable[[], Status | None]
) -> Status:
    _check_by(action, by)
    with transaction.atomic(using=lifecycle.alias()):
        after = arrow()
        if after is None:
            raise StaleVersion(why_not(action, row))
        made = record(action, row, after, by=by, reason=reason)
        made.save(using=lifecycle.alias(), force_insert=True)
    tell(action, row, after, by)
    return after


def _check_by(action: str, by: str) -> None:
    if not by:
        raise ValueError(f"{action}: by='' names nobody; say who does it")


def _named(row: ProcessedJob, reason: str) -> str:
    """Return the reason of a cancel, which names the rerun that it drops."""
    return reason if row.rerun_args is None else f"{reason}; {DROPPED}".removeprefix("; ")


def _is_as_seen(row: ProcessedJob) -> bool:
    return lifecycle.jobs().filter(pk=row.pk, version=row.version).exists()


def _reached(row: ProcessedJob, grip: Grip) -> Status | None:
    if grip is Grip.UNREACHABLE:
        words = _("row %(pk)s: Redis can not be reached; nothing was changed")
        raise StaleVersion(words % {"pk": row.pk})
    return Status(row.status) if grip is Grip.HELD else None


def _send(status: Status, row: ProcessedJob) -> Status:
    """Hand the row over after the commit, instead of at the coordinator's next tick."""
    fresh = lifecycle.jobs().get(pk=row.pk)
    if fresh.run_after > lifecycle.database_now():
        return status  # a debounced rerun: the coordinator hands it over in time
    sent_as = lifecycle.mark_sent(fresh.pk, fresh.version, fresh.dispatch_id)
    if sent_as is not None:
        dispatch.push_on_commit([Delivery.of(fresh, sent_as)])
    return status


def _free(pk: int, message: tuple[str, str | None] | None) -> None:
    queue, dispatch_id = message or ("", None)
    if dispatch_id:
        _remove(queue, dispatch_id)
    locks.clear(pk)


def _remove(queue: str, dispatch_id: str) -> None:
    """Take a message out of its queue, unless other rows wait for it, too."""
    if not _is_waited_for(dispatch_id):
        dispatch.remove(queue, dispatch_id)


def _is_waited_for(dispatch_id: str) -> bool:
    waiting = lifecycle.jobs().filter(dispatch_id=dispatch_id, status__in=WAITING)
    return waiting.exists()


def _after_commit(act: Callable[[], Any]) -> None:
    def act_after_commit() -> None:
        act()

    transaction.on_commit(act_after_commit, using=lifecycle.alias(), robust=True)
