"""
One simulated run: the doors through which the tested code meets time, Redis and the database.

Each exchange and each statement is a point where the baton may go on or a fault may happen.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from datetime import datetime
from typing import Any

from django.db import OperationalError
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.simulation import happenings, stage
from tests.simulation.baton import Actor, Baton, Process
from tests.simulation.database.base import Line
from tests.simulation.faults import Fault
from tests.simulation.redis_model import Store

BUSY = 20_000  # milliseconds that a statement waits for another writer
QUEUE = "rq:queue:default"
STARTED = "rq:wip:default"


class World(Baton):
    """What ``stage`` shows to the tested code."""

    observer: Any
    play: Any

    def __init__(self, seed: int, faults: tuple[Fault, ...]) -> None:
        super().__init__(seed, faults)
        self.redis = Store(lambda: self.now)
        self.db_skew = 0
        self.jumps = 0  # milliseconds that the database's clock was put back, in sum
        self.troubled = False  # whether a transaction stood still, and all others with it
        self.executions: dict[bytes, Process] = {}

    def _happen(self, fault: Fault, actor: Actor) -> None:
        self._note(f"FAULT {fault.kind} {fault.amount or ''}")
        self.happened.append(fault)
        happenings.happen(self, fault, actor)

    # ---- the clock

    def db_now(self) -> int:
        return self.now + self.db_skew

    def monotonic(self) -> float:
        skew = self.current.process.skew if self.current else 0
        return (self.now + skew) / 1000

    def utcnow(self) -> datetime:
        return stage.utc(self.now)

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.chance.random()

    def token(self) -> str:
        process = self.touch().process
        process.tokens += 1
        return f"{process.name}-{process.tokens}"

    def sleep(self, seconds: float) -> None:
        self.reach("sleep")
        self.park(self.after(seconds))

    def wait(self, event: stage.Event, seconds: float) -> bool:
        if not event.is_set():
            self.park(self.after(seconds), event.is_set)
        else:
            self.touch()
        return event.is_set()

    def start(self, target: Callable[[], None], *, name: str) -> Callable[[float], None]:
        process = self.touch().process
        self.names[process.name] += 1
        started = self.spawn(process, target, f"{process.name}.{self.names[process.name]}")

        def join(seconds: float) -> None:
            if not started.done:
                self.park(self.now + round(seconds * 1000), lambda: started.done)

        return join

    # ---- Redis

    def exchange(self, db: int, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Send commands in one go; a fault may lose them or their replies."""
        point = f"redis:{commands[0][0]}"
        lost = False
        try:
            self.reach(point)
        except happenings.ReplyLost:
            lost = True
        for command in commands:
            if command[0] == "RPUSH" and command[1] == QUEUE:
                self.observer.pushed(command[2])
        if point == "redis:TIME":
            self._heartbeat_executions()
        replies = self.redis.exchange(db, commands)
        if lost:
            return [RedisConnectionError("simulated: the reply was lost")]
        return replies

    def _heartbeat_executions(self) -> None:
        """Renew what RQ believes alive, as its workers do by and by."""
        for execution, process in list(self.executions.items()):
            if process.dead:
                del self.executions[execution]
            elif process.paused_until <= self.now:
                self.redis.execute(0, ("ZADD", STARTED, self.now // 1000 + 8, execution))

    # ---- the database

    def begin(self, line: Line) -> None:
        """Wait for the right to write, as long as SQLite's busy time-out."""
        self.reach("begin")
        self._wait_to_write()
        self.writer = line
        self.observer.begin(line)

    def _wait_to_write(self) -> None:
        if self.writer is not None:
            self.park(self.now + BUSY, lambda: self.writer is None)
            if self.writer is not None:
                raise sqlite3.OperationalError("database is locked")

    def autocommit(self, line: Line, execute: Callable[[], Any]) -> Any:
        lost = False
        try:
            self.reach("statement")
        except happenings.CommitLost:
            line.broken = True
            raise sqlite3.OperationalError("simulated: the server went away") from None
        except happenings.CommitReplyLost:
            lost = True
        self._wait_to_write()
        self.observer.begin(line)
        done = execute()
        self._committed(line)
        if lost:
            line.broken = True
            raise sqlite3.OperationalError("simulated: no reply from the server")
        self.reach("stated")
        return done

    def commit(self, line: Line) -> None:
        lost = False
        try:
            self.reach(f"commit:{self.touch().last}")
        except happenings.CommitLost:
            line.rollback()
            self.rolled_back(line)
            line.broken = True
            raise OperationalError("simulated: the server went away") from None
        except happenings.CommitReplyLost:
            lost = True
        line.commit()
        self.writer = None
        self._committed(line)
        if lost:
            line.broken = True
            raise OperationalError("simulated: no reply to COMMIT")
        self.reach(f"committed:{self.touch().last}")

    def _committed(self, line: Line) -> None:
        if line.dirty:
            self.observer.look(line)
            line.dirty.clear()

    def rolled_back(self, line: Line) -> None:
        if self.writer is line:
            self.writer = None
