"""
One action on all rows that match a filter, done by a job of ours: pages of PAGE rows.

The changes, their records and the cursor are one transaction per page, so that a run which dies
is taken up where it was, and nothing is done twice. Rows that are alike are moved by one statement.
A page that the database refuses is done again row by row: one bad row stops none of the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth import get_user_model
from django.db import DatabaseError, transaction
from django.db.models import F
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from dedupjobs import (
    FOREVER,
    Snooze,
    clock,
    criteria,
    current_attempt,
    dispatch,
    job,
    journal,
    lifecycle,
    locks,
    operations,
    probes,
)
from dedupjobs.clock import DbNow
from dedupjobs.exceptions import StaleVersion
from dedupjobs.journal import Entry
from dedupjobs.locks import Grip
from dedupjobs.models import BulkOperation, BulkRefusal, Operation, ProcessedJob, Status

PAGE = 500
FEW = 10  # rows that are alike are moved one by one
SLICE = 60.0  # seconds of one attempt; then the next one goes on, and other jobs get their turn
KEPT = timedelta(days=30)  # that an ended bulk operation stays in the tables
READ = (
    *("key", "key_hash", "scope", "name", "queue", "status", "version", "args", "rerun_args"),
    *("max_attempts", "cancel_requested", "hold_requested", "dispatch_id"),
)
"""What is read of a row: its large columns are left in the database."""
IN_USE = gettext_lazy("in use by a transaction of somebody else")

_QUEUE = next(iter(sorted(dispatch.queue_names(), key=lambda name: name != "default")), "default")

PERMISSIONS = {
    "retry": "retry",
    "cancel": "cancel",
    "hold": "hold",
    "unhold": "hold",
    "limit": "retry",
    "purge": "purge",
    "free lock": "free",
}
"""Which permission an action asks for: ``dedupjobs.<this>_processedjob``."""


def start(
    action: str,
    given: Mapping[str, str],
    *,
    user: Any,
    reason: str,
    limit: int | None = None,
) -> BulkOperation:
    """Have an action done to all rows that match now; rows that are made later are left alone."""
    if action not in PERMISSIONS or not reason:
        raise ValueError(f"{action!r} because of {reason!r} is no bulk operation")
    _forget_old()
    with transaction.atomic(using=lifecycle.alias()):
        bulk: BulkOperation = _all().create(
            action=action,
            criteria=json.dumps(criteria.frozen(lifecycle.jobs(), given)),
            by=user.get_username()[:200],
            user_pk=str(user.pk),
            reason=reason,
            limit=limit,
            upto=lifecycle.jobs().order_by("-pk").values_list("pk", flat=True).first() or 0,
            created_at=DbNow(),
        )
        do_in_bulk.enqueue(bulk=bulk.pk)
    return bulk


def stop(bulk: BulkOperation, *, by: str) -> bool:
    """
    End it; a page that is under way is finished first. False: it has ended already.

    Each page locks the bulk operation's row, so this waits for one, and the next finds it ended.
    """
    running = _all().filter(pk=bulk.pk, ended_at=None)
    words = _("stopped by %(by)s") % {"by": by}
    return bool(running.update(stopped_by=by[:200], ended_at=DbNow(), note=words))


def identity_of(bulk: BulkOperation) -> str:
    """Return the hash of the key of the job that does it."""
    return do_in_bulk.identity_of({"bulk": bulk.pk})


def rows_of(bulk: BulkOperation) -> criteria.Rows:
    """Return the rows that a bulk operation is about, as they match at present."""
    given = json.loads(bulk.criteria)
    may = _may(_user(bulk), "arguments")
    rows = lifecycle.jobs().filter(pk__lte=bulk.upto).exclude(name=do_in_bulk.name)
    return criteria.matching(rows, given, arguments=may)


@job(
    name="dedupjobs.bulk",
    key="bulk:{bulk}",
    unique_for=FOREVER,
    queue=_QUEUE,
)
def do_in_bulk(*, bulk: int) -> str:
    """Do pages until all is done, a person stops it, or SLICE is over."""
    until = clock.monotonic() + SLICE
    while clock.monotonic() < until:
        current_attempt().check()
        if ended := page(bulk):
            return ended
    raise Snooze(0, "the next slice goes on")


def page(pk: int) -> str:
    """Do the next page; return how the bulk operation has ended, or "" if it goes on."""
    bulk = _all().filter(pk=pk).first()
    if bulk is None or bulk.ended_at is not None:
        return bulk.note if bulk else "nothing to do"
    if not _may(_user(bulk), PERMISSIONS[bulk.action]):
        words = _("%(by)s may not %(action)s any more")
        return _end(bulk, words % {"by": bulk.by, "action": bulk.action})
    if bulk.total is None:
        bulk.total = rows_of(bulk).count()
        _all().filter(pk=pk).update(total=bulk.total)
    behind = rows_of(bulk).filter(pk__gt=bulk.cursor).order_by("pk")
    pks = list(behind.values_list("pk", flat=True)[:PAGE])
    if not pks:
        return _end(bulk, _("done"))
    try:
        _do(bulk, pks, one_by_one=False)
    except (DatabaseError, StaleVersion):
        _do(bulk, pks, one_by_one=True)
    probes.reach("bulk.page")
    return ""


@dataclass(slots=True)
class _Written:
    """What a page leaves in the tables besides the changes themselves."""

    at: datetime
    done: list[tuple[ProcessedJob, Status]] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    refusals: list[BulkRefusal] = field(default_factory=list)

    def refuse(self, bulk: BulkOperation, pk: int, words: str) -> None:
        self.refusals.append(BulkRefusal(bulk=bulk, job_pk=pk, words=words))


def _do(bulk: BulkOperation, pks: Sequence[int], *, one_by_one: bool) -> None:
    written = _Written(at=lifecycle.database_now())
    alias = lifecycle.alias()
    with transaction.atomic(using=alias):
        # The guard of the page: two runs of one bulk operation can not both take it.
        mine = _all().filter(pk=bulk.pk, cursor=bulk.cursor, ended_at=None)
        if not mine.update(cursor=pks[-1]):
            return
        chosen = rows_of(bulk).filter(pk__in=pks).order_by("pk")
        free = list(lifecycle.skip_locked(chosen.only(*READ)))
        if len(free) < len(pks):
            there = set(chosen.values_list("pk", flat=True))
            for pk in sorted(there - {row.pk for row in free}):
                written.refuse(bulk, pk, str(IN_USE))
        if bulk.action == "free lock":
            orphans = operations.orphans(free)
            for row in free:
                _free_lock(bulk, row, orphans.get(row.pk), written)
        else:
            moved = set() if one_by_one else _do_alike(bulk, free, written)
            for row in free:
                if row.pk not in moved:
                    _do_one(bulk, row, written, apart=one_by_one)
        Operation.objects.using(alias).bulk_create(written.operations)
        BulkRefusal.objects.using(alias).bulk_create(written.refusals)
        journal.write(bulk.user_pk, written.entries)
        operations.tell_all(bulk.action, written.done, bulk.by)
        _all().filter(pk=bulk.pk).update(
            changed=F("changed") + len(written.done),
            refused=F("refused") + len(written.refusals),
        )


def _do_alike(bulk: BulkOperation, rows: Sequence[ProcessedJob], written: _Written) -> set[int]:
    """Move many rows by few statements, and return which; raises StaleVersion as they do."""
    moved: set[int] = set()
    for group in operations.alike(bulk.action, rows, bulk.limit).values():
        if len(group) > FEW:
            after = operations.move_alike(
                bulk.action, group, by=bulk.by, reason=bulk.reason, limit=bulk.limit
            )
            _note_alike(bulk, group, after, written)
            moved.update(row.pk for row in group)
    return moved


def _note_alike(
    bulk: BulkOperation, rows: Sequence[ProcessedJob], after: Status, written: _Written
) -> None:
    """As _note, for rows that were moved by one statement."""
    operations.record_alike(rows, _record(bulk, rows[0], after, written))
    words = _line(bulk, rows[0], after)
    theirs = lifecycle.jobs().filter(pk__in=[row.pk for row in rows]).order_by("pk")
    if not journal.write_alike(bulk.user_pk, theirs, words):
        written.entries += [Entry(row=row, words=words) for row in rows]
    for row in rows:
        _done(bulk, row, after, written)


def _do_one(bulk: BulkOperation, row: ProcessedJob, written: _Written, *, apart: bool) -> None:
    action, by = bulk.action, bulk.by
    after = None
    if operations.applies(action, row):
        try:
            # Without ``apart`` an error is the page's, which is then done again.
            with transaction.atomic(using=lifecycle.alias(), savepoint=apart):
                after = operations.move(action, row, by=by, reason=bulk.reason, limit=bulk.limit)
        except DatabaseError as error:
            if not apart:
                raise
            written.refuse(bulk, row.pk, f"{type(error).__name__}: {error}"[:2_000])
            return
    if after is None:
        written.refuse(bulk, row.pk, operations.why_not(action, row, bulk.limit))
        return
    _note(bulk, row, after, written)


def _free_lock(
    bulk: BulkOperation, row: ProcessedJob, owner: str | None, written: _Written
) -> None:
    if owner is None:
        written.refuse(bulk, row.pk, _("it has no orphaned lock"))
    elif locks.release(row.pk, owner) is Grip.HELD:
        _note(bulk, row, Status(row.status), written)
    else:
        written.refuse(bulk, row.pk, _("its lock changed hands, or Redis can not be reached"))


def _note(bulk: BulkOperation, row: ProcessedJob, after: Status, written: _Written) -> None:
    action = bulk.action
    gone = action == "purge" and not lifecycle.jobs().filter(pk=row.pk).exists()
    if not gone:
        written.operations.append(_record(bulk, row, after, written))
    written.entries.append(Entry(row=row, words=_line(bulk, row, after), gone=gone))
    _done(bulk, row, after, written)


def _record(bulk: BulkOperation, row: ProcessedJob, after: Status, written: _Written) -> Operation:
    facts = {"by": bulk.by, "reason": bulk.reason}
    made = operations.record(bulk.action, row, after, **facts, at=written.at)
    made.bulk = bulk
    return made


def _line(bulk: BulkOperation, row: ProcessedJob, after: Status) -> str:
    return journal.line(bulk.action, row.status, after, f"{bulk.reason} (bulk {bulk.pk})")


def _done(bulk: BulkOperation, row: ProcessedJob, after: Status, written: _Written) -> None:
    written.done.append((row, after))
    if after == Status.CANCELLED and bulk.action == "cancel":
        operations.free_message(row)


def _end(bulk: BulkOperation, words: str) -> str:
    _all().filter(pk=bulk.pk, ended_at=None).update(ended_at=DbNow(), note=words)
    return words


def _forget_old() -> None:
    old = _all().filter(ended_at__lt=DbNow(-KEPT)).values_list("pk", flat=True)
    _all().filter(pk__in=list(old[:100])).delete()


def _user(bulk: BulkOperation) -> Any:
    return get_user_model()._default_manager.filter(pk=bulk.user_pk).first()


def _may(user: Any, what: str) -> bool:
    active = user is not None and user.is_active and user.is_staff
    return bool(active and user.has_perm(f"dedupjobs.{what}_processedjob"))


def _all() -> Any:
    return BulkOperation._base_manager.using(lifecycle.alias())
