"""
Breadth first over all worlds of a configuration.

Every trace is a shortest one. I5 is judged as liveness: without faults and new calls no path is
endless, and each ends at rest.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from tests.exhaustive import actors, observer
from tests.exhaustive.state import BUMPS, FINAL, IDLE, Config, Message, World

BY_PEOPLE = {
    "enqueue", "join", "turned-away", "rerun", "replace", "reopen", "peek", "look", "hold",
    "retry", "unhold", "cancel",
}  # fmt: skip


def canonical(w: World, arrow: str, c: Config) -> World:
    """
    Return the world that stands for all with the same future.

    Ended attempts to which no worker refers are forgotten and numbers ranked anew, dispatch ids
    only tell the row's own from others, and workers are interchangeable.
    """
    row, alive = w.row, w.owned
    kept = [a for a in w.attempts if not a.outcome or a.number in alive]
    rank = {0: 0}
    for number in sorted({row.attempts, *(a.number for a in kept)}):
        rank.setdefault(number, len(rank))

    def own(sent: int) -> int:
        return int(sent == row.sent != 0)

    one, other = (
        k if k == IDLE else k._replace(number=rank[k.number], sent=own(k.sent)) for k in w.workers
    )
    unburied = any(not a.outcome and a.number not in alive for a in kept)
    return World(
        row._replace(attempts=rank[row.attempts], sent=own(row.sent)),
        tuple([a._replace(number=rank[a.number]) for a in kept]),
        tuple(sorted([Message(m.generation, own(m.sent)) for m in w.queue])),
        (one, other) if one <= other else (other, one),
        w.ghost,
        w.calls,
        w.operations,
        w.faults,
        w.view,
        w.looked and _is_stale(arrow, c),
        w.reaped if unburied or not c.has("bury_owner") else "",
    )


def _is_stale(arrow: str, c: Config) -> bool:
    """Tell whether what the operator saw still counts after this arrow, by a dropped guard."""
    unnoticed = arrow not in observer.MOVES or BUMPS.get(arrow, "bump_other") in c.dropped
    return unnoticed or "operator_version" in c.dropped


@dataclass(slots=True)
class Report:
    """What an exploration found; ``violations``: each with its configuration and trace."""

    states: int = 0
    steps: int = 0
    completed: bool = True
    violations: dict[str, tuple[Config, list[str]]] = field(default_factory=dict)

    def add(self, other: Report) -> None:
        """Take in another exploration; of each violation the shortest trace stays."""
        self.states += other.states
        self.steps += other.steps
        self.completed = self.completed and other.completed
        for text, (config, trace) in other.violations.items():
            if text not in self.violations or len(trace) < len(self.violations[text][1]):
                self.violations[text] = config, trace


class Exploration:
    """One configuration's worlds, each with the step by which it was first reached."""

    def __init__(self, config: Config) -> None:
        self.config = config
        start = World(operations=config.operations, faults=config.faults)
        self.worlds = [start]
        self.index = {start: 0}
        self.parents = array("l", [-1])
        self.words = [""]
        # For I5: how many steps lead on without fault and people, and from where such ones come.
        self.ways_on = array("l", [0])
        self.ways_from: list[list[int]] = [[]]
        self.report = Report()

    def run(self, deadline: float, *, first: bool = False) -> Report:
        """Explore until all is seen, the deadline (monotonic), or the ``first`` violation."""
        for at, world in enumerate(self.worlds):  # grows while it is read
            if time.monotonic() > deadline or (first and self.report.violations):
                self.report.completed = False
                break
            self._expand(at, world)
        else:
            self._judge_rest()
        self.report.states = len(self.worlds)
        return self.report

    def _expand(self, at: int, world: World) -> None:
        for step in actors.steps(world, self.config):
            after, violations = observer.observe(world, step, self.config)
            self.report.steps += 1
            for text in violations:
                self._violated(text, at, str(step))
            found = self._index_of(canonical(after, step.arrow, self.config), at, str(step))
            free = after.faults == world.faults and step.arrow not in BY_PEOPLE
            if free and found != at:
                self.ways_on[at] += 1
                self.ways_from[found].append(at)

    def _index_of(self, world: World, at: int, words: str) -> int:
        found = self.index.setdefault(world, len(self.worlds))
        if found == len(self.worlds):
            self.worlds.append(world)
            self.parents.append(at)
            self.words.append(words)
            self.ways_on.append(0)
            self.ways_from.append([])
        return found

    def _judge_rest(self) -> None:
        """Where nothing goes on by itself all must be at rest; and no way may be endless."""
        ways_on = array("l", self.ways_on)
        ends = [i for i, ways in enumerate(ways_on) if not ways]
        for i in ends:
            if not _rests(self.worlds[i]):
                self._violated(f"I5 {self.worlds[i].row.status} for ever", i)
        while ends:
            for before in self.ways_from[ends.pop()]:
                ways_on[before] -= 1
                if not ways_on[before]:
                    ends.append(before)
        endless = next((i for i, ways in enumerate(ways_on) if ways), None)
        if endless is not None:
            self._violated("I5 a cycle without faults", endless)

    def _violated(self, text: str, at: int, *last: str) -> None:
        if text not in self.report.violations:
            self.report.violations[text] = self.config, [*self._trace(at), *last]

    def _trace(self, at: int) -> list[str]:
        trace = []
        while at > 0:
            trace.append(self.words[at])
            at = self.parents[at]
        return trace[::-1]


def _rests(w: World) -> bool:
    if w.row is None:
        return True
    still_open = any(not a.outcome for a in w.attempts)
    return w.row.status in (*FINAL, "HELD") and w.workers == (IDLE, IDLE) and not still_open


BOUNDS = [
    (2, 1, 1), (2, 0, 2), (2, 1, 2), (3, 1, 1), (2, 2, 1), (2, 2, 2), (3, 2, 1), (3, 1, 2),
]  # fmt: skip
"""Calls, operator's acts and faults, small ones first."""

POLICIES = ("return", "replace", "rerun", "debounce")


def configurations(
    bounds: Iterable[tuple[int, int, int]], modes: tuple[str, ...] = ("plain", "atomic")
) -> Iterator[Config]:
    """
    Yield every kind of job for each bound.

    With all guards in force "inner" moves as "atomic" does.
    """
    # The policy changes fastest, so that the first few are as different as they can be.
    axes = (modes, ("retry", "hold"), ("reopen", "block"), ("none", "forever"), POLICIES)
    for calls, operations, faults in bounds:
        for mode, on_lost, on_dead, unique_for, policy in itertools.product(*axes):
            yield Config(
                policy=policy,
                unique_for=unique_for,
                on_dead=on_dead,
                on_lost=on_lost,
                mode=mode,
                calls=calls,
                operations=operations,
                faults=faults,
            )


def explore(config: Config, deadline: float = float("inf")) -> Report:
    """Explore one configuration."""
    return Exploration(config).run(deadline)


def without(guards: Iterable[str], configs: Iterable[Config], deadline: float) -> Report:
    """Drop guards, and explore until a configuration shows a violation."""
    dropped = frozenset(guards)
    total = Report()
    for config in configs:
        extra = config.extra or any(guard.startswith("snooze") for guard in dropped)
        mutant = replace(config, dropped=dropped, extra=extra)
        total.add(Exploration(mutant).run(deadline, first=True))
        if total.violations or not total.completed:
            break
    return total
