"""
What a world is made of.

Every committed transaction is one step, so rows carry no locks. Numbers instead of values:
payloads are numbered in the order of their calls, 0 is NULL; a due time is reached or not; a
lease is live or over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

WAITING = ("PENDING", "RETRYING")
ACTIVE = (*WAITING, "RUNNING")
FINAL = ("SUCCEEDED", "DEAD", "CANCELLED")
STATUSES = (*ACTIVE, *FINAL, "HELD")

MAX_FAILURES = 2  # max_attempts of the job
MAX_LOST = 2
QUEUE = 2  # messages that fit; a push that finds no room fails
NEW = 2  # a dispatch id just drawn; ``canonical`` renames it to 1

BUMPS = {"claim": "bump_claim", "reopen": "bump_reopen", "replace": "bump_replace",
         "rerun": "bump_rerun"}  # fmt: skip
LOOKS = {"operator_version", "bump_other", *BUMPS.values()}
"""Guards without which an operator acts on what he saw before: his look is a step then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """
    One kind of job, the bounds, and the guards that are dropped.

    ``mode``: a plain job, an atomic one, or "inner": ``attempt.complete()`` in its own atomic().
    ``extra``: it may also snooze once and cancel itself.
    """

    policy: str = "return"  # replace, rerun, debounce
    unique_for: str = "none"  # forever
    on_dead: str = "reopen"  # block
    on_lost: str = "retry"  # hold
    mode: str = "plain"
    calls: int = 2
    operations: int = 1
    faults: int = 1
    extra: bool = False
    dropped: frozenset[str] = frozenset()

    def has(self, guard: str) -> bool:
        """Tell whether a guard is in force."""
        return guard not in self.dropped

    @property
    def looks(self) -> bool:
        """Tell whether the operator's look is a step of its own."""
        return bool(self.dropped & LOOKS)

    def __str__(self) -> str:
        kind = f"{self.policy} {self.unique_for} {self.on_dead} {self.on_lost} {self.mode}"
        return f"{kind} {self.calls}/{self.operations}/{self.faults}" + " extra" * self.extra


class Row(NamedTuple):
    """``ProcessedJob``. ``sent``: its dispatch id; ``due``: ``run_after`` is reached."""

    status: str
    generation: int
    attempts: int
    failures: int
    lost: int
    args: int
    rerun: int
    due: bool
    sent: int
    cancel: bool
    hold: bool


class Attempt(NamedTuple):
    """
    ``JobAttempt``, and the payload that its worker has read.

    ``outcome``: "" while open. ``lease``: "live", "over", or "renewed" after a sweep chose it.
    ``begun``: 2 is a ``began_at`` that was rolled back with the job's transaction.
    """

    number: int
    generation: int
    args: int
    outcome: str
    lease: str
    begun: int


class Worker(NamedTuple):
    """
    What one worker is at.

    "idle"; "got" a message; "seek": its claim's COMMIT had no reply; "run"; "unsure": its
    ending's COMMIT had no reply. ``early``: the payload it read, ``drawn``: the fence it drew
    before the claim, which only a dropped guard allows.
    """

    doing: str = "idle"
    number: int = 0
    generation: int = 0
    sent: int = 0
    ending: str = ""
    early: int = 0
    drawn: int = 0


class Message(NamedTuple):
    generation: int
    sent: int


class Ghost(NamedTuple):
    """
    What only the observer knows.

    ``tried``: payload of this generation's attempts. ``last``: the newest accepted payload that
    was not dropped by name; ``wake``: it is not yet claimed; ``unseen``: nor seen by the
    operator. ``ran``, ``high``: newest succeeded and claimed payload. ``done``: generations that
    had their effect. ``failures``, ``lost``: recounted since the row was opened. ``doubt``: user
    code was cut off under on_lost="hold".
    """

    tried: int = 0
    last: int = 0
    wake: bool = False
    unseen: bool = False
    ran: int = 0
    high: int = 0
    done: tuple[int, ...] = ()
    failures: int = 0
    lost: int = 0
    asked_cancel: bool = False
    asked_hold: bool = False
    doubt: bool = False
    snoozed: bool = False


class World(NamedTuple):
    """
    One state. ``view``: what a call has read and decided, ``looked``: the operator is about to
    act, ``reaped``: why a parent has a dead horse to bury, ``calls`` etc.: how many were made.
    """

    row: Row | None = None
    attempts: tuple[Attempt, ...] = ()
    queue: tuple[Message, ...] = ()
    workers: tuple[Worker, Worker] = (Worker(), Worker())
    ghost: Ghost = Ghost()
    calls: int = 0
    operations: int = 0
    faults: int = 0
    view: tuple[str, int] = ("", 0)
    looked: bool = False
    reaped: str = ""

    def attempt(self, number: int) -> Attempt:
        return next(a for a in self.attempts if a.number == number)

    def change(self, number: int, **fields: object) -> World:
        """Return this world with one attempt changed."""
        changed = tuple(a._replace(**fields) if a.number == number else a for a in self.attempts)
        return self._replace(attempts=changed)

    def put(self, index: int, worker: Worker) -> World:
        """Return this world with one worker at something else."""
        one, other = self.workers
        return self._replace(workers=(one, worker) if index else (worker, other))

    @property
    def owned(self) -> set[int]:
        """Numbers of the attempts that a living worker believes to be its own."""
        return {w.number for w in self.workers if w.number}


IDLE = Worker()


class Step(NamedTuple):
    """
    One thing that can happen: the arrow's name, words for a trace, the world afterwards.

    ``payload``: that of a call.
    """

    arrow: str
    words: str
    world: World
    payload: int = 0

    def __str__(self) -> str:
        return f"{self.arrow}{self.words and ' '}{self.words}"
