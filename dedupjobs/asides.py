"""
Rows that may not run yet: set aside without a message, and recalled once they may.

Whoever frees room recalls the next row; a worker that has set one aside looks again, since room
may have been freed between its count and its write. The coordinator's ``Sweep`` is the net below:
it lets go whatever no longer has a reason to wait, and so ends a pause at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dedupjobs import clock, controls, dispatch, lifecycle, locks, signals
from dedupjobs.dispatch import Delivery
from dedupjobs.lifecycle import Claim, Refusal

MOST_MARKS = 200  # that one sweep looks at
SPARE = 5  # rows that a recall looks at beside those that it wants
MOST_AT_ONCE = 1_000  # rows that are recalled where no limit is left
PATIENCE = 5.0  # seconds that a push may take: no request waits for it
SOONEST, LATEST = 1.0, 5.0  # seconds between two looks whether locks can be had again, doubling
COLUMNS = ("pk", "version", "generation", "name", "queue", "dispatch_id", "args", "run_after")


def put(pk: int, generation: int, refusal: Refusal) -> bool:
    """Set a row aside whose claim was refused; False: another message of it is on its way."""
    sent_as = refusal.sent_as
    if not lifecycle.set_aside(pk, generation, sent_as=sent_as, mark=refusal.mark):
        return False
    signals.tell(signals.set_aside, refusal.name, job_pk=pk, words=refusal.words)
    row = lifecycle.jobs().filter(pk=pk).only(*COLUMNS).first()
    if row is not None and row.dispatch_id == refusal.mark and _is_over(refusal, row):
        _send([row], 1)
    return True


def _is_over(refusal: Refusal, row: Any) -> bool:
    """Whether what stood in a row's way has gone meanwhile; of locks only the sweep knows."""
    return refusal.mark != lifecycle.NO_LOCKS and controls.refusal_of(row) is None


def freed(claim: Claim) -> int:
    """An attempt has ended: recall one row for each limit that it counted against."""
    limits = controls.known().limits(claim.name, claim.args)
    return sum(recall(limit.mark, 1) for limit in limits)


def recall(mark: str, most: int) -> int:
    """Give the oldest rows that wait under a mark a message; return how many got one."""
    # A few more are looked at: others may be about to recall the same ones.
    rows = lifecycle.aside(mark).only(*COLUMNS)[: most + SPARE] if most > 0 else ()
    return _send(rows, most)


def startable(rows: Sequence[Any]) -> list[Any]:
    """Set those aside that a pause keeps from starting, instead of waking a worker for each."""
    force = controls.known()
    paused: dict[str, list[int]] = defaultdict(list)
    may = []
    for row in rows:
        rule = force.pause(row.name, row.queue)
        if rule is None:
            may.append(row)
        else:
            paused[controls.pause_mark(str(rule.pk))].append(row.pk)
    for mark, pks in paused.items():
        lifecycle.set_aside_unsent(pks, mark)
    return may


@dataclass(slots=True)
class Sweep:
    """The net below all: what has no reason to wait any more is let go."""

    _after: str = lifecycle.ROOM_MARKS
    _again: float = -math.inf  # when to look next whether locks can be had
    _pause: float = SOONEST

    def do(self, *, rooms: bool, most: int) -> int:
        """
        Let rows go whose reason to wait is over, ``most`` of each mark; return how many.

        ``rooms``: also look for room in groups, MOST_MARKS of them, which costs a count each.
        Those rows get a message; what was paused is left to the hand-over that follows.
        """
        let_go = self._paused(most) + (self._rooms(most) if rooms else 0)
        if let_go:
            signals.tell(signals.recalled, "", count=let_go)
        return let_go

    def _paused(self, most: int) -> int:
        in_force = {controls.pause_mark(str(rule.pk)) for rule in controls.known().rules}
        marks = lifecycle.marks(most=MOST_MARKS, before=lifecycle.ROOM_MARKS)
        if lifecycle.NO_LOCKS not in marks:
            self._pause = SOONEST
        elif not self._has_locks(clock.monotonic()):
            in_force.add(lifecycle.NO_LOCKS)
        return sum(_released(mark, most) for mark in marks if mark not in in_force)

    def _has_locks(self, now: float) -> bool:
        """
        Whether locks can be had for the rows that wait for them; looked at ever more rarely.

        Also where they can be had again and again for a moment only, so that no row goes round
        faster than that.
        """
        if now < self._again:
            return False
        self._again, self._pause = now + self._pause, min(2 * self._pause, LATEST)
        return not locks.why_unreachable()

    def _rooms(self, most: int) -> int:
        marks = lifecycle.marks(most=MOST_MARKS, after=self._after)
        self._after = marks[-1] if len(marks) == MOST_MARKS else lifecycle.ROOM_MARKS
        let_go = 0
        for mark in marks:
            row = lifecycle.aside(mark).only(*COLUMNS).first()
            if row is None:
                lifecycle.forget_mark(mark)
            else:
                let_go += recall(mark, min(_room_for(row), most))
        return let_go


def _released(mark: str, most: int) -> int:
    released = lifecycle.release(mark, most=most)
    if not released:
        lifecycle.forget_mark(mark)
    return released


def _room_for(row: Any) -> int:
    """Return how many rows like this one may start now."""
    if controls.known().pause(row.name, row.queue):
        return 0
    limits = controls.known().limits(row.name, row.args)
    return max(min((limit.room() for limit in limits), default=MOST_AT_ONCE), 0)


def _send(rows: Iterable[Any], most: int) -> int:
    deliveries: list[Delivery] = []
    for row in rows:
        if len(deliveries) == most:
            break
        sent_as = lifecycle.mark_sent(row.pk, row.version, row.dispatch_id)
        if sent_as is not None:
            deliveries.append(Delivery.of(row, sent_as))
    return dispatch.push(deliveries, within=PATIENCE) if deliveries else 0
