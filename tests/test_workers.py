"""The same jobs under RQ's own workers and ours, and what else arrives on their queues."""

from __future__ import annotations

import pickle
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import django_rq
import pytest
from django.conf import settings
from django.db import connection, connections, transaction
from redis import Redis
from rq import Queue
from rq.exceptions import StopRequested
from rq.job import Job as RqJob
from rq.serializers import DefaultSerializer, JSONSerializer

from dedupjobs import dispatch, lifecycle
from dedupjobs.clock import DbNow
from dedupjobs.dispatch import Delivery
from dedupjobs.models import AttemptOutcome, JobAttempt, ProcessedJob, Status
from dedupjobs.worker import DedupWorker
from tests import live, sessions
from tests.app import jobs
from tests.app.models import Ledger
from tests.live import DEDUP, PATIENCE, SIMPLE, STOCK, Spawn, with_server, with_sqlite
from tests.rows import tables_missing
from tests.servers import Valkey
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
    live.start_worker(spawn, *queues, worker=worker_class, **env)
    if worker_class != DEDUP:
        live.start_coordinator(spawn)


# ---- the same under every class


@every_worker
def test_jobs_end_the_same_under_every_worker_class(spawn: Spawn, worker_class: str) -> None:
    with live.changed(RQ={"WORKER_CLASS": worker_class}):
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
            live.wait_for(outcome)
            assert live.outcomes(outcome) == [SUCCEEDED]
        for outcome in retried:
            live.wait_for(outcome)
            assert live.outcomes(outcome) == [FAILED, SUCCEEDED]
        for outcome in dead:
            live.wait_for(outcome, Status.DEAD)
            assert live.outcomes(outcome) == [FAILED]
    assert live.row_of(good[1]).result == '"async async"'
    assert [live.notes(f) for f in ("sys.exit", "raise", "return")] == [["parent"]] * 3
    assert live.notes("undone") == []
    until(lambda: live.locks_left() == [], PATIENCE)


@pytest.mark.large
@with_sqlite
@every_worker
def test_worker_on_several_queues_runs_the_jobs_of_each_once(
    spawn: Spawn, worker_class: str
) -> None:
    with live.changed(RQ={"WORKER_CLASS": worker_class}):
        start(spawn, worker_class, "default", "high", "low")
        kinds = (jobs.record, jobs.record_high, jobs.record_low)
        outcomes = [kind.enqueue(tag=f"{n}") for kind in kinds for n in range(3)]
        for outcome in outcomes:
            live.wait_for(outcome)
            assert live.outcomes(outcome) == [SUCCEEDED]


@with_server
@every_worker
def test_two_messages_for_one_row_run_it_once(
    spawn: Spawn, tmp_path: Path, worker_class: str
) -> None:
    release = tmp_path / "release"
    with live.changed(RQ={"WORKER_CLASS": worker_class}):
        outcome = jobs.wait.enqueue(tag="twice", release=str(release))
        row = live.row_of(outcome)
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
            live.start_worker(spawn, worker=worker_class)
        live.begun("twice")
        until(lambda: live.queued() == [], PATIENCE, what="the others are dropped")
        release.touch()
        live.wait_for(outcome)
    assert live.outcomes(outcome) == [SUCCEEDED]
    assert live.notes("twice") == ["begin 1", "end 1"]


@with_server
@pytest.mark.parametrize("worker_class", [DEDUP, SIMPLE])
def test_worker_whose_connections_were_killed_goes_on_with_fresh_ones(
    spawn: Spawn, tmp_path: Path, worker_class: str
) -> None:
    release = tmp_path / "release"
    with live.changed(RQ={"WORKER_CLASS": worker_class}):
        start(spawn, worker_class)
        live.wait_for(jobs.record.enqueue(tag="before"))
        sessions.terminate(*sessions.others())
        live.wait_for(jobs.record.enqueue(tag="between"))
        during = jobs.wait.enqueue(tag="during", release=str(release))
        live.begun("during")
        sessions.terminate(*sessions.others())
        release.touch()
        live.wait_for(during)
        live.wait_for(jobs.record.enqueue(tag="after"))
    # Its own write failed on the dead connection; that is an error of the job like any other.
    assert live.outcomes(during) == [FAILED, SUCCEEDED]
    assert JobAttempt.objects.exclude(job_id=during.job.pk).count() == 3


# ---- serializers


@pytest.mark.parametrize(("worker_class", "is_json"), [(DEDUP, True), (STOCK, False)])
def test_message_is_json_exactly_where_workers_are_dedup_workers(
    worker_class: str, is_json: bool
) -> None:
    with live.changed(RQ={"WORKER_CLASS": worker_class}):
        outcome = jobs.record.enqueue(tag="a")
    with Redis.from_url(settings.RQ_QUEUES["default"]["URL"]) as client:
        data = zlib.decompress(client.hget(f"rq:job:{live.queued()[0]}", "data"))
    loads = JSONSerializer.loads if is_json else pickle.loads
    assert loads(data)[2] in ([[[outcome.job.pk, 1]]], ([[outcome.job.pk, 1]],))


@with_sqlite
@pytest.mark.large
def test_dedup_worker_reads_json_whatever_serializer_its_command_line_names(spawn: Spawn) -> None:
    outcome = jobs.record.enqueue(tag="a")
    spawn("rqworker", "--serializer", "rq.serializers.PickleSerializer", **live.env_of())
    live.wait_for(outcome)


@pytest.mark.large
@with_sqlite
def test_foreign_pickle_fails_naming_the_setting_and_runs_once_it_is_set_and_requeued(
    spawn: Spawn, rq_queue: Queue
) -> None:
    foreign = rq_queue.enqueue(jobs.note, "foreign", "ran")
    ours = jobs.record.enqueue(tag="ours")
    worker = live.start_worker(spawn)
    live.wait_for(ours)
    until(lambda: foreign.id in rq_queue.failed_job_registry, PATIENCE)
    assert worker.is_alive()
    assert live.notes("foreign") == []
    result = RqJob.fetch(foreign.id, connection=rq_queue.connection).latest_result()
    assert "FOREIGN_PICKLE" in str(result.exc_string)

    worker.stop()
    live.start_worker(spawn, FOREIGN_PICKLE=True)
    rq_queue.failed_job_registry.requeue(foreign.id)
    until(lambda: live.notes("foreign") == ["ran"], PATIENCE)


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
    worker = live.start_worker(spawn)
    last = jobs.record.enqueue(tag="last")
    live.wait_for(last)
    failed = rq_queue.failed_job_registry
    until(lambda: failed.count == len(forged), PATIENCE, what="all have failed")
    assert worker.is_alive()
    assert JobAttempt.objects.count() == 1
    assert live.row_of(untouched).status == Status.HELD
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
    dispatch.set_epoch("default", ttl=3600)  # or the row would be sent again, as it is now
    live.start_worker(spawn, RESEND_AFTER=1_000)
    live.wait_for(jobs.record.enqueue(tag="last"))
    assert all(s.id not in rq_queue.failed_job_registry for s in sent)
    assert live.outcomes(held) == []


@with_sqlite
@pytest.mark.large
def test_json_message_naming_any_function_by_its_path_does_not_run_it(
    spawn: Spawn, rq_queue: Queue, tmp_path: Path
) -> None:
    json_queue = Queue("default", connection=rq_queue.connection, serializer=JSONSerializer)
    proof = tmp_path / "proof"
    forged = json_queue.enqueue("os.system", args=(f"touch {proof}",))
    live.start_worker(spawn)
    live.wait_for(jobs.record.enqueue(tag="last"))
    until(lambda: forged.get_status(refresh=True) in ("finished", "failed"), PATIENCE)
    assert not proof.exists()


# ---- jobs that a worker does not know


@with_server
def test_worker_names_the_jobs_at_start_that_it_can_not_run_and_parks_their_rows(
    spawn: Spawn,
) -> None:
    outcome = jobs.record.enqueue(tag="ghost")
    ProcessedJob.objects.filter(pk=outcome.job.pk).update(name="app.of_tomorrow")
    worker = live.start_worker(spawn)
    row = live.wait_for(outcome, Status.HELD)
    worker.wait_for_output("does not know: app.of_tomorrow", PATIENCE)
    assert live.outcomes(outcome) == [AttemptOutcome.HELD]
    assert "app.of_tomorrow" in row.error
    assert row.failures == 0
    live.wait_for(jobs.record.enqueue(tag="known"))


# ---- rubbish


@with_sqlite
@pytest.mark.large
def test_dedup_worker_goes_on_although_ids_in_redis_are_no_text(spawn: Spawn) -> None:
    with live.rq_client() as client:
        client.rpush("rq:queue:default:intermediate", b"\xff\xfe")
        client.rpush("rq:queue:default", b"\xff\xfd")
    outcome = jobs.record.enqueue(tag="behind rubbish")
    worker = live.start_worker(spawn)
    live.wait_for(outcome)
    assert worker.is_alive()
    assert "can't decode" in worker.output


# ---- one writer at a time


@contextmanager
def writing() -> Iterator[list[Exception]]:
    """Let a web process's thread write all the time; yield what went wrong there."""
    over = threading.Event()
    errors: list[Exception] = []

    def write() -> None:
        try:
            while not over.wait(0.005):
                with transaction.atomic():
                    Ledger.objects.create(tag="web")
        except Exception as error:
            errors.append(error)
        finally:
            connections.close_all()

    web = threading.Thread(target=write, daemon=True)
    web.start()
    try:
        yield errors
    finally:
        over.set()
        web.join()


@pytest.mark.large
@pytest.mark.skipif(connection.vendor != "sqlite", reason="about SQLite's one writer")
@pytest.mark.timeout(400)
def test_500_jobs_run_once_each_on_sqlite_while_the_web_writes(spawn: Spawn) -> None:
    few = {"BATCH": 5, "PUSH_TIMEOUT": 5.0}  # to a message, or the last ones' turn comes too late
    with live.changed(RQ={"WORKER_CLASS": SIMPLE}, DEDUPJOBS=few):
        start(spawn, SIMPLE)
        live.start_worker(spawn, worker=SIMPLE)
        with writing() as errors:
            for page in range(10):
                jobs.record.enqueue_many([{"tag": f"{page}.{n}"} for n in range(50)])
            left = ProcessedJob.objects.exclude(status=Status.SUCCEEDED)
            until(lambda: not left.all().exists(), 300, what="all jobs are done")
    assert errors == [], "nobody was told that the database is locked"
    assert list(JobAttempt.objects.values_list("outcome", flat=True)) == [SUCCEEDED] * 500
    assert Ledger.objects.exclude(tag="web").count() == 500


# ---- a Redis that is there and says nothing


@pytest.mark.large
@with_sqlite
def test_worker_gives_a_silent_redis_up_within_seconds_and_comes_back(spawn: Spawn) -> None:
    with Valkey() as server, live.changed(**live.redis_at(server.url)):
        worker = live.start_worker(spawn, env={"DEDUPJOBS_TEST_REDIS": server.url})
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        try:
            worker.wait_for_output("Redis is away: Timeout", 9)
        finally:
            server.process.send_signal(signal.SIGCONT)
        begun = time.monotonic()
        live.wait_for(jobs.record.enqueue(tag="after"))
        assert time.monotonic() - begun < 8


@pytest.mark.large
@with_sqlite
def test_worker_looks_for_its_redis_every_five_seconds_however_long_it_is_away(
    spawn: Spawn,
) -> None:
    with Valkey() as server, live.changed(**live.redis_at(server.url)):
        worker = live.start_worker(spawn, env={"DEDUPJOBS_TEST_REDIS": server.url})
        server.kill()
        worker.wait_for_output("retrying in 5 seconds", 20)
        server.restart()
        live.wait_for(jobs.record.enqueue(tag="after"))


# ---- burst


@pytest.mark.large
@pytest.mark.parametrize("wiped", [False, True])
def test_burst_runs_what_is_due_without_a_message_before_it_ends(
    spawn: Spawn, rq_queue: Queue, wiped: bool
) -> None:
    lost, unsent, later = (jobs.record.enqueue(tag=tag) for tag in ("lost", "unsent", "later"))
    rq_queue.empty()
    live.unsent(unsent, run_after=-1)
    live.unsent(later, run_after=600)
    if not wiped:
        dispatch.set_epoch("default", ttl=60)
        ProcessedJob.objects.filter(pk=lost.job.pk).update(dispatched_at=DbNow(-60))
    assert spawn("rqworker", "--burst", **live.env_of(TICK=60, RESEND_AFTER=30)).wait(40) == 0
    assert live.outcomes(lost) == live.outcomes(unsent) == [SUCCEEDED]
    assert live.row_of(later).dispatched_at is None, "a burst does not wait for it"


@pytest.mark.large
@with_sqlite
def test_burst_ends_although_it_can_not_see_what_is_due(spawn: Spawn) -> None:
    with tables_missing():
        worker = spawn("rqworker", "--burst")
        assert worker.wait(40) == 0
    assert "can not see what is due" in worker.output


# ---- SIGTERM


def test_stop_that_somebody_swallows_is_remembered(rq_queue: Queue) -> None:
    worker = DedupWorker([rq_queue], connection=rq_queue.connection)
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        with suppress(StopRequested):  # as logging does with whatever a handler raises
            worker.request_stop(signal.SIGTERM, None)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert worker._stop_requested
    with pytest.raises(StopRequested):  # instead of waiting until a message comes
        worker.dequeue_job_and_maintain_ttl(1)
