"""
What a person does to a job: cancel, hold, unhold, retry. Each is guarded by the row's version
that the person looked at, and leaves an ``Operation`` that says who and why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import transaction

from dedupjobs import dispatch, lifecycle, locks, signals
from dedupjobs.clock import DbNow
from dedupjobs.dispatch import Delivery
from dedupjobs.exceptions import StaleVersion
from dedupjobs.lifecycle import Change
from dedupjobs.models import Operation, ProcessedJob, Status


def cancel(row: ProcessedJob, *, by: str, reason: str = "") -> Status:
    """
    Cancel a waiting or held job at once, and free its key, lock and message.

    A RUNNING job is asked to stop, and does so at its next check, or when its attempt ends
    without a success; the answer is RUNNING then.
    """
    words = f"cancelled by {by}: {reason}" if reason else f"cancelled by {by}"
    if row.rerun_args is not None:
        reason = f"{reason}; a waiting rerun was dropped".removeprefix("; ")
    newest = lifecycle.jobs().filter(pk=row.pk).values_list("queue", "dispatch_id").first()
    status = _act("cancel", row, by, reason, lambda: lifecycle.cancel(row.pk, row.version, words))
    if status == Status.CANCELLED:
        _after_commit(lambda: _free(row.pk, newest))
    return status


def hold(row: ProcessedJob, *, by: str, reason: str = "") -> Status:
    """Keep a waiting job from running until ``unhold``; a RUNNING one is asked to stop there."""
    words = f"held by {by}: {reason}" if reason else f"held by {by}"
    return _act("hold", row, by, reason, lambda: lifecycle.hold(row.pk, row.version, words))


def unhold(row: ProcessedJob, *, by: str, reason: str = "") -> Status:
    """Let a held job run now, with fresh budgets."""
    return _send(
        _act("unhold", row, by, reason, lambda: lifecycle.unhold(row.pk, row.version)), row
    )


def retry(row: ProcessedJob, *, by: str, reason: str = "") -> Status:
    """Run a dead, cancelled or waiting job now, in the same generation, with fresh budgets."""
    return _send(_act("retry", row, by, reason, lambda: lifecycle.retry(row.pk, row.version)), row)


def _act(
    action: str, row: ProcessedJob, by: str, reason: str, arrow: Callable[[], Status | None]
) -> Status:
    if not by:
        raise ValueError(f"{action}: by='' names nobody; say who does it")
    with transaction.atomic(using=lifecycle.alias()):
        after = arrow()
        if after is None:
            raise StaleVersion(_why_not(action, row))
        Operation.objects.using(lifecycle.alias()).create(
            job_id=row.pk,
            action=action,
            by=by[:200],
            reason=reason,
            before=row.status,
            after=after,
            at=DbNow(),
        )
    facts: dict[str, Any] = {"job_pk": row.pk, "action": action, "by": by, "after": after}
    change = Change.of(row, after, version=row.version + 1)

    def tell() -> None:
        signals.tell(signals.operated, row.name, **facts)
        signals.tell(signals.job_changed, row.name, changes=[change])

    _after_commit(tell)
    return after


def _why_not(action: str, row: ProcessedJob) -> str:
    now = lifecycle.jobs().filter(pk=row.pk).first()
    if now is None:
        return f"{action}: row {row.pk} is gone"
    if now.version != row.version:
        return (
            f"{action}: row {row.pk} has changed since it was looked at (then {row.status}, now "
            f"{now.status}); look again"
        )
    if now.is_tombstone:
        return f"{action}: row {row.pk} has lost its arguments by pruning; enqueue it again"
    return f"{action}: row {row.pk} is {now.status}, which {action} does not apply to"


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
        dispatch.remove(queue, dispatch_id)
    locks.clear(pk)


def _after_commit(act: Callable[[], Any]) -> None:
    def act_after_commit() -> None:
        act()

    transaction.on_commit(act_after_commit, using=lifecycle.alias(), robust=True)
