"""
PostgreSQL's own clock is moved while jobs run: two witnesses keep the living and find the dead.

libfaketime stands between a PostgreSQL of this module's own and the system's clock; its offset is
read from a file, so it changes while the server runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from django.db import connection

from dedupjobs import clock
from dedupjobs.clock import DbNow
from dedupjobs.coordinator import Coordinator
from dedupjobs.models import JobAttempt, ProcessedJob, Status
from tests.app import jobs
from tests.app.models import Ledger
from tests.processes import Spawned
from tests.servers import HOST, PostgreSQL
from tests.waiting import until

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(
        os.environ.get("DEDUPJOBS_TEST_DB") != "postgresql", reason="moves PostgreSQL's clock"
    ),
    pytest.mark.skipif(
        not LIBRARIES, reason="no libfaketime here; on Debian: apt-get install libfaketime"
    ),
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(300),
]

PATIENCE = 60  # seconds; the machine may be busy
FORWARD, BACK = timedelta(seconds=60), timedelta(hours=-1)
LEASE = 2  # seconds, that of `jobs.wait`

Spawn = Callable[..., Spawned]


class MovingClock(PostgreSQL):
    """A PostgreSQL whose wall clock is the machine's plus ``move``; its timers stay right."""

    def start(self) -> None:
        self.offset = self.home / "offset"
        self.move(timedelta())
        super().start()
        self.move(timedelta())

    def move(self, offset: timedelta) -> None:
        """Set the clock so far from the right time, at once and for all connections."""
        new = self.home / "offset.new"
        new.write_text(f"{offset.total_seconds():+.0f}\n")
        new.chmod(0o644)
        new.replace(self.offset)

    def _command(self) -> list[str]:
        return [
            "env",
            f"LD_PRELOAD={LIBRARIES[0]}",
            f"FAKETIME_TIMESTAMP_FILE={self.offset}",
            "FAKETIME_NO_CACHE=1",
            "DONT_FAKE_MONOTONIC=1",
            *super()._command(),
        ]


@pytest.fixture(scope="module")
def server() -> Iterator[MovingClock]:
    with MovingClock() as server:
        yield server


@pytest.fixture
def moving(server: MovingClock, transactional_db: None) -> Iterator[MovingClock]:
    """Let this process use a fresh database of the server whose clock moves."""
    where = connection.settings_dict
    name = f"moving_{clock.token()}"
    with server.connect() as plain:
        plain.execute(f"CREATE DATABASE {name}")
    usual = {key: where[key] for key in ("HOST", "PORT", "NAME")}
    connection.close()
    where.update(HOST=HOST, PORT=str(server.port), NAME=name)
    try:
        subprocess.run(
            [sys.executable, "-m", "django", "migrate", "--run-syncdb", "--verbosity", "0"],
            env={**os.environ, **env_of(server, name)},
            check=True,
        )
        yield server
    finally:
        server.move(timedelta())
        connection.close()
        where.update(usual)


def env_of(server: MovingClock, name: str) -> dict[str, str]:
    settings = {"TICK": 0.2, "RECLAIM_EVERY": 0.3, "LEADER_TTL": 1, "RESEND_AFTER": 2}
    return {
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DEDUPJOBS_TEST_POSTGRESQL": f"{HOST}:{server.port}",
        "DEDUPJOBS_TEST_DB_NAME": name,
        "DEDUPJOBS_TEST_SETTINGS": json.dumps(settings),
    }


@pytest.fixture
def start(moving: MovingClock, spawn: Spawn) -> Callable[[], Spawned]:
    """Start workers, each with a coordinator of its own."""

    def start_worker() -> Spawned:
        name = str(connection.settings_dict["NAME"])
        worker = spawn("rqworker", "default", **env_of(moving, name))
        worker.wait_for_output("Listening on", PATIENCE)
        return worker

    return start_worker


def jump(server: MovingClock, offset: timedelta) -> None:
    """Move the clock, and see that the database's own ``DbNow`` has moved."""
    server.move(offset)

    def has_moved() -> bool:
        now = ProcessedJob.objects.annotate(db_now=DbNow()).values_list("db_now", flat=True)
        return abs(now[0] - clock.utcnow() - offset) < timedelta(seconds=5)

    until(has_moved, what=f"the database's clock has moved by {offset}")


def begun(tag: str, number: int = 1) -> int:
    """Wait until an attempt has begun, and return its process."""
    head = f"begin {number} "
    found = until(
        lambda: Ledger.objects.filter(tag=tag, note__startswith=head).first(),
        PATIENCE,
        what=f"attempt {number} of {tag} begins",
    )
    return int(found.note.removeprefix(head))


def let_it_beat(beats: int) -> None:
    """Wait for so many beats of the only open attempt; six are one lease."""
    seen: set[object] = set()

    def enough() -> bool:
        seen.update(JobAttempt.objects.values_list("beat_at", flat=True))
        return len(seen) > beats

    until(enough, PATIENCE, what=f"{beats} beats")


def ends_well(pk: int) -> None:
    until(
        lambda: ProcessedJob.objects.get(pk=pk).status == Status.SUCCEEDED,
        PATIENCE,
        what=f"row {pk} succeeds",
    )


def outcomes(pk: int) -> list[str | None]:
    found = JobAttempt.objects.filter(job_id=pk).order_by("number")
    return list(found.values_list("outcome", flat=True))


def kill_with_children(worker: Spawned) -> None:
    """Kill a worker, its horse and its coordinator: the whole host is gone."""
    for pid in (worker.pid, *worker.children()):
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
    worker.wait(PATIENCE)


@pytest.mark.parametrize("offset", [FORWARD, BACK], ids=["forward", "back"])
def test_clock_that_jumps_takes_no_live_job(
    moving: MovingClock, start: Callable[[], Spawned], tmp_path: Path, offset: timedelta
) -> None:
    release = tmp_path / "release"
    start()
    start()
    pk = jobs.wait.enqueue(tag="alive", release=str(release)).job.pk
    begun("alive")
    for there in (offset, timedelta(), offset):
        jump(moving, there)
        let_it_beat(9)
        assert outcomes(pk) == [None]
    release.touch()
    ends_well(pk)
    assert outcomes(pk) == ["SUCCEEDED"]
    assert Ledger.objects.filter(tag="alive", note__startswith="begin").count() == 1


@pytest.mark.parametrize("offset", [FORWARD, BACK], ids=["forward", "back"])
def test_clock_that_jumps_after_a_host_died_keeps_no_dead_job(
    moving: MovingClock, start: Callable[[], Spawned], tmp_path: Path, offset: timedelta
) -> None:
    release = tmp_path / "release"
    doomed = start()
    pk = jobs.wait.enqueue(tag="dead", release=str(release)).job.pk
    begun("dead")
    start()
    kill_with_children(doomed)
    jump(moving, offset)
    release.touch()
    begun("dead", 2)
    ends_well(pk)
    assert outcomes(pk) == ["LOST", "SUCCEEDED"]


def test_coordinator_in_the_jump_takes_neither_the_living_nor_keeps_the_dead(
    moving: MovingClock, start: Callable[[], Spawned], tmp_path: Path
) -> None:
    """One of two jobs lives on in a worker, the other's worker died just before the jump."""
    release = tmp_path / "release"
    doomed = start()
    dead = jobs.wait.enqueue(tag="dead", release=str(release)).job.pk
    begun("dead")
    start()
    alive = jobs.wait.enqueue(tag="alive", release=str(release)).job.pk
    begun("alive")
    kill_with_children(doomed)
    jump(moving, FORWARD)
    coordinator = Coordinator()
    until(lambda: coordinator.reclaim() or "LOST" in outcomes(dead), PATIENCE)
    assert outcomes(alive) == [None]
    release.touch()
    ends_well(alive)
    assert outcomes(alive) == ["SUCCEEDED"]


def test_job_whose_time_the_clock_jumps_over_runs(
    moving: MovingClock, start: Callable[[], Spawned]
) -> None:
    start()
    pk = jobs.record.using(run_after=45).enqueue(tag="later").job.pk
    jump(moving, FORWARD)
    ends_well(pk)


def test_job_that_the_clock_leaves_in_the_future_runs_once_the_clock_is_right_again(
    moving: MovingClock, start: Callable[[], Spawned]
) -> None:
    """Its message comes too early and is dropped; the row remembers."""
    pk = jobs.record.enqueue(tag="early").job.pk
    jump(moving, BACK)
    worker = start()
    worker.wait_for_output("Job OK", PATIENCE)
    assert ProcessedJob.objects.get().status == Status.PENDING
    jump(moving, timedelta())
    ends_well(pk)
    assert Ledger.objects.filter(tag="early").count() == 1


def test_job_enqueued_while_the_clock_is_wrong_runs_at_once(
    moving: MovingClock, start: Callable[[], Spawned]
) -> None:
    start()
    jobs.record.enqueue(tag="before")
    for offset in (FORWARD, BACK):
        jump(moving, offset)
        ends_well(jobs.record.enqueue(tag=str(offset)).job.pk)
