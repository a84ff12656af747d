"""The status cache: what a process believes, for how long, and what it never believes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.conf import settings
from django.db import connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from dedupjobs import FOREVER, cache, clock, controls, lifecycle, operations
from dedupjobs.clock import DbNow
from dedupjobs.exceptions import ArgumentError, NoResult, PayloadMismatch, ResultTimeout
from dedupjobs.lifecycle import Place
from dedupjobs.models import Kind, ProcessedJob, Status
from dedupjobs.testing import run_pending
from tests import live
from tests.app import jobs
from tests.proxy import Proxy
from tests.rows import at
from tests.servers import HOST, NOBODY, Valkey
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

LONG = {"L1_TTL": 600, "PUSH_TIMEOUT": 10, "LISTEN": "never"}  # nothing but changes ends belief


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(controls, "DEAF", 3600)  # read once, so that queries can be counted
    with live.changed(DEDUPJOBS=LONG):
        yield


def queries() -> CaptureQueriesContext:
    return CaptureQueriesContext(connection)


def done(tag: str = "a", **arguments: Any) -> ProcessedJob:
    """Return the row of a success that holds its key for ever."""
    row = jobs.record.enqueue(tag=tag, **arguments).job
    run_pending()
    return ProcessedJob.objects.get(pk=row.pk)


def entry_of(row: ProcessedJob) -> bytes | None:
    with raw_client() as client:
        return client.get(cache.entry_key(row.key_hash))


def raw_client() -> redis.Redis:
    """A client of the cache's server that decodes nothing."""
    return redis.Redis.from_url(settings.CACHE_URL)


def another_process() -> None:
    """Forget what this process believes, as one that has just started."""
    cache.forget_clients()


# ---- reading


def test_status_follows_a_job_from_nothing_to_its_success() -> None:
    assert jobs.record.status(tag="a") is None
    jobs.record.enqueue(tag="a")
    assert jobs.record.status(tag="a") is Status.PENDING
    run_pending()
    assert jobs.record.status(tag="a") is Status.SUCCEEDED


def test_success_is_read_from_the_database_once_then_from_redis_then_from_here() -> None:
    row = done(text="x")
    with queries() as first:
        assert jobs.record.status(tag="a") is Status.SUCCEEDED
    another_process()
    with queries() as second:
        assert jobs.record.status(tag="a") is Status.SUCCEEDED
        with raw_client() as client:
            client.flushdb()
        assert jobs.record.result(tag="a") == "x"
    assert (len(first), len(second)) == (1, 0)
    assert entry_of(row) is None


def test_change_that_nobody_told_is_believed_away_for_l1_ttl_at_the_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = clock.monotonic()
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    with live.changed(DEDUPJOBS={**LONG, "L1_TTL": 2}):
        row = jobs.record.enqueue(tag="a").job
        assert jobs.record.status(tag="a") is Status.PENDING
        claim = lifecycle.claim(row.pk, 1, owner="another process", place=Place())
        assert claim is not None
        lifecycle.complete(claim, "null", unique_for=FOREVER)
        now += 1.999
        assert jobs.record.status(tag="a") is Status.PENDING
        now += 0.002
        assert jobs.record.status(tag="a") is Status.SUCCEEDED


def test_key_that_is_not_there_is_asked_for_each_time() -> None:
    controls.current()  # which a process reads once in a while
    with queries() as asked:
        assert [jobs.record.status(tag="a") for _ in range(3)] == [None] * 3
    assert len(asked) == 3
    with raw_client() as client:
        assert [k for k in client.scan_iter() if (client.get(k) or b"?")[:1] != b"?"] == []


@pytest.mark.parametrize("state", ["waiting", "dead", "held by nothing"])
def test_what_is_no_success_that_holds_its_key_never_goes_to_redis(state: str) -> None:
    specimen = {
        "waiting": jobs.record,
        "dead": jobs.fail_for_good,
        "held by nothing": jobs.record_again,
    }
    row = specimen[state].enqueue(tag="a").job
    if state != "waiting":
        run_pending()
    assert specimen[state].status(tag="a") == ProcessedJob.objects.get(pk=row.pk).status
    assert (entry_of(row) or b"?").startswith(b"?")  # at the most, that somebody reads


def test_only_arguments_that_stand_in_the_key_are_needed() -> None:
    jobs.record_for_tenant.enqueue(tenant="t", tag="a")
    assert jobs.record_for_tenant.status(tag="a", tenant="t") is Status.PENDING
    with pytest.raises(ArgumentError, match="'tag'"):
        jobs.record_for_tenant.status(tenant="t")
    with pytest.raises(ArgumentError, match="'tenant'"):
        jobs.record_for_tenant.status(tag="a")
    with pytest.raises(ArgumentError, match="has no key"):
        jobs.record_always.status(tag="a")
    with pytest.raises(TypeError, match=r"testapp\.record"):
        jobs.record.status(order=7)


def test_key_that_was_chosen_for_a_call_is_asked_by_it() -> None:
    jobs.record.using(key="mine").enqueue(tag="a")
    assert jobs.record.using(key="mine").status() is Status.PENDING
    assert jobs.record.status(tag="a") is None


def test_result_says_what_is_missing() -> None:
    with pytest.raises(NoResult, match="nothing was enqueued"):
        jobs.record.result(tag="a")
    jobs.record.enqueue(tag="a", text="x")
    with pytest.raises(ResultTimeout, match="PENDING"):
        jobs.record.result(tag="a")
    run_pending()
    assert jobs.record.result(tag="a") == "x"
    jobs.fail_for_good.enqueue(tag="a")
    run_pending()
    with pytest.raises(NoResult, match="no luck"):
        jobs.fail_for_good.result(tag="a")


def test_large_result_does_not_travel_with_its_entry_and_is_read_all_the_same() -> None:
    row = jobs.return_text.enqueue(length=cache.LARGEST_RESULT).job  # and two quotes
    run_pending()
    assert jobs.return_text.status(length=cache.LARGEST_RESULT) is Status.SUCCEEDED
    assert len(entry_of(row) or b"") < 1_000
    another_process()
    assert jobs.return_text.result(length=cache.LARGEST_RESULT) == "x" * cache.LARGEST_RESULT


def test_async_readers_get_the_same() -> None:
    done(text="x")

    async def ask() -> list[Any]:
        first = await jobs.record.astatus(tag="a")
        return [first, await jobs.record.astatus(tag="a"), await jobs.record.aresult(tag="a")]

    assert async_to_sync(ask)() == [Status.SUCCEEDED, Status.SUCCEEDED, "x"]


def test_without_a_status_cache_each_read_asks_the_database() -> None:
    done()
    with override_settings(DEDUPJOBS={**LONG, "STATUS_CACHE": None}), queries() as asked:
        assert [jobs.record.status(tag="a") for _ in range(2)] == [Status.SUCCEEDED] * 2
        assert jobs.record.enqueue(tag="a").kind is Kind.REPLAYED
    assert len(asked) == 3


def test_process_remembers_no_more_than_its_size_and_forgets_the_oldest() -> None:
    with live.changed(DEDUPJOBS={**LONG, "L1_SIZE": 3}):
        rows = [done(str(n)) for n in range(4)]
        for n in range(4):
            jobs.record.status(tag=str(n))
        believed = [cache.peek(row.key_hash) is not None for row in rows]
    assert believed == [False, True, True, True]


# ---- enqueueing what is done


def test_duplicate_of_a_known_success_asks_no_database() -> None:
    row = done(text="x")
    assert jobs.record.enqueue(tag="a", text="x").kind is Kind.REPLAYED  # brings it to the cache
    for _ in ("from here", "from Redis"):
        with queries() as asked:
            outcome = jobs.record.enqueue(tag="a", text="x")
            assert (outcome.kind, outcome.job.pk) == (Kind.REPLAYED, row.pk)
            assert "holds this key for ever" in outcome.reason
        assert len(asked) == 0
        another_process()
    assert outcome.result() == "x"
    assert outcome.job.args == row.args  # what did not travel is read when it is asked for


def test_other_arguments_on_a_known_success_are_a_mismatch_that_the_database_tells() -> None:
    done(text="x")
    jobs.record.enqueue(tag="a", text="x")
    with pytest.raises(PayloadMismatch, match="text"):
        jobs.record.enqueue(tag="a", text="y")


def test_success_answers_no_longer_than_its_window() -> None:
    row = jobs.record_hourly.enqueue(tag="a").job
    run_pending()
    ProcessedJob.objects.filter(pk=row.pk).update(unique_until=DbNow(5))
    with live.changed(DEDUPJOBS={**LONG, "L1_TTL": 4}):
        assert jobs.record_hourly.enqueue(tag="a").kind is Kind.REPLAYED
        with raw_client() as client:
            assert client.pttl(cache.entry_key(row.key_hash)) <= 1_000  # ends a whole L1_TTL before
        until(
            lambda: jobs.record_hourly.enqueue(tag="a").kind is Kind.CREATED,
            what="the key is free once its window is over",
        )
        assert ProcessedJob.objects.get(pk=row.pk).generation == 2


def test_window_that_is_nearly_over_is_not_told_to_others() -> None:
    row = jobs.record_hourly.enqueue(tag="a").job
    run_pending()
    ProcessedJob.objects.filter(pk=row.pk).update(unique_until=DbNow(60))
    assert jobs.record_hourly.status(tag="a") is Status.SUCCEEDED
    assert (entry_of(row) or b"?").startswith(b"?")


def test_success_that_holds_nothing_answers_no_enqueue() -> None:
    done_once = jobs.record_again.enqueue(tag="a").job
    run_pending()
    assert jobs.record_again.status(tag="a") is Status.SUCCEEDED
    assert jobs.record_again.enqueue(tag="a").kind is Kind.CREATED
    assert ProcessedJob.objects.get(pk=done_once.pk).generation == 2


# ---- changes


def test_change_in_this_process_is_seen_at_once_and_deletes_the_entry_of_all() -> None:
    row = jobs.fail_for_good.enqueue(tag="a").job
    run_pending()
    assert jobs.fail_for_good.status(tag="a") is Status.DEAD
    operations.retry(ProcessedJob.objects.get(pk=row.pk), by="op")
    assert jobs.fail_for_good.status(tag="a") is Status.PENDING


def test_slow_reader_does_not_put_an_old_row_over_a_newer_one() -> None:
    row = done(text="x")

    def purge() -> None:
        cache_was = entry_of(row)
        assert cache_was is not None
        assert cache_was.startswith(b"?")
        ProcessedJob.objects.filter(pk=row.pk).update(status=Status.DEAD, version=row.version + 1)
        fresh = ProcessedJob.objects.get(pk=row.pk)
        from dedupjobs import invalidation

        invalidation.announce([lifecycle.Change.of(fresh, fresh.status)])

    with at("cache.loaded", purge):
        assert jobs.record.status(tag="a") is Status.SUCCEEDED  # as it was when it was asked for
    assert entry_of(row) is None
    assert jobs.record.status(tag="a") is Status.DEAD


def test_reader_that_was_slow_while_redis_was_wiped_fills_nothing() -> None:
    row = done()

    def wipe() -> None:
        with raw_client() as client:
            client.flushdb()

    with at("cache.loaded", wipe):
        jobs.record.status(tag="a")
    assert entry_of(row) is None


def test_second_reader_at_the_same_time_leaves_the_filling_to_the_first() -> None:
    row = done()
    seen = []

    def read_too() -> None:
        another_process()
        seen.append(jobs.record.status(tag="a"))
        seen.append((entry_of(row) or b"").startswith(b"?"))

    with at("cache.leased", read_too):
        jobs.record.status(tag="a")
    assert seen == [Status.SUCCEEDED, True]
    assert (entry_of(row) or b"").startswith(b"1|")


def test_older_entry_of_redis_is_not_believed_by_who_has_seen_newer() -> None:
    row = done()
    jobs.record.status(tag="a")
    old = entry_of(row)
    assert old is not None
    ProcessedJob.objects.filter(pk=row.pk).update(version=row.version + 1, result='"new"')
    cache.expire(row.key_hash)
    with raw_client() as client:
        client.delete(cache.entry_key(row.key_hash))
        assert jobs.record.result(tag="a") == "new"
        client.set(cache.entry_key(row.key_hash), old)
    cache.expire(row.key_hash)
    assert jobs.record.result(tag="a") == "new"
    another_process()  # one that has seen nothing believes it, until it ends
    assert jobs.record.result(tag="a") == ""


def test_database_that_was_restored_is_believed_although_its_version_is_older() -> None:
    row = done()
    ProcessedJob.objects.filter(pk=row.pk).update(version=row.version + 10)
    jobs.fail_for_good.status(tag="x")
    assert jobs.record.status(tag="a") is Status.SUCCEEDED
    ProcessedJob.objects.filter(pk=row.pk).update(version=row.version, status=Status.CANCELLED)
    cache.expire(row.key_hash)
    with raw_client() as client:
        client.flushdb()
    assert jobs.record.status(tag="a") is Status.CANCELLED


def test_inside_a_transaction_the_database_tells_what_the_transaction_has_done() -> None:
    row = done()
    jobs.record.status(tag="a")
    with transaction.atomic():
        ProcessedJob.objects.filter(pk=row.pk).update(status=Status.CANCELLED)
        assert jobs.record.status(tag="a") is Status.CANCELLED
        transaction.set_rollback(True)
    assert jobs.record.status(tag="a") is Status.SUCCEEDED


def test_row_found_in_a_transaction_is_brought_to_the_cache_after_its_commit() -> None:
    row = done()
    with transaction.atomic():
        assert jobs.record.enqueue(tag="a").kind is Kind.REPLAYED
        assert entry_of(row) is None
    assert (entry_of(row) or b"").startswith(b"1|")


# ---- what stands in Redis and is not ours


@pytest.mark.parametrize(
    "forged",
    [
        b"1|00000000000000000001.000000000009|00000000000000000000000000000000|[]",
        pickle.dumps({"status": "SUCCEEDED"}),
        b"",
        b"1|",
        b"?lease",
        b"2|x|y|z",
        b"\xff\xfe" * 100,
        b"1|" + b"|" * 1000,
    ],
    ids=["bad seal", "pickle", "empty", "cut", "lease", "scheme", "bytes", "bars"],
)
def test_entry_that_we_did_not_write_is_no_answer(forged: bytes) -> None:
    row = jobs.record.enqueue(tag="a").job
    with raw_client() as client:
        client.set(cache.entry_key(row.key_hash), forged)
    assert jobs.record.status(tag="a") is Status.PENDING
    assert jobs.record.enqueue(tag="a").kind is Kind.DUPLICATE


def test_entry_of_another_key_or_of_another_secret_is_no_answer() -> None:
    entry = None
    row = done("a")
    jobs.record.status(tag="a")
    entry = entry_of(row)
    assert entry is not None
    other = jobs.record.enqueue(tag="b").job
    with raw_client() as client:
        client.set(cache.entry_key(other.key_hash), entry)
    assert jobs.record.status(tag="b") is Status.PENDING
    another_process()
    with override_settings(SECRET_KEY="new"), queries() as asked:
        assert jobs.record.status(tag="a") is Status.SUCCEEDED
    assert len(asked) == 1
    another_process()
    old = settings.SECRET_KEY
    with override_settings(SECRET_KEY="new", SECRET_KEY_FALLBACKS=[old]), queries() as asked:
        assert jobs.record.status(tag="a") is Status.SUCCEEDED
    assert len(asked) == 0


def test_cleared_cache_loses_nothing_but_speed() -> None:
    from django.core.cache import caches

    done(text="x")
    jobs.record.status(tag="a")
    caches["default"].clear()
    another_process()
    assert jobs.record.result(tag="a") == "x"
    assert jobs.record.enqueue(tag="a", text="x").kind is Kind.REPLAYED


# ---- a Redis that is sick


def test_reads_without_redis_come_from_the_database_and_cost_one_time_out_a_second() -> None:
    done()
    another_process()
    with live.changed(DEDUPJOBS={"L1_TTL": 0.001}, CACHES=live.redis_at(NOBODY)["CACHES"]):
        answers = [jobs.record.status(tag="a") for _ in range(20)]
    assert answers == [Status.SUCCEEDED] * 20


def test_reads_from_a_black_hole_are_cut_off_by_the_budget_and_then_by_the_breaker() -> None:
    done()
    port = int(settings.CACHE_URL.split(":")[2].split("/")[0])
    with Proxy(port) as proxy:
        caches = live.redis_at(f"redis://{HOST}:{proxy.port}")["CACHES"]
        with live.changed(DEDUPJOBS={"L1_TTL": 0.001, "LISTEN": "never"}, CACHES=caches):
            jobs.record.status(tag="a")
            proxy.black_hole()
            waits = []
            for _ in range(50):
                begun = clock.monotonic()
                assert jobs.record.status(tag="a") is Status.SUCCEEDED
                waits.append(clock.monotonic() - begun)
                if sorted(waits)[len(waits) // 2] < 0.1 and len(waits) > 5:
                    break
            assert sorted(waits)[len(waits) // 2] < 0.2  # most are refused at once


def test_cache_that_is_no_redis_costs_speed_and_no_call() -> None:
    done(text="x")
    local = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}
    with live.changed(DEDUPJOBS=LONG, CACHES={"default": local}):
        assert jobs.record.status(tag="a") is Status.SUCCEEDED
        assert jobs.record.enqueue(tag="a", text="x").kind is Kind.REPLAYED
        assert jobs.record.enqueue(tag="b").kind is Kind.CREATED


def test_read_that_was_cut_off_leaves_its_reply_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with (
        Valkey() as server,
        live.changed(**live.redis_at(server.url), DEDUPJOBS=LONG),
        server.client() as admin,
    ):
        client = cache.client()
        client.redis.mset({"one": "1", "two": "2"})
        kind: Any = client.redis.connection_pool.connection_class
        admin.execute_command("CLIENT", "PAUSE", "300", "ALL")  # so the reply comes later
        with monkeypatch.context() as patched:
            patched.setattr(kind, "read_response", cut_off)
            with pytest.raises(KeyboardInterrupt):
                client.get("one")
        assert client.get("two") == b"2"
