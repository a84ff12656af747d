"""One stage: its actors, who are started again when they die, and what the judge wants to know."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from dedupjobs import lifecycle
from dedupjobs.clock import DbNow
from dedupjobs.models import (
    ACTIVE,
    WAITING,
    EventStatus,
    JobAttempt,
    OutboxEvent,
    ProcessedJob,
    Status,
)
from tests.faults import arming, enqueuer, ledger
from tests.faults.app.jobs import LEASE
from tests.faults.app.models import Applied
from tests.faults.house import House, faketime
from tests.faults.judge import ENDLESS
from tests.faults.ward import Ward

WORKERS = 3
ENQUEUERS = 1
CONSUMERS = 2  # of which one has its turn
STOCK_COORDINATORS = 2
SHORT_LIFE = 2.0  # seconds; a stock worker ends at once where Redis is away
MOST_FAILURES = 20
PAUSE_AFTER_FAILURE = 0.5  # seconds, as a supervisor of processes has it


@dataclass(slots=True)
class Actor:
    """
    A process of the stage. ``wanted``: it is started again when it ends. ``host``: where it runs.
    """

    name: str
    role: str
    argv: list[str]
    pid: int = 0
    wanted: bool = True
    host: str = ""
    lives: int = 0
    started: float = 0.0
    failures: int = 0  # lives in a row that ended at once
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
        self.reasons: Counter[str] = Counter()
        self.errors: list[str] = []
        self._wakes: list[tuple[float, int]] = []
        self._second: list[tuple[float, int]] = []
        self._seen = 0
        self._exits: dict[int, int] = {}
        self.vanished: list[Any] = []
        self.losses_brought = 0.0
        self.backlog = 12  # rows that wait, above which callers slow down and faults pause
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._trouble: Exception | None = None
        self.seed = seed

    # ---- life

    def __enter__(self) -> Stage:
        for folder in ("armed", "taken", "logs"):
            (self.home / folder).mkdir()
        self.set_pace(self.pace)
        env = self._env()
        self.wards = {host: Ward(env, before) for host, before in self.house.hosts.items()}
        self.cast()
        # Of its own, since a stopped process may hold the database that the stage waits for.
        self._minder = threading.Thread(target=self._mind, daemon=True)
        self._minder.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._minder.join()
        for actor in self.actors:
            if actor.popen is not None:
                actor.popen.kill()
                actor.popen.wait()
        for ward in self.wards.values():
            ward.close()

    def cast(self) -> None:
        """Start who shall be there from the beginning."""
        for _ in range(WORKERS):
            self.add("worker", "rqworker", "default")
        if not self.dedup:
            for _ in range(STOCK_COORDINATORS):
                self.add("coordinator", "dedupjobs_coordinator")
        for _ in range(ENQUEUERS):
            self.add("enqueuer")
        for _ in range(CONSUMERS):
            self.add("consumer", "dedupjobs_consume")

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
        return 4 / 3 * LEASE + waits + 6 + usual["TIMEOUT_GRACE"] + 30

    # ---- actors

    def add(self, role: str, *argv: str, wanted: bool = True, host: str = "", **env: str) -> Actor:
        """Start an actor; with ``env`` as a program of its own, since variables can not change."""
        actor = Actor(f"{role}{len(self.actors)}", role, list(argv), wanted=wanted, host=host)
        with self._lock:
            if env:
                self._execute(actor, env)
            else:
                self._start(actor)
            self.actors.append(actor)
        return actor

    def _start(self, actor: Actor) -> None:
        actor.lives += 1
        actor.started = time.monotonic()
        argv = [f"{actor.name}x{actor.lives}"] if actor.role == "enqueuer" else actor.argv
        order = {
            "argv": argv,
            "role": actor.role,
            "rq": self.worker,
            "log": str(self.home / "logs" / f"{actor.name}.log"),
        }
        actor.pid = self.wards[actor.host].fork(order)

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

    def _mind(self) -> None:
        try:
            while not self._over.wait(0.05):
                with self._lock:
                    self.supervise()
        except Exception as error:
            self._trouble = error

    def supervise(self) -> None:
        """Start again who has ended, and wake who was stopped."""
        self._gather_exits()
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
            if actor.pid in self._exits:
                status = self._exits.pop(actor.pid)
                self._note_end(actor, status)
            if not actor.pid and actor.wanted and actor.popen is None and _may_start(actor):
                self._start(actor)

    def _gather_exits(self) -> None:
        for ward in self.wards.values():
            self._exits |= ward.exits()
        for actor in self.actors:
            if actor.popen is not None and actor.pid and actor.popen.poll() is not None:
                self._exits[actor.pid] = actor.popen.returncode

    def _note_end(self, actor: Actor, status: int) -> None:
        self.ended[f"{actor.role} {status}"] += 1
        if status == 1:
            said = self.log(actor).strip().rpartition("\n")[2]
            self.reasons[said[-160:]] += 1
        actor.pid = 0
        failed = status == 1 and time.monotonic() - actor.started < SHORT_LIFE
        actor.failures = actor.failures + 1 if failed else 0
        if actor.failures > MOST_FAILURES:
            raise RuntimeError(f"{actor.name} ends again and again:\n{self.log(actor)}")

    def log(self, actor: Actor) -> str:
        """Return the end of what an actor has printed."""
        return (self.home / "logs" / f"{actor.name}.log").read_text(errors="replace")[-3000:]

    def _follow_up(self, entry: tuple[int, dict[str, Any]]) -> None:
        self._seen, facts = entry
        if facts["what"] != "strike":
            return
        if facts["action"] == arming.STOP:
            due = facts["at"] + 4 / 3 * LEASE + self.settings.get("RECLAIM_EVERY", 5) + 1
            self._wakes += [(due, pid) for pid in self._stopped(facts)]
        if facts["action"] == arming.TERM_TWICE:
            self._second.append((facts["at"] + 1.15, facts["main"]))

    def _stopped(self, facts: dict[str, Any]) -> set[int]:
        return {facts["pid"], facts["main"]} if facts["role"] == "horse" else {facts["pid"]}

    def wake_all(self) -> None:
        """Wake whoever is still stopped."""
        with self._lock:
            for _, pid in self._wakes:
                self.signal(pid, signal.SIGCONT)
            self._wakes.clear()

    # ---- time

    def pause(self, seconds: float) -> None:
        """Let time pass for the actors."""
        time.sleep(seconds)
        if self._trouble is not None:
            raise self._trouble

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

    def breathe(self, seconds: float = 10, most: int | None = None) -> None:
        """Let the workers catch up, or a fault would be measured by the backlog of others."""
        most = self.backlog // 2 if most is None else most
        waiting = self._waiting()
        self.set_pace(self.pace if waiting <= most else 1.0)
        if waiting > 2 * most:
            self.wait_until(lambda: self._waiting() <= most, seconds)
            self.set_pace(self.pace)

    def _waiting(self) -> int:
        due = ProcessedJob.objects.filter(status__in=WAITING, run_after__lte=DbNow())
        return due.count()

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

    def goes_on(self, strike: Strike) -> bool:
        """Return whether the jobs that a fault has hit are at work again, or done."""
        since = datetime.fromtimestamp(strike.since, UTC)
        again = JobAttempt.objects.filter(job__in=strike.jobs, claimed_at__gt=since)
        jobs = set(again.values_list("job_id", flat=True))
        done = ProcessedJob.objects.filter(pk__in=strike.jobs).exclude(status__in=ACTIVE)
        jobs |= set(done.values_list("pk", flat=True))
        return bool(jobs) or not strike.jobs if strike.first else jobs >= set(strike.jobs)

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

    def at_hand(self) -> list[int]:
        """Return the rows that wait or run, and will not be called again."""
        rows = ProcessedJob.objects.filter(status__in=ACTIVE)
        return [pk for pk, key in rows.values_list("pk", "key") if not key.startswith(ENDLESS)]

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
        wards = {ward.process.pid for ward in self.wards.values()}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                mine = process.environ().get("FAULTS_ACTOR") == str(self.home)
                if mine and process.pid not in wards:
                    found.append((process.pid, " ".join(process.cmdline())[:100]))
        return found

    def told(self) -> bool:
        """Return whether all events have had their effect, as far as that can be counted."""
        events = OutboxEvent.objects.count()
        return Applied.objects.count() >= events and not undelivered().exists()

    def active(self) -> int:
        return ProcessedJob.objects.filter(status__in=ACTIVE).count()

    def running(self) -> list[int]:
        rows = ProcessedJob.objects.filter(status=Status.RUNNING)
        return list(rows.values_list("pk", flat=True)[:200])


def undelivered() -> Any:
    """Return the events that are on their way."""
    return OutboxEvent.objects.exclude(status=EventStatus.DELIVERED)


def _may_start(actor: Actor) -> bool:
    return not actor.failures or time.monotonic() - actor.started > PAUSE_AFTER_FAILURE
