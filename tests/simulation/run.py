"""One seed: who is on stage, when the storm ends, and what the calm must bring."""

from __future__ import annotations

import hashlib
import random
import traceback
from dataclasses import dataclass

from django.db import connections

from dedupjobs import conf, runner, stats, wire
from tests.simulation import actors, stage
from tests.simulation.baton import START, Process
from tests.simulation.database.base import DatabaseWrapper
from tests.simulation.faults import LEASE, Fault, draw
from tests.simulation.jobs import ALL, WEIGHTS
from tests.simulation.observer import Observer
from tests.simulation.world import World

TICKS = (2.0, 3.0, 4.0)  # seconds between two rounds of a coordinator: one of these in a run
LATE = 9.0  # seconds after which most runs are over
KEPT = 400  # lines of a trace
TABLES = (
    *("dedupjobs_operation", "dedupjobs_duplicatesample", "dedupjobs_duplicatecount"),
    *("dedupjobs_fold", "dedupjobs_summary"),
    *("dedupjobs_jobattempt", "dedupjobs_processedjob", "dedupjobs_jobstep"),
    *("simulation_effect", "sqlite_sequence"),
)


DUTIES = {"prune": 0.1, "fold": 0.25}
"""Duties of a coordinator that cost much, and in which part of the runs it has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run, to the last detail; parts of it can be taken away to find what matters."""

    seed: int
    faults: tuple[Fault, ...]
    without: frozenset[str] = frozenset()  # actors that are left out

    @classmethod
    def of(cls, seed: int) -> Plan:
        return cls(seed=seed, faults=draw(random.Random(seed)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run showed."""

    plan: Plan
    violations: tuple[str, ...]
    digest: str
    steps: int
    milliseconds: int
    happened: tuple[Fault, ...]
    cast: tuple[str, ...]
    trace: tuple[str, ...]
    errors: tuple[str, ...]

    def text(self, lines: int) -> str:
        """Return what one wants to read of a run: the last ``lines`` of its trace, and why."""
        without = f", without {', '.join(sorted(self.plan.without))}" if self.plan.without else ""
        return "\n".join(
            [
                *self.trace[-lines:],
                *self.errors,
                f"seed {self.plan.seed}{without}",
                *(f"  fault: {fault}" for fault in self.plan.faults),
                *(f"  VIOLATION: {violation}" for violation in self.violations),
            ]
        )


def run(plan: Plan) -> Result:
    """Run a plan on an empty database and an empty Redis."""
    _empty()
    world = World(plan.seed, plan.faults)
    _Director(world, plan)
    host, runner.host = runner.host, actors.Host(world)
    stage.enter(world)
    wire.budget.reset()
    stats._forget_owed()
    try:
        world.run()
    finally:
        stage.leave()
        runner.host = host
    return Result(
        plan=plan,
        violations=tuple(world.violations),
        digest=hashlib.sha1("\n".join(world.trace).encode()).hexdigest(),
        steps=len(world.trace),
        milliseconds=world.now - START,
        happened=tuple(world.happened),
        trace=tuple(world.trace[-KEPT:]),
        cast=tuple(world.processes),
        errors=tuple("".join(traceback.format_exception(error)) for error in world.errors),
    )


def _empty() -> None:
    wrapper: DatabaseWrapper = connections["default"]  # type: ignore[assignment]
    wrapper.ensure_connection()
    line = wrapper.connection
    line.begin()
    for table in TABLES:
        line.cursor().execute(f"DELETE FROM {table}")
    line.commit()


class _Director:
    """Casts the actors, ends the storm, and judges the calm."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.deadline = 0
        world.observer = Observer(world)
        world.play = actors.Play(world)
        world.direct = self.direct
        world.died = self.died
        self.storm_until = world.now + 1000 * world.chance.choice((4, 8, 16))
        self.blocking_move = world.chance.random() < 0.5
        self.tick = world.chance.choice(TICKS)
        self.spared = [duty for duty, run in DUTIES.items() if world.chance.random() >= run]
        if "fold" in self.spared:
            self.spared.append("summarise")
        self.buries = world.chance.random() < 0.5
        self.callers = self._cast()

    def _cast(self) -> list[Process]:
        world, chance = self.world, self.world.chance
        jobs = chance.choices(ALL, WEIGHTS, k=chance.choice((1, 1, 2)))
        callers = []
        late = chance.random() < 0.25  # once all is over, all call at the same moment
        serial = 0
        for _ in range(chance.choice((1, 2, 2))):
            calls = []
            for _ in range(chance.choice((1, 2, 2))):
                serial += 1
                number = serial if chance.random() < 0.7 else 1
                job = chance.choice(jobs)
                ways = ["plain", "plain", "atomic", "rollback", "many", "later"]
                if not job.options.newest_wins:
                    ways.append("now")
                pause = chance.choice((0.0, 0.0, 0.5, 1.0, 2.0, 4.0))
                calls.append((job, 1, number, chance.choice(ways), pause))
            if late:
                pause = LATE - sum(pause for *_, pause in calls)
                calls.append((jobs[0], 1, serial + 100, "plain", pause))
            callers.append(self._start("caller", lambda p, c=calls: actors.call(world, c)))
        for _ in range(chance.choice((1, 2, 2, 3))):
            self._start("worker", self._worker)
        for _ in range(chance.choice((1, 1, 1, 2))):
            self._start("coordinator", self._coordinator)
        acts = chance.choice((0, 0, 2, 3))
        if acts:
            script = [
                (
                    chance.choice((0.5, 0.5, 1.0, 2.0)),
                    chance.choice(("cancel", "hold", "unhold", "retry")),
                    chance.choice((0.0, 0.5, 1.0)),
                )
                for _ in range(acts)
            ]
            callers.append(self._start("operator", lambda p: actors.operate(world, script)))
        return [caller for caller in callers if caller is not None]

    def _start(self, kind, body, after=0.0):
        world = self.world
        process = world.process(kind)
        if process.name in self.plan.without and not after:  # successors always come
            return None

        def act() -> None:
            if after:
                world.park(world.now + round(1000 * after))
            body(process)

        process.actor = world.spawn(process, act)
        return process

    def _worker(self, process: Process) -> None:
        actors.worker(self.world, process, self.blocking_move)

    def _coordinator(self, process: Process) -> None:
        actors.coordinate(self.world, self.tick, spared=self.spared)

    # ---- called by the world

    def died(self, process: Process) -> None:
        """A supervisor starts workers and coordinators again; a parent buries its horse."""
        process.dead = True
        if process.kind == "worker":
            if process.owner and self.buries:
                owner, message = process.owner, process.message
                self._start("parent", lambda p: actors.bury(self.world, owner, message), 0.2)
            self._start("worker", self._worker, 1.0)
        elif process.kind == "coordinator":
            self._start("coordinator", self._coordinator, 1.0)

    def direct(self) -> None:
        """Called before each switch: end the storm, then the calm."""
        world = self.world
        if not world.calm:
            acting = any(not p.dead and not p.actor.done for p in self.callers)
            if not acting and (world.now >= self.storm_until or self._at_rest()):
                self._calm()
        elif self._at_rest():
            self._finale()
        elif world.now > self.deadline:
            world.fail(f"I5 after the last fault: {self._unfinished()}")

    def _at_rest(self) -> bool:
        world = self.world
        busy = any(
            a.process.message or a.process.kind not in ("worker", "coordinator")
            for a in world.actors
        )
        return not busy and world.observer.at_rest

    def _calm(self) -> None:
        world = self.world
        world.calm = True
        world.pending.clear()
        last = max(
            [world.now, *(max(a.process.paused_until, a.stalled_until) for a in world.actors)]
        )
        self.deadline = last + bound(self.tick) + world.observer.longest_wait()
        if world.chance.random() < 0.5:
            self._start("operator", lambda p: actors.relieve(world))

    def _unfinished(self) -> str:
        rows = self.world.observer.rows.values()
        return ", ".join(f"{r.name} is {r.status}" for r in rows if r.status not in ("SUCCEEDED",))

    def _finale(self) -> None:
        world = self.world
        world.observer.final()
        keys = {row.key_hash for row in world.observer.rows.values()} | world.observer.pruned
        for kind, pk, key_hash in world.observer.answers:
            world.observer.check(key_hash in keys, f"I2 {kind} was answered, but row {pk} is gone")
        for db, key, left in world.redis.contents():
            lasting = key.startswith("rq:") and not key.startswith("rq:job:")
            world.observer.check(lasting or left is not None, f"I8 {key} in {db} lives for ever")
        world.end()


def bound(tick: float) -> int:
    """
    Return the milliseconds of the quiet phase after which every job must have ended (I5).

    DESIGN §1: 4/3 lease + RECLAIM_EVERY + LEADER_TTL + RESEND_AFTER, the time for which RQ
    believes in a dead worker, the longest backoff and debounce, two runs, and a tick for each.
    """
    setting = conf.get()
    waits = setting.RECLAIM_EVERY + setting.LEADER_TTL + setting.RESEND_AFTER
    return round(LEASE * 4 / 3 + 1000 * (waits + actors.EXECUTION_TTL + 4 + 4 + 2 * 3 + 6 * tick))
