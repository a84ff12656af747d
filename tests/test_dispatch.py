"""Pushing to a Redis that is healthy, sick or gone costs a request little and loses no row."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import redis
from django.conf import settings
from django.db import connection, transaction
from redis.exceptions import RedisError
from rq.job import Job as RqJob
from rq.serializers import JSONSerializer

from dedupjobs import dispatch, probes, signals, wire
from dedupjobs.coordinator import Coordinator
from dedupjobs.dispatch import Delivery
from dedupjobs.models import AttemptOutcome, JobAttempt, ProcessedJob, Status
from tests import live
from tests.app import jobs
from tests.live import PATIENCE
from tests.proxy import Proxy
from tests.servers import HOST, Valkey
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

REQUEST = 20  # enqueues in one request
RUNS = 40  # on a busy machine a process waits for the CPU, too; an idle one needs a single run
MAY_LOSE = 0.3  # seconds, all of them together

Fault = Callable[[Proxy, Valkey], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    with Valkey() as valkey:
        yield valkey


@pytest.fixture
def proxy(server: Valkey) -> Iterator[Proxy]:
    """Between us and a server of our own; it holds the queues, and locks and all else too."""
    with server.client() as client:
        client.flushall()
    with (
        Proxy(server.port) as made,
        live.changed(
            DEDUPJOBS={"PUSH_TIMEOUT": 5.0}, **live.redis_at(f"redis://{HOST}:{made.port}")
        ),
    ):
        yield made


@pytest.fixture
def bounded(proxy: Proxy) -> Iterator[Proxy]:
    """The same, where a push may take as little time as it does by default."""
    with live.changed(DEDUPJOBS={}):
        yield proxy


@pytest.fixture
def failures() -> Iterator[list[Exception]]:
    """The errors of all hand-overs that fail."""
    errors: list[Exception] = []

    def note(error: Exception, **_: Any) -> None:
        errors.append(error)

    signals.hand_over_failed.connect(note)
    yield errors
    signals.hand_over_failed.disconnect(note)


def loss(fault: Fault, proxy: Proxy, server: Valkey, request: Callable[[str], Any]) -> float:
    """Return the seconds that a request waits for a sick Redis, by the best of some runs."""
    healthy, sick = [], []
    for run in range(RUNS):
        healthy.append(seconds(request, f"healthy {run}"))
        with fault(proxy, server):
            sick.append(seconds(request, f"sick {run}"))
        if min(sick) - min(healthy) <= MAY_LOSE:
            break
    return min(sick) - min(healthy)


def seconds(request: Callable[[str], Any], tag: str) -> float:
    """Time a request in a process that has just started, without what the database took."""
    in_sql = 0.0

    def timed(execute: Callable[..., Any], *args: Any) -> Any:
        nonlocal in_sql
        begun = time.monotonic()
        try:
            return execute(*args)
        finally:
            in_sql += time.monotonic() - begun

    dispatch.forget_clients()
    begun = time.monotonic()
    with connection.execute_wrapper(timed):
        request(tag)
    return time.monotonic() - begun - in_sql


def all_run_once(outcomes: list[Any]) -> None:
    """Let a coordinator and a worker act until all rows are done."""
    coordinator = Coordinator()

    def done() -> bool:
        coordinator.tick()
        live.work_off()
        return not ProcessedJob.objects.exclude(status=Status.SUCCEEDED).exists()

    until(done, PATIENCE, what="all rows are handed over and run")
    assert JobAttempt.objects.count() == len(outcomes)
    assert not JobAttempt.objects.exclude(outcome=AttemptOutcome.SUCCEEDED).exists()
    for outcome in outcomes:
        assert len(live.notes(outcome.job.key.removeprefix("record:"))) == 1


# ---- faults: each is a context in which Redis is sick


@contextmanager
def refused(proxy: Proxy, server: Valkey) -> Iterator[None]:
    proxy.refuse()
    proxy.cut()
    yield
    proxy.pass_through()


@contextmanager
def black_hole(proxy: Proxy, server: Valkey) -> Iterator[None]:
    proxy.black_hole()
    yield
    proxy.pass_through()
    proxy.cut()


@contextmanager
def slow(proxy: Proxy, server: Valkey) -> Iterator[None]:
    proxy.delay(0.1)
    yield
    proxy.pass_through()


@contextmanager
def disk_full(proxy: Proxy, server: Valkey) -> Iterator[None]:
    """Let a snapshot fail, as on a full disk; the server itself answers MISCONF to writes."""
    in_the_way = server.home / "dump.rdb"
    in_the_way.mkdir(exist_ok=True)
    with server.client() as client:
        client.config_set("save", "3600 1000000")
        client.config_set("stop-writes-on-bgsave-error", "yes")
        client.bgsave()

        def has_failed() -> bool:
            told = client.info("persistence")
            return told["rdb_last_bgsave_status"] == "err" and not told["rdb_bgsave_in_progress"]

        until(has_failed, PATIENCE, what="the snapshot fails")
        with pytest.raises(redis.ResponseError, match="MISCONF"):
            client.set("a", 1)
        yield
        client.config_set("save", "")
        in_the_way.rmdir()


@pytest.mark.parametrize("fault", [refused, black_hole, slow, disk_full])
def test_twenty_enqueues_with_a_sick_redis_lose_little_time_and_no_row(
    bounded: Proxy, server: Valkey, fault: Fault
) -> None:
    outcomes = []

    def request(tag: str) -> None:
        outcomes.extend(jobs.record.enqueue(tag=f"{tag} {n}") for n in range(REQUEST))

    assert loss(fault, bounded, server, request) <= MAY_LOSE
    assert ProcessedJob.objects.filter(status=Status.PENDING).count() == len(outcomes)
    unsent = ProcessedJob.objects.filter(dispatch_id=None, dispatched_at=None)
    keys = set(unsent.values_list("key", flat=True))
    sick = {outcome.job.key for outcome in outcomes if "sick" in outcome.job.key}
    # While replies are slow, some may fit into the budget.
    assert keys & sick if fault is slow else keys >= sick
    all_run_once(outcomes)


@pytest.mark.parametrize("fault", [black_hole, slow])
def test_transaction_with_twenty_enqueues_on_two_queues_has_one_budget_for_its_commit(
    bounded: Proxy, server: Valkey, fault: Fault
) -> None:
    def request(tag: str) -> None:
        with transaction.atomic():
            for n in range(REQUEST // 2):
                jobs.record.enqueue(tag=f"{tag} {n}")
                jobs.record_high.enqueue(tag=f"{tag} {n}")

    assert loss(fault, bounded, server, request) <= MAY_LOSE


def test_rows_enqueued_around_a_wipe_run_once(proxy: Proxy, server: Valkey) -> None:
    Coordinator().tick()
    outcomes = [jobs.record.enqueue(tag=f"before {n}") for n in range(10)]
    with server.client() as client:
        client.flushall()
    outcomes += [jobs.record.enqueue(tag=f"after {n}") for n in range(10)]
    all_run_once(outcomes)


# ---- the breaker


def test_first_failed_push_opens_the_breaker_so_that_the_next_ones_fail_at_once(
    bounded: Proxy, failures: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "WINDOW", 60.0)
    bounded.black_hole()
    for n in range(REQUEST):
        jobs.record.enqueue(tag=f"dark {n}")
    assert len(failures) == REQUEST
    asked = [error for error in failures if "within the last second" not in str(error)]
    assert len(asked) == 1, "the others have not asked Redis"
    assert "within the last second" not in str(failures[0])


def test_breaker_closes_once_redis_is_back_however_many_enqueues_come(proxy: Proxy) -> None:
    proxy.refuse()
    assert live.row_of(jobs.record.enqueue(tag="dark")).dispatched_at is None
    proxy.pass_through()
    numbers = iter(range(10_000))
    until(
        lambda: live.row_of(jobs.record.enqueue(tag=f"light {next(numbers)}")).dispatched_at,
        PATIENCE,
        what="a push succeeds",
    )
    assert len(live.queued()) == 1


# ---- lost replies, hooks


def test_push_whose_reply_is_lost_is_not_repeated_by_the_client_and_its_copy_runs_nothing(
    proxy: Proxy,
) -> None:
    jobs.record.enqueue(tag="opens the connection")
    assert live.work_off() == 1
    proxy.swallow_reply_to(b"RPUSH")
    outcome = jobs.record.enqueue(tag="swallowed")
    assert proxy.swallowed.wait(PATIENCE)
    assert len(live.queued()) == 1, "the server has it, once"
    assert live.row_of(outcome).dispatched_at is None, "we do not know it"
    coordinator = Coordinator()
    coordinator.tick()
    until(
        lambda: coordinator.tick() and len(live.queued()) >= 2,
        PATIENCE,
        what="the coordinator sends another",
    )
    assert len(set(live.queued())) == len(live.queued())
    assert live.work_off() >= 2
    assert live.outcomes(outcome) == [AttemptOutcome.SUCCEEDED]
    assert live.notes("swallowed") == [""]


def test_commit_hooks_around_ours_run_although_redis_is_gone(proxy: Proxy) -> None:
    proxy.refuse()
    ran = []
    with transaction.atomic():
        transaction.on_commit(lambda: ran.append("before"))
        outcome = jobs.record.enqueue(tag="middle")
        transaction.on_commit(lambda: ran.append("after"))
    assert ran == ["before", "after"]
    assert live.row_of(outcome).status == Status.PENDING


@pytest.mark.parametrize("point", ["push.before", "push.after"])
def test_commit_hooks_around_ours_run_whatever_a_push_raises(proxy: Proxy, point: str) -> None:
    def fail(reached: str) -> None:
        if reached == point:
            raise RuntimeError("no error of Redis")

    ran = []
    probes.hook = fail
    try:
        with transaction.atomic():
            transaction.on_commit(lambda: ran.append("before"))
            outcome = jobs.record.enqueue(tag="middle")
            transaction.on_commit(lambda: ran.append("after"))
    finally:
        probes.hook = None
    assert ran == ["before", "after"]
    assert live.row_of(outcome).status == Status.PENDING


def test_receiver_that_raises_changes_no_enqueue(proxy: Proxy) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("a bad receiver")

    proxy.refuse()
    for signal in (signals.hand_over_failed, signals.job_enqueued):
        signal.connect(fail)
    try:
        outcome = jobs.record.enqueue(tag="kept")
    finally:
        for signal in (signals.hand_over_failed, signals.job_enqueued):
            signal.disconnect(fail)
    assert outcome.created
    assert live.row_of(outcome).dispatched_at is None


def test_push_to_a_queue_that_was_removed_leaves_its_row_and_pushes_the_others(
    proxy: Proxy, failures: list[Exception]
) -> None:
    here = jobs.record.enqueue(tag="here")
    gone = jobs.record.enqueue(tag="gone")
    ProcessedJob.objects.filter(pk=gone.job.pk).update(queue="removed")
    with live.rq_client() as client:
        client.delete("rq:queue:default")
    rows = [live.row_of(gone), live.row_of(here)]
    pushed = dispatch.push(
        Delivery(queue=r.queue, dispatch_id=r.dispatch_id or "", name=r.name, rows=((r.pk, 1),))
        for r in rows
    )
    assert pushed == 1
    assert live.queued() == [rows[1].dispatch_id]
    assert "removed" in str(failures[0])
    assert live.row_of(gone).dispatched_at is None


def test_message_carries_rows_and_nothing_else_and_does_not_stay(proxy: Proxy) -> None:
    outcome = jobs.record.enqueue(tag="secret", text="of a customer")
    (message_id,) = live.queued()
    assert message_id == live.row_of(outcome).dispatch_id
    with redis.Redis.from_url(settings.RQ_QUEUES["default"]["URL"]) as client:
        message = RqJob.fetch(message_id, connection=client, serializer=JSONSerializer)
    assert (message.func_name, message.args, message.kwargs) == (
        "dedupjobs.runner.run",
        [[[outcome.job.pk, 1]]],
        {},
    )
    assert (message.result_ttl, message.failure_ttl) == (60, 86_400)
    assert "secret" not in str(message.to_dict())


@pytest.mark.parametrize("seconds", [0, 60], ids=["of another is over", "of another has begun"])
def test_threads_have_deadlines_of_their_own(seconds: int) -> None:
    client = dispatch._producer("default").wire
    begun, go_on = threading.Event(), threading.Event()

    def other() -> None:
        with client.deadline(seconds):
            begun.set()
            assert go_on.wait(PATIENCE)

    def ping() -> str:
        try:
            return "answered" if client.redis.ping() else ""
        except RedisError as error:
            return str(error)

    with ThreadPoolExecutor(1) as pool, client.deadline(60 - seconds):
        done = pool.submit(other)
        assert begun.wait(PATIENCE)
        during = ping()
        go_on.set()
        done.result(PATIENCE)
        ours = "answered" if seconds == 0 else "the time that a push may take is over"
        assert (during, ping()) == (ours, ours)
