"""What is counted, by the event that the counter names; and that odd counts harm nobody."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.conf import settings as django_settings
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from dedupjobs import (
    cache,
    clock,
    coordinator,
    counters,
    invalidation,
    lifecycle,
    locks,
    operations,
    prometheus,
    readings,
    registry,
    runner,
    stats,
)
from dedupjobs.alerts.watch import Watch
from dedupjobs.coordinator import Coordinator
from dedupjobs.counters import FAST, Buckets
from dedupjobs.locks import Grip
from dedupjobs.models import JobAttempt, ProcessedJob, Status
from dedupjobs.registry import FOREVER, job
from tests import live
from tests.app import jobs
from tests.proxy import Proxy
from tests.rows import Side, alter, alter_attempt, at, claimed, expire, race, tables_missing
from tests.servers import Valkey
from tests.test_quorum import lock_servers
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

RECORD = "testapp.record"


@pytest.fixture(autouse=True)
def _patient() -> Iterator[None]:
    """A busy machine must not look like a fault."""
    with live.brisk(LOCK_TIMEOUT=10, PUSH_TIMEOUT=10, METRICS_TOKEN="a secret of the scraper"):
        counters.forget_clients()
        yield
    counters.forget_clients()


@pytest.fixture
def client() -> Iterator[redis.Redis]:
    with live.cache_client() as made:
        yield made


def counted(metric: str) -> dict[tuple[str, ...], Any]:
    """Return a metric's samples, once this process has paid."""
    counters.pay()
    found = counters.read()
    return found.histograms[metric] if metric in found.histograms else found.counters[metric]


def run(row: ProcessedJob | Any) -> Status | None:
    """Let a message for the row arrive at a worker."""
    row = ProcessedJob.objects.get(pk=getattr(row, "job", row).pk)
    return runner.deliver(row.pk, row.generation, owner=clock.token())


def lines(**query: Any) -> list[str]:
    """Return the samples that a scraper gets."""
    answer = scrape(**query)
    assert answer.status_code == 200, answer.content
    return [line for line in answer.content.decode().splitlines() if not line.startswith("#")]


def scrape(**query: Any) -> Any:
    authorization = {"Authorization": "Bearer a secret of the scraper"}
    return Client(headers=authorization).get("/metrics", query)


# ---- each counter, by its event


def test_run_counts_its_attempt_its_lock_its_duration_and_its_delay() -> None:
    run(jobs.record.enqueue(tag="a"))
    assert counted("attempts_total") == {("SUCCEEDED", RECORD): 1}
    assert counted("lock_acquire_success_total") == {(): 1}
    assert counted("lock_acquire_failed_total") == {}
    took = counted("job_processing_duration_seconds")[(RECORD,)]
    assert took.counts[-1] == 1
    assert 0 < took.total < 60
    assert counted("queue_delay_seconds")[("default",)].counts[-1] == 1
    assert counted("lock_wait_seconds") == {}
    assert counted("lock_expired_before_completion_total") == {}
    assert counted("job_retry_total") == {}


@pytest.mark.parametrize(
    ("specimen", "args", "reason", "outcome"),
    [
        (jobs.fail, {}, "error", "FAILED"),
        (jobs.wish, {"what": "retry"}, "asked", "FAILED"),
        (jobs.wish, {"what": "snooze"}, "snoozed", "SNOOZED"),
        (jobs.give_up, {}, "", "FAILED"),
        (jobs.wish, {"what": "cancel"}, "", "CANCELLED"),
    ],
)
def test_ending_counts_its_outcome_and_why_another_attempt_follows(
    specimen: Any, args: dict[str, Any], reason: str, outcome: str
) -> None:
    run(specimen.enqueue(tag="a", **args))
    assert counted("attempts_total") == {(outcome, specimen.name): 1}
    assert counted("job_retry_total") == ({(reason, specimen.name): 1} if reason else {})


def test_job_that_dies_is_counted_and_one_that_lives_is_not() -> None:
    run(jobs.fail_for_good.enqueue(tag="a"))
    run(jobs.fail.enqueue(tag="a"))
    assert counted("jobs_dead_total") == {(jobs.fail_for_good.name,): 1}


def test_timed_out_attempt_and_its_retry_are_counted_as_such() -> None:
    @job(name="testapp.late", key="late:{tag}", unique_for=FOREVER, timeout=0.1)
    def late(*, tag: str) -> None:
        time.sleep(30)

    try:
        run(late.enqueue(tag="a"))
        assert counted("attempts_total") == {("TIMED_OUT", "testapp.late"): 1}
        assert counted("job_retry_total") == {("timeout", "testapp.late"): 1}
    finally:
        registry.forget("testapp.late")


def test_interrupted_attempt_and_its_retry_are_counted_as_such() -> None:
    with pytest.raises(KeyboardInterrupt):
        run(jobs.interrupt_once.enqueue(tag="a"))
    assert counted("attempts_total") == {("INTERRUPTED", jobs.interrupt_once.name): 1}
    assert counted("job_retry_total") == {("interrupted", jobs.interrupt_once.name): 1}


def test_operators_retry_is_counted() -> None:
    row = jobs.fail_for_good.enqueue(tag="a").job
    run(row)
    operations.retry(ProcessedJob.objects.get(), by="siti")
    assert counted("job_retry_total") == {("operator", jobs.fail_for_good.name): 1}


def test_busy_lock_before_a_row_that_another_runs_is_a_failed_acquisition() -> None:
    claim = claimed(jobs.record.enqueue(tag="a").job)
    locks.acquire(claim.job_pk, claim.owner, ttl=60)
    run(claim_row := ProcessedJob.objects.get())
    assert claim_row.status == Status.RUNNING
    assert counted("lock_acquire_failed_total") == {("busy",): 1}
    assert counted("lock_acquire_success_total") == {}


def test_leftover_lock_that_the_claims_winner_takes_over_is_a_success() -> None:
    row = jobs.record.enqueue(tag="a").job
    locks.acquire(row.pk, "dead", ttl=60)
    run(row)
    assert counted("lock_acquire_success_total") == {(): 1}
    assert counted("lock_acquire_failed_total") == {}


def test_unreachable_lock_is_a_failed_acquisition_which_is_told_once_redis_is_back(
    client: redis.Redis,
) -> None:
    row = jobs.record.enqueue(tag="a").job
    client.hset(live.lock_name(row.pk), "a", "hash")  # what the script can not read
    assert run(row) is Status.SUCCEEDED
    assert counted("lock_acquire_failed_total") == {("unreachable",): 1}


def test_run_that_could_not_reach_its_lock_tells_so_by_itself() -> None:
    with Valkey() as server, Proxy(server.port) as proxy:
        slow = live.redis_at(f"redis://127.0.0.1:{proxy.port}")
        with live.changed(**slow, DEDUPJOBS={"LOCK_TIMEOUT": 0.1, "PUSH_TIMEOUT": 10}):
            row = live.row_of(jobs.record.enqueue(tag="a"))
            counters.forget_owed()
            proxy.delay(0.2)
            assert live.deliver(row) == Status.SUCCEEDED
            proxy.delay(0.0)
        with live.changed(**live.redis_at(server.url)):
            failed = counters.read().counters["lock_acquire_failed_total"]
    assert failed == {("unreachable",): 1}


def test_wait_for_a_lock_is_measured_from_the_first_delivery_that_met_it_busy(
    client: redis.Redis,
) -> None:
    row = jobs.record.enqueue(tag="a").job
    claim = claimed(row)
    locks.acquire(claim.job_pk, claim.owner, ttl=60)
    run(row)
    # As if that had been 7 s ago, by the server's own clock.
    mark = live.lock_name(row.pk).replace(":lock:", ":waited:")
    client.pexpire(mark, locks.WAITED_TTL - 7_000)
    run(row)  # a later one does not begin the wait anew
    beat_at = expire(claim)
    lost = lifecycle.reclaim(claim.fence, beat_at=beat_at, ahead_of=None, reason="no beat")
    assert lost is not None
    locks.release(row.pk, claim.owner)
    run(row)
    waited = counted("lock_wait_seconds")[(RECORD,)]
    assert waited.counts[-1] == 1
    assert 7 <= waited.total < 30
    newest = JobAttempt.objects.get(number=2)
    assert newest.lock_wait is not None
    assert 7 <= newest.lock_wait < 30
    assert not client.exists(mark), "the wait is over"


@pytest.mark.parametrize("gone", ["none", "another's"])
def test_lock_that_is_gone_before_the_end_is_counted_once(client: redis.Redis, gone: str) -> None:
    row = jobs.record.enqueue(tag="a").job

    def lose() -> None:
        client.delete(live.lock_name(row.pk))
        if gone == "another's":
            client.set(live.lock_name(row.pk), f"{row.pk}:thief")

    with at("user_code.before", lose):
        run(row)
    assert counted("lock_expired_before_completion_total") == {(RECORD,): 1}


def test_beat_that_finds_the_lock_gone_is_counted_and_the_release_not_again(
    client: redis.Redis, tmp_path: Any
) -> None:
    release = tmp_path / "go"
    row = jobs.wait.enqueue(tag="a", release=str(release)).job
    side = Side(run, row)
    try:
        live.begun("a")
        client.delete(live.lock_name(row.pk))
        _wait_for_a_beat()
        _wait_for_a_beat()  # which finds it gone, too
    finally:
        release.touch()
    assert side.result() == Status.SUCCEEDED
    assert counted("lock_expired_before_completion_total") == {("testapp.wait",): 1}


def _wait_for_a_beat() -> None:
    now = lifecycle.database_now()
    until(lambda: JobAttempt.objects.get().beat_at > now, 20, what="a beat")


def test_lock_of_a_successor_is_no_expired_one(client: redis.Redis) -> None:
    row = jobs.record_again.enqueue(tag="a").job
    seen = []

    def succeed_at_once() -> None:
        # Between our ending and our release somebody calls again, and is taken at once.
        jobs.record_again.enqueue(tag="a")
        fresh = ProcessedJob.objects.get()
        claim = claimed(fresh, owner="the next one")
        seen.append(locks.replace(fresh.pk, claim.owner, ttl=60))

    with at("release.before", succeed_at_once):
        run(row)
    assert seen == [Grip.HELD]
    assert client.get(live.lock_name(row.pk)) == f"{row.pk}:the next one"
    assert counted("lock_expired_before_completion_total") == {}


@pytest.mark.usefixtures("step_by_step")
def test_conflict_is_counted_where_an_insert_lost_and_nowhere_else() -> None:
    jobs.record.enqueue(tag="a")
    jobs.record.enqueue(tag="a")
    jobs.record.enqueue_many([{"tag": "a"}, {"tag": "b"}, {"tag": "b"}])
    assert counted("idempotency_conflict_total") == {}

    def come_first() -> None:
        side = threading.Thread(target=_enqueue_elsewhere)
        side.start()
        side.join()

    with at("enqueue.read", come_first):
        assert jobs.record.enqueue(tag="raced").kind == "DUPLICATE"
    assert counted("idempotency_conflict_total") == {(RECORD,): 1}


def _enqueue_elsewhere() -> None:
    try:
        jobs.record.enqueue(tag="raced")
    finally:
        connection.close()


def test_races_of_many_calls_count_at_most_the_calls_that_lost() -> None:
    kinds = [o.kind for o in race(*[lambda: jobs.record.enqueue(tag="a")] * 4)]
    assert sorted(kinds) == ["CREATED", "DUPLICATE", "DUPLICATE", "DUPLICATE"]
    assert counted("idempotency_conflict_total").get((RECORD,), 0) <= 3


def test_attempt_that_is_reclaimed_is_counted_as_stale_lost_recovered_and_retried() -> None:
    claim = claimed(jobs.record.enqueue(tag="a").job)
    now = lifecycle.database_now()
    beat_at, lease_until = now - timedelta(seconds=100), now - timedelta(seconds=99)
    alter_attempt(claim, beat_at=beat_at, lease_until=lease_until)
    recovering = Coordinator()
    until(recovering.reclaim, 60, every=0.1, what="the second witness")
    assert counted("stale_processing_records_total") == {(RECORD,): 1}
    assert counted("attempts_total") == {("LOST", RECORD): 1}
    assert counted("recovered_total") == {("lease",): 1}
    assert counted("job_retry_total") == {("lost", RECORD): 1}
    recovery = counted("recovery_seconds")[("lease",)]
    assert recovery.counts[-1] == 1
    assert 100 <= recovery.total < 200


def test_attempt_that_is_buried_is_recovered_but_was_not_stale() -> None:
    claim = claimed(jobs.record.enqueue(tag="a").job, begins=False)
    lost = lifecycle.bury(claim.fence, "its process died")
    assert lost is not None
    coordinator.tell_lost(lost, "death")
    assert counted("recovered_total") == {("death",): 1}
    assert counted("attempts_total") == {("RETURNED", RECORD): 1}
    assert counted("job_retry_total") == {("returned", RECORD): 1}
    assert counted("stale_processing_records_total") == {}


def test_message_that_rq_lost_is_counted_with_the_time_that_it_was_lost(
    redis_client: redis.Redis,
) -> None:
    row = jobs.record_high.enqueue(tag="a").job
    redis_client.delete("rq:queue:high")
    hour_ago = lifecycle.database_now() - timedelta(hours=1)
    alter(row, dispatched_at=hour_ago)
    assert Coordinator().resend_lost("high") == 1
    assert counted("requeued_stuck_total") == {("lost", "high"): 1}
    assert 3_600 <= counted("recovery_seconds")[("lost",)].total < 3_700


def test_messages_of_a_wiped_server_are_counted(redis_client: redis.Redis) -> None:
    ticking = Coordinator()
    ticking.tick()
    for tag in "abc":
        jobs.record.enqueue(tag=tag)
    redis_client.flushdb()
    ticking.resend_wiped("default")
    assert counted("requeued_stuck_total") == {("wiped", "default"): 3}


def test_reads_of_the_status_cache_are_counted_by_what_answered() -> None:
    row = jobs.record.enqueue(tag="a").job
    run(row)
    cache.forget_clients()
    counters.pay()
    before = counters.read().counters
    assert jobs.record.status(tag="a") == Status.SUCCEEDED  # the database
    assert jobs.record.status(tag="a") == Status.SUCCEEDED  # this process
    cache.forget_clients()
    assert jobs.record.status(tag="a") == Status.SUCCEEDED  # Redis
    missed = counted("cache_misses_total")[()] - before["cache_misses_total"].get((), 0)
    assert missed == 1
    hits = counted("cache_hits_total")
    assert hits[("redis",)] - before["cache_hits_total"].get(("redis",), 0) == 1
    assert hits[("process",)] - before["cache_hits_total"].get(("process",), 0) == 1


def test_invalidations_are_counted_when_they_are_sent_and_when_they_are_heard() -> None:
    row = jobs.record.enqueue(tag="a").job
    run(row)
    assert counted("invalidations_sent_total") == {(): 1}
    fresh = ProcessedJob.objects.get()
    invalidation.handle(invalidation.encode(lifecycle.Change.of(fresh, fresh.status)))
    invalidation.handle(b"rubbish")
    assert counted("invalidations_received_total") == {(): 1}


def test_duplicates_are_those_of_the_ledger() -> None:
    row = jobs.record.enqueue(tag="a").job
    jobs.record.enqueue(tag="a")
    run(row)
    jobs.record.enqueue(tag="a")
    run(row)
    stats.fold()
    found = {line for line in lines() if line.startswith("dedupjobs_duplicate")}
    assert found == {
        f'dedupjobs_duplicate_detected_total{{cause="{cause}",job="{RECORD}"}} 1.0'
        for cause in ("producer", "replay", "redelivery")
    }


# ---- processes


@pytest.mark.large
def test_horse_that_ends_after_its_job_has_its_counts_in_redis(
    spawn: live.Spawn, client: redis.Redis
) -> None:
    done = [jobs.record.enqueue(tag=tag) for tag in "abc"]
    live.start_worker(spawn)
    for outcome in done:
        live.wait_for(outcome)
    until(
        lambda: counters.read().counters["attempts_total"] == {("SUCCEEDED", RECORD): 3},
        20,
        what="all three are counted",
    )
    until(
        lambda: counters.read(coordinator.ROLE).signs.get(coordinator.ROLE, 99) < 60,
        20,
        what="its coordinator leaves a sign",
    )


@pytest.mark.large
def test_horse_killed_past_its_time_out_is_counted_by_its_parent_and_its_end_is_told(
    spawn: live.Spawn,
) -> None:
    outcome = jobs.swallow_everything.enqueue(tag="a")
    worker = live.start_worker(spawn, TIMEOUT_GRACE=0.5)
    live.wait_for(outcome, Status.DEAD)
    worker.wait_for_output(f"row {outcome.job.pk} is DEAD (failures)")
    name = jobs.swallow_everything.name
    until(
        lambda: counters.read().counters["attempts_total"] == {("TIMED_OUT", name): 1},
        20,
        what="its parent has counted it",
    )


def test_web_process_pays_when_a_request_has_ended_and_at_most_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counters, "EVERY", 3600)
    counters.add("attempts_total", "FAILED", RECORD)
    counters.add("attempts_total", "FAILED", RECORD)
    assert counters.read().counters["attempts_total"] == {("FAILED", RECORD): 1}
    counters._owed.paid -= 2 * counters.EVERY
    scrape()  # the end of any request
    assert counters.read().counters["attempts_total"] == {("FAILED", RECORD): 2}


def test_process_that_ends_pays_what_it_owes(process_env: dict[str, str]) -> None:
    code = (
        "import django; django.setup()\n"
        "from dedupjobs import counters\n"
        f"for _ in range(3): counters.add('attempts_total', 'FAILED', '{RECORD}')\n"
    )
    subprocess.run([sys.executable, "-c", code], env=process_env, check=True)
    assert counters.read().counters["attempts_total"] == {("FAILED", RECORD): 3}


# ---- the gauges


def gauge(name: str) -> dict[str, float]:
    return {
        sample.rpartition(" ")[0].removeprefix(f"dedupjobs_{name}"): float(sample.split(" ")[-1])
        for sample in lines(**{"name[]": f"dedupjobs_{name}"})
    }


def test_backlog_counts_what_is_due_and_what_is_not_yet() -> None:
    for tag in "abc":
        jobs.record.enqueue(tag=tag)
    jobs.record_high.using(run_after=3_600).enqueue(tag="later")
    minute_ago = lifecycle.database_now() - timedelta(seconds=60)
    alter(ProcessedJob.objects.get(key="record:b"), run_after=minute_ago)
    assert gauge("backlog") == {
        '{queue="default"}': 3, '{queue="high"}': 0, '{queue="low"}': 0,
    }  # fmt: skip
    assert gauge("delayed")['{queue="high"}'] == 1
    assert gauge("messages") == {
        '{queue="default"}': 3, '{queue="high"}': 0, '{queue="low"}': 0,
    }  # fmt: skip
    assert 60 <= gauge("backlog_oldest_age_seconds")['{queue="default"}'] < 120


def test_outbox_is_as_old_as_its_oldest_due_row_without_a_message() -> None:
    first, second, retried = (jobs.record.enqueue(tag=tag).job for tag in "abc")
    jobs.record.using(run_after=3_600).enqueue(tag="later")
    assert gauge("outbox_age_seconds") == {"": 0}
    now = lifecycle.database_now()
    alter(first, run_after=now - timedelta(seconds=500))  # it has a message
    alter(second, dispatched_at=None, run_after=now - timedelta(seconds=60))
    assert 60 <= gauge("outbox_age_seconds")[""] < 120
    alter(retried, status="RETRYING", dispatched_at=None, run_after=now - timedelta(seconds=200))
    assert 200 <= gauge("outbox_age_seconds")[""] < 260


def test_stale_attempts_and_those_that_hold_their_rows_are_shown() -> None:
    stale, working = (claimed(jobs.record.enqueue(tag=tag).job) for tag in "ab")
    expire(stale)
    hour_ago = lifecycle.database_now() - timedelta(hours=1)
    alter_attempt(working, claimed_at=hour_ago)
    assert gauge("stale_processing_records") == {"": 1}
    assert gauge("active_locks") == {"": 1}
    assert 3_600 <= gauge("active_lock_oldest_age_seconds")[""] < 3_700


@pytest.mark.large
def test_coordinator_and_workers_show_their_last_sign_of_life(spawn: live.Spawn) -> None:
    assert gauge("coordinator_heartbeat_age_seconds") == {}
    assert gauge("workers")['{queue="default"}'] == 0
    Coordinator().tick()
    assert gauge("coordinator_heartbeat_age_seconds")[""] < 60
    live.start_worker(spawn)
    assert gauge("workers")['{queue="default"}'] == 1
    assert gauge("worker_heartbeat_age_seconds")['{queue="default"}'] < 60


def test_memory_of_each_redis_is_shown_with_its_limit() -> None:
    used = gauge("redis_memory_used_bytes")
    assert set(used) == {'{server="locks"}', '{server="queue default"}'}
    assert min(used.values()) > 100_000
    assert gauge("redis_memory_limit_bytes") == dict.fromkeys(used, 0)
    assert gauge("redis_server_up") == dict.fromkeys(used, 1)


@pytest.mark.large
def test_each_lock_server_of_a_quorum_shows_its_memory_and_whether_it_takes_locks() -> None:
    with lock_servers(3) as servers:
        Watch().round()
        with servers.valkeys[1].client() as client:
            client.config_set("maxmemory", "1")
            client.config_set("maxmemory-policy", "noeviction")
        assert gauge("redis_memory_limit_bytes") == {
            '{server="locks"}': 0,
            '{server="locks locks1"}': 1,
            '{server="locks locks2"}': 0,
            '{server="queue default"}': 0,
        }
        servers.kill(0)
        assert gauge("redis_server_up") == {
            '{server="locks"}': 0,
            '{server="locks locks1"}': 0,
            '{server="locks locks2"}': 1,
            '{server="queue default"}': 1,
        }
        assert set(gauge("redis_memory_used_bytes")) == {
            '{server="locks locks1"}',
            '{server="locks locks2"}',
            '{server="queue default"}',
        }
        assert not gauge("coordinator_heartbeat_age_seconds"), "it stands on the first one"
        assert gauge("alerts")['{kind="no_coordinator"}'] == 0, "one has just looked"


# ---- labels


def test_label_that_would_explode_is_other_and_no_key_is_ever_one(client: redis.Redis) -> None:
    for i in range(5_000):
        counters.add("attempts_total", f"outcome {i}", f"job of key {i}")
        counters.observe("queue_delay_seconds", f"queue {i}", seconds=1)
    assert counted("attempts_total") == {("other", "other"): 5_000}
    assert client.hlen("dedupjobs:{counters}") < 10
    text = "\n".join(lines())
    assert "of key" not in text
    assert 'queue="other"' in text


def test_forged_fields_are_ignored_or_other_and_crash_nobody(client: redis.Redis) -> None:
    key = "dedupjobs:{counters}"
    forged = {
        "attempts_total": "1",
        "attempts_total|FAILED": "1",
        f"attempts_total|FAILED|{RECORD}|more": "3",
        f"attempts_total|FAILED|{RECORD}": "not a number",
        "attempts_total|made up|x\ny": "4",
        "job_processing_duration_seconds|0.3|testapp.record": "5",
        "job_processing_duration_seconds|sum": "5",
        "lock_acquire_success_total|a|b": "6",
        "nonsense": "7",
        "": "8",
        "|||": "9",
        b"\xff\xfe": b"\x00",
        "since": "soon",
    }
    client.hset(key, mapping=forged)
    text = lines()
    assert [line for line in text if line.startswith("dedupjobs_attempts")] == [
        'dedupjobs_attempts_total{job="other",outcome="FAILED"} 3.0',
        'dedupjobs_attempts_total{job="other",outcome="other"} 4.0',
    ]
    with counters.gathering():  # one payment, of which one field can not be counted
        counters.add("attempts_total", "FAILED", RECORD)
        run(jobs.record.enqueue(tag="a"))
    assert counted("attempts_total")[("SUCCEEDED", RECORD)] == 1


def test_hash_replaced_by_something_else_is_shown_as_empty_and_counted_anew(
    client: redis.Redis,
) -> None:
    client.set("dedupjobs:{counters}", "no hash")
    assert "dedupjobs_redis_up 1.0" in lines()
    run(jobs.record.enqueue(tag="a"))
    assert counted("attempts_total") == {("SUCCEEDED", RECORD): 1}


def test_flood_of_forged_fields_is_read_to_a_bound(client: redis.Redis) -> None:
    for start in range(0, 120_000, 20_000):
        flood = {f"x{i}": "1" for i in range(start, start + 20_000)}
        client.hset("dedupjobs:{counters}", mapping=flood)
    begun = time.monotonic()
    assert counters.read().counters["attempts_total"] == {}
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("seconds", [-5.0, float("nan"), float("-inf"), float("inf")])
def test_clock_that_runs_backwards_counts_a_duration_of_nothing(seconds: float) -> None:
    counters.observe("queue_delay_seconds", "default", seconds=seconds)
    assert counted("queue_delay_seconds") == {("default",): Buckets((1,) * (len(FAST) + 1), 0.0)}


# ---- Redis and the database away


@pytest.fixture
def own_redis() -> Iterator[Valkey]:
    """A server of our own, which queues, locks and counts are on."""
    with Valkey() as server, live.changed(**live.redis_at(server.url)):
        counters.forget_clients()
        yield server
    counters.forget_clients()


@pytest.mark.parametrize("fault", ["stopped", "hanging"])
def test_scrape_while_redis_is_away_answers_soon_with_what_the_tables_say(
    own_redis: Valkey, fault: str
) -> None:
    run(jobs.record.enqueue(tag="a"))
    assert own_redis.process is not None
    if fault == "stopped":
        own_redis.kill()
    else:
        own_redis.process.send_signal(signal.SIGSTOP)
    try:
        with live.changed(DEDUPJOBS={"METRICS_TOKEN": "a secret of the scraper"}):
            counters.forget_clients()
            begun = time.monotonic()
            text = lines()
            assert time.monotonic() - begun < 3
    finally:
        if fault == "hanging":
            own_redis.process.send_signal(signal.SIGCONT)
    assert "dedupjobs_redis_up 0.0" in text
    assert "dedupjobs_database_up 1.0" in text
    assert 'dedupjobs_backlog{queue="default"} 0.0' in text
    for name in ("attempts_total", "lock_acquire_success_total", "cache_misses_total"):
        assert not any(line.startswith(f"dedupjobs_{name}") for line in text), "no false 0"


def test_scrape_without_tables_answers_with_what_redis_says_and_no_false_0() -> None:
    counters.add("attempts_total", "FAILED", RECORD)
    with tables_missing():
        text = lines()
    assert "dedupjobs_database_up 0.0" in text
    assert "dedupjobs_redis_up 1.0" in text
    assert f'dedupjobs_attempts_total{{job="{RECORD}",outcome="FAILED"}} 1.0' in text
    for name in ("backlog", "stale_processing_records", "active_locks", "duplicate_detected"):
        assert not any(line.startswith(f"dedupjobs_{name}") for line in text)


def test_counts_made_while_redis_is_away_are_told_when_it_is_back(own_redis: Valkey) -> None:
    own_redis.kill()
    for _ in range(3):
        counters.add("attempts_total", "FAILED", RECORD)
        counters.pay()
    own_redis.restart()
    until(
        lambda: counted("attempts_total") == {("FAILED", RECORD): 3}, 20, every=0.2,
        what="all three are told once",
    )  # fmt: skip


def test_lost_redis_begins_at_0_and_says_since_when(client: redis.Redis) -> None:
    run(jobs.record.enqueue(tag="a"))
    counters.pay()
    assert abs(counters.read().since - time.time()) < 60
    client.hset("dedupjobs:{counters}", "since", "1000000000")
    assert "dedupjobs_counters_since_timestamp_seconds 1e+09" in lines()
    client.flushdb()
    assert counters.read().since is None
    run(jobs.record.enqueue(tag="b"))
    assert counted("attempts_total") == {("SUCCEEDED", RECORD): 1}
    assert abs(counters.read().since - time.time()) < 60


def test_counts_have_an_end(client: redis.Redis) -> None:
    run(jobs.record.enqueue(tag="a"))
    Coordinator().tick()
    for key in client.scan_iter("dedupjobs:{counters}*"):
        assert client.ttl(key) > 0


def test_nothing_is_counted_where_the_project_wants_none(client: redis.Redis) -> None:
    with live.changed(DEDUPJOBS={**django_settings.DEDUPJOBS, "METRICS": False}):
        run(jobs.record.enqueue(tag="a"))
        counters.pay()
        assert not client.exists("dedupjobs:{counters}")


# ---- the page


def test_page_is_for_the_token_and_for_those_who_may_view_jobs() -> None:
    assert Client().get("/metrics").status_code == 401
    wrong = Client(headers={"Authorization": "Bearer a secret of the scrapes"})
    assert wrong.get("/metrics").status_code == 401
    for odd in ("", "Bearer", "Bearer ", "Basic a secret of the scraper", "Bearer \xe9"):
        answer = Client(headers={"Authorization": odd}).get("/metrics")
        assert answer.status_code == 401
        assert answer["WWW-Authenticate"].startswith("Bearer")
    user = User.objects.create_user("siti")
    visitor = Client()
    visitor.force_login(user)
    assert visitor.get("/metrics").status_code == 403
    user.user_permissions.add(Permission.objects.get(codename="view_processedjob"))
    assert visitor.get("/metrics").status_code == 200
    assert scrape().status_code == 200


def test_page_without_a_token_in_the_settings_takes_none() -> None:
    with live.changed(DEDUPJOBS={}):
        for given in ("None", "", "null"):
            answer = Client(headers={"Authorization": f"Bearer {given}"}).get("/metrics")
            assert answer.status_code == 401


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"name[]": "dedupjobs_backlogs"}, "Did you mean 'dedupjobs_backlog'?"),
        ({"name[]": ["dedupjobs_backlog", "' OR 1=1"]}, "is no metric of this page"),
        ({"name": "dedupjobs_backlog"}, "takes name[]= only"),
        ({"format": "x" * 10_000}, "takes name[]= only"),
    ],
)
def test_odd_parameters_are_refused_in_a_sentence(query: dict[str, Any], words: str) -> None:
    answer = scrape(**query)
    assert answer.status_code == 400
    assert words in answer.content.decode()
    assert len(answer.content) < 500


def test_page_is_only_read() -> None:
    authorization = {"Authorization": "Bearer a secret of the scraper"}
    for method in ("post", "put", "delete"):
        assert getattr(Client(headers=authorization), method)("/metrics").status_code == 405


def test_page_is_what_prometheus_reads_in_both_formats() -> None:
    run(jobs.record.enqueue(tag="a"))
    run(jobs.fail.enqueue(tag="b"))
    plain = {f.name for f in text_string_to_metric_families(scrape().content.decode())}
    headers = {
        "Authorization": "Bearer a secret of the scraper",
        "Accept": "application/openmetrics-text; version=1.0.0",
    }
    answer = Client(headers=headers).get("/metrics")
    assert answer["Content-Type"].startswith("application/openmetrics-text")
    opened = {f.name for f in open_metrics(answer.content.decode())}
    assert "dedupjobs_attempts" in plain & opened
    assert "dedupjobs_job_processing_duration_seconds" in plain & opened
    for odd in ("", "*/*", "nonsense;;;q=", "x" * 5_000):
        assert Client(headers={**headers, "Accept": odd}).get("/metrics").status_code == 200


def test_page_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "is_installed", False)
    answer = scrape()
    assert answer.status_code == 503
    assert "pip install 'dedupjobs[prometheus]'" in answer.content.decode()
    with pytest.raises(ImportError, match="pip install"):
        prometheus.register()


def test_metrics_stand_in_a_projects_own_registry_when_it_wishes() -> None:
    registry_of_project = CollectorRegistry()
    prometheus.register(registry_of_project)
    run(jobs.record.enqueue(tag="a"))
    counters.pay()
    labels = {"job": RECORD, "outcome": "SUCCEEDED"}
    assert registry_of_project.get_sample_value("dedupjobs_attempts_total", labels) == 1
    with pytest.raises(ValueError, match="Duplicated"):
        prometheus.register(registry_of_project)


def test_names_are_those_that_dashboards_lean_on() -> None:
    assert {
        "duplicate_detected_total",
        "lock_acquire_success_total",
        "lock_acquire_failed_total",
        "lock_expired_before_completion_total",
        "job_retry_total",
        "job_processing_duration_seconds",
        "idempotency_conflict_total",
        "stale_processing_records",
        "stale_processing_records_total",
    } <= set(readings.names())


# ---- scenarios


def test_scrape_costs_the_same_statements_whatever_the_history() -> None:
    """S-081: labels are bounded, and no query grows with the table."""

    def statements() -> int:
        with CaptureQueriesContext(connection) as captured:
            assert scrape().status_code == 200
        return len(captured.captured_queries)

    few = statements()
    for tag in range(30):
        run(jobs.record.enqueue(tag=str(tag)))
    assert statements() == few


def test_worker_restarts_and_keys_add_no_series() -> None:
    """S-081: 200 restarts and many keys leave the page as long as it was."""
    run(jobs.record.enqueue(tag="first"))
    counters.pay()
    before = len(lines())
    for number in range(50):
        counters.forget_owed()  # as a new process begins
        run(jobs.record.enqueue(tag=f"key {number}"))
    counters.pay()
    assert len(lines()) == before


def test_numbers_of_page_and_tables_agree_after_settling() -> None:
    """S-112: what was counted is what the tables say."""
    for tag in "abcdef":
        run(jobs.record.enqueue(tag=tag))
    for tag in "xy":
        run(jobs.fail_for_good.enqueue(tag=tag))
    counted_by_outcome = {o: n for (o, _), n in counted("attempts_total").items()}
    there = JobAttempt.objects.values_list("outcome", flat=True)
    assert counted_by_outcome == {o: list(there).count(o) for o in set(there)}


def test_no_argument_stands_on_the_page() -> None:
    """S-118: neither keys nor arguments are labels."""
    jobs.record.enqueue(tag="kunci", text="rahasia-besar")
    run(ProcessedJob.objects.get())
    counters.pay()
    text = scrape().content.decode()
    assert "kunci" not in text
    assert "rahasia" not in text
