"""Other settings for some calls: ``job.using(queue_name=, run_after=, key=)``."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
import redis
from django.db import transaction

from dedupjobs import clock, lifecycle, runner
from dedupjobs.clock import DbNow
from dedupjobs.coordinator import Coordinator
from dedupjobs.exceptions import ArgumentError, JobDefinitionError, PayloadMismatch, UnknownQueue
from dedupjobs.models import Kind, ProcessedJob, Status
from dedupjobs.testing import frozen_clock, run_pending
from tests.app import jobs
from tests.app.models import Ledger
from tests.rows import alter, claimed, job_row
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)


def queued(client: redis.Redis, queue: str = "default") -> list[str]:
    return [i.decode() for i in client.lrange(f"rq:queue:{queue}", 0, -1)]


# ---- queue_name


def test_call_for_another_queue_is_pushed_there_and_only_that_call_is(
    redis_client: redis.Redis,
) -> None:
    low = jobs.record.using(queue_name="low").enqueue(tag="a")
    default = jobs.record.enqueue(tag="b")
    assert (low.job.queue, default.job.queue) == ("low", "default")
    assert queued(redis_client, "low") == [low.job.dispatch_id]
    assert queued(redis_client) == [default.job.dispatch_id]
    assert jobs.record.options.queue == "default"


def test_queue_is_no_part_of_the_key() -> None:
    jobs.record.enqueue(tag="a")
    assert jobs.record.using(queue_name="low").enqueue(tag="a").kind is Kind.DUPLICATE


def test_retry_of_a_call_for_another_queue_goes_there_too(redis_client: redis.Redis) -> None:
    with frozen_clock():  # its backoff is not over yet
        outcome = jobs.fail.using(queue_name="high").enqueue(tag="a")
        assert run_pending() == 1
    alter(outcome.job, run_after=DbNow(-1))
    redis_client.flushdb()
    Coordinator().tick()
    assert len(queued(redis_client, "high")) == 1
    assert queued(redis_client) == []


def test_reopened_key_goes_to_the_queue_of_the_call_that_reopens_it() -> None:
    jobs.record_again.using(queue_name="low").enqueue(tag="a")
    run_pending()
    assert jobs.record_again.using(queue_name="high").enqueue(tag="a").job.queue == "high"


@pytest.mark.parametrize("way", ["enqueue", "run_now"])
def test_queue_that_does_not_exist_is_refused_with_those_that_do(way: str) -> None:
    variant = jobs.record.using(queue_name="nowhere")
    with pytest.raises(UnknownQueue, match=r"'nowhere' is not in RQ_QUEUES .*default, high, low"):
        getattr(variant, way)(tag="a")
    assert not ProcessedJob.objects.exists()


@pytest.mark.parametrize("wrong", ["", 7, b"low"])
def test_queue_name_that_is_no_text_is_refused(wrong: Any) -> None:
    with pytest.raises(JobDefinitionError, match="queue_name"):
        jobs.record.using(queue_name=wrong)


# ---- run_after


@pytest.mark.parametrize("delay", [60, 60.0, timedelta(minutes=1)], ids=repr)
def test_delay_is_counted_from_now_by_the_databases_clock(delay: Any) -> None:
    row = jobs.record.using(run_after=delay).enqueue(tag="a").job
    left = (row.run_after - lifecycle.database_now()).total_seconds()
    assert left == pytest.approx(60, abs=5)


@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=10))], ids=str)
def test_moment_in_any_zone_is_stored_as_the_same_instant(zone: Any) -> None:
    moment = datetime(2099, 7, 1, 12, 0, 0, 123_000, tzinfo=zone)
    outcome = jobs.record.using(run_after=moment).enqueue(tag="a")
    assert job_row(outcome.job).run_after == moment
    assert outcome.job.dispatched_at is None


@pytest.mark.parametrize(
    "wrong",
    [datetime(2099, 1, 1), -1, timedelta(seconds=-1), "tomorrow", True, float("nan"), float("inf")],
    ids=repr,
)
def test_moment_that_is_naive_or_no_delay_is_refused(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="run_after"):
        jobs.record.using(run_after=wrong)


@pytest.mark.parametrize(
    "past", [0, timedelta(0), datetime(2020, 1, 1, tzinfo=UTC)], ids=["0", "timedelta", "datetime"]
)
def test_moment_that_has_passed_runs_at_once(redis_client: redis.Redis, past: Any) -> None:
    outcome = jobs.record.using(run_after=past).enqueue(tag="a")
    assert queued(redis_client) == [outcome.job.dispatch_id]
    assert run_pending() == 1


def test_future_run_is_not_handed_over_before_its_time_and_is_then(
    redis_client: redis.Redis,
) -> None:
    outcome = jobs.record.using(run_after=timedelta(hours=1)).enqueue(tag="a", text="x")
    coordinator = Coordinator()
    assert coordinator.tick().handed_over == 0
    assert queued(redis_client) == []
    assert run_pending() == 0
    runner.deliver(outcome.job.pk, 1, owner="forged")  # whoever sends a message: it is not due
    assert job_row(outcome.job).status == Status.PENDING
    alter(outcome.job, run_after=DbNow(-0.1))
    assert coordinator.tick().handed_over == 1
    assert queued(redis_client) == [job_row(outcome.job).dispatch_id]
    assert coordinator.tick().handed_over == 0  # once
    assert run_pending() == 1
    assert job_row(outcome.job).result == '"x"'


def test_future_run_begins_no_earlier_than_it_may() -> None:
    outcome = jobs.record.using(run_after=0.5).enqueue(tag="a")
    coordinator = Coordinator()
    until(lambda: coordinator.tick().handed_over + run_pending())
    until(lambda: run_pending() or job_row(outcome.job).status == Status.SUCCEEDED)
    started = job_row(outcome.job).started_at
    assert started is not None
    assert (started - outcome.job.created_at).total_seconds() >= 0.5


def test_future_run_in_a_transaction_leaves_nothing_in_redis(redis_client: redis.Redis) -> None:
    with transaction.atomic():
        jobs.record.using(run_after=60).enqueue(tag="a")
    assert redis_client.dbsize() == 0
    assert ProcessedJob.objects.count() == 1


def test_duplicate_leaves_the_due_time_of_what_waits() -> None:
    first = jobs.record.using(run_after=3600).enqueue(tag="a")
    second = jobs.record.enqueue(tag="a")
    assert (second.kind, second.job.run_after) == (Kind.DUPLICATE, first.job.run_after)
    assert run_pending() == 0


def test_queue_delay_of_a_future_run_counts_from_its_due_time() -> None:
    outcome = jobs.record.using(run_after=3600).enqueue(tag="a")
    alter(outcome.job, enqueued_at=DbNow(-3600), run_after=DbNow(-1))
    claim = claimed(outcome.job)
    assert claim.queue_delay == pytest.approx(1, abs=3)


def test_call_that_replaces_what_waits_brings_its_own_due_time_and_queue(
    redis_client: redis.Redis,
) -> None:
    jobs.replace.enqueue(tag="a", text="old")
    later = jobs.replace.using(run_after=3600, queue_name="low")
    outcome = later.enqueue(tag="a", text="new")
    assert outcome.kind is Kind.REPLACED
    row = job_row(outcome.job)
    assert row.run_after > lifecycle.database_now() + timedelta(minutes=50)
    assert row.queue == "low"
    assert run_pending() == 0
    assert Ledger.objects.count() == 0


def test_call_that_is_to_run_after_a_run_and_later_does_not_run_before_its_time() -> None:
    """Either it waits, or it is refused; it must not be told RERUN and run at once."""
    row = jobs.keep_last.enqueue(tag="a", text="old").job
    claim = claimed(row)
    try:
        outcome = jobs.keep_last.using(run_after=3600).enqueue(tag="a", text="new")
    except (JobDefinitionError, ArgumentError):
        return
    assert outcome.kind is Kind.RERUN
    lifecycle.complete(claim, "null", unique_for=None)
    assert run_pending() == 0


# ---- key


def test_key_of_a_call_stands_for_the_whole_key() -> None:
    outcome = jobs.record.using(key="order-9:again").enqueue(tag="a")
    assert outcome.job.key == "order-9:again"
    assert jobs.record.enqueue(tag="a").created  # the job's own key is another one
    assert jobs.record.using(key="order-9:again").enqueue(tag="a").kind is Kind.DUPLICATE


def test_key_of_a_call_keeps_tenants_and_jobs_apart() -> None:
    one = jobs.record_for_tenant.using(key="k").enqueue(tenant="one", tag="a")
    two = jobs.record_for_tenant.using(key="k").enqueue(tenant="two", tag="a")
    other = jobs.record_again.using(key="k").enqueue(tag="a")
    assert (one.created, two.created, other.created) == (True, True, True)


def test_key_of_a_call_with_other_arguments_is_a_mismatch() -> None:
    jobs.record.using(key="k").enqueue(tag="a")
    with pytest.raises(PayloadMismatch, match="another value of tag"):
        jobs.record.using(key="k").enqueue(tag="b")


def test_key_of_a_call_of_a_job_without_keys_deduplicates_and_compares() -> None:
    keyed = jobs.record_always.using(key="k")
    assert keyed.enqueue(tag="a").kind is Kind.CREATED
    assert keyed.enqueue(tag="a").kind is Kind.DUPLICATE
    assert jobs.record_always.enqueue(tag="a").kind is Kind.CREATED
    with pytest.raises(PayloadMismatch):
        keyed.enqueue(tag="b")  # else somebody is told "done" about other work


@pytest.mark.parametrize("wrong", ["", " \n", 7, b"x"])
def test_key_that_is_no_text_is_refused(wrong: Any) -> None:
    with pytest.raises(JobDefinitionError, match=r"key=.*; give text that makes two calls"):
        jobs.record.using(key=wrong)


def test_long_key_counts_as_a_whole_and_is_cut_only_where_it_is_shown() -> None:
    long = "k" * 3_000
    for key in (long, f"{long}!"):
        assert jobs.record.using(key=key).enqueue(tag="a").created
        assert not jobs.record.using(key=key).enqueue(tag="a").created
        assert jobs.record.enqueue(tag=key).created  # as a template's key may be
    assert {len(row.key) for row in ProcessedJob.objects.all()} == {200}


# ---- together


def test_settings_of_a_call_go_together_and_leave_the_job_as_it_was() -> None:
    variant = jobs.record.using(queue_name="low", run_after=3600, key="k")
    row = variant.enqueue(tag="a", text="x").job
    assert (row.queue, row.key, json.loads(row.args)["text"]) == ("low", "k", "x")
    assert row.run_after > clock.utcnow() + timedelta(minutes=50)
    plain = jobs.record.enqueue(tag="a", text="x").job
    assert (plain.queue, plain.key) == ("default", "record:a")
    assert run_pending() == 1
