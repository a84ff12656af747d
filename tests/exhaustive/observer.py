"""
The invariants of docs/design.md §7, judged by the difference that a step made.

The arrow's own code is not asked. Besides I1 to I12: A requests bind, B a key that on_dead="block"
has stopped rests, D due times hold, H on_lost="hold" asks a person, R no request outlives its run.
I5 is the explorer's.
"""

from __future__ import annotations

from types import SimpleNamespace

from tests.exhaustive.state import (
    FINAL,
    MAX_FAILURES,
    MAX_LOST,
    Attempt,
    Config,
    Ghost,
    Step,
    World,
)

_CODE = {
    "PENDING": "P", "RETRYING": "T", "RUNNING": "R", "SUCCEEDED": "S", "DEAD": "D",
    "CANCELLED": "C", "HELD": "H",
}  # fmt: skip

MOVES = {
    "enqueue": "-P", "replace": "PP", "rerun": "PP TT RR", "reopen": "SP DP CP",
    "claim": "PR TR",
    "complete": "RS RP", "again": "RS RP", "fail": "RT", "timeout": "RT", "give_up": "RD RP",
    "snooze": "RT", "interrupt": "RP RH", "unclaim": "RP", "stop": "RC", "leave": "RC RP",
    "park": "RH", "reclaim": "RT RH RD RC RP", "bury": "RT RH RD RC RP",
    "hold": "PH TH RR", "retry": "DP HP CP TP", "unhold": "HP", "cancel": "PC TC HC RR",
}  # fmt: skip
"""From where to where each arrow of §3 may move a row; whatever else happens moves none."""


def observe(before: World, step: Step, c: Config) -> tuple[World, list[str]]:
    """Return the step's world with the observer's knowledge moved on, and what it violates."""
    o = _Observation(before, step, c)
    o.judge_move()
    for attempt in step.world.attempts:
        o.judge_attempt(attempt)
    if o.claimed is not None:
        o.judge_claim(o.claimed)
    o.judge_stop()
    o.judge_opening()
    o.learn()
    o.judge_row()
    return step.world._replace(ghost=Ghost(**o.ghost.__dict__)), o.violations


class _Observation:
    """One step, with the ghost as it becomes; ``judge_…`` and ``learn`` in their order."""

    def __init__(self, before: World, step: Step, c: Config) -> None:
        self.config = c
        self.step = step
        self.arrow = step.arrow
        self.words = step.words
        self.before = before
        self.after = step.world
        self.old = before.row
        self.row = step.world.row
        self.known = {a.number: a for a in before.attempts}
        self.claimed: Attempt | None = None
        self.ghost = SimpleNamespace(**step.world.ghost._asdict())
        self.violations: list[str] = []

    @property
    def grown(self) -> bool:
        return self.old is not None and self.row.generation != self.old.generation

    def check(self, holds: object, otherwise: str) -> None:
        if not holds:
            self.violations.append(otherwise)

    def judge_move(self) -> None:
        was = self.old.status if self.old else None
        moved = _CODE.get(was, "-") + _CODE[self.row.status]
        legal = moved in MOVES[self.arrow] if self.arrow in MOVES else was == self.row.status
        self.check(legal, f"I9 {self.arrow} from {was} to {self.row.status}")

    def judge_attempt(self, a: Attempt) -> None:
        old = self.known.get(a.number)
        if old is None:
            self.claimed = a
            old = a._replace(begun=0)
        if old.outcome != a.outcome:
            self._judge_ending(old, a)
        elif a.begun and not old.begun:
            self.check(
                not a.outcome, f"I6 user code begins in an attempt that ended as {a.outcome}"
            )
            self.check(not self.ghost.doubt, "H user code was cut off and begins again unasked")

    def _judge_ending(self, old: Attempt, a: Attempt) -> None:
        g, outcome = self.ghost, a.outcome
        g.failures += outcome in ("FAILED", "TIMED_OUT")
        g.lost += outcome == "LOST"
        self.check(not old.outcome, f"I6 outcome {old.outcome} overwritten by {outcome}")
        self.check(a.begun or outcome != "LOST", "I6 LOST, but user code had not begun")
        self.check(not a.begun or outcome != "RETURNED", "I6 RETURNED, but user code had begun")
        cut_off = outcome in ("LOST", "INTERRUPTED") and a.begun
        g.doubt = g.doubt or (cut_off and self.config.on_lost == "hold")
        if outcome == "SUCCEEDED":
            self._judge_success(a)

    def _judge_success(self, a: Attempt) -> None:
        g, c = self.ghost, self.config
        once = g.done and c.unique_for == "forever" and c.policy in ("return", "replace")
        self.check(a.generation not in g.done and not once, "I1 effect twice")
        self.check(self.arrow != "again", "I1 SUCCEEDED, but the effect was rolled back")
        g.done, g.ran = tuple(sorted({*g.done, a.generation})), a.args

    def judge_claim(self, a: Attempt) -> None:
        g = self.ghost
        others = [x for x in self.after.attempts if x is not a]
        alive = self.after.owned
        robbed = [
            x
            for x in others
            if x.number in alive and x.lease != "over" and x.outcome in ("LOST", "RETURNED")
        ]
        spent = g.failures >= MAX_FAILURES or g.lost >= MAX_LOST
        self.check(all(x.outcome for x in others), "I3 two attempts open")
        self.check(not robbed, "I3 claimed while the lease of a live owner lives")
        self.check("fence" not in self.words, "I4 the fence does not grow")
        self.check(self.row.due, "D claimed before run_after")
        self.check(not spent, "I6 claimed although a budget is used up")
        own = a.generation == self.row.generation
        self.check(own, "I12 an attempt bears another generation's idempotency key")
        self.check(g.tried in (0, a.args), "I12 one generation runs two payloads")
        self.check(a.args >= g.high, "I11 an older payload is claimed after a newer one")
        self.check(not (self.row.cancel or self.row.hold), "A claimed against a request")
        g.tried, g.high, g.wake = a.args, max(g.high, a.args), bool(g.wake and a.args != g.last)

    def judge_stop(self) -> None:
        g = self.ghost
        gone = self.arrow in ("reclaim", "bury") and self.row.status == "CANCELLED"
        if self.arrow == "stop" or gone:
            self.check(g.asked_cancel, "R stopped without a request for this run")
            # A waiting rerun goes with the run that was cancelled; the row's error names it.
            g.last, g.wake = self.row.args, False
        self.check(g.asked_hold or self.arrow != "park", "R parked without a request for this run")

    def judge_opening(self) -> None:
        g, row, old = self.ghost, self.row, self.old
        taken = old and old.rerun and not row.rerun and row.status == "PENDING"
        opened = self.grown or taken
        if not opened and self.arrow not in ("enqueue", "reopen", "retry", "unhold"):
            return
        spent = g.failures >= MAX_FAILURES or g.lost >= MAX_LOST
        dead = spent and self.arrow in ("give_up", "reclaim", "bury", "reopen")
        rests = dead and self.config.on_dead == "block" and not (old and old.cancel)
        self.check(not rests, 'B a key that "block" has stopped runs again without an operator')
        renamed = self.grown and self.arrow == "reopen" and old.status != "SUCCEEDED"
        other = not (renamed and g.tried == row.args)
        self.check(other, "I12 the same call continues under another idempotency key")
        g.tried = 0 if self.grown else g.tried
        g.failures = g.lost = 0
        g.asked_cancel = g.asked_hold = False

    def learn(self) -> None:
        g, row, arrow = self.ghost, self.row, self.arrow
        if arrow in ("enqueue", "reopen", "replace", "rerun"):
            g.last = row.rerun if arrow == "rerun" else row.args
            g.wake, g.unseen = True, self.config.looks
        elif arrow in ("cancel", "hold", "retry", "unhold"):
            self._learn_operation()
        elif arrow == "join" and self.config.policy in ("rerun", "debounce"):
            self.check(self.step.payload == g.last, "I11 a newer payload is turned away")
        g.unseen = g.unseen and arrow != "look"
        g.snoozed = g.snoozed or arrow == "snooze"

    def _learn_operation(self) -> None:
        g, row = self.ghost, self.row
        g.doubt = False
        g.asked_cancel = g.asked_cancel or (self.arrow == "cancel" and row.status == "RUNNING")
        g.asked_hold = g.asked_hold or (self.arrow == "hold" and row.status == "RUNNING")
        if self.arrow == "cancel" and row.status == "CANCELLED":  # the record names what it drops
            self.check(not g.unseen, "I2 cancel drops a call that the operator has not seen")
            g.last, g.wake = row.args, False

    def judge_row(self) -> None:
        g, row = self.ghost, self.row
        kept = row.status == "DEAD" and self.config.on_dead == "block" and row.rerun
        rests = row.status not in FINAL or kept or not (g.wake or row.rerun)
        newest = row.status != "SUCCEEDED" or g.ran == g.last
        budgets = (row.failures, row.lost) == (g.failures, g.lost)
        self.check(budgets, "I6 budgets differ from the outcomes since the row was opened")
        self.check((row.rerun or row.args) == g.last, "I2 the newest accepted payload is gone")
        self.check(rests, f"I2 {row.status}, but an accepted call never runs")
        asked = (row.cancel or row.hold) and row.status not in ("RUNNING", "HELD", "CANCELLED")
        self.check(not asked, f"R a request stands although the row is {row.status}")
        self.check(newest, "I11 SUCCEEDED with an older payload than the last accepted")
