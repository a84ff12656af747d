"""
What goes wrong in a run: a list drawn from the seed, each fault bound to a point of the code.

"On the third time that ``settle.between`` is reached, the process dies." A fault that is dropped
leaves the others where they are, so a failing run can be made smaller.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LEASE = 6_000  # milliseconds, as in settings.DEDUPJOBS


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Where user code is at work: the longest part of a run, so most of what happens happens there.
AT_USER = _words("labour labour effect ending")
AT_END = _words("effect ending")
# Where somebody reacts to what went wrong before.
RECLAIMING = _words(
    "reclaim.before reclaim.before reclaim.between reclaim.uncommitted reclaim.committed"
)
REACTING = RECLAIMING + _words(
    """
    claim.before claim.row_won claim.uncommitted claim.committed
    settle.before settle.between settle.uncommitted settle.committed
    beat.before beat.done mark_sent.before push.before push.after release.before lock.after
    """
)
AT_REDIS = _words("redis:SET redis:EVALSHA redis:MULTI redis:EXPIRE redis:TIME redis:PING")
AT_ENDING = _words(
    """
    commit:settle.committed commit:settle.committed commit:settle.uncommitted
    commit:claim.uncommitted
    """
)
AT_COMMIT = AT_ENDING + _words(
    """
    commit:settle.committed commit:enqueue.inserted commit:reclaim.uncommitted
    commit:mark_sent.before commit:beat.before commit:effect statement
    """
)
OFTEN = _words("begin statement stated sleep")
SCENES = (
    REACTING
    + AT_USER
    + OFTEN
    + AT_REDIS
    + _words(
        """
        enqueue.read enqueue.inserted reopen.before replace.before rerun.before
        push.before push.after lock.before lock.after user_code.before user_code.after
        mark_unsent.before fenced.locked worker.popped worker.started worker.done
        completing.after business committed:enqueue.inserted committed:claim.uncommitted
        committed:settle.uncommitted
        """
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens when a point is reached for the ``nth`` time; ``amount`` in milliseconds."""

    kind: str
    point: str
    nth: int
    amount: int = 0

    def __str__(self) -> str:
        amount = f" {self.amount / 1000:+g} s" if self.amount else ""
        return f"{self.kind}{amount} at {self.point} #{self.nth}"


KINDS = {
    "crash": 8,  # never scheduled again: no clean-up runs
    "die": 5,  # an exception unwinds, clean-up runs
    "pause": 7,  # the process stands still
    "stall": 3,  # one thread does
    "flush": 3,
    "double": 4,
    "reorder": 1,
    "lose message": 3,
    "lose request": 2,
    "lose reply": 3,
    "lose commit": 4,
    "lose commit's reply": 5,
    "jump": 4,
    "shut down": 4,
    "time out": 1,
}
PLACES = {
    "lose request": AT_REDIS,
    "lose reply": AT_REDIS,
    "lose commit": AT_COMMIT,
    "lose commit's reply": AT_COMMIT,
    "shut down": AT_USER,
    "time out": AT_USER,
}


def draw(chance: random.Random) -> tuple[Fault, ...]:
    """Return the faults of one run: usually two or three, at times none or many."""
    database_jumps = chance.random() < 0.7  # one kind of clock jumps in a run: each has a witness
    roll = chance.random()
    if roll < 0.35:
        return _followed(chance, database_jumps)
    if roll < 0.5:
        kind = chance.choice(("lose commit", "lose commit's reply"))
        return (Fault(kind=kind, point=chance.choice(AT_ENDING), nth=chance.choice((1, 1, 2))),)
    number = chance.choice((0, 1, 1, 2, 2, 3, 3, 4, 6))
    return tuple(_one(chance, database_jumps) for _ in range(number))


def _followed(chance: random.Random, database_jumps: bool) -> tuple[Fault, ...]:
    """A worker is hit at its work, and then those are hit who react."""
    first = chance.choice(("crash", "crash", "pause", "pause", "pause", "stall", "shut down"))
    at_work = Fault(kind=first, point=chance.choice(AT_USER), nth=1, amount=_amount(chance, first))
    then = chance.choice(("again", "react", "react", "react", "jump"))
    if then == "again":
        other = chance.choice((at_work.kind, "crash"))
        return at_work, Fault(kind=other, point=at_work.point, nth=2, amount=_amount(chance, other))
    if then == "jump":
        at_end = Fault(kind=first, point=chance.choice(AT_END), nth=1, amount=at_work.amount)
        return _jump(chance, database_jumps, "labour", 1), at_end
    second = chance.choice(("pause", "stall", "stall", "crash", "die"))
    return at_work, Fault(
        kind=second,
        point=chance.choice(chance.choice((REACTING, RECLAIMING))),
        nth=chance.choice((1, 1, 1, 2)),
        amount=_amount(chance, second),
    )


def _one(chance: random.Random, database_jumps: bool) -> Fault:
    kind = chance.choices(tuple(KINDS), tuple(KINDS.values()))[0]
    point = chance.choice(PLACES.get(kind, SCENES))
    often = point in OFTEN or point in AT_REDIS
    nth = chance.choice((1, 2, 3, 4, 6, 9) if often else (1, 1, 1, 2, 2, 3))
    if kind == "jump":
        return _jump(chance, database_jumps, point, nth)
    return Fault(kind=kind, point=point, nth=nth, amount=_amount(chance, kind))


def _jump(chance: random.Random, database_jumps: bool, point: str, nth: int) -> Fault:
    amount = chance.choice((2, 5, 60, 3_600)) * 1000
    if not database_jumps:
        return Fault(kind="process clock jumps", point=point, nth=nth, amount=amount)
    if chance.random() < 0.4:
        amount = -chance.choice((2, 20, 150)) * 1000
    return Fault(kind="database clock jumps", point=point, nth=nth, amount=amount)


def _amount(chance: random.Random, kind: str) -> int:
    if kind not in ("pause", "stall"):
        return 0
    return round(LEASE * chance.choice((0.25, 0.75, 1.25, 1.5, 2.5)))
