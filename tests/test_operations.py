"""What an operator does to a job: from which status, guarded by what, and what it leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
import redis
from django.core.management import CommandError, call_command
from django.db import connection, transaction

from dedupjobs import (
    clock,
    current_attempt,
    dispatch,
    lifecycle,
    locks,
    operations,
    probes,
    runner,
    signals,
)
from dedupjobs import job as register
from dedupjobs.clock import DbNow
from dedupjobs.coordinator import Coordinator
from dedupjobs.exceptions import StaleVersion
from dedupjobs.lifecycle import Place
from dedupjobs.models import JobAttempt, Kind, Operation, ProcessedJob, Status
from dedupjobs.registry import FOREVER
from dedupjobs.testing import run_pending
from tests.app import jobs
from tests.app.models import Ledger
from tests.rows import Side
from tests.waiting import until

pytestmark = pytest.mark.django_db
committing = pytest.mark.django_db(transaction=True)

QUEUE = "rq:queue:default"
ACTIONS: dict[str, Callable[..., Status]] = {
    "cancel": operations.cancel,
    "hold": operations.hold,
    "unhold": operations.unhold,
    "retry": operations.retry,
}


@pytest.fixture(autouse=True)
def _patient(settings: Any) -> Iterator[None]:
    """Let a busy machine take its time with each push."""
    settings.DEDUPJOBS = {"PUSH_TIMEOUT": 30, "LOCK_TIMEOUT": 30}
    dispatch.forget_clients()
    locks.forget_clients()
    yield
    dispatch.forget_clients()
    locks.forget_clients()


# ---- specimens


@register(
    key="watchful:{tag}",
    unique_for=FOREVER,
    on_conflict="rerun",
    name="operations.watchful",
    timeout=60,
)
def watchful(*, tag: str, text: str = "") -> None:
    """Run until an operator asks."""
    jobs.note(tag, text)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        current_attempt().check()
        time.sleep(0.02)


@register(
    key="stubborn:{tag}",
    unique_for=FOREVER,
    on_conflict="rerun",
    on_dead="block",
    max_attempts=1,
    name="operations.stubborn",
)
def stubborn(*, tag: str, text: str = "") -> str:
    """Fail once in each life, under an idempotency key."""
    jobs.note(tag, f"{current_attempt().idempotency_key()} {text}")
    if Ledger.objects.filter(tag=tag).count() == 1:
        raise ValueError("not yet")
    return text


# ---- helpers


def fresh(row: ProcessedJob) -> ProcessedJob:
    return ProcessedJob.objects.get(pk=row.pk)


def row_in(status: Status) -> ProcessedJob:
    """Return a row that is in this status."""
    row = jobs.record.enqueue(tag=str(status)).job
    if status == Status.RUNNING:
        assert lifecycle.claim(row.pk, 1, owner=clock.token(), place=Place())
    else:
        ended = DbNow() if status in ("SUCCEEDED", "DEAD", "CANCELLED") else None
        ProcessedJob.objects.filter(pk=row.pk).update(
            status=status, failures=4, lost_count=2, attempts=4, finished_at=ended
        )
    return fresh(row)


def everything() -> list[Any]:
    tables = (ProcessedJob, JobAttempt, Operation)
    return [row for table in tables for row in table.objects.order_by("pk").values()]


@contextmanager
def during_the_run(action: Callable[[], Any]) -> Iterator[None]:
    """Do something, once, between the claim of a job and the call of its function."""

    def hook(point: str) -> None:
        if point == "user_code.before":
            probes.hook = None
            action()

    probes.hook = hook
    try:
        yield
    finally:
        probes.hook = None


def deliver(row: ProcessedJob) -> Status | None:
    now = fresh(row)
    return runner.deliver(now.pk, now.generation, owner=clock.token())


# ---- from every status

ALLOWED = {
    ("cancel", "PENDING"): "CANCELLED",
    ("cancel", "RETRYING"): "CANCELLED",
    ("cancel", "HELD"): "CANCELLED",
    ("cancel", "RUNNING"): "RUNNING",
    ("hold", "PENDING"): "HELD",
    ("hold", "RETRYING"): "HELD",
    ("hold", "RUNNING"): "RUNNING",
    ("unhold", "HELD"): "PENDING",
    ("retry", "DEAD"): "PENDING",
    ("retry", "CANCELLED"): "PENDING",
    ("retry", "RETRYING"): "PENDING",
    ("retry", "HELD"): "PENDING",
}
REFUSED = [(a, s) for a in ACTIONS for s in Status if (a, s.value) not in ALLOWED]


@pytest.mark.parametrize(("action", "status"), ALLOWED)
def test_operation_moves_the_row_and_leaves_who_and_why(action: str, status: str) -> None:
    row = row_in(Status(status))
    after = ACTIONS[action](row, by="ada", reason="the month is closed")
    now = fresh(row)
    assert after == now.status == ALLOWED[action, status]
    assert now.version > row.version
    assert (now.generation, now.key_hash, now.args) == (1, row.key_hash, row.args)
    asked = {"cancel": (True, False), "hold": (False, True)} if status == "RUNNING" else {}
    assert (now.cancel_requested, now.hold_requested) == asked.get(action, (False, False))
    if status != "RUNNING" and action in ("cancel", "hold"):
        assert "by ada: the month is closed" in now.error
    record = Operation.objects.get()
    assert (record.job_id, record.action, record.by) == (row.pk, action, "ada")
    assert (record.reason, record.before, record.after) == ("the month is closed", status, after)
    assert abs(record.at - lifecycle.database_now()) < timedelta(seconds=30)


@pytest.mark.parametrize(("action", "status"), REFUSED)
def test_operation_that_does_not_apply_is_refused_with_the_reason(
    action: str, status: Status
) -> None:
    row = row_in(status)
    before = everything()
    words = f"{action}: row {row.pk} is {status}, which {action} does not apply to"
    with pytest.raises(StaleVersion, match=words):
        ACTIONS[action](row, by="ada")
    assert everything() == before


@pytest.mark.parametrize("action", ACTIONS)
def test_operation_on_a_row_that_somebody_moved_is_refused(action: str) -> None:
    looked_at = row_in(Status.HELD if action == "unhold" else Status.RETRYING)
    ProcessedJob.objects.filter(pk=looked_at.pk).update(
        status=Status.SUCCEEDED, version=looked_at.version + 1
    )
    before = everything()
    words = (
        f"row {looked_at.pk} has changed since it was looked at "
        rf"\(then {looked_at.status}, now SUCCEEDED\); look again"
    )
    with pytest.raises(StaleVersion, match=words):
        ACTIONS[action](looked_at, by="ada")
    assert everything() == before


@pytest.mark.parametrize("action", ACTIONS)
def test_operation_on_a_row_that_moved_and_came_back_is_refused(action: str) -> None:
    looked_at = row_in(Status.HELD if action in ("cancel", "unhold") else Status.RETRYING)
    ProcessedJob.objects.filter(pk=looked_at.pk).update(version=looked_at.version + 2)
    with pytest.raises(StaleVersion, match="has changed since it was looked at"):
        ACTIONS[action](looked_at, by="ada")
    assert fresh(looked_at).status == looked_at.status


@pytest.mark.parametrize("action", ACTIONS)
def test_operation_on_a_row_that_is_gone_is_refused(action: str) -> None:
    row = row_in(Status.DEAD)
    pk = row.pk
    ProcessedJob.objects.all().delete()
    with pytest.raises(StaleVersion, match=f"{action}: row {pk} is gone"):
        ACTIONS[action](row, by="ada")


@pytest.mark.parametrize("action", ACTIONS)
def test_operation_by_nobody_is_refused(action: str) -> None:
    row = row_in(Status.RETRYING)
    before = everything()
    with pytest.raises(ValueError, match="say who does it"):
        ACTIONS[action](row, by="")
    assert everything() == before


# ---- cancel


@committing
def test_cancel_of_a_waiting_job_frees_message_and_key(redis_client: redis.Redis) -> None:
    row = jobs.record.enqueue(tag="a").job
    message = str(row.dispatch_id).encode()
    assert message in redis_client.lrange(QUEUE, 0, -1)
    assert operations.cancel(row, by="ada") == Status.CANCELLED
    assert message not in redis_client.lrange(QUEUE, 0, -1)
    assert not redis_client.exists(b"rq:job:" + message)
    assert jobs.record.enqueue(tag="a").kind is Kind.CREATED


@committing
def test_cancel_of_a_row_that_was_sent_again_frees_the_newest_message(
    redis_client: redis.Redis,
) -> None:
    looked_at = jobs.record.enqueue(tag="a").job
    redis_client.flushdb()
    assert Coordinator().tick().resent == 1
    assert redis_client.llen(QUEUE) == 1
    operations.cancel(looked_at, by="ada")
    assert redis_client.llen(QUEUE) == 0


def test_cancel_of_a_job_that_waits_for_its_retry_frees_the_lock() -> None:
    row = jobs.wish.enqueue(tag="a", what="retry").job
    assert deliver(row) == Status.RETRYING
    assert locks.holder(row.pk) is not None
    with _commits():
        operations.cancel(fresh(row), by="ada")
    assert locks.holder(row.pk) is None


@contextmanager
def _commits() -> Iterator[None]:
    """Run the hooks of the block as a commit does."""
    from django.test import TestCase

    with TestCase.captureOnCommitCallbacks(execute=True):
        yield


def test_cancel_of_a_waiting_job_with_a_rerun_drops_it_and_says_so() -> None:
    row = stubborn.enqueue(tag="a", text="first").job
    with during_the_run(lambda: stubborn.enqueue(tag="a", text="second")):
        assert deliver(row) == Status.DEAD
    ProcessedJob.objects.update(status=Status.RETRYING)
    operations.cancel(fresh(row), by="ada", reason="no")
    now = fresh(row)
    assert (now.status, now.rerun_args, now.rerun_fingerprint) == ("CANCELLED", None, None)
    assert now.error == "cancelled by ada: no; a waiting rerun was dropped"


@pytest.mark.parametrize(
    ("action", "asked_as", "status", "outcome"),
    [
        ("cancel", "cancelled on request", "CANCELLED", "CANCELLED"),
        ("hold", "held on request", "HELD", "HELD"),
    ],
)
@committing
def test_request_to_a_running_job_is_seen_at_its_next_check(
    action: str, asked_as: str, status: str, outcome: str
) -> None:
    row = watchful.enqueue(tag="a").job
    worker = Side(lambda: deliver(row))
    until(lambda: Ledger.objects.filter(tag="a").exists(), what="it runs")
    assert ACTIONS[action](fresh(row), by="ada") == Status.RUNNING
    assert worker.result() == status
    now, attempt = fresh(row), JobAttempt.objects.get()
    assert (now.status, attempt.outcome, attempt.reason) == (status, outcome, asked_as)
    assert (now.cancel_requested, now.hold_requested, now.failures) == (False, False, 0)
    assert locks.holder(row.pk) is None


@committing
def test_cancel_of_a_running_job_drops_its_waiting_rerun_and_names_it() -> None:
    row = watchful.enqueue(tag="a", text="first").job
    worker = Side(lambda: deliver(row))
    until(lambda: Ledger.objects.filter(tag="a").exists(), what="it runs")
    assert watchful.enqueue(tag="a", text="second").kind is Kind.RERUN
    operations.cancel(fresh(row), by="ada")
    assert worker.result() == Status.CANCELLED
    assert fresh(row).rerun_args is None
    assert fresh(row).error == "cancelled on request; a waiting rerun was dropped"
    assert run_pending() == 0


@pytest.mark.parametrize(("action", "status"), [("cancel", "CANCELLED"), ("hold", "HELD")])
def test_request_to_a_job_that_fails_is_obeyed_instead_of_its_retry(
    action: str, status: str
) -> None:
    row = jobs.fail.enqueue(tag="a").job
    with during_the_run(lambda: ACTIONS[action](fresh(row), by="ada")):
        assert deliver(row) == status
    now = fresh(row)
    assert (now.status, now.failures) == (status, 1)
    assert (now.cancel_requested, now.hold_requested) == (False, False)
    assert JobAttempt.objects.get().outcome == "FAILED"


@pytest.mark.parametrize(("action", "status"), [("cancel", "CANCELLED"), ("hold", "HELD")])
def test_request_to_a_job_whose_worker_died_is_obeyed_by_the_reclaim(
    action: str, status: str
) -> None:
    row = row_in(Status.RUNNING)
    ACTIONS[action](row, by="ada")
    JobAttempt.objects.update(lease_until=DbNow(-1))
    attempt = JobAttempt.objects.get()
    lost = lifecycle.reclaim(attempt.pk, beat_at=attempt.beat_at, ahead_of=None, reason="no beat")
    assert lost is not None
    assert lost.status == fresh(row).status == status


def test_request_to_a_job_that_succeeds_is_forgotten() -> None:
    row = jobs.record.enqueue(tag="a").job
    with during_the_run(lambda: operations.cancel(fresh(row), by="ada")):
        assert deliver(row) == Status.SUCCEEDED
    assert not fresh(row).cancel_requested
    assert jobs.record.enqueue(tag="a").kind is Kind.REPLAYED


# ---- hold


def test_held_job_is_not_run_and_blocks_its_key_until_unheld() -> None:
    row = jobs.record.enqueue(tag="a").job
    operations.hold(row, by="ada", reason="fraud check")
    assert deliver(row) is None
    assert run_pending() == 0
    again = jobs.record.enqueue(tag="a")
    assert (again.kind, again.job) == (Kind.BLOCKED, row)
    assert "held by ada: fraud check" in again.reason
    operations.unhold(fresh(row), by="ada")
    assert run_pending() == 1
    assert fresh(row).status == Status.SUCCEEDED


# ---- retry, unhold


@committing
@pytest.mark.parametrize(
    ("action", "status"), [("unhold", "HELD"), ("retry", "DEAD"), ("retry", "RETRYING")]
)
def test_job_that_is_let_go_on_is_pushed_at_once_with_fresh_budgets(
    redis_client: redis.Redis, action: str, status: str
) -> None:
    row = row_in(Status(status))
    ProcessedJob.objects.filter(pk=row.pk).update(
        run_after=DbNow(3_600), dispatch_id=None, dispatched_at=None
    )
    redis_client.flushdb()
    with transaction.atomic():
        ACTIONS[action](fresh(row), by="ada")
        assert redis_client.llen(QUEUE) == 0
    now = fresh(row)
    assert redis_client.lrange(QUEUE, 0, -1) == [str(now.dispatch_id).encode()]
    assert (now.failures, now.lost_count, now.attempts) == (0, 0, row.attempts)
    assert (now.generation, now.finished_at, now.error) == (1, None, "")
    assert now.dispatched_at is not None
    assert deliver(row) == Status.SUCCEEDED


def test_retry_goes_on_under_the_same_idempotency_key() -> None:
    row = stubborn.enqueue(tag="a", text="x").job
    assert deliver(row) == Status.DEAD
    operations.retry(fresh(row), by="ada")
    assert deliver(row) == Status.SUCCEEDED
    first, second = Ledger.objects.order_by("pk").values_list("note", flat=True)
    assert first == second
    assert fresh(row).generation == 1


@pytest.mark.parametrize("action", ["retry", "unhold"])
def test_job_that_is_let_go_on_takes_a_waiting_rerun(action: str) -> None:
    row = stubborn.enqueue(tag="a", text="first").job
    with during_the_run(lambda: stubborn.enqueue(tag="a", text="second")):
        assert deliver(row) == Status.DEAD
    assert fresh(row).rerun_args is not None  # kept under on_dead="block"
    if action == "unhold":
        ProcessedJob.objects.update(status=Status.HELD)
    ACTIONS[action](fresh(row), by="ada")
    now = fresh(row)
    assert (now.generation, now.rerun_args, now.rerun_fingerprint) == (2, None, None)
    assert deliver(row) == Status.SUCCEEDED
    assert fresh(row).result == '"second"'


@committing
def test_debounced_job_that_is_let_go_on_is_not_sent_before_it_is_due(
    redis_client: redis.Redis,
) -> None:
    row = jobs.debounced.enqueue(tag="a", text="first").job
    ProcessedJob.objects.update(
        status=Status.HELD, attempts=1, rerun_args=row.args, rerun_fingerprint=row.fingerprint
    )
    operations.unhold(fresh(row), by="ada")
    now = fresh(row)
    if now.run_after > lifecycle.database_now():  # a message now would find nothing to take
        assert (redis_client.llen(QUEUE), now.dispatched_at) == (0, None)
    coordinator = Coordinator()
    until(lambda: coordinator.tick() and deliver(row) == Status.SUCCEEDED, seconds=5)


def test_retry_of_a_job_without_its_arguments_is_refused() -> None:
    row = jobs.fail_and_block.enqueue(tag="a").job
    assert deliver(row) == Status.DEAD
    lifecycle.prune(row.name, older_than=-1, limit=10)
    assert fresh(row).is_tombstone
    with pytest.raises(StaleVersion, match="arguments"):
        operations.retry(fresh(row), by="ada")
    assert fresh(row).status == Status.DEAD


# ---- transactions


@committing
def test_operation_that_rolls_back_leaves_nothing(redis_client: redis.Redis) -> None:
    told: list[str] = []

    def hear(sender: str, action: str, **_: Any) -> None:
        told.append(action)

    waiting, dead = row_in(Status.PENDING), row_in(Status.DEAD)
    before, queued = everything(), redis_client.lrange(QUEUE, 0, -1)
    signals.operated.connect(hear)
    try:
        with pytest.raises(RuntimeError), transaction.atomic():  # noqa: PT012 - both in one
            operations.cancel(waiting, by="ada")
            operations.retry(dead, by="ada")
            raise RuntimeError
        assert (everything(), told) == (before, [])
        assert redis_client.lrange(QUEUE, 0, -1) == queued
        operations.cancel(waiting, by="ada")
        assert told == ["cancel"]
    finally:
        signals.operated.disconnect(hear)


@committing
def test_operation_and_claim_at_once_have_one_winner() -> None:
    for i in range(10):
        row = jobs.record.enqueue(tag=f"race {i}").job
        barrier = threading.Barrier(2)

        def claim(row: ProcessedJob = row, barrier: threading.Barrier = barrier) -> Any:
            connection.ensure_connection()
            barrier.wait(20)
            return lifecycle.claim(row.pk, 1, owner=clock.token(), place=Place())

        def cancel(row: ProcessedJob = row, barrier: threading.Barrier = barrier) -> Any:
            connection.ensure_connection()
            barrier.wait(20)
            try:
                return operations.cancel(row, by="ada")
            except StaleVersion:
                return None

        claimer, canceller = Side(claim), Side(cancel)
        claimed, cancelled = claimer.result(), canceller.result()
        assert (claimed is None) != (cancelled is None)
        assert fresh(row).status == ("RUNNING" if claimed else "CANCELLED")


# ---- the command


def operate(*args: Any) -> tuple[str, str]:
    out, err = StringIO(), StringIO()
    try:
        call_command("dedupjobs_operate", *args, stdout=out, stderr=err)
    except CommandError as error:
        err.write(f"CommandError: {error}")
    return out.getvalue(), err.getvalue()


def test_command_does_it_to_each_row_and_records_it() -> None:
    one, two = row_in(Status.PENDING), row_in(Status.RETRYING)
    out, err = operate("hold", str(one.pk), str(two.pk), "--by", "ada", "--reason", "stocktaking")
    assert err == ""
    assert f"row {one.pk} ({one}): PENDING → HELD" in out
    assert f"row {two.pk} ({two}): RETRYING → HELD" in out
    assert set(Operation.objects.values_list("by", "reason", "after")) == {
        ("ada", "stocktaking", "HELD")
    }


def test_command_goes_on_behind_a_refusal_and_fails_at_its_end() -> None:
    done, row = row_in(Status.SUCCEEDED), row_in(Status.PENDING)
    out, err = operate("cancel", str(done.pk), "987654", str(row.pk), "--by", "ada")
    assert f"cancel: row {done.pk} is SUCCEEDED, which cancel does not apply to" in err
    assert "cancel: there is no row 987654" in err
    assert "CommandError: 2 of 3 rows were left as they are" in err
    assert out == f"row {row.pk} ({row}): PENDING → CANCELLED\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("cancel", "1"), "--by"),
        (("explode", "1", "--by", "ada"), "explode"),
        (("cancel", "--by", "ada"), "pk"),
        (("cancel", "one", "--by", "ada"), "one"),
        (("cancel", "{pk}", "--by", ""), "who"),
    ],
)
def test_command_refuses_wrong_arguments_with_a_sentence(args: tuple[str, ...], words: str) -> None:
    row = row_in(Status.PENDING)
    before = everything()
    out, err = operate(*(arg.format(pk=row.pk) for arg in args))
    assert out == ""
    assert "CommandError" in err
    assert words in err
    assert everything() == before
