"""
A discrete simulation of workers, a coordinator and something that all jobs lean on.

Rules and numbers are the real ones: ``pressure`` for the score and what stretches,
``backoff.Exponential`` for retries, ``sight.Past`` for the growth of the backlog. Only what they
are told is simulated: arrivals, run times, and whether a call is answered. As in the coordinator,
a look comes every EVERY seconds, sees delays through summaries that are up to 20 s old, and due
retries reach the queue with a tick.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import fmean

from dedupjobs import pressure
from dedupjobs.alerts.sight import GROWING, Past
from dedupjobs.backoff import Exponential
from dedupjobs.conf import Settings
from dedupjobs.pressure import CALM, Level, Limits, Load
from dedupjobs.thresholds import Thresholds

WINDOW = 10.0  # seconds over which a peak is counted
EVERY, TICK = Thresholds().EVERY, Settings().TICK
SUMMARISED = Settings().SUMMARISE_EVERY


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """``fails``: the share of runs that fail though all is well; times in seconds."""

    seconds: float = 600.0  # of arrivals
    per_second: float = 60.0
    at_once: int = 0  # that arrive at the very beginning
    workers: int = 20
    runs: tuple[float, float] = (0.1, 0.3)
    refused: tuple[float, float] = (0.03, 0.07)  # how long a run takes that is refused
    fails: float = 0.01
    outage: tuple[float, float] = (0.0, 0.0)
    max_attempts: int = 25


CALM_DAY = Scene()
OUTAGE = Scene(outage=(120.0, 300.0))
LIGHT = replace(OUTAGE, per_second=20.0)
SLOWLY = replace(OUTAGE, refused=(0.15, 0.25))


@dataclass(slots=True, kw_only=True)
class Result:
    """``peak``: most retries begun within WINDOW; ``mean``: seconds from arrival to success."""

    enqueued: int = 0
    succeeded: int = 0
    dead: int = 0
    retries: int = 0
    peak: int = 0
    mean: float = 0.0
    ended_at: float = 0.0
    most_score: float = 0.0


@dataclass(slots=True)
class Work:
    arrived: float
    due: float
    failures: int = 0


@dataclass(slots=True)
class World:
    scene: Scene
    limits: Limits
    chance: random.Random
    now: float = 0.0
    level: Level = CALM
    idle: int = 0
    open: int = 0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    order: count[int] = field(default_factory=count)
    queue: deque[Work] = field(default_factory=deque)
    delayed: list[tuple[float, int, Work]] = field(default_factory=list)
    ended: deque[tuple[float, float]] = field(default_factory=deque)  # when, its queue delay
    begun: deque[float] = field(default_factory=deque)  # retries, within WINDOW
    waiting: Past = field(default_factory=Past)
    took: list[float] = field(default_factory=list)
    result: Result = field(default_factory=Result)
    backoff: Exponential = field(default_factory=Exponential)

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), act))

    # ---- what happens

    def arrive(self) -> None:
        self.result.enqueued += 1
        self.open += 1
        self.queue.append(Work(self.now, self.now))
        self.fetch()

    def next_arrival(self) -> None:
        if self.now < self.scene.seconds:
            self.arrive()
            self.at(self.chance.expovariate(self.scene.per_second), self.next_arrival)

    def fetch(self) -> None:
        while self.idle and self.queue:
            self.idle -= 1
            self.begin(self.queue.popleft())

    def begin(self, work: Work) -> None:
        delay = self.now - work.due
        if work.failures:
            self.count_retry()
        down = self.scene.outage[0] <= self.now < self.scene.outage[1]
        well = not down and self.chance.random() >= self.scene.fails
        took = self.chance.uniform(*(self.scene.refused if down else self.scene.runs))
        self.at(took, lambda: self.end(work, delay, well=well))

    def count_retry(self) -> None:
        self.result.retries += 1
        self.begun.append(self.now)
        while self.begun[0] <= self.now - WINDOW:
            self.begun.popleft()
        self.result.peak = max(self.result.peak, len(self.begun))

    def end(self, work: Work, delay: float, *, well: bool) -> None:
        self.ended.append((self.now, delay))
        if well:
            self.result.succeeded += 1
            self.took.append(self.now - work.arrived)
            self.close()
            self.free()
            return
        work.failures += 1
        if work.failures >= self.scene.max_attempts:
            self.result.dead += 1
            self.close()
        else:
            wait = self.backoff(work.failures, self.chance.uniform)
            work.due = self.now + pressure.retry(wait, self.level, self.limits)
            heapq.heappush(self.delayed, (work.due, next(self.order), work))
        self.at(pressure.rest(self.level, self.limits), self.free)

    def free(self) -> None:
        self.idle += 1
        self.fetch()

    def close(self) -> None:
        self.open -= 1
        self.result.ended_at = self.now

    # ---- the coordinator

    def tick(self) -> None:
        while self.delayed and self.delayed[0][0] <= self.now:
            self.queue.append(heapq.heappop(self.delayed)[2])
        self.fetch()
        most = Settings().LEADER_TTL / 2
        self.at(pressure.tick(TICK, self.level, self.limits, most=most), self.tick)

    def look(self) -> None:
        self.waiting.note(self.now, {"": len(self.queue) + len(self.delayed)}, kept=GROWING)
        load = Load(delay=self.mean_delay(), growth=self.waiting.growth(self.now))
        self.level = pressure.eased(self.level, pressure.level(load, self.limits), EVERY)
        self.result.most_score = max(self.result.most_score, self.level.score)
        self.at(EVERY, self.look)

    def mean_delay(self) -> float:
        """Of this minute and the last one, as the summaries knew it when they were made."""
        known = self.now // SUMMARISED * SUMMARISED
        since = (self.now // 60 - 1) * 60
        while self.ended and self.ended[0][0] < since:
            self.ended.popleft()
        delays = [delay for at, delay in self.ended if at <= known]
        if delays:
            return fmean(delays)
        return (self.now - self.queue[0].due) / 2 if self.queue else 0.0


def play(scene: Scene, limits: Limits, *, seed: int) -> Result:
    """Play a scene until all its jobs have ended."""
    world = World(scene, limits, random.Random(seed), idle=scene.workers)
    for _ in range(scene.at_once):
        world.arrive()
    world.at(0.0, world.next_arrival)
    world.at(0.0, world.tick)
    world.at(0.0, world.look)
    while world.open or world.now < scene.seconds:
        world.now, _, act = heapq.heappop(world.events)
        act()
    world.result.mean = fmean(world.took)
    return world.result
