"""One stage: its actors, who are started again when they die, and what the judge wants to know."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dedupjobs import lifecycle
from dedupjobs.models import ACTIVE, WAITING, ProcessedJob, Status
from tests.faults import arming, enqueuer, ledger
from tests.faults.house import House, faketime

WORKERS = 3
ENQUEUERS = 1
BACKLOG = 25  # waiting rows above which the enqueuers slow down
AFTER_STOP = 8.0  # seconds until a stopped process is woken: longer than lease and recovery
STOCK_COORDINATORS = 2
MOST_FAILURES = 60  # workers that end with status 1, as RQ's do where Redis is away


@dataclass(slots=True)
class Actor:
    """A process of the stage. ``wanted``: it is started again when it ends."""

    name: str
    role: str
    argv: list[str]
    pid: int = 0
    wanted: bool = True
    lives: int = 0
    popen: subprocess.Popen[bytes] | None = None


@dataclass(slots=True)
class Strike:
    """
    A fault as it happened: ``at`` it struck, ``jobs`` that should go on from ``since``.

    ``first``: what counts is the first of the jobs that goes on, so when service is back.
    """

    kind: str
    at: float
    since: float = 0.0
    jobs: list[int] = field(default_factory=list)
    first: bool = False


class Stage:
    """Entered, everything runs; left, nothing does."""

    def __init__(
        self, house: House, worker: str, seed: str, settings: dict[str, Any], pace: float
    ) -> None:
        self.house = house
        self.worker = worker
        self.settings = settings
        self.pace = pace
        self.rng = random.Random(f"{seed} {house.database} {worker}")
        self.home = house.home
        self.actors: list[Actor] = []
        self.strikes: list[Strike] = []
        self.ended: Counter[str] = Counter()
        self.errors: list[str] = []
        self._wakes: list[tuple[float, int]] = []
        self._second: list[tuple[float, int]] = []
        self._seen = 0
        self._text = b""
        self._pids: list[int] = []
        self._exits: dict[int, int] = {}
        self.vanished: list[Any] = []
        self.seed = seed

    # ---- life

    def __enter__(self) -> Stage:
        for folder in ("armed", "taken", "logs"):
            (self.home / folder).mkdir()
        self.set_pace(self.pace)
        env = self._env()
        self.nursery = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.nursery"],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for _ in range(WORKERS):
            self.add("worker", "rqworker", "default")
        if not self.dedup:
            for _ in range(STOCK_COORDINATORS):
                self.add("coordinator", "dedupjobs_coordinator")
        for _ in range(ENQUEUERS):
            self.add("enqueuer")
        return self

    def __exit__(self, *exc_info: object) -> None:
        for actor in self.actors:
            if actor.popen is not None:
                actor.popen.kill()
                actor.popen.wait()
        assert self.nursery.stdin is not None
        self.nursery.stdin.close()
        self.nursery.wait(30)

    def _env(self) -> dict[str, str]:
        env = self.house.env(direct=False, settings=self.settings, worker=self.worker)
        return {**env, "FAULTS_ACTOR": str(self.home), "FAULTS_SEED": self.seed}

    @property
    def dedup(self) -> bool:
        return "dedupjobs" in self.worker

    @property
    def bound(self) -> float:
        """Seconds within which all jobs of §1 go on after the last fault, and then some to run."""
        usual = {"RECLAIM_EVERY": 5, "RESEND_AFTER": 30, "LEADER_TTL": 10, **self.settings}
        waits = usual["RECLAIM_EVERY"] + usual["RESEND_AFTER"] + usual["LEADER_TTL"]
        return 4 / 3 * 5 + waits + 6 + usual["TIMEOUT_GRACE"] + 30

    # ---- actors

    def add(self, role: str, *argv: str, wanted: bool = True, **env: str) -> Actor:
        """Start an actor; with ``env`` as a program of its own, since variables can not change."""
        actor = Actor(f"{role}{len(self.actors)}", role, list(argv), wanted=wanted)
        self.actors.append(actor)
        if env:
            self._execute(actor, env)
        else:
            self._start(actor)
        return actor

    def _start(self, actor: Actor) -> None:
        actor.lives += 1
        argv = [f"{actor.name}x{actor.lives}"] if actor.role == "enqueuer" else actor.argv
        order = {
            "argv": argv,
            "role": actor.role,
            "rq": self.worker,
            "log": str(self.home / "logs" / f"{actor.name}.log"),
        }
        assert self.nursery.stdin is not None
        self.nursery.stdin.write(json.dumps(order).encode() + b"\n")
        self.nursery.stdin.flush()
        while not self._pids:
            self._hear(10)
        actor.pid = self._pids.pop(0)

    def _execute(self, actor: Actor, env: dict[str, str]) -> None:
        prefix = faketime(Path(env["CLOCK"])) if "CLOCK" in env else []
        with (self.home / "logs" / f"{actor.name}.log").open("ab") as log:
            actor.popen = subprocess.Popen(
                [*prefix, sys.executable, "-m", "django", *actor.argv],
                env={**os.environ, **self._env(), **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        actor.pid = actor.popen.pid

    def end(self, actor: Actor) -> None:
        """Let an actor end as a deploy does, and not come back."""
        actor.wanted = False
        if actor.pid:
            self.signal(actor.pid, signal.SIGTERM)

    def signal(self, pid: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def alive(self, role: str) -> list[Actor]:
        return [a for a in self.actors if a.role == role and a.pid]

    def supervise(self) -> None:
        """Start again who has ended, wake who was stopped, and set the pace by the backlog."""
        self._hear(0)
        now = time.time()
        for entry in ledger.read_from(self.home / "ledger", self._seen):
            self._follow_up(entry)
        for due, pid in [w for w in self._wakes if w[0] <= now]:
            self.signal(pid, signal.SIGCONT)
            self._wakes.remove((due, pid))
        for due, pid in [w for w in self._second if w[0] <= now]:
            self.signal(pid, signal.SIGTERM)
            self._second.remove((due, pid))
        for actor in self.actors:
            if actor.popen is not None and actor.pid and actor.popen.poll() is not None:
                self._exits[actor.pid] = actor.popen.returncode
            if actor.pid in self._exits:
                status = self._exits.pop(actor.pid)
                self._note_end(actor, status)
            if not actor.pid and actor.wanted and actor.popen is None:
                self._start(actor)

    def _note_end(self, actor: Actor, status: int) -> None:
        self.ended[f"{actor.role} {status}"] += 1
        actor.pid = 0
        if self.ended[f"{actor.role} 1"] > MOST_FAILURES:
            raise RuntimeError(f"{actor.name} ends again and again:\n{self.log(actor)}")

    def log(self, actor: Actor) -> str:
        """Return the end of what an actor has printed."""
        return (self.home / "logs" / f"{actor.name}.log").read_text(errors="replace")[-3000:]

    def _follow_up(self, entry: tuple[int, dict[str, Any]]) -> None:
        self._seen, facts = entry
        if facts["what"] != "strike":
            return
        if facts["action"] == arming.STOP:
            self._wakes += [(facts["at"] + AFTER_STOP, pid) for pid in self._stopped(facts)]
        if facts["action"] == arming.TERM_TWICE:
            self._second.append((facts["at"] + 1.15, facts["main"]))

    def _stopped(self, facts: dict[str, Any]) -> set[int]:
        return {facts["pid"], facts["main"]} if facts["role"] == "horse" else {facts["pid"]}

    def wake_all(self) -> None:
        """Wake whoever is still stopped."""
        for _, pid in self._wakes:
            self.signal(pid, signal.SIGCONT)
        self._wakes.clear()

    def _hear(self, seconds: float) -> None:
        out = self.nursery.stdout
        assert out is not None
        while select.select([out], [], [], seconds)[0]:
            seconds = 0
            heard = os.read(out.fileno(), 65536)
            if not heard:
                raise RuntimeError("the nursery has ended")
            *lines, self._text = (self._text + heard).split(b"\n")
            for facts in map(json.loads, lines):
                if "pid" in facts:
                    self._pids.append(facts["pid"])
                else:
                    self._exits[facts["ended"]] = facts["status"]

    # ---- time

    def pause(self, seconds: float) -> None:
        """Let time pass for the actors."""
        until = time.monotonic() + seconds
        while True:
            self.supervise()
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.1))

    def wait_until(self, true: Any, seconds: float) -> bool:
        """Let time pass until ``true()``; False: it did not come true in time."""
        until = time.monotonic() + seconds
        while not true():
            if time.monotonic() > until:
                return False
            self.pause(0.1)
        return True

    def set_pace(self, seconds: float) -> None:
        """Let each enqueuer wait so long between two calls."""
        new = self.home / "rate.new"
        new.write_text(f"{seconds:.4f}")
        new.rename(self.home / "rate.txt")

    def steady(self) -> None:
        """Slow the enqueuers down where the workers are behind."""
        waiting = ProcessedJob.objects.filter(status__in=WAITING).count()
        self.set_pace(self.pace if waiting < BACKLOG else 1.0)

    # ---- faults

    def arm(self, role: str, point: str, action: str) -> bool:
        return arming.arm(self.home, role, point, action)

    def armed(self) -> list[str]:
        return sorted(path.name for path in (self.home / "armed").iterdir())

    def disarm(self) -> list[str]:
        """Take back what nobody has come by; return its names."""
        left = self.armed()
        for name in left:
            with suppress(FileNotFoundError):
                (self.home / "armed" / name).unlink()
        return left

    def struck(self, kind: str, **facts: Any) -> Strike:
        """Note a fault; recovery counts from ``since``, by default now."""
        now = time.time()
        strike = Strike(kind, at=now, **{"since": now, **facts})
        self.strikes.append(strike)
        return strike

    def unhold(self) -> None:
        """Do what a person does after a deploy: let go what old code could not run."""
        for row in ProcessedJob.objects.filter(status=Status.HELD):
            lifecycle.unhold(row.pk, row.version)

    # ---- rows

    def burst(self, count: int, kind: str = "plain") -> list[int]:
        """Call some jobs at once, from here; return their primary keys."""
        called = []
        for number in range(count):
            tag = f"{kind}.driver.{time.time_ns()}.{number}"
            called.append(enqueuer.call(kind, tag, 0))
        return [pk for pk in called if pk is not None]

    def waiting(self) -> list[int]:
        """Return the rows that wait now for a worker, and have a message."""
        rows = ProcessedJob.objects.filter(status__in=WAITING, dispatched_at__isnull=False)
        return list(rows.values_list("pk", flat=True)[:200])

    def left_behind(self) -> list[str]:
        """End all workers and coordinators; return what outlives them, in sentences."""
        for actor in self.actors:
            self.end(actor)
        gone = self.wait_until(lambda: not any(a.pid for a in self.actors), 30)
        left = [] if gone else [f"{a.name} does not end" for a in self.actors if a.pid]
        return left + [f"process {pid} is left: {command}" for pid, command in self._orphans()]

    def _orphans(self) -> list[tuple[int, str]]:
        self.wait_until(lambda: not self._of_ours(), 10)
        return self._of_ours()

    def _of_ours(self) -> list[tuple[int, str]]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                mine = process.environ().get("FAULTS_ACTOR") == str(self.home)
                if mine and process.pid != self.nursery.pid:
                    found.append((process.pid, " ".join(process.cmdline())[:100]))
        return found

    def active(self) -> int:
        return ProcessedJob.objects.filter(status__in=ACTIVE).count()

    def running(self) -> list[int]:
        rows = ProcessedJob.objects.filter(status=Status.RUNNING)
        return list(rows.values_list("pk", flat=True)[:200])
