"""
Threads that run jobs which wait for something else, one batch after the other.

Each has database connections of its own, which it keeps while there is work and closes when it has
been idle for a while. The thread that hands work out waits for its end, and cuts off what takes
too long or stands in the way of a shutdown.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from django.db import connections

from dedupjobs import clock, interrupts
from dedupjobs.exceptions import ShutdownReached
from dedupjobs.interrupts import Watch

IDLE = 5.0  # seconds without work after which a thread gives its connections up
NAME = "dedupjobs-thread"

Task = Callable[[], None]


class Crew:
    """The threads of this process; there is one crew, and it grows as it is asked to."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._size = 0

    def run(self, task: Task, count: int) -> None:
        """
        Run ``task`` in ``count`` threads and return when all have returned.

        What one raises is raised here, once all have ended. A SIGTERM that ends a running job
        elsewhere ends those that run here.
        """
        while self._size < count:
            clock.start(self._work, name=f"{NAME}-{self._size}")
            self._size += 1
        shift = _Shift(task, count)
        for _ in range(count):
            self._tasks.put(shift.run)
        try:
            with interrupts.armed(interrupts.Cutter(None)):
                shift.watch.wait(shift.is_over)
        except BaseException as raised:
            shift.watch.cut_all()
            shift.watch.wait(shift.is_over)
            if not isinstance(raised, ShutdownReached):
                raise
        if shift.raised:
            raise shift.raised[0]

    def _work(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=IDLE)
            except queue.Empty:
                connections.close_all()
                task = self._tasks.get()
            task()


class _Shift:
    """One task in several threads."""

    def __init__(self, task: Task, count: int) -> None:
        self._task = task
        self._left = count
        self._guard = threading.Lock()
        self.watch = Watch()
        self.raised: list[BaseException] = []

    def is_over(self) -> bool:
        return self._left == 0

    def run(self) -> None:
        try:
            with self.watch.kept():
                self._task()
        except BaseException as raised:
            self.raised.append(raised)
            with suppress(Exception):
                connections.close_all()
        finally:
            with self._guard:
                self._left -= 1
            self.watch.notify()


crew = Crew()


def _be_new() -> None:
    """A forked child has none of its parent's threads."""
    global crew  # noqa: PLW0603 - there is one per process
    crew = Crew()


os.register_at_fork(after_in_child=_be_new)


def run(task: Task, count: int) -> None:
    """Run ``task`` in ``count`` threads of this process's crew."""
    crew.run(task, count)
