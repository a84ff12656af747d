"""The ledger of duplicates: what was turned away, why, how often, and by whom it was asked for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
import redis
from django.conf import settings as django_settings
from django.core.management import CommandError, call_command
from django.core.signals import request_finished
from django.db import OperationalError, connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout

from dedupjobs import (
    clock,
    counters,
    dispatch,
    lifecycle,
    locks,
    probes,
    runner,
    stats,
    wire,
)
from dedupjobs.clock import DbNow
from dedupjobs.coordinator import Coordinator
from dedupjobs.lifecycle import Place
from dedupjobs.models import DuplicateCount, DuplicateSample, JobAttempt, ProcessedJob, Status
from dedupjobs.testing import run_pending
from tests import live
from tests.app import jobs
from tests.rows import Held, Side, before_sql, together
from tests.servers import Valkey
from tests.sessions import needs_row_locks
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)  # duplicates are told after the commit


@pytest.fixture
def impatient() -> None:
    """Leave PUSH_TIMEOUT as it is by default: what a request may lose to Redis."""


@pytest.fixture(autouse=True)
def _patient(request: pytest.FixtureRequest, settings: Any) -> Iterator[None]:
    """Let a busy machine take its time with each count, except in tests of the budget."""
    impatient = "impatient" in request.fixturenames
    settings.DEDUPJOBS = {} if impatient else {"PUSH_TIMEOUT": 30, "LOCK_TIMEOUT": 30}
    _forget_clients()
    yield
    _forget_clients()


def _forget_clients() -> None:
    dispatch.forget_clients()
    locks.forget_clients()
    stats.forget_clients()


def counts() -> dict[tuple[str, str], int]:
    """Return the counts in the table, by job and cause."""
    found = DuplicateCount.objects.values_list("name", "cause", "count")
    return {(name.removeprefix("testapp."), cause): count for name, cause, count in found}


def succeeded(tag: str = "a") -> ProcessedJob:
    """Return the row of a job that has run."""
    row = jobs.record.enqueue(tag=tag).job
    run_pending()
    return row


def deliver(row: ProcessedJob) -> Status | None:
    """Let a message for the row arrive at a worker."""
    return runner.deliver(row.pk, row.generation, owner=clock.token())


# ---- each cause, as it comes about


def ask_while_active() -> None:
    for _ in range(2):
        jobs.record.enqueue(tag="a")


def ask_after_success() -> None:
    succeeded()
    jobs.record.enqueue(tag="a")


def repeat_a_message() -> None:
    deliver(succeeded())


def race_for_a_row() -> None:
    row = jobs.record.enqueue(tag="a").job
    assert lifecycle.claim(row.pk, 1, owner="another worker", place=Place())
    deliver(row)


def end_after_the_lease() -> None:
    row = jobs.record.enqueue(tag="a").job
    probes.hook = _reclaim_before_the_end
    try:
        assert deliver(row) is None
    finally:
        probes.hook = None
    assert JobAttempt.objects.get().outcome == "LOST"


def _reclaim_before_the_end(point: str) -> None:
    if point == "user_code.after":
        JobAttempt.objects.update(lease_until=DbNow(-1))
        attempt = JobAttempt.objects.get()
        lost = lifecycle.reclaim(
            attempt.pk, beat_at=attempt.beat_at, ahead_of=None, reason="no beat"
        )
        assert lost is not None


@pytest.mark.parametrize(
    ("happen", "cause", "words"),
    [
        (ask_while_active, "producer", "an active job"),
        (ask_after_success, "replay", "has succeeded and holds this key"),
        (repeat_a_message, "redelivery", "a message found the row SUCCEEDED"),
        (race_for_a_row, "race", "a message found the row RUNNING"),
        (end_after_the_lease, "lease", "Succeeded after its lease was lost"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_duplicate_is_counted_under_its_cause(
    happen: Callable[[], None], cause: str, words: str
) -> None:
    happen()
    folded = stats.fold()
    assert (folded.duplicates, folded.samples) == (1, 1)
    assert counts() == {("record", cause): 1}
    assert ProcessedJob.objects.get().duplicates == 1
    sample = DuplicateSample.objects.get()
    assert (sample.cause, sample.job_id) == (cause, ProcessedJob.objects.get().pk)
    assert words in sample.detail


def test_first_call_and_its_run_count_nothing() -> None:
    succeeded()
    assert stats.fold() == stats.Folded()
    assert counts() == {}


def test_batch_and_inline_calls_are_counted_too() -> None:
    jobs.record.enqueue_many([{"tag": "a"}, {"tag": "a"}, {"tag": "a"}])
    jobs.record.run_now(tag="a")
    stats.fold()
    assert counts() == {("record", "producer"): 3}


def test_duplicate_inside_a_transaction_is_counted_once_that_has_committed() -> None:
    jobs.record.enqueue(tag="a")
    with pytest.raises(RuntimeError), transaction.atomic():  # noqa: PT012 - both in one
        jobs.record.enqueue(tag="a")
        raise RuntimeError
    assert stats.fold() == stats.Folded()
    with transaction.atomic():
        jobs.record.enqueue(tag="a")
        assert stats.fold() == stats.Folded()
    assert stats.fold().duplicates == 1


def test_sample_says_where_the_call_came_from() -> None:
    jobs.record.enqueue(tag="a")
    token = stats.request_id.set("request-17")
    try:
        jobs.record.enqueue(tag="a")
    finally:
        stats.request_id.reset(token)
    jobs.record.enqueue(tag="a")
    stats.fold()
    asked, other = DuplicateSample.objects.order_by("pk")
    assert (asked.request_id, other.request_id) == ("request-17", "")
    assert (asked.host, asked.pid) == (socket.gethostname(), os.getpid())
    assert abs(asked.at - clock.utcnow()) < timedelta(seconds=30)


def test_counts_of_several_folds_add_up() -> None:
    for number in (3, 4):
        for _ in range(number):
            jobs.record.enqueue(tag="a")
        stats.fold()
    first = DuplicateCount.objects.get()
    assert (first.count, ProcessedJob.objects.get().duplicates) == (6, 6)
    assert first.first_at <= first.last_at


def test_table_of_samples_keeps_the_newest_thousand() -> None:
    row = jobs.record.enqueue(tag="a").job
    for half in range(2):
        with stats.gathering():
            for i in range(600):
                stats.count_duplicate(row.pk, row.name, "producer", f"{half * 600 + i}")
        stats.fold()
    details = DuplicateSample.objects.order_by("pk").values_list("detail", flat=True)
    assert list(details) == [str(i) for i in range(200, 1200)]
    assert counts() == {("record", "producer"): 1200}


def test_sample_of_a_row_that_is_gone_is_left_out_and_its_count_stays() -> None:
    row = jobs.record.enqueue(tag="a").job
    jobs.record.enqueue(tag="a")
    row.delete()
    assert stats.fold().duplicates == 1
    assert counts() == {("record", "producer"): 1}
    assert not DuplicateSample.objects.exists()


# ---- a hot key


@pytest.mark.large
def test_hot_key_costs_each_call_one_read_and_the_fold_brings_all() -> None:
    row = jobs.record.enqueue(tag="hot").job
    before = ProcessedJob.objects.filter(pk=row.pk).values().get()
    with CaptureQueriesContext(connection) as captured:
        for _ in range(500):
            jobs.record.enqueue(tag="hot")
    texts = [query["sql"] for query in captured.captured_queries]
    statements = [text for text in texts if "dedupjobs_control" not in text]  # read now and then
    assert len(statements) == 500
    assert all(
        text.startswith(("SELECT", "WITH")) and "FOR UPDATE" not in text for text in statements
    )
    assert ProcessedJob.objects.filter(pk=row.pk).values().get() == before
    assert stats.fold().duplicates == 500
    assert counts() == {("record", "producer"): 500}
    assert ProcessedJob.objects.get().duplicates == 500


def test_hot_key_of_several_threads_loses_no_count() -> None:
    jobs.record.enqueue(tag="hot")

    def ask() -> None:
        for _ in range(50):
            jobs.record.enqueue(tag="hot")

    together(ask, ask, ask)
    assert stats.fold().duplicates == 150
    assert ProcessedJob.objects.get().duplicates == 150


def in_redis() -> int:
    """Return how many duplicates Redis knows of that were not folded yet."""
    return sum(int(n) for n in stats._client().redis.hvals(stats._key("duplicates")))


@pytest.fixture
def lasting_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a process that has sent a count gather what follows, for as long as the test lasts."""
    monkeypatch.setattr(stats, "GATHER", 3600)


@pytest.mark.usefixtures("lasting_gather")
def test_storm_of_duplicates_is_gathered_and_then_told_at_once() -> None:
    jobs.record.enqueue(tag="hot")
    for _ in range(101):
        jobs.record.enqueue(tag="hot")
    assert in_redis() == 1  # the first one was told without delay
    stats.flush()
    stats.flush()
    assert in_redis() == 101


@pytest.mark.usefixtures("lasting_gather")
def test_what_was_gathered_is_told_when_the_request_ends() -> None:
    for _ in range(4):
        jobs.record.enqueue(tag="hot")
    assert in_redis() == 1
    request_finished.send(sender=None)
    assert in_redis() == 3


@pytest.mark.usefixtures("lasting_gather")
def test_what_was_gathered_is_told_when_the_run_of_a_message_ends() -> None:
    row = succeeded()
    jobs.record.enqueue(tag="a")
    assert in_redis() == 1
    runner.run([[row.pk, 1], [row.pk, 1]])
    assert in_redis() == 3


def test_what_was_gathered_is_told_when_the_process_ends(process_env: dict[str, str]) -> None:
    script = """
import django
django.setup()
from dedupjobs import stats
from tests.app import jobs
stats.GATHER = 3600
for _ in range(4):
    jobs.record.enqueue(tag="hot")
"""
    subprocess.run([sys.executable, "-c", script], env=process_env, check=True, timeout=60)
    assert in_redis() == 3


def test_fold_costs_one_update_a_row() -> None:
    for tag in "abc":
        for _ in range(5):
            jobs.record.enqueue(tag=tag)
    with CaptureQueriesContext(connection) as captured:
        stats.fold()
    updates = [
        query["sql"]
        for query in captured.captured_queries
        if query["sql"].startswith("UPDATE") and "dedupjobs_processedjob" in query["sql"]
    ]
    assert len(updates) == 3
    assert all("version" not in text for text in updates)  # no arrow: operators are not disturbed


@needs_row_locks
def test_fold_is_not_held_up_by_a_locked_row() -> None:
    busy = jobs.record.enqueue(tag="busy").job
    for tag in ("busy", "busy", "free"):
        jobs.record.enqueue(tag=tag)
    jobs.record.enqueue(tag="free")
    with Held(busy, attempts=0):
        Side(Coordinator().fold).result(5)
        assert ProcessedJob.objects.get(key="record:free").duplicates == 1
    stats.fold()
    assert ProcessedJob.objects.get(key="record:busy").duplicates == 2
    assert counts() == {("record", "producer"): 3}


# ---- a fold that is cut off, twice at work, or without Redis


def test_fold_that_was_cut_off_is_finished_by_the_next() -> None:
    for _ in range(4):
        jobs.record.enqueue(tag="a")

    def cut() -> None:
        raise OperationalError("the server went away")

    with before_sql("dedupjobs_duplicatecount", action=cut), pytest.raises(OperationalError):
        stats.fold()
    assert ProcessedJob.objects.get().duplicates == 0
    jobs.record.enqueue(tag="a")
    assert stats.fold().duplicates == 3
    assert stats.fold().duplicates == 1
    assert ProcessedJob.objects.get().duplicates == 4
    assert counts() == {("record", "producer"): 4}


def test_two_coordinators_that_fold_at_once_count_each_duplicate_once() -> None:
    for _ in range(8):
        jobs.record.enqueue(tag="a")
    standing, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        standing.set()
        assert go_on.wait(20)

    def slow_fold() -> None:
        with before_sql(action=stand):
            stats.fold()

    slow = Side(slow_fold)
    assert standing.wait(20)
    stats.fold()
    go_on.set()
    slow.result()
    stats.fold()
    assert ProcessedJob.objects.get().duplicates == 7
    assert counts() == {("record", "producer"): 7}


def test_wiped_redis_loses_what_was_not_folded_and_no_more(redis_cache: Any) -> None:
    for _ in range(6):
        jobs.record.enqueue(tag="a")
    stats.fold()
    for _ in range(3):
        jobs.record.enqueue(tag="a")
    stats.flush()
    redis_cache.flushdb()
    for _ in range(2):
        jobs.record.enqueue(tag="a")
    stats.fold()
    assert ProcessedJob.objects.get().duplicates == 5 + 2


@pytest.fixture
def redis_cache() -> Iterator[Any]:
    """A client of the database that locks and counts are in."""
    with redis.Redis.from_url(django_settings.CACHE_URL) as client:
        yield client


def test_counts_in_redis_end_by_themselves(redis_cache: Any) -> None:
    for _ in range(2):
        jobs.record.enqueue(tag="a")
    ours = redis_cache.keys("dedupjobs:*")
    assert len(ours) == 2
    assert all(0 < redis_cache.ttl(key) <= 86_400 for key in ours)
    stats.fold()
    assert redis_cache.keys("dedupjobs:*") == []


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    """A server of our own, which queues, locks and counts are on."""
    with Valkey() as server:
        queues = {name: {"URL": f"{server.url}/0"} for name in django_settings.RQ_QUEUES}
        cache = {**django_settings.CACHES["default"], "LOCATION": f"{server.url}/1"}
        with override_settings(RQ_QUEUES=queues, CACHES={"default": cache}):
            _forget_clients()
            yield server


@pytest.mark.parametrize("fault", ["stopped", "hanging"])
def test_enqueue_answers_within_the_budget_while_redis_is_away(
    impatient: None, valkey: Valkey, fault: str
) -> None:
    with live.changed(DEDUPJOBS={"PUSH_TIMEOUT": 30, "LOCK_TIMEOUT": 30}):
        jobs.record.enqueue(tag="a")
        jobs.record.enqueue(tag="a")
        assert stats.fold().duplicates == 1
    jobs.record.enqueue(tag="a")  # connects again
    assert valkey.process is not None
    if fault == "stopped":
        valkey.kill()
    else:
        valkey.process.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    kinds = {str(jobs.record.enqueue(tag="a").kind) for _ in range(20)}
    spent = time.monotonic() - begun
    assert kinds == {"DUPLICATE"}
    assert spent < 2  # one PUSH_TIMEOUT of 250 ms a second, where each call alone would take it
    Coordinator().fold()  # tells, and does not raise
    if fault == "stopped":
        valkey.restart()
    else:
        valkey.process.send_signal(signal.SIGCONT)
    until(_counts_again, what="the breaker is closed and duplicates are counted again")


def _counts_again() -> bool:
    jobs.record.enqueue(tag="a")
    try:
        return stats.fold().duplicates > 0
    except (RedisError, OSError):
        return False


@pytest.mark.parametrize(
    ("connected", "late", "owed"),
    [
        (False, "deadline", True),  # over while it connects
        (True, "deadline", True),  # over before it sends
        (False, "answer", True),  # that of the handshake
        (True, "answer", False),
    ],
)
def test_count_is_owed_again_unless_it_was_sent(
    monkeypatch: pytest.MonkeyPatch, connected: bool, late: str, owed: bool
) -> None:
    def no_answer(*_: Any, **__: Any) -> None:
        raise RedisTimeout("no answer")

    with live.changed(DEDUPJOBS={"PUSH_TIMEOUT": 30, "LOCK_TIMEOUT": 30}):
        for client in (stats._client(), counters._client()) if connected else ():
            client.redis.ping()
        with monkeypatch.context() as patched:
            if late == "answer":
                patched.setattr(wire.DeadlineConnection, "read_response", no_answer)
            else:
                patched.setattr(wire.Budget, "left", lambda _: -1.0)
            stats.count_duplicate(1, "testapp.record", "producer", "")
            counters.add("attempts_total", "FAILED", "testapp.record")
            counters.pay()
        assert (stats._owed.counts == {"1:producer:testapp.record": 1}) is owed
        assert (len(stats._owed.samples) == 1) is owed
        assert any("FAILED" in name for name in counters._owed.counts) is owed


def test_fold_whose_last_word_to_redis_failed_counts_nothing_twice(valkey: Valkey) -> None:
    for _ in range(5):
        jobs.record.enqueue(tag="a")
    with valkey.client() as admin:

        def refuse_deletes() -> None:
            admin.execute_command("ACL", "SETUSER", "default", "-del", "-unlink")

        with (
            before_sql("dedupjobs_duplicatesample", action=refuse_deletes),
            pytest.raises(RedisError),
        ):
            stats.fold()
        admin.execute_command("ACL", "SETUSER", "default", "+del", "+unlink")
    stats.fold()
    assert ProcessedJob.objects.get().duplicates == 4
    assert counts() == {("record", "producer"): 4}


@override_settings(DEDUPJOBS={"FOLD_EVERY": 0.001, "PUSH_TIMEOUT": 30, "LOCK_TIMEOUT": 30})
def test_coordinator_folds_as_often_as_it_is_told() -> None:
    coordinator = Coordinator()
    for number in (1, 2):
        jobs.record.enqueue(tag="a")
        jobs.record.enqueue(tag="a")
        coordinator.tick()
        assert ProcessedJob.objects.get().duplicates == (1 if number == 1 else 3)


# ---- the command


def printed(*args: str) -> list[str]:
    out = StringIO()
    call_command("dedupjobs_duplicates", *args, stdout=out)
    return out.getvalue().splitlines()


def test_command_shows_counts_top_keys_and_newest_samples() -> None:
    for tag, number in (("cold", 2), ("hot", 1_300), ("warm", 5)):
        row = jobs.record.enqueue(tag=tag).job
        with stats.gathering():
            for _ in range(number):
                stats.count_duplicate(row.pk, row.name, "producer", "again")
    stats.fold()
    lines = printed("--top", "2")
    at = lines.index("Top keys:")
    assert lines[:2] == ["By job and cause:", "      1,307  testapp.record  producer"]
    assert lines[at + 1].startswith("      1,300  testapp.record record:hot  (row ")
    assert lines[at + 1].endswith(", PENDING)")
    assert lines[at + 2].startswith("          5  testapp.record record:warm")
    assert lines[at + 3] == "Newest:"
    assert len(lines[at + 4 :]) == 2
    who = f"UTC  testapp.record record:warm  producer by {socket.gethostname()}:{os.getpid()}"
    assert all(line.endswith(who) for line in lines[at + 4 :])


def test_command_without_duplicates_shows_empty_lists() -> None:
    assert printed() == ["By job and cause:", "Top keys:", "Newest:"]


def test_command_refuses_a_top_below_one() -> None:
    with pytest.raises(CommandError, match="--top 0: give a whole number of at least 1"):
        printed("--top", "0")
