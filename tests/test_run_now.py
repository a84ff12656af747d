"""Running a call here and now: same rows, same attempts, no queue."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import redis
from django.db import connection, connections, transaction

from dedupjobs import lifecycle, probes
from dedupjobs.clock import DbNow
from dedupjobs.coordinator import Coordinator
from dedupjobs.exceptions import (
    JobConflict,
    JobDefinitionError,
    PayloadMismatch,
    UnknownQueue,
)
from dedupjobs.models import AttemptOutcome, JobAttempt, Kind, ProcessedJob, Status
from dedupjobs.registry import Job
from dedupjobs.testing import run_pending
from tests.app import jobs
from tests.app.models import Ledger
from tests.rows import Side, alter, claimed, job_row, race

pytestmark = pytest.mark.django_db(transaction=True)


def notes(tag: str = "a") -> list[str]:
    return list(Ledger.objects.filter(tag=tag).order_by("pk").values_list("note", flat=True))


# ---- the run


def test_call_that_is_run_now_leaves_the_same_rows_as_a_workers_run(
    redis_client: redis.Redis,
) -> None:
    outcome = jobs.record.run_now(tag="a", text="x")
    assert (outcome.kind, outcome.created, outcome.result()) == (Kind.CREATED, True, "x")
    assert outcome.job.status == Status.SUCCEEDED  # the row as it is afterwards
    row = job_row(outcome.job)
    assert (row.status, row.attempts, row.generation, row.result) == ("SUCCEEDED", 1, 1, '"x"')
    assert (row.unique_until, row.finished_at is None) == (None, False)
    attempt = JobAttempt.objects.get()
    assert (attempt.number, attempt.outcome) == (1, AttemptOutcome.SUCCEEDED)
    assert attempt.began_at is not None
    assert attempt.run_time is not None
    assert redis_client.dbsize() == 0  # no message for a worker
    assert notes() == ["x"]


def test_message_that_comes_twice_is_processed_once() -> None:
    assert jobs.record.run_now(tag="a", text="x").result() == "x"
    again = jobs.record.run_now(tag="a", text="x")
    assert (again.kind, again.result()) == (Kind.REPLAYED, "x")
    assert jobs.record.enqueue(tag="a", text="x").kind is Kind.REPLAYED
    assert run_pending() == 0
    assert notes() == ["x"]


def test_message_that_comes_to_eight_consumers_at_once_is_processed_by_one() -> None:
    outcomes = race(*[lambda: jobs.record.run_now(tag="a", text="x")] * 8)
    assert [outcome for outcome in outcomes if isinstance(outcome, Exception)] == []
    assert [outcome.kind for outcome in outcomes].count(Kind.CREATED) == 1
    assert notes() == ["x"]
    assert JobAttempt.objects.count() == 1


def test_call_whose_row_was_pruned_before_its_run_ended_gets_the_row_as_it_was() -> None:
    """A process that stood still: others have taken its job, ended it, and pruned it."""

    def prune(point: str) -> None:
        if point == "user_code.after":
            JobAttempt.objects.all().delete()
            ProcessedJob.objects.all().delete()

    probes.hook = prune
    try:
        outcome = jobs.record.run_now(tag="a", text="x")
    finally:
        probes.hook = None
    assert (outcome.kind, outcome.job.status) == (Kind.CREATED, Status.PENDING)
    assert not ProcessedJob.objects.exists()
    assert notes() == ["x"]


def test_key_that_waits_for_a_worker_is_not_run_now() -> None:
    row = jobs.record.enqueue(tag="a").job
    outcome = jobs.record.run_now(tag="a")
    assert (outcome.kind, outcome.job.pk) == (Kind.DUPLICATE, row.pk)
    assert notes() == []
    assert run_pending() == 1


def test_key_that_runs_elsewhere_is_not_run_now() -> None:
    claimed(jobs.record.enqueue(tag="a").job)
    assert jobs.record.run_now(tag="a").kind is Kind.DUPLICATE
    assert notes() == []


@pytest.mark.parametrize("attempts", [0, 1])
def test_key_that_is_free_again_is_run_now(attempts: int) -> None:
    row = jobs.record.enqueue(tag="a", text="old").job
    alter(row, status=Status.DEAD, attempts=attempts)
    outcome = jobs.record.run_now(tag="a", text="new")
    assert (outcome.kind, outcome.job.pk, outcome.result()) == (Kind.CREATED, row.pk, "new")
    assert outcome.job.attempts == attempts + 1
    assert outcome.job.generation == attempts + 1  # other arguments: another intention


def test_call_without_a_key_is_run_now_each_time() -> None:
    kinds = [jobs.record_always.run_now(tag="a").kind for _ in range(2)]
    assert kinds == [Kind.CREATED] * 2
    assert notes() == ["", ""]


def test_call_with_a_key_of_its_own_is_run_now_once() -> None:
    for kind in (Kind.CREATED, Kind.REPLAYED):
        assert jobs.record.using(key="message-17").run_now(tag="a").kind is kind
    assert notes() == [""]
    assert ProcessedJob.objects.get().key == "message-17"


def test_job_may_be_run_now_from_within_a_job() -> None:
    outcome = jobs.run_another.run_now(tag="a")
    assert outcome.result() == "inner"
    assert notes() == ["inner", "outer 1"]
    assert ProcessedJob.objects.filter(status=Status.SUCCEEDED).count() == 2


def test_async_job_is_run_now() -> None:
    assert jobs.record_async.run_now(tag="a").result() == "async a"


# ---- what does not go well


def test_failure_does_not_raise_and_waits_for_a_worker(redis_client: redis.Redis) -> None:
    outcome = jobs.fail.run_now(tag="a", times=1)
    assert (outcome.kind, outcome.job.status) == (Kind.CREATED, Status.RETRYING)
    assert (outcome.job.failures, outcome.job.attempts) == (1, 1)
    assert "attempt 1 of a" in outcome.job.error
    assert jobs.fail.run_now(tag="a", times=1).kind is Kind.DUPLICATE  # it has its own time
    alter(outcome.job, run_after=DbNow(-1))
    assert Coordinator().tick().handed_over == 1
    assert redis_client.llen("rq:queue:default") == 1
    assert run_pending() == 1
    assert job_row(outcome.job).status == Status.SUCCEEDED
    assert notes() == ["1", "2"]


def test_failure_for_good_is_dead_and_the_next_call_runs_again() -> None:
    for attempts in (1, 2):
        outcome = jobs.fail_for_good.run_now(tag="a")
        assert (outcome.kind, outcome.job.status) == (Kind.CREATED, Status.DEAD)
        assert outcome.job.attempts == attempts


def test_keyboard_interrupt_is_passed_on_and_the_row_waits_for_a_worker() -> None:
    with pytest.raises(KeyboardInterrupt):
        jobs.interrupt_once.run_now(tag="a")
    row = ProcessedJob.objects.get()
    assert (row.status, row.failures) == (Status.PENDING, 0)
    assert run_pending() == 1
    assert notes() == ["1", "2"]


def test_policies_of_the_key_hold_as_for_any_call() -> None:
    jobs.record.run_now(tag="a", text="x")
    with pytest.raises(PayloadMismatch):
        jobs.record.run_now(tag="a", text="y")
    claimed(jobs.record_strict.enqueue(tag="a").job)
    with pytest.raises(JobConflict):
        jobs.record_strict.run_now(tag="a")
    row = jobs.record.enqueue(tag="held").job
    lifecycle.hold(row.pk, row.version)
    assert jobs.record.run_now(tag="held").kind is Kind.BLOCKED
    with pytest.raises(TypeError, match="tag"):
        jobs.record.run_now()
    with pytest.raises(UnknownQueue):
        jobs.record.using(queue_name="nowhere").run_now(tag="b")


@pytest.mark.parametrize(
    ("specimen", "words"),
    [
        (jobs.keep_last, "rerun"),
        (jobs.replace, "replace"),
        (jobs.debounced, "debounce"),
        (jobs.record.using(run_after=timedelta(seconds=5)), "run_after"),
    ],
    ids=["rerun", "replace", "debounce", "run_after"],
)
def test_run_now_of_what_is_to_run_later_is_refused_before_anything_is_written(
    specimen: Job[..., Any], words: str
) -> None:
    with pytest.raises(JobDefinitionError, match=words):
        specimen.run_now(tag="a")
    assert not ProcessedJob.objects.exists()


# ---- inside the caller's transaction


def test_run_in_a_transaction_commits_with_it() -> None:
    with transaction.atomic():
        Ledger.objects.create(tag="caller")
        assert jobs.record.run_now(tag="a", text="x").result() == "x"
        assert Side(Ledger.objects.count).result() == 0
    assert (notes(), notes("caller")) == (["x"], [""])
    assert ProcessedJob.objects.get().status == Status.SUCCEEDED


def test_run_in_a_transaction_that_rolls_back_leaves_nothing_and_can_be_made_again() -> None:
    with transaction.atomic():
        jobs.record.run_now(tag="a", text="x")
        transaction.set_rollback(True)
    assert (notes(), ProcessedJob.objects.count(), JobAttempt.objects.count()) == ([], 0, 0)
    assert jobs.record.run_now(tag="a", text="x").created
    assert notes() == ["x"]


def test_failure_in_a_transaction_keeps_the_callers_work_and_waits_for_a_worker(
    redis_client: redis.Redis,
) -> None:
    with transaction.atomic():
        Ledger.objects.create(tag="caller")
        outcome = jobs.fail.run_now(tag="a", times=1)
        assert outcome.job.status == Status.RETRYING
    assert notes("caller") == [""]
    assert job_row(outcome.job).failures == 1
    alter(outcome.job, run_after=DbNow(-1))
    assert Coordinator().tick().handed_over == 1


def test_atomic_job_that_fails_in_a_transaction_undoes_its_own_effects_only() -> None:
    with transaction.atomic():
        Ledger.objects.create(tag="caller")
        outcome = jobs.record_atomically.run_now(tag="a", fails=True)
        assert outcome.job.status == Status.RETRYING
    assert (notes(), notes("caller")) == ([], [""])


def test_query_that_the_database_refuses_is_a_failure_and_the_transaction_goes_on() -> None:
    with transaction.atomic():
        Ledger.objects.create(tag="caller")
        outcome = jobs.break_query.run_now(tag="a")
        assert outcome.job.status == Status.DEAD
        Ledger.objects.create(tag="caller", note="after")
    assert notes("caller") == ["", "after"]
    assert JobAttempt.objects.get().outcome == AttemptOutcome.FAILED


def test_time_out_in_a_transaction_keeps_the_callers_connection_and_work() -> None:
    with transaction.atomic():
        Ledger.objects.create(tag="caller")
        mine = connection.connection
        outcome = jobs.outlast_timeout.run_now(tag="a")
        assert outcome.job.status == Status.DEAD
        assert connection.connection is mine
        Ledger.objects.create(tag="caller", note="after")
    assert notes("caller") == ["", "after"]
    assert notes() == ["begin"]
    assert JobAttempt.objects.get().outcome == AttemptOutcome.TIMED_OUT


def test_time_out_outside_a_transaction_is_settled_on_a_usable_connection() -> None:
    outcome = jobs.outlast_timeout.run_now(tag="a")
    assert outcome.job.status == Status.DEAD
    assert JobAttempt.objects.get().outcome == AttemptOutcome.TIMED_OUT
    assert notes() == ["begin"]


# ---- off the main thread


def test_run_off_the_main_thread_has_no_time_out_and_leaves_its_connection_to_the_caller() -> None:
    def consume() -> tuple[Any, bool]:
        connections["default"].ensure_connection()
        mine = connections["default"].connection
        outcome = jobs.outlast_timeout.run_now(tag="a")
        return outcome.result(), connections["default"].connection is mine

    assert Side(consume).result() == ("outlasted", True)
    assert notes() == ["begin", "end"]
    assert JobAttempt.objects.get().outcome == AttemptOutcome.SUCCEEDED
