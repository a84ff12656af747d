"""Who watches over a worker's process sees whether it is well."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dedupjobs import vitals
from tests import live
from tests.app import jobs
from tests.live import PATIENCE, Spawn, with_sqlite
from tests.servers import Valkey
from tests.waiting import until

pytestmark = [pytest.mark.django_db(transaction=True), with_sqlite]


@pytest.fixture
def beat(tmp_path: Path) -> Path:
    return tmp_path / "beat"


def moves(beat: Path) -> None:
    """Wait until the file was touched again, twice: the first time may have been before."""
    until(beat.exists, PATIENCE, what="the file is there")
    for _ in range(2):
        before = beat.stat().st_mtime_ns
        until(lambda before=before: beat.stat().st_mtime_ns > before, 10)  # type: ignore[misc]


@pytest.mark.large
def test_worker_touches_its_file_while_it_waits_and_while_a_job_runs(
    spawn: Spawn, beat: Path, tmp_path: Path
) -> None:
    live.start_worker(spawn, HEARTBEAT_FILE=str(beat))
    moves(beat)
    waiting = jobs.wait.enqueue(tag="long", release=str(tmp_path / "release"))
    live.begun("long")
    moves(beat)
    assert live.row_of(waiting).status == "RUNNING"
    (tmp_path / "release").touch()
    live.wait_for(waiting)


@pytest.mark.large
def test_worker_that_stands_still_touches_nothing_and_goes_on_once_it_may(
    spawn: Spawn, beat: Path
) -> None:
    worker = live.start_worker(spawn, HEARTBEAT_FILE=str(beat))
    moves(beat)
    worker.signal(signal.SIGSTOP)
    until(lambda: time.time() - beat.stat().st_mtime > 4, PATIENCE, what="the file grows old")
    worker.signal(signal.SIGCONT)
    moves(beat)


@pytest.mark.large
def test_worker_whose_redis_is_away_is_well_all_the_same(spawn: Spawn, beat: Path) -> None:
    with Valkey() as server:
        worker = live.start_worker(
            spawn, env={"DEDUPJOBS_TEST_REDIS": server.url}, HEARTBEAT_FILE=str(beat)
        )
        moves(beat)
        server.kill()
        moves(beat)
        assert worker.is_alive()


@pytest.mark.large
def test_worker_whose_file_can_not_be_touched_says_so_and_works(spawn: Spawn) -> None:
    worker = live.start_worker(spawn, HEARTBEAT_FILE="/nowhere/beat")
    live.wait_for(jobs.record.enqueue(tag="a"))
    assert "who watches it will miss it" in worker.output


def test_coordinator_touches_the_file(spawn: Spawn, beat: Path) -> None:
    live.start_coordinator(spawn, HEARTBEAT_FILE=str(beat))
    moves(beat)


# ---- systemd


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.settimeout(PATIENCE)
        listening.bind(str(tmp_path / "notify"))
        yield listening


@pytest.mark.large
def test_systemd_hears_of_a_worker_as_long_as_it_is_well(
    spawn: Spawn, systemd: socket.socket
) -> None:
    live.start_worker(spawn, env={"NOTIFY_SOCKET": systemd.getsockname()})
    for _ in range(3):
        assert systemd.recv(100) == b"READY=1\nWATCHDOG=1"


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_sign_reaches_both_kinds_of_sockets_at_most_once_a_second(
    tmp_path: Path, monkeypatch: Any, kind: str
) -> None:
    name = f"@dedupjobs-{os.getpid()}" if kind == "abstract" else str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    monkeypatch.setattr(vitals, "_next", 0.0)
    monkeypatch.setattr(vitals.clock, "monotonic", lambda: 1.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(name.replace("@", "\0"))
        listening.settimeout(0)
        assert vitals.sign() is None
        assert vitals.sign() is None
        assert listening.recv(100) == b"READY=1\nWATCHDOG=1"
        with pytest.raises(BlockingIOError):
            listening.recv(100)


def test_sign_that_nobody_takes_is_no_error_of_the_worker(monkeypatch: Any) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/notify")
    monkeypatch.setattr(vitals, "_next", 0.0)
    assert isinstance(vitals.sign(), FileNotFoundError)
