"""Live controls in other processes: how soon they are in force, and what kills leave of limits."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from dedupjobs import clock, levers, lifecycle
from dedupjobs.levers import Wish
from dedupjobs.models import AttemptOutcome, Control, ControlKind, JobAttempt, ProcessedJob, Status
from tests import live
from tests.app import jobs
from tests.live import DEDUP, PATIENCE, SIMPLE, Spawn
from tests.processes import Spawned
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

LOST, SUCCEEDED = AttemptOutcome.LOST, AttemptOutcome.SUCCEEDED
WHO = {"by": "anna", "reason": "an incident"}
HEARD, UNHEARD = 1.0, 5.0  # seconds until a control is in force everywhere
BUSY = 0.5  # seconds by which a machine with too few cores may be late


def put(kind: str, value: float | None = None, **about: Any) -> Control:
    ((aim, target),) = about.items()
    return levers.add(Wish(kind=kind, aim=aim, target=target, value=value), **WHO)


def put_unheard(kind: str, **about: str) -> Control:
    """Put a control in force of which no message tells: as if Redis were down."""
    ((aim, target),) = about.items()
    return Control.objects.create(
        kind=kind, aim=aim, target=target, created_at=clock.utcnow(), place="here", **WHO
    )


# ---- how soon


def start_caller(spawn: Spawn, process_env: dict[str, str], listens: str) -> Iterator[Spawned]:
    env = {**process_env, **live.env_of(LISTEN="always" if listens == "listen" else "never")}
    caller = Spawned((sys.executable, "-m", "tests.caller", listens), env)
    try:
        caller.wait_for_output("CREATED", PATIENCE)
        yield caller
    finally:
        caller.stop()


def blocked_after(caller: Spawned, moment: float) -> float:
    """Return the seconds from ``moment`` to the first call that was turned away."""

    def first() -> float | None:
        lines = [line.split() for line in caller.output.splitlines() if line.startswith("call")]
        return next((float(at) for _, at, kind in lines if kind == "BLOCKED"), None)

    return until(first, PATIENCE, what="a call is turned away") - moment


@pytest.mark.parametrize(
    ("listens", "within"),
    [("listen", HEARD), ("deaf", UNHEARD)],
    ids=["by a message within 1 s", "without one within 5 s"],
)
def test_filter_is_in_force_in_a_calling_process(
    spawn: Spawn, process_env: dict[str, str], listens: str, within: float
) -> None:
    for caller in start_caller(spawn, process_env, listens):
        if listens == "listen":
            until(invalidation_is_heard, PATIENCE, what="the caller listens")
        begun = time.time()
        put(ControlKind.FILTER, job="testapp.record_always")
        assert blocked_after(caller, begun) < within + BUSY


def invalidation_is_heard() -> bool:
    with live.cache_client() as client:
        ours = str(client.connection_pool.connection_kwargs["db"])
        return any(one["db"] == ours for one in client.client_list(_type="pubsub"))


@pytest.mark.large
def test_filter_that_no_message_told_is_in_force_in_a_listening_process_within_five_seconds(
    spawn: Spawn, process_env: dict[str, str]
) -> None:
    for caller in start_caller(spawn, process_env, "listen"):
        until(invalidation_is_heard, PATIENCE, what="the caller listens")
        begun = time.time()
        put_unheard(ControlKind.FILTER, job="testapp.record_always")
        assert blocked_after(caller, begun) < UNHEARD + BUSY


@contextmanager
def calls() -> Iterator[None]:
    """Enqueue a job every few milliseconds while the block runs."""
    stop = threading.Event()

    def call() -> None:
        number = 0
        try:
            while not stop.wait(0.03):
                number += 1
                jobs.record_always.enqueue(tag=f"n{number}")
        finally:
            connections.close_all()

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def last_claim_after(control: Control, within: float) -> float:
    """Return how long after a pause the last job was claimed; its rows are set aside by then."""
    time_is_up = time.monotonic() + within + BUSY
    until(lambda: time.monotonic() > time_is_up, PATIENCE, what="the time is up")
    before = JobAttempt.objects.count()
    aside = until(lambda: lifecycle.marks(most=1), PATIENCE, what="rows are set aside")
    assert JobAttempt.objects.count() == before, "jobs still start"
    assert aside
    last = JobAttempt.objects.order_by("-claimed_at").first()
    assert last is not None
    return (last.claimed_at - control.created_at).total_seconds()


@pytest.fixture(params=[DEDUP, SIMPLE])
def worker(request: pytest.FixtureRequest) -> Iterator[str]:
    """A class of workers, for which this process writes its messages."""
    with live.changed(RQ={"WORKER_CLASS": request.param}):
        yield request.param


def test_worker_stops_starting_jobs_within_a_second_of_a_pause_and_starts_again_at_its_end(
    spawn: Spawn, worker: str
) -> None:
    live.start_worker(spawn, worker=worker)
    if worker == DEDUP:
        until(invalidation_is_heard, PATIENCE, what="the worker's coordinator listens")
    else:
        live.start_coordinator(spawn)
    with calls():
        until(lambda: JobAttempt.objects.count() > 5, PATIENCE)
        control = put(ControlKind.PAUSE, queue="default")
        assert last_claim_after(control, HEARD) < HEARD + BUSY
    levers.end(control.pk, **WHO)
    unfinished = ProcessedJob.objects.exclude(status=Status.SUCCEEDED)
    until(lambda: not unfinished.exists(), PATIENCE, what="all have run")
    assert not JobAttempt.objects.exclude(outcome=SUCCEEDED).exists()


@pytest.mark.large
def test_worker_that_no_message_told_of_a_pause_stops_starting_jobs_within_five_seconds(
    spawn: Spawn,
) -> None:
    live.start_worker(spawn)
    with calls():
        until(lambda: JobAttempt.objects.count() > 5, PATIENCE)
        control = put_unheard(ControlKind.PAUSE, queue="default")
        assert last_claim_after(control, UNHEARD) < UNHEARD + BUSY


# ---- what is set reaches runs that are under way


def test_time_out_that_is_set_ends_a_run_that_is_under_way(
    spawn: Spawn, worker: str, tmp_path: Path
) -> None:
    live.start_worker(spawn, worker=worker, TIMEOUT_GRACE=20)  # no parent is to kill it first
    outcome = jobs.wait.enqueue(tag="a", release=str(tmp_path / "never"))
    live.begun("a")
    put(ControlKind.TIMEOUT, 1, job="testapp.wait")
    attempt = live.wait_for_outcome(outcome, AttemptOutcome.TIMED_OUT)
    assert "1 s" in attempt.error_message
    assert attempt.run_time is not None
    assert attempt.run_time < 5


@pytest.mark.large
def test_time_out_that_is_set_lets_a_run_that_is_under_way_go_on(
    spawn: Spawn, worker: str, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    live.start_worker(spawn, worker=worker)
    outcome = jobs.wait_briefly.enqueue(tag="a", release=str(release))
    live.begun("a")
    put(ControlKind.TIMEOUT, 60, job="testapp.wait_briefly")
    begun = live.attempt(outcome).claimed_at
    until(
        # Its own time-out is 5 s, and a DedupWorker kills it a second later.
        lambda: (lifecycle.database_now() - begun).total_seconds() > 7,
        PATIENCE,
        what="its own time-out is over",
    )
    assert live.outcomes(outcome) == [None]
    release.touch()
    live.wait_for(outcome)
    assert live.outcomes(outcome) == [SUCCEEDED]


def test_lease_that_is_set_reaches_a_run_that_is_under_way(spawn: Spawn, tmp_path: Path) -> None:
    release = tmp_path / "release"
    live.start_worker(spawn)
    outcome = jobs.wait.enqueue(tag="a", release=str(release))
    live.begun("a")
    put(ControlKind.LEASE, 300, job="testapp.wait")

    def leased() -> bool:
        attempt = live.attempt(outcome)
        return (attempt.lease_until - attempt.beat_at).total_seconds() > 200

    until(leased, 2 / 6 + HEARD + 2, what="the next beats renew it for so long")
    release.touch()
    live.wait_for(outcome)


# ---- limits under kills


class Watch:
    """Counts open attempts all the time, and keeps the most."""

    def __init__(self) -> None:
        self.most = 0
        self._looked = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        assert self._looked.wait(PATIENCE)
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        try:
            while not self._stop.wait(0.01):
                self.most = max(self.most, JobAttempt.objects.filter(outcome=None).count())
                self._looked.set()
        finally:
            connections.close_all()


def test_slot_of_a_killed_horse_is_free_at_once(spawn: Spawn, tmp_path: Path) -> None:
    release = tmp_path / "release"
    live.start_worker(spawn)
    live.start_worker(spawn)
    put(ControlKind.LEASE, 60, job="testapp.run_one_per_tenant")
    first = jobs.run_one_per_tenant.enqueue(tag="a", tenant=1, release=str(release))
    horse = live.begun("a")
    second = jobs.run_one_per_tenant.enqueue(tag="b", tenant=1)
    until(lambda: lifecycle.is_aside(live.row_of(second)), PATIENCE, what="b waits for room")
    with Watch() as watch:
        killed_at = lifecycle.database_now()
        live.kill(horse)
        ran = live.wait_for_outcome(first, LOST)
        release.touch()
        live.wait_for(second)
        live.wait_for(first)
    assert watch.most == 1
    assert (ran.ended_at - killed_at).total_seconds() < 2  # long before its lease would end


@pytest.mark.large
def test_slot_of_a_killed_worker_is_free_once_its_lease_is_over(
    spawn: Spawn, tmp_path: Path
) -> None:
    doomed = live.start_worker(spawn)
    first = jobs.run_one_per_tenant.enqueue(tag="a", tenant=1, release=str(tmp_path / "never"))
    horse = live.begun("a")
    live.start_worker(spawn)
    second = jobs.run_one_per_tenant.enqueue(tag="b", tenant=1)
    until(lambda: lifecycle.is_aside(live.row_of(second)), PATIENCE, what="b waits for room")
    with Watch() as watch:
        live.kill(doomed.pid)
        live.kill(horse)
        doomed.wait()
        live.wait_for_outcome(first, LOST)
        until(lambda: JobAttempt.objects.filter(pk__gt=live.attempt(first).pk).exists(), PATIENCE)
    lease_over = live.attempt(first).lease_until
    claimed = JobAttempt.objects.filter(pk__gt=live.attempt(first).pk).order_by("pk").first()
    assert claimed is not None
    assert claimed.claimed_at >= lease_over, "no live lease was passed over"
    # Two witnesses, and RECLAIM_EVERY, TICK and LEADER_TTL of the brisk settings.
    assert (claimed.claimed_at - lease_over).total_seconds() < 2 / 3 + 1 + 3
    assert watch.most == 1
    assert second.created


@pytest.mark.large
@pytest.mark.timeout(400)
def test_limit_holds_while_workers_and_horses_are_killed_and_every_job_ends(spawn: Spawn) -> None:
    """
    Three workers, a limit of 2, thirty jobs; every half second a worker or a horse is killed.

    At no time are there more than two open attempts, and at the end everything has run.
    """
    chance = random.Random(7)
    env = live.env_of()
    workers = [live.start_worker(spawn) for _ in range(3)]
    outcomes = [jobs.run_two_for_a_moment.enqueue(tag=f"t{n}") for n in range(30)]
    killed = 0
    with Watch() as watch:
        while killed < 12:
            before = len(_ended())
            until(lambda n=before: len(_ended()) > n or not _waiting(), PATIENCE, what="one ends")
            victim = chance.randrange(len(workers))
            doomed = workers[victim]
            children = doomed.children()
            if chance.random() < 0.5 and children:
                with suppress(ProcessLookupError):  # dead already, and not yet reaped
                    live.kill(chance.choice(children))
            else:
                doomed.signal(signal.SIGKILL)
                doomed.wait()
                workers[victim] = spawn("rqworker", "default", **env)
            killed += 1
        for outcome in outcomes:
            live.wait_for(outcome, seconds=120)
    assert watch.most == 2
    assert not JobAttempt.objects.filter(outcome=None).exists()
    until(lambda: not lifecycle.marks(most=10), PATIENCE, what="the last mark is gone")


def _ended() -> list[int]:
    return list(JobAttempt.objects.exclude(outcome=None).values_list("pk", flat=True))


def _waiting() -> bool:
    return bool(live.queued()) or JobAttempt.objects.filter(outcome=None).exists()
