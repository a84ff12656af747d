"""What a caller learns from an Outcome: the holder, the result, and what stands in the way."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import transaction

from dedupjobs import FOREVER, lifecycle, operations
from dedupjobs.clock import DbNow
from dedupjobs.exceptions import (
    ArgumentError,
    JobConflict,
    NoResult,
    PayloadMismatch,
    ResultTimeout,
)
from dedupjobs.models import Kind, ProcessedJob, Status
from dedupjobs.testing import run_pending
from tests.app import jobs
from tests.rows import Side, alter, alter_attempt, claimed, job_row

pytestmark = pytest.mark.django_db
committing = pytest.mark.django_db(transaction=True)

AT_ONCE = 5.0  # seconds; far less than what the tests below offer to wait


# ---- the holder


def test_outcome_of_a_key_that_nobody_is_at_has_no_holder() -> None:
    assert jobs.record.enqueue(tag="a").holder is None
    run_pending()
    replayed = jobs.record.enqueue(tag="a")
    assert replayed.kind is Kind.REPLAYED
    assert replayed.holder is None


def test_holder_of_a_running_job_says_who_it_is_and_when_it_last_beat() -> None:
    claim = claimed(jobs.record.enqueue(tag="a").job)
    alter_attempt(claim, beat_at=DbNow(-25), host="worker-7", pid=4711)
    holder = jobs.record.enqueue(tag="a").holder
    assert holder is not None
    assert (holder.status, holder.attempt) == (Status.RUNNING, 1)
    assert (holder.host, holder.pid) == ("worker-7", 4711)
    assert holder.beat_age == pytest.approx(25, abs=3)


def test_holder_is_the_open_attempt_and_not_an_ended_one() -> None:
    row = jobs.record.enqueue(tag="a").job
    lifecycle.interrupt(claimed(row), on_lost="retry")
    assert jobs.record.enqueue(tag="a").holder is None
    claimed(row)
    holder = jobs.record.enqueue(tag="a").holder
    assert holder is not None
    assert holder.attempt == 2


def test_conflict_carries_the_holder() -> None:
    claimed(jobs.record_strict.enqueue(tag="a").job)
    with pytest.raises(JobConflict) as caught:
        jobs.record_strict.enqueue(tag="a")
    assert caught.value.outcome.holder is not None
    assert caught.value.outcome.holder.attempt == 1


# ---- results


def test_result_of_a_replay_is_what_the_first_run_returned() -> None:
    jobs.record.enqueue(tag="a", text="done")
    run_pending()
    again = jobs.record.enqueue(tag="a", text="done")
    assert (again.kind, again.result()) == (Kind.REPLAYED, "done")
    assert jobs.Ledger.objects.count() == 1


@pytest.mark.parametrize("what", range(len(jobs.FALSY)), ids=lambda what: repr(jobs.FALSY[what]))
def test_falsy_result_counts_as_done_and_comes_back_as_it_was(what: int) -> None:
    jobs.give_falsy.enqueue(tag="a", what=what)
    assert run_pending() == 1
    again = jobs.give_falsy.enqueue(tag="a", what=what)
    assert again.kind is Kind.REPLAYED
    result = again.result()
    assert result == jobs.FALSY[what]
    assert type(result) is type(jobs.FALSY[what])
    assert run_pending() == 0


@pytest.mark.parametrize("wrong", ["5", None, timedelta(seconds=5), float("nan")])
def test_timeout_that_is_no_number_of_seconds_is_refused(wrong: Any) -> None:
    outcome = jobs.record.enqueue(tag="a")
    for ask in (outcome.result, async_to_sync(outcome.aresult)):
        with pytest.raises(ArgumentError, match=r"^timeout=.*; give a number of seconds$"):
            ask(timeout=wrong)


@committing
def test_result_of_a_running_job_is_waited_for(transactional_db: None) -> None:
    outcome = jobs.record.enqueue(tag="a", text="late")
    claim = claimed(outcome.job)
    waiter = Side(outcome.result, timeout=30)
    waiter.join(0.3)
    assert waiter.is_alive()  # it is not there yet
    lifecycle.complete(claim, '"late"', unique_for=FOREVER)
    assert waiter.result() == "late"


@committing
def test_duplicate_gets_the_result_of_the_run_that_it_met(transactional_db: None) -> None:
    jobs.record.enqueue(tag="a", text="x")
    duplicate = jobs.record.enqueue(tag="a", text="x")
    assert duplicate.kind is Kind.DUPLICATE
    worker = Side(run_pending)
    assert duplicate.result(timeout=30) == "x"
    worker.result()


@committing
def test_result_that_does_not_come_in_time_is_an_error_that_names_the_state(
    transactional_db: None,
) -> None:
    outcome = jobs.record.enqueue(tag="a")
    with pytest.raises(ResultTimeout, match="'record:a' is still PENDING"):
        outcome.result(timeout=0.1)
    claimed(outcome.job)
    with pytest.raises(TimeoutError, match="RUNNING"):
        outcome.result()


@committing
def test_result_of_an_unfinished_job_inside_a_transaction_is_an_error_at_once(
    transactional_db: None,
) -> None:
    begun = time.monotonic()
    with transaction.atomic():
        outcome = jobs.record.enqueue(tag="a")
        with pytest.raises(ResultTimeout, match=r"inside atomic\(\).*after the commit"):
            outcome.result(timeout=60)
        assert ProcessedJob.objects.exists()  # the transaction goes on
    assert time.monotonic() - begun < AT_ONCE


@committing
def test_result_that_is_there_can_be_had_inside_a_transaction(transactional_db: None) -> None:
    jobs.record.enqueue(tag="a", text="done")
    run_pending()
    with transaction.atomic():
        assert jobs.record.enqueue(tag="a", text="done").result(timeout=60) == "done"


def test_result_of_a_dead_job_is_an_error_with_its_reason() -> None:
    outcome = jobs.fail_for_good.enqueue(tag="a")
    run_pending()
    with pytest.raises(NoResult, match=r"DEAD: .*ValueError: no luck with a"):
        outcome.result(timeout=60)


def test_result_of_a_cancelled_job_is_an_error_with_its_reason() -> None:
    outcome = jobs.record.enqueue(tag="a")
    operations.cancel(outcome.job, by="ops", reason="wrong order")
    with pytest.raises(NoResult, match=r"CANCELLED: .*wrong order"):
        outcome.result(timeout=60)


def test_result_of_a_held_job_is_an_error_with_its_reason() -> None:
    outcome = jobs.record.enqueue(tag="a")
    operations.hold(outcome.job, by="ops", reason="fraud check")
    begun = time.monotonic()
    with pytest.raises(NoResult, match=r"HELD: .*fraud check") as caught:
        outcome.result(timeout=60)
    assert not isinstance(caught.value, ResultTimeout)
    assert time.monotonic() - begun < AT_ONCE


def test_result_that_was_pruned_is_an_error_that_says_so() -> None:
    jobs.record.enqueue(tag="a", text="x")
    run_pending()
    alter(ProcessedJob.objects.get(), finished_at=DbNow(-10))
    assert lifecycle.prune("testapp.record", older_than=5, limit=10).tombstones == 1
    again = jobs.record.enqueue(tag="a", text="x")
    assert again.kind is Kind.REPLAYED
    with pytest.raises(NoResult, match="has succeeded, but its result was pruned"):
        again.result()


def test_result_of_a_row_that_is_gone_is_an_error_that_says_so() -> None:
    outcome = jobs.record_again.enqueue(tag="a")
    run_pending()
    alter(outcome.job, finished_at=DbNow(-10))
    assert lifecycle.prune("testapp.record_again", older_than=5, limit=10).deleted == 1
    with pytest.raises(NoResult, match="again:a"):
        outcome.result()


@pytest.mark.parametrize(
    ("what", "words"), [("huge", "MAX_RESULT is 65,536"), ("lambda", "is not serialisable")]
)
def test_result_that_was_not_kept_is_an_error_that_says_why(what: str, words: str) -> None:
    jobs.give_back.enqueue(tag="a", what=what)
    run_pending()
    again = jobs.give_back.enqueue(tag="a", what=what)
    assert again.kind is Kind.REPLAYED
    with pytest.raises(NoResult, match=f"has succeeded, but its result was not stored.*{words}"):
        again.result()


def test_failure_is_not_replayed_but_runs_again() -> None:
    jobs.fail_for_good.enqueue(tag="a")
    assert run_pending() == 1
    again = jobs.fail_for_good.enqueue(tag="a")
    assert (again.kind, again.job.status) == (Kind.CREATED, Status.PENDING)
    assert run_pending() == 1
    with pytest.raises(NoResult):
        again.result()


# ---- what stands in the way


def test_outcome_is_true_whatever_it_says() -> None:
    first = jobs.record.enqueue(tag="a")
    duplicate = jobs.record.enqueue(tag="a")
    lifecycle.hold(first.job.pk, 0)
    blocked = jobs.record.enqueue(tag="a")
    assert [o.kind for o in (first, duplicate, blocked)] == [
        *(Kind.CREATED, Kind.DUPLICATE, Kind.BLOCKED)
    ]
    assert all((first, duplicate, blocked))
    assert [o.created for o in (first, duplicate, blocked)] == [True, False, False]


def test_call_that_was_accepted_raises_for_no_conflict() -> None:
    created = jobs.keep_last.enqueue(tag="a", text="1")
    replaced = jobs.keep_last.enqueue(tag="a", text="2")
    claimed(created.job)
    rerun = jobs.keep_last.enqueue(tag="a", text="3")
    debounced = [jobs.debounced_slowly.enqueue(tag="a", text=text) for text in "12"][1]
    jobs.record.enqueue(tag="a")
    run_pending()
    replayed = jobs.record.enqueue(tag="a")
    outcomes = [created, replaced, rerun, debounced, replayed]
    assert [o.kind for o in outcomes] == [
        *(Kind.CREATED, Kind.REPLACED, Kind.RERUN, Kind.DEBOUNCED, Kind.REPLAYED)
    ]
    for outcome in outcomes:
        assert outcome.raise_for_conflict() is outcome


def test_call_that_was_turned_away_raises_for_its_conflict_with_itself_as_outcome() -> None:
    row = jobs.record.enqueue(tag="a").job
    duplicate = jobs.record.enqueue(tag="a")
    lifecycle.hold(row.pk, 0)
    blocked = jobs.record.enqueue(tag="a")
    for outcome in (duplicate, blocked):
        with pytest.raises(JobConflict, match="record:a") as caught:
            outcome.raise_for_conflict()
        assert caught.value.outcome is outcome


def test_mismatch_that_the_job_lets_pass_is_a_conflict_only_if_it_is_asked_for() -> None:
    jobs.record_warning.enqueue(tag="a", text="x")
    outcome = jobs.record_warning.enqueue(tag="a", text="y")
    assert outcome.error is None
    with pytest.raises(JobConflict):
        outcome.raise_for_conflict()


# ---- from async code


@committing
def test_async_code_enqueues_and_awaits_the_result(transactional_db: None) -> None:
    async def use() -> tuple[Kind, Kind, Any]:
        first = await jobs.record.aenqueue(tag="a", text="x")
        await sync_to_async(run_pending)()
        second = await jobs.record.using(queue_name="low").aenqueue(tag="a", text="x")
        return first.kind, second.kind, await second.aresult()

    assert async_to_sync(use)() == (Kind.CREATED, Kind.REPLAYED, "x")


def test_async_call_raises_what_the_call_would() -> None:
    async def use() -> None:
        await jobs.record.aenqueue(tag="a", text="x")
        with pytest.raises(PayloadMismatch):
            await jobs.record.aenqueue(tag="a", text="y")
        with pytest.raises(ResultTimeout):
            await (await jobs.record.aenqueue(tag="a", text="x")).aresult()

    async_to_sync(use)()


@committing
def test_async_wait_for_a_result_lets_other_code_use_the_database_meanwhile(
    transactional_db: None,
) -> None:
    """Django keeps one thread for all async code's queries: a wait must not occupy it."""

    async def use() -> Any:
        outcome = await jobs.record.aenqueue(tag="a", text="x")
        waiting = asyncio.create_task(outcome.aresult(timeout=30))
        await asyncio.sleep(0)  # it begins to wait
        await sync_to_async(run_pending)()
        return await waiting

    assert async_to_sync(use)() == "x"


@committing
def test_result_is_seen_by_several_who_wait(transactional_db: None) -> None:
    outcome = jobs.record.enqueue(tag="a", text="x")
    ready = threading.Barrier(4)

    def wait() -> Any:
        ready.wait(10)
        return outcome.result(timeout=30)

    waiters = [Side(wait) for _ in range(3)]
    ready.wait(10)
    run_pending()
    assert [waiter.result(30) for waiter in waiters] == ["x"] * 3


def test_window_that_holds_a_key_is_named_in_the_reason() -> None:
    row = jobs.record_hourly.enqueue(tag="a").job
    run_pending()
    reason = jobs.record_hourly.enqueue(tag="a").reason
    until = job_row(row).unique_until
    assert until is not None
    assert f"until {until:%Y-%m-%d %H:%M:%S} UTC" in reason
    assert until - lifecycle.database_now() < timedelta(hours=1)
