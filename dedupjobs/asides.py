"""
Rows that may not run yet: set aside without a message, and recalled once they may.

Whoever frees room recalls the next row; a worker that has set one aside looks again, since room
may have been freed between its count and its write. The coordinator's ``sweep`` is the net below:
it lets go whatever no longer has a reason to wait, and so ends a pause at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dedupjobs import controls, dispatch, lifecycle, signals
from dedupjobs.dispatch import Delivery
from dedupjobs.lifecycle import Claim, Refusal

MOST_MARKS = 200  # that one sweep looks at
MOST_AT_ONCE = 1_000  # rows that are recalled where no limit is left
PATIENCE = 5.0  # seconds that a push may take: no request waits for it
COLUMNS = ("pk", "version", "generation", "name", "queue", "dispatch_id", "args", "run_after")


def put(pk: int, generation: int, refusal: Refusal) -> bool:
    """Set a row aside whose claim was refused; False: another message of it is on its way."""
    sent_as = refusal.sent_as
    if not lifecycle.set_aside(pk, generation, sent_as=sent_as, mark=refusal.mark):
        return False
    signals.tell(signals.set_aside, refusal.name, job_pk=pk, words=refusal.words)
    row = lifecycle.jobs().filter(pk=pk).only(*COLUMNS).first()
    if row is not None and row.dispatch_id == refusal.mark and controls.refusal_of(row) is None:
        _send([row])  # what stood in its way has gone meanwhile
    return True


def freed(claim: Claim) -> int:
    """An attempt has ended: recall one row for each limit that it counted against."""
    limits = controls.known().limits(claim.name, claim.args)
    return sum(recall(limit.mark, 1) for limit in limits)


def recall(mark: str, most: int) -> int:
    """Give the oldest rows that wait under a mark a message; return how many got one."""
    return _send(lifecycle.aside(mark).only(*COLUMNS)[:most])


def sweep(*, rooms: bool, most: int) -> int:
    """
    Let rows go whose reason to wait is over, ``most`` of each; return how many.

    ``rooms``: also look for room in groups, which costs a count each. Those rows get a message;
    what was paused is left to the hand-over that follows.
    """
    let_go = 0
    in_force = {controls.pause_mark(str(rule.pk)) for rule in controls.known().rules}
    for mark in lifecycle.marks(most=MOST_MARKS):
        if mark in in_force:
            continue
        row = lifecycle.aside(mark).only(*COLUMNS).first()
        if row is None:
            lifecycle.forget_mark(mark)
        elif mark.startswith(controls.pause_mark("")):
            let_go += lifecycle.release(mark, most=most)
        elif rooms:
            let_go += recall(mark, min(_room_for(row), most))
    if let_go:
        signals.tell(signals.recalled, "", count=let_go)
    return let_go


def _room_for(row: Any) -> int:
    """Return how many rows like this one may start now."""
    if controls.known().pause(row.name, row.queue):
        return 0
    limits = controls.known().limits(row.name, row.args)
    return max(min((limit.room() for limit in limits), default=MOST_AT_ONCE), 0)


def _send(rows: Iterable[Any]) -> int:
    deliveries = []
    for row in rows:
        sent_as = lifecycle.mark_sent(row.pk, row.version, row.dispatch_id)
        if sent_as is not None:
            deliveries.append(Delivery.of(row, sent_as))
    return dispatch.push(deliveries, within=PATIENCE) if deliveries else 0
