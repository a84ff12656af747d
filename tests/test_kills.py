"""Workers that are killed, stopped or told to end in the middle of a job."""

from __future__ import annotations

import math
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import django_rq
import psutil
import pytest
import redis
from django.db import connection, transaction
from rq.command import send_stop_job_command
from rq.job import Job as RqJob
from rq.serializers import JSONSerializer

from dedupjobs import clock, dispatch, lifecycle
from dedupjobs.dispatch import Delivery
from dedupjobs.horse import Horse, Ride, Sheet
from dedupjobs.models import AttemptOutcome, JobAttempt, Kind, Status
from dedupjobs.worker import DedupWorker
from tests import live, sessions
from tests.app import jobs
from tests.live import DEDUP, PATIENCE, SIMPLE, STOCK, Spawn, with_server, with_sqlite
from tests.processes import Spawned
from tests.waiting import until

LOST, SUCCEEDED = AttemptOutcome.LOST, AttemptOutcome.SUCCEEDED
INTERRUPTED, TIMED_OUT = AttemptOutcome.INTERRUPTED, AttemptOutcome.TIMED_OUT

AT_ONCE = 2.0  # seconds from the death of a horse to its row's next claim
RUNS = 8  # on a busy machine a parent waits for the CPU, too; on an idle one the first run does


@pytest.fixture
def release(tmp_path: Path) -> Path:
    return tmp_path / "release"


def stop_and_find_nothing_left(*workers: Spawned) -> None:
    """End the workers as a deploy does; nothing of theirs may outlive them (I8)."""
    for worker in workers:
        if worker.is_alive():
            worker.signal(signal.SIGTERM)
    for worker in workers:
        worker.wait(PATIENCE)
        until(lambda w=worker: not w.children(), PATIENCE, what=f"{worker.title} left no process")
    assert live.locks_left() == []
    assert live.eternal_keys() == []
    if connection.vendor != "sqlite":
        until(lambda: not sessions.others(), PATIENCE, what="the connections are closed")


def send_copy(outcome: object) -> None:
    """Push a second message for a row, as a lost reply or another coordinator would."""
    row = live.row_of(outcome)
    dispatch.push(
        [
            Delivery(
                queue=row.queue,
                dispatch_id=lifecycle.new_dispatch_id(),
                name=row.name,
                rows=((row.pk, row.generation),),
            )
        ]
    )


# ---- kill -9


def test_horse_killed_is_closed_as_lost_and_its_row_runs_again_at_once(
    spawn: Spawn, tmp_path: Path
) -> None:
    worker = live.start_worker(spawn)
    seconds = math.inf
    for run in range(RUNS):
        seconds = min(seconds, kill_a_horse(f"horse {run}", tmp_path / f"release {run}"))
        if seconds <= AT_ONCE:
            break
    # The lease is a minute: the parent has buried its horse, no coordinator has waited for it.
    assert seconds <= AT_ONCE
    stop_and_find_nothing_left(worker)


def kill_a_horse(tag: str, release: Path) -> float:
    """Return the seconds from the death of a job's horse to the next claim, which succeeds."""
    outcome = jobs.wait_with_long_lease.enqueue(tag=tag, release=str(release))
    horse = live.begun(tag)
    killed_at = lifecycle.database_now()
    live.kill(horse)
    live.begun(tag, 2)
    release.touch()
    row = live.wait_for(outcome)
    assert live.outcomes(outcome) == [LOST, SUCCEEDED]
    assert (row.lost_count, row.failures) == (1, 0)
    assert live.notes(tag) == ["begin 1", "begin 2", "end 2"]
    return (live.attempt(outcome, 2).claimed_at - killed_at).total_seconds()


@live.with_server
def test_attempt_of_a_dead_horse_whose_row_is_locked_is_ended_a_little_later(
    transactional_db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = live.claimed(jobs.record.enqueue(tag="a"), lease=60, overdue=-60)
    queue = django_rq.get_queue("default")
    worker = DedupWorker([queue], connection=queue.connection)
    horse = Horse(os.getpid(), Sheet())
    with ExitStack() as others:
        others.enter_context(live.rows_locked(JobAttempt.objects.filter(pk=claim.fence)))
        monkeypatch.setattr(clock, "sleep", lambda _: others.close())
        worker._end_all(Ride(claim.owner, horse, clock.monotonic()))
    horse.close()
    assert JobAttempt.objects.get(pk=claim.fence).outcome == LOST


@pytest.mark.large
def test_horse_and_parent_killed_are_recovered_by_another_worker_after_the_lease(
    spawn: Spawn, release: Path
) -> None:
    doomed = live.start_worker(spawn)
    outcome = jobs.wait.enqueue(tag="both", release=str(release))
    horse = live.begun("both")
    live.kill(doomed.pid)
    live.kill(horse)
    doomed.wait()
    other = live.start_worker(spawn)
    again = jobs.wait.enqueue(tag="both", release=str(release))
    assert (again.kind, again.job.pk) == (Kind.DUPLICATE, outcome.job.pk)
    live.begun("both", 2)
    release.touch()
    row = live.wait_for(outcome)
    first, second = live.attempt(outcome), live.attempt(outcome, 2)
    assert live.outcomes(outcome) == [LOST, SUCCEEDED]
    assert first.ended_at >= first.lease_until, "nobody takes a live lease"
    assert second.pk > first.pk
    assert row.lost_count == 1
    assert jobs.wait.enqueue(tag="both", release=str(release)).kind is Kind.REPLAYED
    stop_and_find_nothing_left(other)


@pytest.mark.large
@with_server
def test_parent_killed_alone_leaves_a_horse_that_beats_and_finishes_once(
    spawn: Spawn, release: Path
) -> None:
    doomed = live.start_worker(spawn)
    coordinator = live.coordinator_of(doomed)
    outcome = jobs.wait.enqueue(tag="orphan", release=str(release))
    horse = live.begun("orphan")
    other = live.start_worker(spawn)
    live.kill(doomed.pid)
    doomed.wait()
    leased_until = live.attempt(outcome).lease_until
    until(
        lambda: (live.attempt(outcome).lease_until - leased_until).total_seconds() > 2.5,
        PATIENCE,
        what="the horse beats on for longer than a lease",
    )
    release.touch()
    live.wait_for(outcome)
    until(lambda: not live.is_running(horse), PATIENCE, what="the horse ends")
    until(lambda: not live.is_running(coordinator), PATIENCE, what="the coordinator ends")
    assert live.outcomes(outcome) == [SUCCEEDED]
    assert live.notes("orphan") == ["begin 1", "end 1"]
    stop_and_find_nothing_left(other)


@with_server
def test_horse_killed_under_a_stock_worker_is_recovered_by_the_coordinator_after_the_lease(
    spawn: Spawn, release: Path
) -> None:
    with live.changed(RQ={"WORKER_CLASS": STOCK}):
        worker = live.start_worker(spawn, worker=STOCK)
        live.start_coordinator(spawn)
        outcome = jobs.wait.enqueue(tag="stock", release=str(release))
        live.kill(live.begun("stock"))
        live.begun("stock", 2)
        release.touch()
        live.wait_for(outcome)
    first = live.attempt(outcome)
    assert live.outcomes(outcome) == [LOST, SUCCEEDED]
    assert first.ended_at >= first.lease_until
    assert worker.is_alive()


def test_horse_of_a_job_that_must_not_be_repeated_blindly_killed_leaves_it_held(
    spawn: Spawn, release: Path
) -> None:
    live.start_worker(spawn)
    outcome = jobs.wait_carefully.enqueue(tag="held", release=str(release))
    live.kill(live.begun("held"))
    row = live.wait_for(outcome, Status.HELD)
    assert live.outcomes(outcome) == [LOST]
    assert "lost" in row.error
    again = jobs.wait_carefully.enqueue(tag="held", release=str(release))
    assert again.kind is Kind.BLOCKED
    release.touch()
    assert lifecycle.unhold(row.pk, row.version) == Status.PENDING
    live.wait_for(outcome)
    assert live.outcomes(outcome) == [LOST, SUCCEEDED]


def test_horse_killed_by_itself_is_lost_each_time_until_its_budget_is_used(spawn: Spawn) -> None:
    worker = live.start_worker(spawn)
    outcome = jobs.leave.enqueue(tag="exit", how="os._exit")
    row = live.wait_for(outcome, Status.DEAD)
    assert live.outcomes(outcome) == [LOST] * 3
    assert (row.lost_count, row.failures) == (3, 0)
    assert "lost" in row.error
    assert jobs.leave.enqueue(tag="exit", how="os._exit").kind is Kind.CREATED, "the key is free"
    live.wait_for(outcome, Status.DEAD)
    stop_and_find_nothing_left(worker)


@pytest.mark.large
@pytest.mark.skipif(
    connection.vendor == "sqlite",
    reason="a short lease for all jobs fails a check of atomic ones on SQLite",
)
def test_horse_killed_by_itself_under_a_stock_worker_is_found_by_the_coordinator(
    spawn: Spawn,
) -> None:
    env = {"DEFAULTS": {"lease": 0.6}}
    with live.changed(RQ={"WORKER_CLASS": STOCK}):
        live.start_worker(spawn, worker=STOCK, **env)
        live.start_coordinator(spawn, **env)
        outcome = jobs.leave.enqueue(tag="exit", how="os._exit")
        live.wait_for(outcome, Status.DEAD)
    assert live.outcomes(outcome) == [LOST] * 3


# ---- jobs that hang or keep everything for themselves


@pytest.mark.large
@with_sqlite
def test_job_holding_the_gil_longer_than_its_lease_lives_by_its_parents_beats(
    spawn: Spawn,
) -> None:
    live.start_worker(spawn)
    live.start_worker(spawn)
    outcome = jobs.hold_gil.enqueue(tag="gil", seconds=3)
    live.wait_for(outcome)
    only = live.attempt(outcome)
    assert live.outcomes(outcome) == [SUCCEEDED]
    assert live.notes("gil") == ["1"]
    assert (only.ended_at - only.claimed_at).total_seconds() > 1.5, "it outlived its first lease"
    assert only.beat_at > only.claimed_at


@with_sqlite
@pytest.mark.large
def test_hanging_job_with_signals_masked_is_killed_after_the_grace_as_timed_out(
    spawn: Spawn,
) -> None:
    worker = live.start_worker(spawn)
    outcome = jobs.hang.enqueue(tag="masked", how="signals masked")
    row = live.wait_for(outcome, Status.DEAD)
    only = live.attempt(outcome)
    assert live.outcomes(outcome) == [TIMED_OUT]
    assert (row.failures, row.lost_count) == (1, 0)
    assert only.error_class == "builtins.TimeoutError"
    assert "killed" in only.error_message
    assert (only.ended_at - only.claimed_at).total_seconds() >= 1.5, "time-out and grace"
    until(lambda: live.locks_left() == [], PATIENCE, what="the lock is given up, too")
    assert jobs.hang.enqueue(tag="masked", how="signals masked").kind is Kind.CREATED
    worker.signal(signal.SIGTERM)


@with_sqlite
@pytest.mark.large
def test_job_swallowing_every_exception_is_killed_after_the_grace_as_timed_out(
    spawn: Spawn,
) -> None:
    worker = live.start_worker(spawn)
    outcome = jobs.swallow_everything.enqueue(tag="deaf")
    live.wait_for(outcome, Status.DEAD)
    assert live.outcomes(outcome) == [TIMED_OUT]
    stop_and_find_nothing_left(worker)


@pytest.mark.parametrize("worker_class", [DEDUP, STOCK, SIMPLE])
@pytest.mark.large
def test_job_swallowing_exception_is_ended_by_its_time_out_under_every_worker(
    spawn: Spawn, worker_class: str
) -> None:
    with live.changed(RQ={"WORKER_CLASS": worker_class}):
        live.start_worker(spawn, worker=worker_class, TIMEOUT_GRACE=60)
        outcomes = [
            jobs.hang.enqueue(tag=how, how=how) for how in ("swallow Exception", "sleep", *in_sql())
        ]
        after = jobs.record.enqueue(tag="after")
        for outcome in outcomes:
            row = live.wait_for(outcome, Status.DEAD)
            assert live.outcomes(outcome) == [TIMED_OUT]
            assert row.failures == 1
        live.wait_for(after)
    until(lambda: live.locks_left() == [], PATIENCE, what="the lock is given up, too")


def in_sql() -> tuple[str, ...]:
    return () if connection.vendor == "sqlite" else ("sql",)


# ---- shutdown


@pytest.mark.large
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=with_sqlite)])
def test_parent_told_to_end_interrupts_its_job_after_the_grace_and_claims_nothing_more(
    spawn: Spawn, release: Path, times: int
) -> None:
    worker = live.start_worker(spawn, SHUTDOWN_GRACE=1 if times == 1 else 60)
    outcome = jobs.wait_with_long_lease.enqueue(tag="deploy", release=str(release))
    live.begun("deploy")
    for _ in range(times):
        worker.signal(signal.SIGTERM)
        sent = time.monotonic()
        next_job = jobs.record.enqueue(tag="next")
        if times == 2:  # RQ takes two within a second for one
            until(lambda at=sent: time.monotonic() - at > 1.1)
    worker.wait(PATIENCE)
    assert live.locks_left() == [], "given up before the worker's end"
    assert live.outcomes(outcome) == [INTERRUPTED]
    row = live.row_of(outcome)
    assert (row.status, row.failures, row.lost_count) == (Status.PENDING, 0, 0)
    assert "SIGTERM" in live.attempt(outcome).reason
    assert live.row_of(next_job).attempts == 0
    assert live.notes("deploy") == ["begin 1"]

    release.touch()
    new = live.start_worker(spawn)
    live.wait_for(outcome)
    live.wait_for(next_job)
    assert live.outcomes(outcome) == [INTERRUPTED, SUCCEEDED]
    stop_and_find_nothing_left(worker, new)


@with_sqlite
@pytest.mark.large
def test_parent_told_to_end_lets_a_job_finish_within_the_grace(spawn: Spawn, release: Path) -> None:
    worker = live.start_worker(spawn, SHUTDOWN_GRACE=60)
    outcome = jobs.wait.enqueue(tag="finish", release=str(release))
    live.begun("finish")
    worker.signal(signal.SIGTERM)
    release.touch()
    worker.wait(PATIENCE)
    assert live.outcomes(outcome) == [SUCCEEDED]
    assert live.row_of(outcome).status == Status.SUCCEEDED
    stop_and_find_nothing_left(worker)


@pytest.mark.large
@with_sqlite
def test_job_that_ignores_its_interruption_is_killed_as_interrupted(spawn: Spawn) -> None:
    worker = live.start_worker(spawn, TIMEOUT_GRACE=1.5, SHUTDOWN_GRACE=0.1)
    outcome = jobs.swallow_shutdown.enqueue(tag="deaf")
    until(lambda: live.notes("deaf"), PATIENCE, what="it begins")
    worker.signal(signal.SIGTERM)
    worker.wait(PATIENCE)
    row = live.row_of(outcome)
    assert live.outcomes(outcome) == [INTERRUPTED]
    assert (row.status, row.failures, row.lost_count) == (Status.PENDING, 0, 0)
    assert "killed" in live.attempt(outcome).reason
    stop_and_find_nothing_left(worker)


@pytest.mark.parametrize("worker_class", [DEDUP, STOCK])
@pytest.mark.large
def test_horse_told_to_end_is_interrupted_and_its_job_runs_again(
    spawn: Spawn, release: Path, worker_class: str
) -> None:
    with live.changed(RQ={"WORKER_CLASS": worker_class}):
        worker = live.start_worker(spawn, worker=worker_class)
        if worker_class == STOCK:
            live.start_coordinator(spawn)
        outcome = jobs.wait_with_long_lease.enqueue(tag="term", release=str(release))
        live.kill(live.begun("term"), signal.SIGTERM)
        live.begun("term", 2)
        release.touch()
        row = live.wait_for(outcome)
    assert live.outcomes(outcome) == [INTERRUPTED, SUCCEEDED]
    assert (row.failures, row.lost_count) == (0, 0)
    assert worker.is_alive()


@with_sqlite
@pytest.mark.large
def test_simple_worker_told_twice_to_end_interrupts_its_job_and_gives_its_lock_up(
    spawn: Spawn, release: Path
) -> None:
    with live.changed(RQ={"WORKER_CLASS": SIMPLE}):
        worker = live.start_worker(spawn, worker=SIMPLE)
        outcome = jobs.wait_with_long_lease.enqueue(tag="simple", release=str(release))
        live.begun("simple")
        worker.signal(signal.SIGTERM)
        worker.wait_for_output("warm shut down requested", PATIENCE)
        sent = time.monotonic()
        until(lambda: time.monotonic() - sent > 1.1)  # RQ takes two within a second for one
        assert live.outcomes(outcome) == [None], "the first signal lets the job go on"
        worker.signal(signal.SIGTERM)
        worker.wait(PATIENCE)
        assert live.outcomes(outcome) == [INTERRUPTED]
        assert live.row_of(outcome).status == Status.PENDING
        assert live.locks_left() == []


@pytest.mark.large
@with_sqlite
def test_idle_workers_told_to_end_as_a_job_arrives_lose_none(spawn: Spawn) -> None:
    workers = [
        spawn("rqworker", *queues, **live.env_of(SHUTDOWN_GRACE=60))
        for queues in (["default"], ["default", "high"]) * 3
    ]
    for worker in workers:
        worker.wait_for_output("Listening on", PATIENCE)
    outcomes = []
    for number, worker in enumerate(workers):
        worker.signal(signal.SIGTERM)
        outcomes.append(jobs.record.enqueue(tag=f"idle {number}"))
    for worker in workers:
        worker.wait(PATIENCE)
    survivor = live.start_worker(spawn)
    for outcome in outcomes:
        live.wait_for(outcome)
    assert JobAttempt.objects.count() == len(workers)
    assert not JobAttempt.objects.exclude(outcome=SUCCEEDED).exists()
    stop_and_find_nothing_left(survivor)


@with_sqlite
@pytest.mark.large
def test_job_stopped_through_rq_is_cancelled(
    spawn: Spawn, release: Path, redis_client: redis.Redis
) -> None:
    worker = live.start_worker(spawn)
    outcome = jobs.wait.enqueue(tag="stop", release=str(release))
    live.begun("stop")
    rq_id = live.attempt(outcome).rq_id
    message = RqJob(rq_id, connection=redis_client, serializer=JSONSerializer)
    until(lambda: message.refresh() or message.worker_name, PATIENCE, what="RQ's books name it")
    send_stop_job_command(redis_client, rq_id, serializer=JSONSerializer)
    row = live.wait_for(outcome, Status.CANCELLED)
    assert live.outcomes(outcome) == [AttemptOutcome.CANCELLED]
    assert (row.failures, row.lost_count) == (0, 0)
    live.wait_for(jobs.record.enqueue(tag="next"))
    stop_and_find_nothing_left(worker)


# ---- stopped and woken


def stop_between_beats(outcome: Any, *pids: int) -> None:
    """Stop the processes while we have locked the attempt, or one might keep it locked."""
    with transaction.atomic():
        JobAttempt.objects.select_for_update().get(pk=live.attempt(outcome).pk)
        for pid in pids:
            live.kill(pid, signal.SIGSTOP)
            until(lambda p=pid: psutil.Process(p).status() == psutil.STATUS_STOPPED)


@pytest.mark.large
@pytest.mark.parametrize(
    "first_awake",
    [
        pytest.param("horse", marks=with_server),
        pytest.param("parent", marks=with_sqlite),
    ],
)
def test_worker_stopped_past_its_lease_and_woken_writes_nothing_stale(
    spawn: Spawn, release: Path, first_awake: str
) -> None:
    sleeper = live.start_worker(spawn)
    outcome = jobs.wait.enqueue(tag="zombie", release=str(release))
    horse = live.begun("zombie")
    other = live.start_worker(spawn)
    stop_between_beats(outcome, sleeper.pid, horse)
    live.begun("zombie", 2)
    release.touch()
    live.wait_for(outcome)
    ended = live.attempt(outcome, 2).ended_at
    version = live.row_of(outcome).version
    if first_awake == "horse":
        live.kill(horse, signal.SIGCONT)
        until(
            lambda: live.attempt(outcome).late_ending == SUCCEEDED,
            PATIENCE,
            what="the late success is noted",
        )
        live.kill(sleeper.pid, signal.SIGCONT)
    else:
        live.kill(sleeper.pid, signal.SIGCONT)
    if first_awake == "parent":
        until(lambda: not live.is_running(horse), PATIENCE, what="the stale horse is killed")
    stop_and_find_nothing_left(sleeper, other)
    late = ["end 1"] if first_awake == "horse" else []
    assert live.notes("zombie") == ["begin 1", "begin 2", "end 2", *late]
    assert live.outcomes(outcome) == [LOST, SUCCEEDED]
    assert live.attempt(outcome, 2).ended_at == ended
    assert live.row_of(outcome).version == version


@pytest.mark.large
@with_server
def test_second_message_for_a_running_row_is_dropped_however_long_the_job_takes(
    spawn: Spawn, release: Path
) -> None:
    workers = [live.start_worker(spawn) for _ in range(2)]
    outcome = jobs.wait.enqueue(tag="long", release=str(release))
    live.begun("long")
    send_copy(outcome)
    until(lambda: live.queued() == [], PATIENCE, what="the copy is taken")
    leased_until = live.attempt(outcome).lease_until
    until(
        lambda: (live.attempt(outcome).lease_until - leased_until).total_seconds() > 3,
        PATIENCE,
        what="it runs for longer than its lease",
    )
    send_copy(outcome)
    until(lambda: live.queued() == [], PATIENCE, what="the copy is taken")
    with live.cache_client() as client:
        owner = live.attempt(outcome).owner
        assert client.get(live.lock_name(outcome.job.pk)) == f"{outcome.job.pk}:{owner}"
    release.touch()
    live.wait_for(outcome)
    assert live.outcomes(outcome) == [SUCCEEDED]
    assert live.notes("long") == ["begin 1", "end 1"]
    stop_and_find_nothing_left(*workers)


# ---- the coordinator child


@with_sqlite
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.large
def test_coordinator_ends_with_its_parent(spawn: Spawn, end: signal.Signals) -> None:
    worker = live.start_worker(spawn)
    coordinator = live.coordinator_of(worker)
    worker.signal(end)
    worker.wait(PATIENCE)
    until(lambda: not live.is_running(coordinator), PATIENCE, what="the coordinator ends too")


@with_sqlite
@pytest.mark.large
def test_coordinator_outlives_the_signals_of_a_deploy_while_its_parent_works(
    spawn: Spawn, release: Path
) -> None:
    worker = live.start_worker(spawn, SHUTDOWN_GRACE=60)
    coordinator = live.coordinator_of(worker)
    outcome = jobs.wait.enqueue(tag="deploy", release=str(release))
    live.begun("deploy")
    live.kill(coordinator, signal.SIGTERM)
    live.kill(coordinator, signal.SIGINT)
    release.touch()
    live.wait_for(outcome)
    assert live.coordinator_of(worker) == coordinator


@with_sqlite
@pytest.mark.large
def test_coordinator_killed_is_replaced_and_acts(spawn: Spawn) -> None:
    worker = live.start_worker(spawn)
    coordinator = live.coordinator_of(worker)
    live.kill(coordinator)
    live.wait_for(jobs.record.enqueue(tag="wakes the parent"))
    until(
        lambda: live.idle_children(worker) not in ([], [coordinator]),
        PATIENCE,
        what="another coordinator",
    )
    outcome = jobs.fail.enqueue(tag="needs a coordinator", times=1)
    live.wait_for(outcome)
    assert live.outcomes(outcome) == [AttemptOutcome.FAILED, SUCCEEDED]
    stop_and_find_nothing_left(worker)
