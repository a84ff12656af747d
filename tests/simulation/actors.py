"""Who acts: those who call, those who run, the coordinator, the operator, and user code."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db import DatabaseError, InterfaceError, connections, transaction

from dedupjobs import clock, lifecycle, locks, operations, runner
from dedupjobs.context import current_attempt
from dedupjobs.coordinator import Coordinator
from dedupjobs.exceptions import (
    Cancel,
    DedupJobsError,
    PayloadMismatch,
    Retry,
    Snooze,
    StaleVersion,
)
from dedupjobs.models import ProcessedJob, Status
from tests.simulation.baton import Process
from tests.simulation.world import QUEUE, STARTED, World

INTERMEDIATE = f"{QUEUE}:intermediate"
EXECUTION_TTL = 8  # seconds that RQ believes in a silent worker


# ---- workers


def worker(world: World, process: Process, blocking_move: bool) -> None:
    """Pop messages and run them, as an RQ worker on one queue (or on several) does."""
    while True:
        world.park(math.inf, lambda: bool(world.redis.peek(0, QUEUE)))
        world.reach("worker.idle")
        if blocking_move:
            popped = world.redis.execute(0, ("LMOVE", QUEUE, INTERMEDIATE, "LEFT", "RIGHT"))
        else:
            popped = world.redis.execute(0, ("LPOP", QUEUE))
        if popped is None:
            continue
        process.message = popped.decode()
        process.owner = f"{process.name}-{process.message}-{world.names['ride']}"
        world.names["ride"] += 1
        world.reach("worker.popped")
        _work(world, process, popped)
        process.message = process.owner = ""


def _work(world: World, process: Process, popped: bytes) -> None:
    redis = world.redis
    execution = popped + b":" + process.owner.encode()
    redis.execute(0, ("ZADD", STARTED, world.now // 1000 + EXECUTION_TTL, execution))
    redis.execute(0, ("LREM", INTERMEDIATE, 1, popped))
    world.executions[execution] = process
    world.reach("worker.started")
    data = redis.execute(0, ("HGET", b"rq:job:" + popped, "data"))
    if data is not None:
        function, _, args, _ = json.loads(zlib.decompress(data))
        assert function == "dedupjobs.runner.run"
        try:
            runner.run(*args)
        except (DatabaseError, InterfaceError):
            process.troubled = True
            connections.close_all()  # RQ fails the message; the row waits for the coordinator
    world.reach("worker.done")
    world.executions.pop(execution, None)
    redis.execute(0, ("ZREM", STARTED, execution))
    redis.execute(0, ("DEL", b"rq:job:" + popped))


class Host(runner.Host):
    """Each worker's own host: the owner that its parent has minted, and the message's id."""

    __slots__ = ("world",)

    def __init__(self, world: World) -> None:
        self.world = world
        self.pays_when_idle = False
        self.description = ""

    @property  # type: ignore[override]
    def owner(self) -> str:
        return self.world.current.process.owner if self.world.current else ""

    @property  # type: ignore[override]
    def rq_id(self) -> str:
        return self.world.current.process.message if self.world.current else ""


def bury(world: World, owner: str, message: str) -> None:
    """Do what the parent of a dead horse does."""
    try:
        for claim in lifecycle.claimed_by(owner):
            lifecycle.bury(claim.fence, "lost: its process died")
            locks.release(claim.job_pk, claim.owner)
        lifecycle.mark_unsent([message])
    except (DatabaseError, InterfaceError):
        connections.close_all()


# ---- the coordinator


def coordinate(world: World, every: float, *, spared: list[str]) -> None:
    coordinator = Coordinator()
    coordinator._next.update(dict.fromkeys(spared, math.inf))
    while True:
        clock.sleep(every)
        try:
            coordinator.tick()
        except (DatabaseError, InterfaceError):
            connections.close_all()


# ---- those who call


def call(world: World, calls: list[tuple[Any, int, int, str, float]]) -> None:
    """Enqueue, in the way that each call says, after its pause."""
    for job, key, serial, how, pause in calls:
        clock.sleep(pause)
        try:
            _enqueue(world, job, key, serial, how)
        except PayloadMismatch:
            continue
        except _RollbackError:
            continue
        except (DatabaseError, InterfaceError):
            world.touch().process.troubled = True
            connections.close_all()
        except DedupJobsError as error:
            if "moved by others" not in str(error):
                raise


def _enqueue(world: World, job: Any, key: int, serial: int, how: str) -> None:
    arguments = {"k": key, "n": serial}
    asked_at = world.db_now()
    match how:
        case "plain":
            outcome = job.enqueue(**arguments)
        case "atomic" | "rollback":
            with transaction.atomic():
                outcome = job.enqueue(**arguments)
                world.reach("business")
                if how == "rollback":
                    raise _RollbackError
        case "many":
            outcome = job.enqueue_many([arguments, arguments])[0]
        case "later" if job.options.newest_wins:
            outcome = job.enqueue(**arguments)
        case "later":
            outcome = job.using(run_after=timedelta(seconds=2)).enqueue(**arguments)
        case _:
            outcome = job.run_now(**arguments)
    world.observer.answered(outcome.kind, outcome.job, asked_at)


class _RollbackError(Exception):
    pass


# ---- the operator


def operate(world: World, acts: list[tuple[float, str, float]]) -> None:
    """Look at a row, wait a little, act on what was seen."""
    for pause, action, thought in acts:
        clock.sleep(pause)
        try:
            rows = list(lifecycle.jobs().order_by("pk"))
            if rows:
                row = rows[int(world.chance.random() * len(rows))]
                world.observer.seen(row.pk)
                clock.sleep(thought)
                _act(action, row)
        except (DatabaseError, InterfaceError):
            connections.close_all()


def relieve(world: World) -> None:
    """Unhold and retry what rests and may go on."""
    for row in lifecycle.jobs().order_by("pk"):
        world.observer.seen(row.pk)
        if row.status == Status.HELD:
            _act("unhold", row)
        elif row.status == Status.DEAD:
            _act("retry", row)


def _act(action: str, row: ProcessedJob) -> None:
    act: Callable[..., Any] = getattr(operations, action)
    try:
        act(row, by="operator")
    except StaleVersion:
        return


# ---- user code


class Play:
    """How long user code takes, and how it ends; in the calm it always succeeds."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.troubled = world.chance.choice((0.0, 0.2, 0.8))

    def labour(self, *, brief: bool) -> None:
        """Work; ``brief`` for what holds SQLite's only right to write, and so keeps beats out."""
        world, chance = self.world, self.world.chance
        attempt = current_attempt()
        claim = attempt._claim
        world.observer.ran_with(claim.fence, claim.args)
        for _ in range(chance.choice((1, 1, 2))):
            world.reach("labour")
            clock.sleep(chance.choice((0.01, 0.5)) if brief or world.calm else self._long())
            if chance.random() < 0.5:
                attempt.check()

    def _long(self) -> float:
        chance = self.world.chance
        return chance.choice((0.01, 0.5, 0.5, 1.0, 2.0)) if chance.random() < 0.95 else 7.0

    def ending(self) -> None:
        world = self.world
        world.reach("ending")
        if world.calm or world.chance.random() >= self.troubled:
            return
        roll = world.chance.random()
        if roll < 0.6:
            raise ValueError("simulated: user code failed")
        if roll < 0.75:
            raise Retry("simulated", after=1)
        if roll < 0.9:
            raise Snooze(1, "simulated")
        raise Cancel("simulated")
