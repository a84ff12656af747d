"""
Actors are threads that pass one baton, and time is a number.

At each point that an actor reaches, the baton may go to another one, chosen by the seed, or a
fault may happen. Time moves on when all wait.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable

from tests.simulation.database.base import Line, cut_off
from tests.simulation.faults import Fault
from tests.simulation.threads import Thread, main, take

START = 1_000_000  # milliseconds since the epoch of the simulation
HALF = 500  # milliseconds


class Gone(BaseException):
    """Raised into what is left of a dead process, or of a world that is over."""


class Died(BaseException):
    """The process ends here; its clean-up runs."""


class Process:
    """Threads that live, stand still and die together, and have one monotonic clock."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind
        self.skew = 0
        self.paused_until = 0
        self.dead = False
        self.troubled = False  # whether it may rightly have lost a lease though it lives
        self.tokens = 0
        self.owner = ""  # of the delivery it runs, as its parent has minted it
        self.message = ""  # the RQ id of that delivery


class Actor:
    """A thread of a process, and what it waits for."""

    def __init__(self, name: str, process: Process, body: Callable[[], None]) -> None:
        self.name = name
        self.process = process
        self.body = body
        self.thread: Thread = take()
        self.until: float | None = None  # waits until then, or until ``ready``; None: can go on
        self.ready: Callable[[], bool] | None = None
        self.stalled_until = 0
        self.last = ""  # the probe that it reached last
        self.raising: BaseException | None = None
        self.done = False

    def can_go(self, now: int) -> bool:
        if self.process.paused_until > now or self.stalled_until > now:
            return False
        if self.until is None or self.until <= now:
            return True
        return self.ready is not None and self.ready()

    def wakes_at(self) -> float:
        until = 0 if self.until is None else self.until
        return max(until, self.process.paused_until, self.stalled_until)


class Baton:
    """The actors of a run, its time, its faults, and its trace."""

    def __init__(self, seed: int, faults: tuple[Fault, ...]) -> None:
        self.chance = random.Random(seed * 2 + 1)
        self.restless = self.chance.choice((0.03, 0.15, 0.4))
        self.now = START
        self.actors: list[Actor] = []
        self.dead: list[Actor] = []
        self.processes: dict[str, Process] = {}
        self.current: Actor | None = None
        self.writer: Line | None = None
        self.over = False
        self.calm = False  # no faults any more
        self.names: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()
        self.pending: dict[tuple[str, int], list[Fault]] = defaultdict(list)
        for fault in faults:
            self.pending[fault.point, fault.nth].append(fault)
        self.happened: list[Fault] = []
        self.violations: list[str] = []
        self.errors: list[BaseException] = []
        self.trace: list[str] = []
        self.direct: Callable[[], None] = lambda: None
        self.died: Callable[[Process], None] = lambda process: None

    def spawn(self, process: Process, body: Callable[[], None], name: str = "") -> Actor:
        """Add an actor, which runs once the world picks it."""
        actor = Actor(name or process.name, process, body)
        actor.thread.give(self, actor)
        self.actors.append(actor)
        return actor

    def process(self, kind: str) -> Process:
        self.names[kind] += 1
        made = Process(f"{kind}{self.names[kind]}", kind)
        self.processes[made.name] = made
        return made

    def process_of(self, owner: str) -> Process | None:
        """Return the process that has drawn a token or rides with an owner."""
        return self.processes.get(owner.partition("-")[0])

    def run(self) -> None:
        """Let the actors run until the director says that it is over; then end them all."""
        first = self._pick()
        if first is not None:
            self._hand_to(first)
            main.acquire()
        for actor in [*self.actors, *self.dead]:
            if not actor.done:
                actor.raising = Gone("the world is over")
                self._hand_to(actor)
                main.acquire()

    def finish(self, actor: Actor) -> None:
        """Called by a thread whose actor is done: hand the baton on."""
        actor.done = True
        if self.over:
            main.release()
            return
        if actor in self.actors:
            self.actors.remove(actor)
        self._note("ends")
        following = self._pick()
        if following is None:
            main.release()
        else:
            self._hand_to(following)

    def fail(self, text: str) -> None:
        """Note a violation; the run ends at the next switch."""
        if not self.over:
            self.violations.append(text)
            self._note(f"VIOLATION {text}")

    def end(self) -> None:
        self.over = True

    def _hand_to(self, actor: Actor) -> None:
        self.current = actor
        actor.thread.baton.release()

    def switch(self, actor: Actor) -> None:
        following = self._pick()
        if following is not actor:
            if following is None:
                main.release()
            else:
                self._hand_to(following)
            actor.thread.baton.acquire()
        if actor.raising is not None:
            raise actor.raising

    def _pick(self) -> Actor | None:
        """Choose who goes on; time moves to the next wake-up when all wait. None: it is over."""
        self.now += self.chance.choice((0, 0, 0, 1, 2, 7))
        while True:
            self.direct()
            if self.violations:
                self.end()
            if self.over:
                return None
            ready = [actor for actor in self.actors if actor.can_go(self.now)]
            if ready:
                return ready[int(self.chance.random() * len(ready))]
            wake = min((actor.wakes_at() for actor in self.actors), default=math.inf)
            if wake == math.inf:
                self.fail("I5 nobody can go on")
            else:
                self.now = max(self.now + 1, int(wake))

    def park(self, until: float, ready: Callable[[], bool] | None = None) -> None:
        """Let the current actor wait until a moment, or until ``ready()``."""
        actor = self.touch()
        actor.until, actor.ready = until, ready
        try:
            self.switch(actor)
        finally:
            actor.until = actor.ready = None

    def touch(self) -> Actor:
        """Return the actor that runs; raise into it if it is gone."""
        actor = self.current
        assert actor is not None
        if actor.raising is not None:
            raise actor.raising
        return actor

    def reach(self, point: str) -> None:
        """Note that the current actor is at a point; maybe switch, maybe something happens."""
        actor = self.touch()
        if "." in point and ":" not in point:
            actor.last = point
        self._note(point)
        self.reached[point] += 1
        if self.pending:
            for fault in self.pending.pop((point, self.reached[point]), ()):
                self._happen(fault, actor)
        if self.chance.random() < self.restless:
            self.switch(actor)

    def _note(self, what: str) -> None:
        name = self.current.name if self.current else ""
        self.trace.append(f"{self.now - START:>7} {name:<12} {what}")

    def after(self, seconds: float) -> int:
        """
        Return the moment that many seconds from now; longer waits end on the half second.

        So that those who wait meet: what happens at one moment is what may interleave.
        """
        until = self.now + round(seconds * 1000)
        return until if seconds < HALF / 1000 else max(round(until / HALF) * HALF, self.now + 1)

    def crash(self, actor: Actor) -> None:
        """End the actor's process as kill -9 does: nothing of it ever runs again."""
        process = actor.process
        process.dead = True
        for other in [a for a in self.actors if a.process is process]:
            self.actors.remove(other)
            self.dead.append(other)
            if (wrapper := other.thread.wrapper) is not None:
                cut_off(wrapper)
            other.raising = Gone("killed")
        self.died(process)
        self.switch(actor)

    def _happen(self, fault: Fault, actor: Actor) -> None:
        raise NotImplementedError
