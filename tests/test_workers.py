"""The same jobs under RQ's own workers and ours, and what else arrives on their queues."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import django_rq
import pytest
from django.conf import settings
from redis import Redis
from rq import Queue
from rq.job import Job as RqJob
from rq.serializers import DefaultSerializer, JSONSerializer

from dedupjobs import dispatch, lifecycle
from dedupjobs.dispatch import Delivery
from dedupjobs.models import AttemptOutcome, JobAttempt, ProcessedJob, Status
from tests import faults, sessions
from tests.app import jobs
from tests.faults import DEDUP, PATIENCE, SIMPLE, STOCK, Spawn, with_server, with_sqlite
from tests.waiting import until

FAILED, SUCCEEDED = AttemptOutcome.FAILED, AttemptOutcome.SUCCEEDED

pytestmark = pytest.mark.django_db(transaction=True)
every_worker = pytest.mark.parametrize("worker_class", [DEDUP, STOCK, SIMPLE])


@pytest.fixture
def rq_queue() -> Iterator[Queue]:
    """RQ's own view of the default queue, with its default serializer, as foreign code has it."""
    with Redis.from_url(settings.RQ_QUEUES["default"]["URL"]) as client:
        yield django_rq.get_queue("default", connection=client, serializer=DefaultSerializer)


def start(spawn: Spawn, worker_class: str, *queues: str, **env: Any) -> None:
    faults.start_worker(spawn, *queues, worker=worker_class, **env)
    if worker_class != DEDUP:
        faults.start_coordinator(spawn)


# ---- the same under every class


@every_worker
def test_jobs_end_the_same_under_every_worker_class(spawn: Spawn, worker_class: str) -> None:
    with faults.changed(RQ={"WORKER_CLASS": worker_class}):
        good = [
            jobs.record.enqueue(tag="record", text="a"),
            jobs.record_async.enqueue(tag="async"),
            jobs.record_atomically.enqueue(tag="atomic"),
            jobs.give_back.enqueue(tag="back", what="lambda"),
        ]
        forks = [
            jobs.fork.enqueue(tag=how, how=how)
            for how in ("sys.exit", "raise", "return", "subprocess")
        ]
        retried = [jobs.fail.enqueue(tag="fail", times=1)]
        dead = [
            jobs.give_up.enqueue(tag="give up"),
            jobs.record_atomically.enqueue(tag="undone", fails=True),
            *(
                jobs.leave.enqueue(tag=how, how=how)
                for how in ("sys.exit(0)", "sys.exit(1)", "GeneratorExit", "BaseException")
            ),
        ]
        ProcessedJob.objects.filter(key="atomic:undone").update(max_attempts=1)
        start(spawn, worker_class)
        for outcome in (*good, *forks):
            faults.wait_for(outcome)
            assert faults.outcomes(outcome) == [SUCCEEDED]
        for outcome in retried:
            faults.wait_for(outcome)
            assert faults.outcomes(outcome) == [FAILED, SUCCEEDED]
        for outcome in dead:
            faults.wait_for(outcome, Status.DEAD)
            assert faults.outcomes(outcome) == [FAILED]
    assert faults.row_of(good[1]).result == '"async async"'
    assert [faults.notes(f) for f in ("sys.exit", "raise", "return")] == [["parent"]] * 3
    assert faults.notes("undone") == []
    until(lambda: faults.locks_left() == [], PATIENCE)


@pytest.mark.large
@with_sqlite
@every_worker
def test_worker_on_several_queues_runs_the_jobs_of_each_once(
    spawn: Spawn, worker_class: str
) -> None:
    with faults.changed(RQ={"WORKER_CLASS": worker_class}):
        start(spawn, worker_class, "default", "high", "low")
        kinds = (jobs.record, jobs.record_high, jobs.record_low)
        outcomes = [kind.enqueue(tag=f"{n}") for kind in kinds for n in range(3)]
        for outcome in outcomes:
            faults.wait_for(outcome)
            assert faults.outcomes(outcome) == [SUCCEEDED]


@with_server
@every_worker
def test_two_messages_for_one_row_run_it_once(
    spawn: Spawn, tmp_path: Path, worker_class: str
) -> None:
    release = tmp_path / "release"
    with faults.changed(RQ={"WORKER_CLASS": worker_class}):
        outcome = jobs.wait.enqueue(tag="twice", release=str(release))
        row = faults.row_of(outcome)
        copies = [
            Delivery(
                queue="default",
                dispatch_id=lifecycle.new_dispatch_id(),
                name=row.name,
                rows=((row.pk, row.generation),),
            )
            for _ in range(2)
        ]
        assert dispatch.push(copies) == 2
        for _ in range(2):
            faults.start_worker(spawn, worker=worker_class)
        faults.begun("twice")
        until(lambda: faults.queued() == [], PATIENCE, what="the others are dropped")
        release.touch()
        faults.wait_for(outcome)
    assert faults.outcomes(outcome) == [SUCCEEDED]
    assert faults.notes("twice") == ["begin 1", "end 1"]


@with_server
@pytest.mark.parametrize("worker_class", [DEDUP, SIMPLE])
def test_worker_whose_connections_were_killed_goes_on_with_fresh_ones(
    spawn: Spawn, tmp_path: Path, worker_class: str
) -> None:
    release = tmp_path / "release"
    with faults.changed(RQ={"WORKER_CLASS": worker_class}):
        start(spawn, worker_class)
        faults.wait_for(jobs.record.enqueue(tag="before"))
        sessions.terminate(*sessions.others())
        faults.wait_for(jobs.record.enqueue(tag="between"))
        during = jobs.wait.enqueue(tag="during", release=str(release))
        faults.begun("during")
        sessions.terminate(*sessions.others())
        release.touch()
        faults.wait_for(during)
        faults.wait_for(jobs.record.enqueue(tag="after"))
    # Its own write failed on the dead connection; that is an error of the job like any other.
    assert faults.outcomes(during) == [FAILED, SUCCEEDED]
    assert JobAttempt.objects.exclude(job_id=during.job.pk).count() == 3


# ---- serializers


@pytest.mark.parametrize(("worker_class", "is_json"), [(DEDUP, True), (STOCK, False)])
def test_message_is_json_exactly_where_workers_are_dedup_workers(
    worker_class: str, is_json: bool
) -> None:
    with faults.changed(RQ={"WORKER_CLASS": worker_class}):
        outcome = jobs.record.enqueue(tag="a")
    with Redis.from_url(settings.RQ_QUEUES["default"]["URL"]) as client:
        data = zlib.decompress(client.hget(f"rq:job:{faults.queued()[0]}", "data"))
    loads = JSONSerializer.loads if is_json else pickle.loads
    assert loads(data)[2] in ([[[outcome.job.pk, 1]]], ([[outcome.job.pk, 1]],))


@with_sqlite
def test_dedup_worker_reads_json_whatever_serializer_its_command_line_names(spawn: Spawn) -> None:
    outcome = jobs.record.enqueue(tag="a")
    spawn("rqworker", "--serializer", "rq.serializers.PickleSerializer", **faults.env_of())
    faults.wait_for(outcome)


@with_sqlite
def test_foreign_pickle_fails_naming_the_setting_and_runs_once_it_is_set_and_requeued(
    spawn: Spawn, rq_queue: Queue
) -> None:
    foreign = rq_queue.enqueue(jobs.note, "foreign", "ran")
    ours = jobs.record.enqueue(tag="ours")
    worker = faults.start_worker(spawn)
    faults.wait_for(ours)
    until(lambda: foreign.id in rq_queue.failed_job_registry, PATIENCE)
    assert worker.is_alive()
    assert faults.notes("foreign") == []
    result = RqJob.fetch(foreign.id, connection=rq_queue.connection).latest_result()
    assert "FOREIGN_PICKLE" in str(result.exc_string)

    worker.stop()
    faults.start_worker(spawn, FOREIGN_PICKLE=True)
    rq_queue.failed_job_registry.requeue(foreign.id)
    until(lambda: faults.notes("foreign") == ["ran"], PATIENCE)


# ---- forged messages


FORGED = [
    [["os.system", "true"]],
    [[1]],
    [[1, 1, 1]],
    [[True, 1]],
    [[1.0, 1]],
    [[2**70, 1]],
    [[-1, 1]],
    [None],
    "tests.app.jobs.record",
    {"1": 1},
    None,
    7,
]


@with_server
def test_forged_deliveries_fail_in_rq_and_touch_no_row_and_no_worker(
    spawn: Spawn, rq_queue: Queue
) -> None:
    json_queue = Queue("default", connection=rq_queue.connection, serializer=JSONSerializer)
    untouched = jobs.record.enqueue(tag="untouched")
    lifecycle.hold(untouched.job.pk, 0)
    forged = [json_queue.enqueue("dedupjobs.runner.run", args=(rows,)) for rows in FORGED]
    forged.append(json_queue.enqueue("dedupjobs.runner.run"))
    worker = faults.start_worker(spawn)
    last = jobs.record.enqueue(tag="last")
    faults.wait_for(last)
    failed = rq_queue.failed_job_registry
    until(lambda: failed.count == len(forged), PATIENCE, what="all have failed")
    assert worker.is_alive()
    assert JobAttempt.objects.count() == 1
    assert faults.row_of(untouched).status == Status.HELD
    results = [
        RqJob.fetch(f.id, connection=rq_queue.connection, serializer=JSONSerializer).latest_result()
        for f in forged[:-1]
    ]
    assert all("ArgumentError" in str(result.exc_string) for result in results)


@with_sqlite
def test_delivery_of_an_unknown_row_or_an_old_generation_is_dropped(
    spawn: Spawn, rq_queue: Queue
) -> None:
    json_queue = Queue("default", connection=rq_queue.connection, serializer=JSONSerializer)
    held = jobs.record.enqueue(tag="old")
    ProcessedJob.objects.filter(pk=held.job.pk).update(generation=2, dispatch_id="elsewhere")
    sent = [json_queue.enqueue("dedupjobs.runner.run", args=([[pk, 1]],)) for pk in (10**9, 0)]
    faults.start_worker(spawn, RESEND_AFTER=1_000)
    faults.wait_for(jobs.record.enqueue(tag="last"))
    assert all(s.id not in rq_queue.failed_job_registry for s in sent)
    assert faults.outcomes(held) == []


@with_sqlite
def test_json_message_naming_any_function_by_its_path_does_not_run_it(
    spawn: Spawn, rq_queue: Queue, tmp_path: Path
) -> None:
    json_queue = Queue("default", connection=rq_queue.connection, serializer=JSONSerializer)
    proof = tmp_path / "proof"
    forged = json_queue.enqueue("os.system", args=(f"touch {proof}",))
    faults.start_worker(spawn)
    faults.wait_for(jobs.record.enqueue(tag="last"))
    until(lambda: forged.get_status(refresh=True) in ("finished", "failed"), PATIENCE)
    assert not proof.exists()


# ---- jobs that a worker does not know


@with_server
def test_worker_names_the_jobs_at_start_that_it_can_not_run_and_parks_their_rows(
    spawn: Spawn,
) -> None:
    outcome = jobs.record.enqueue(tag="ghost")
    ProcessedJob.objects.filter(pk=outcome.job.pk).update(name="app.of_tomorrow")
    worker = faults.start_worker(spawn)
    row = faults.wait_for(outcome, Status.HELD)
    worker.wait_for_output("does not know: app.of_tomorrow", PATIENCE)
    assert faults.outcomes(outcome) == [AttemptOutcome.HELD]
    assert "app.of_tomorrow" in row.error
    assert row.failures == 0
    faults.wait_for(jobs.record.enqueue(tag="known"))
