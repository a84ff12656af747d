"""What goes wrong when: calls at a steady pace, and a list of faults, the same for everybody."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import redis

from benchmarks.faults import jobs
from tests.processes import Spawned
from tests.proxy import Proxy
from tests.servers import Valkey

CALLS = 140  # at least; they go on until all faults have struck
PACE = 0.25  # seconds between two calls; two workers keep up with it
TWICE = 5  # every fifth is a double click
BURST = 15
PATIENCE = 30.0  # seconds to find a job at the place where it shall be hit
PAUSED = 9.0  # seconds that a process is stopped: longer than lease and recovery
RQ_GIVES_UP = 100.0  # seconds after which RQ itself takes a worker for dead
STILL = 20.0  # seconds without an effect and with empty queues: no more is expected
LONGEST_REST = 400.0


class Script:
    """Plays once; ``called`` are the numbers whose call has returned without an error."""

    def __init__(
        self,
        home: Path,
        valkey: Valkey,
        proxy: Proxy,
        queues: list[str],
        count: Callable[[], int],
    ) -> None:
        self.home = home
        self.valkey = valkey
        self.proxy = proxy
        self.queues = queues
        self._count = count
        self.called: set[int] = set()
        self.faults: list[str] = []
        self.workers: list[Spawned] = []
        self._next = iter(range(1, 10**6))
        self._over = threading.Event()

    def play(self, call: Callable[[int, str], None]) -> None:
        """Call and strike; return when all that recovers by itself has had its time."""
        self.workers = [self._worker() for _ in range(2)]
        supervising = threading.Thread(target=self._supervise, daemon=True)
        supervising.start()
        striking = threading.Thread(target=self._strike, args=(call,), daemon=True)
        striking.start()
        while striking.is_alive() or len(self.called) < CALLS:
            self._call(call)
            time.sleep(PACE)
        self._rest(RQ_GIVES_UP)
        for worker in list(self.workers):  # a deploy: RQ looks for dead workers' jobs at a start
            worker.signal(signal.SIGTERM)
        self._rest(0)
        self._over.set()
        supervising.join()
        for worker in self.workers:
            worker.stop()

    def _rest(self, least: float) -> None:
        """Return once all is still, and not before ``least`` seconds are over."""
        begun = changed = time.monotonic()
        count = self._count()
        while time.monotonic() < max(begun + least, changed + STILL):
            time.sleep(0.5)
            if self._count() != count or self._queued():
                count, changed = self._count(), time.monotonic()
            if time.monotonic() > begun + LONGEST_REST:
                raise TimeoutError("the queues do not get empty")

    def _queued(self) -> int:
        with self.valkey.client() as client:
            return sum(client.llen(f"rq:queue:{queue}") for queue in self.queues)

    # ---- calls

    def _call(self, call: Callable[[int, str], None]) -> None:
        """Call; a caller that gets an error tries once more, as people and providers do."""
        number = next(self._next)
        queue = self.queues[number % len(self.queues)]
        for _ in range(2 if number % TWICE == 0 else 1):
            for _ in range(2):
                with suppress(redis.RedisError):
                    call(number, queue)
                    self.called.add(number)
                    break

    # ---- workers

    def _worker(self) -> Spawned:
        command = [sys.executable, "-m", "django", "rqworker", *self.queues]
        return Spawned(command, os.environ)

    def _supervise(self) -> None:
        while not self._over.wait(0.2):
            for worker in list(self.workers):
                if not worker.is_alive():
                    self.workers.remove(worker)
                    self.workers.append(self._worker())

    # ---- faults

    def _strike(self, call: Callable[[int, str], None]) -> None:
        time.sleep(3)
        for where in ("before", "after") * 2:
            self._at_work(where, self._kill_horse)
            self._at_work(where, self._kill_worker)
        for _ in range(3):
            self._lose_reply()
        for _ in range(3):
            self._kill_idle(call)
        self._wipe(call)
        for where in ("before", "after"):
            self._at_work(where, self._pause)
            self._at_work(where, self._end_twice)

    def _at_work(self, where: str, hit: Callable[[int, int], None]) -> None:
        """Hit the process that runs a long job and stands before, or after, its effect."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for pid, parent in self._standing(where):
                with suppress(ProcessLookupError):
                    hit(pid, parent)
                    self.faults.append(f"{hit.__name__[1:]} {where} the effect")
                    time.sleep(1)
                    return
            time.sleep(0.01)
        self.faults.append(f"{hit.__name__[1:]} {where} the effect: not found")

    def _standing(self, where: str) -> list[tuple[int, int]]:
        found = []
        for path in (self.home / "work").iterdir():
            said, _, number = path.read_text().partition(" ")
            if said == where and int(number) % jobs.EVERY == 0:
                with suppress(psutil.Error):
                    found.append((int(path.name), psutil.Process(int(path.name)).ppid()))
        return found

    def _kill_horse(self, pid: int, parent: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def _kill_worker(self, pid: int, parent: int) -> None:
        os.kill(parent, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)

    def _pause(self, pid: int, parent: int) -> None:
        """Stop a whole worker, and wake it when others have taken it for dead."""
        for one in (parent, pid):
            os.kill(one, signal.SIGSTOP)
        time.sleep(PAUSED)
        for one in (parent, pid):
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGCONT)

    def _end_twice(self, pid: int, parent: int) -> None:
        """End a worker at once, as an impatient deploy does."""
        os.kill(parent, signal.SIGTERM)
        time.sleep(1.2)
        with suppress(ProcessLookupError):
            os.kill(parent, signal.SIGTERM)

    def _lose_reply(self) -> None:
        """Let a push reach Redis and lose the answer."""
        self.proxy.swallow_reply_to(b"RPUSH")
        self.proxy.swallowed.wait(PATIENCE)
        self.faults.append("reply to a push lost")
        time.sleep(0.5)

    def _kill_idle(self, call: Callable[[int, str], None]) -> None:
        """Kill a worker as messages come in, wherever it then is."""
        for _ in range(3):
            self._call(call)
        worker = self.workers[0]
        for pid in (worker.pid, *worker.children()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.faults.append("worker killed as messages come in")
        time.sleep(1)

    def _wipe(self, call: Callable[[int, str], None]) -> None:
        for _ in range(BURST):
            self._call(call)
        with self.valkey.client() as client:
            client.flushall()
        self.faults.append("Redis wiped")
        time.sleep(2)
