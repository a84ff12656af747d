"""What a call does: every state of its key, every policy, and transactions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.db import DatabaseError, connection, transaction
from django.test.utils import CaptureQueriesContext, override_settings

from dedupjobs import FOREVER, dispatch, job, lifecycle, registry, runner, signals
from dedupjobs.client import Outcome
from dedupjobs.clock import DbNow
from dedupjobs.exceptions import (
    ArgumentError,
    DedupJobsError,
    JobConflict,
    KeyValueError,
    NotMigrated,
    PayloadMismatch,
    PayloadTooLarge,
    UnknownQueue,
)
from dedupjobs.models import Kind, ProcessedJob, Status
from dedupjobs.registry import Job
from dedupjobs.testing import run_pending
from tests.app import jobs
from tests.app.models import Ledger
from tests.rows import (
    Side,
    alter,
    before_sql,
    claimed,
    job_row,
    race,
    snapshot,
    statements,
    tables_missing,
    until_blocked,
)
from tests.servers import NOBODY

pytestmark = pytest.mark.django_db
committing = pytest.mark.django_db(transaction=True)

EXPECTED: dict[str, dict[Status, Kind]] = {
    "for ever": {
        Status.PENDING: Kind.DUPLICATE,
        Status.RUNNING: Kind.DUPLICATE,
        Status.RETRYING: Kind.DUPLICATE,
        Status.SUCCEEDED: Kind.REPLAYED,
        Status.DEAD: Kind.CREATED,
        Status.CANCELLED: Kind.CREATED,
        Status.HELD: Kind.BLOCKED,
    },
}
EXPECTED["while active"] = EXPECTED["for ever"] | {Status.SUCCEEDED: Kind.CREATED}
EXPECTED["block"] = EXPECTED["for ever"] | {Status.DEAD: Kind.BLOCKED}


@job(key="loose:{tag}", unique_for=None, on_mismatch="raise")
def while_active(*, tag: str, text: str = "") -> None:
    """Hold the key only while active."""


@job(key="blocks:{tag}", unique_for=FOREVER, on_dead="block")
def blocks(*, tag: str, text: str = "") -> None:
    """Stay dead until a person retries."""


@job(key="loud:{tag}", unique_for=FOREVER, on_conflict="raise", on_mismatch="ignore")
def loud(*, tag: str, text: str = "") -> None:
    """Raise instead of joining."""


POLICIES: dict[str, Job[..., Any]] = {
    "for ever": jobs.record,
    "while active": while_active,
    "block": blocks,
}


def put(row: ProcessedJob, status: Status, **columns: Any) -> ProcessedJob:
    """Put a row into a state as the lifecycle would leave it."""
    return alter(row, status=status, attempts=1, **columns)


def messages(client: redis.Redis, queue: str = "default") -> list[str]:
    """Return the RQ ids in a queue, in the order in which they will be popped."""
    return [i.decode() for i in client.lrange(f"rq:queue:{queue}", 0, -1)]


@pytest.fixture
def redis_down() -> Iterator[None]:
    """Let every queue's server refuse connections."""
    url = f"{NOBODY}/0"
    with override_settings(RQ_QUEUES={"default": {"URL": url}}):
        dispatch.forget_clients()
        yield
    dispatch.forget_clients()


@pytest.fixture(autouse=True)
def _patient_push() -> Iterator[None]:
    """Close the breaker, and let a push succeed on a machine that is busy."""
    with override_settings(DEDUPJOBS={"PUSH_TIMEOUT": 10}):
        dispatch.forget_clients()
        yield
    dispatch.forget_clients()


# ---- each state of the key, the same call and another one


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("status", Status)
def test_same_call_again_gets_what_the_keys_state_allows(policy: str, status: Status) -> None:
    specimen = POLICIES[policy]
    first = specimen.enqueue(tag="a", text="x")
    assert first.kind is Kind.CREATED
    before = put(first.job, status)
    second = specimen.enqueue(tag="a", text="x")
    expected = EXPECTED[policy][status]
    assert second.kind is expected
    assert second.job.pk == first.job.pk
    assert second.created is (expected is Kind.CREATED)
    assert bool(second) is True
    assert second.reason
    row = job_row(first.job)
    if second.created:
        assert (row.status, row.version) == (Status.PENDING, before.version + 1)
    else:
        assert (row.status, row.version) == (status, before.version)
    assert ProcessedJob.objects.count() == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("status", Status)
def test_call_with_other_arguments_is_refused_while_the_key_is_held_and_taken_when_free(
    policy: str, status: Status
) -> None:
    specimen = POLICIES[policy]
    first = specimen.enqueue(tag="a", text="x").job
    put(first, status)
    before = snapshot()
    if EXPECTED[policy][status] is Kind.CREATED:
        assert specimen.enqueue(tag="a", text="y").created
        assert json.loads(job_row(first).args)["text"] == "y"
        return
    with pytest.raises(PayloadMismatch) as caught:
        specimen.enqueue(tag="a", text="y")
    assert caught.value.outcome.kind is EXPECTED[policy][status]
    assert caught.value.outcome.job.pk == first.pk
    assert caught.value.differing == ("text",)
    assert caught.value.stored == first.fingerprint != caught.value.given
    assert "text" in str(caught.value)
    assert "'y'" not in str(caught.value)  # names, never values
    assert snapshot() == before


def test_call_within_the_window_of_a_success_is_a_replay_and_after_it_a_new_run() -> None:
    first = jobs.record_hourly.enqueue(tag="a").job
    put(first, Status.SUCCEEDED, unique_until=DbNow(timedelta(minutes=1)))
    held = jobs.record_hourly.enqueue(tag="a")
    assert held.kind is Kind.REPLAYED
    assert "until" in held.reason
    alter(first, unique_until=DbNow(-0.1))
    again = jobs.record_hourly.enqueue(tag="a")
    assert again.created
    assert (again.job.generation, again.job.unique_until) == (2, None)


def test_replay_for_ever_says_so_and_carries_the_result() -> None:
    jobs.record.enqueue(tag="a", text="x")
    run_pending()
    outcome = jobs.record.enqueue(tag="a", text="x")
    assert (outcome.kind, outcome.job.result) == (Kind.REPLAYED, '"x"')
    assert "for ever" in outcome.reason


def test_mismatch_under_ignore_is_an_ordinary_duplicate() -> None:
    first = jobs.record_lenient.enqueue(tag="a", text="x")
    second = jobs.record_lenient.enqueue(tag="a", text="y")
    assert (second.kind, second.job.pk) == (Kind.DUPLICATE, first.job.pk)
    assert json.loads(job_row(first.job).args)["text"] == "x"


def test_mismatch_under_warn_is_a_duplicate_whose_reason_names_the_difference() -> None:
    jobs.record_warning.enqueue(tag="a", text="x")
    outcome = jobs.record_warning.enqueue(tag="a", text="y")
    assert outcome.kind is Kind.DUPLICATE
    assert "text" in outcome.reason


@pytest.mark.django_db(transaction=True)
def test_mismatch_is_told_to_receivers_with_its_policy() -> None:
    heard: list[Any] = []

    def hear(differing: Any, policy: str, **_: Any) -> None:
        heard.append((differing, policy))

    signals.mismatch_detected.connect(hear)
    try:
        jobs.record_lenient.enqueue(tag="a", text="x")
        jobs.record_lenient.enqueue(tag="a", text="y")
    finally:
        signals.mismatch_detected.disconnect(hear)
    assert heard == [(("text",), "ignore")]


def test_arguments_outside_the_fingerprint_may_differ() -> None:
    jobs.record_by_fingerprint.enqueue(tag="a", text="x")
    assert jobs.record_by_fingerprint.enqueue(tag="a", text="y").kind is Kind.DUPLICATE


@pytest.mark.parametrize("status", Status)
def test_conflict_under_raise_is_raised_for_an_active_key_only(status: Status) -> None:
    first = jobs.record_strict.enqueue(tag="a").job
    put(first, status)
    expected = EXPECTED["for ever"][status]
    if expected is not Kind.DUPLICATE:
        assert jobs.record_strict.enqueue(tag="a").kind is expected
        return
    with pytest.raises(JobConflict) as caught:
        jobs.record_strict.enqueue(tag="a")
    assert caught.value.outcome.kind is Kind.DUPLICATE
    assert caught.value.outcome.job.pk == first.pk
    assert "strict:a" in str(caught.value)


def test_conflict_under_raise_and_ignored_mismatch_is_a_conflict() -> None:
    loud.enqueue(tag="a", text="x")
    with pytest.raises(JobConflict):
        loud.enqueue(tag="a", text="y")


@pytest.mark.parametrize("status", Status)
def test_outcome_raises_for_a_conflict_only_if_the_call_was_turned_away(status: Status) -> None:
    put(jobs.record.enqueue(tag="a").job, status)
    outcome = jobs.record.enqueue(tag="a")
    if outcome.kind in (Kind.DUPLICATE, Kind.BLOCKED):
        with pytest.raises(JobConflict):
            outcome.raise_for_conflict()
    else:
        assert outcome.raise_for_conflict() is outcome


@pytest.mark.parametrize(
    ("status", "words"),
    [(Status.HELD, "month end"), (Status.DEAD, "no luck"), (Status.RUNNING, "RUNNING")],
)
def test_call_that_is_turned_away_learns_why(status: Status, words: str) -> None:
    put(blocks.enqueue(tag="a").job, status, error="month end" if status == "HELD" else "no luck")
    assert words in blocks.enqueue(tag="a").reason


def test_same_key_for_two_tenants_is_two_jobs() -> None:
    one = jobs.record_for_tenant.enqueue(tenant="one", tag="a")
    two = jobs.record_for_tenant.enqueue(tenant="two", tag="a")
    assert (one.created, two.created) == (True, True)
    assert (one.job.scope, two.job.scope) == ("one", "two")
    assert not jobs.record_for_tenant.enqueue(tenant="one", tag="a").created


def test_call_without_a_key_is_never_a_duplicate() -> None:
    outcomes = [jobs.record_always.enqueue(tag="a") for _ in range(3)]
    assert [o.kind for o in outcomes] == [Kind.CREATED] * 3
    assert len({o.job.key_hash for o in outcomes}) == 3
    run_pending()
    assert Ledger.objects.count() == 3


def test_key_of_a_cancelled_job_is_free_at_once() -> None:
    row = jobs.record.enqueue(tag="a").job
    lifecycle.cancel(row.pk, row.version)
    assert jobs.record.enqueue(tag="a").created
    run_pending()
    assert Ledger.objects.count() == 1


# ---- reopen: generation and budgets


@pytest.mark.parametrize(
    ("status", "attempts", "text", "generation"),
    [
        (Status.SUCCEEDED, 1, "x", 2),
        (Status.SUCCEEDED, 1, "y", 2),
        (Status.DEAD, 1, "x", 1),
        (Status.DEAD, 1, "y", 2),
        (Status.CANCELLED, 1, "x", 1),
        (Status.CANCELLED, 1, "y", 2),
        (Status.CANCELLED, 0, "x", 1),
        (Status.CANCELLED, 0, "y", 1),
    ],
)
def test_reopen_grows_the_generation_only_for_another_intended_execution(
    status: Status, attempts: int, text: str, generation: int
) -> None:
    row = while_active.enqueue(tag="a", text="x").job
    alter(row, status=status, attempts=attempts)
    outcome = while_active.enqueue(tag="a", text=text)
    assert outcome.created
    assert outcome.job.generation == generation
    assert outcome.job.attempts == attempts


@pytest.mark.parametrize("status", [Status.SUCCEEDED, Status.DEAD, Status.CANCELLED])
def test_reopen_starts_with_fresh_budgets_and_nothing_left_of_the_last_run(status: Status) -> None:
    row = while_active.enqueue(tag="a").job
    alter(
        row,
        status=status,
        attempts=3,
        failures=3,
        lost_count=2,
        cancel_requested=True,
        hold_requested=True,
        rerun_args="{}",
        rerun_fingerprint="f",
        result='"old"',
        error="old",
        finished_at=DbNow(),
        unique_until=DbNow(),
        debounce_deadline=DbNow(),
        run_after=DbNow(3600),
        queue="low",
    )
    reopened = while_active.enqueue(tag="a").job
    assert (reopened.failures, reopened.lost_count) == (0, 0)
    assert (reopened.cancel_requested, reopened.hold_requested) == (False, False)
    assert (reopened.rerun_args, reopened.rerun_fingerprint) == (None, None)
    assert (reopened.result, reopened.error) == (None, "")
    assert (reopened.finished_at, reopened.unique_until) == (None, None)
    assert reopened.debounce_deadline is None
    assert reopened.run_after <= lifecycle.database_now()
    assert (reopened.queue, reopened.attempts) == ("default", 3)
    assert reopened.dispatch_id not in (None, row.dispatch_id)  # RQ forgets by id: never twice


def test_reopened_job_runs_with_the_next_number_and_old_messages_are_void() -> None:
    row = while_active.enqueue(tag="a").job
    lifecycle.complete(claimed(row), "null", unique_for=None)
    reopened = while_active.enqueue(tag="a").job
    old = lifecycle.claim(row.pk, row.generation, owner="old", place=lifecycle.Place())
    assert old is None
    assert claimed(reopened).number == 2


@committing
@pytest.mark.parametrize(
    ("columns", "kind", "generation"),
    [
        ({"status": Status.SUCCEEDED}, Kind.REPLAYED, 1),
        # Another call has been reopened, run and died meanwhile: its effects are not ours.
        ({"version": 9, "fingerprint": "f" * 64, "attempts": 2}, Kind.CREATED, 2),
    ],
    ids=["succeeded", "another call's run"],
)
def test_reopen_of_a_row_that_has_moved_since_it_was_read_looks_again(
    transactional_db: None, columns: dict[str, Any], kind: Kind, generation: int
) -> None:
    row = put(jobs.record.enqueue(tag="a").job, Status.DEAD)

    def move() -> None:
        Side(alter, row, **columns).result()

    with before_sql("UPDATE dedupjobs_processedjob", action=move):
        outcome = jobs.record.enqueue(tag="a")
    assert (outcome.kind, outcome.job.generation) == (kind, generation)


@committing
def test_reopen_by_eight_at_once_is_one_reopen(transactional_db: None) -> None:
    row = put(jobs.record.enqueue(tag="a").job, Status.DEAD)
    outcomes = race(*[lambda: jobs.record.enqueue(tag="a")] * 8)
    assert sorted(o.kind for o in outcomes) == ["CREATED"] + ["DUPLICATE"] * 7
    assert job_row(row).version == row.version + 1


@committing
def test_reopen_against_another_call_that_reopens_first_is_a_duplicate(
    transactional_db: None,
) -> None:
    put(jobs.record.enqueue(tag="a").job, Status.DEAD)
    others: list[Outcome] = []

    def reopen_first() -> None:
        others.append(Side(jobs.record.enqueue, tag="a").result())

    with before_sql("UPDATE dedupjobs_processedjob", action=reopen_first):
        outcome = jobs.record.enqueue(tag="a")
    assert (others[0].kind, outcome.kind) == (Kind.CREATED, Kind.DUPLICATE)


@committing
def test_reopen_of_a_row_that_others_move_for_ever_ends_in_an_error(
    transactional_db: None,
) -> None:
    row = put(jobs.record.enqueue(tag="a").job, Status.DEAD)

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("UPDATE"):
            Side(alter, row, version=job_row(row).version + 1).result()
        return execute(sql, params, many, context)

    with (
        connection.execute_wrapper(wrapper),
        pytest.raises(DedupJobsError, match="'record:a': moved by others 10 times"),
    ):
        jobs.record.enqueue(tag="a")


# ---- races on the insert


@committing
def test_calls_by_eight_at_once_make_one_row_and_one_message(
    transactional_db: None, redis_client: redis.Redis
) -> None:
    outcomes = race(*[lambda: jobs.record.enqueue(tag="a")] * 8)
    assert sorted(o.kind for o in outcomes) == ["CREATED"] + ["DUPLICATE"] * 7
    assert {o.job.pk for o in outcomes} == {ProcessedJob.objects.get().pk}
    assert len(messages(redis_client)) == 1


@committing
def test_calls_with_other_arguments_at_once_make_one_row_and_the_others_learn_of_it(
    transactional_db: None,
) -> None:
    def call(text: str) -> Callable[[], Outcome]:
        return lambda: jobs.record.enqueue(tag="a", text=text)

    answers = race(*[call(text) for text in "stuvwxyz"])
    winners = [a for a in answers if isinstance(a, Outcome)]
    assert [w.kind for w in winners] == [Kind.CREATED]
    assert len([a for a in answers if isinstance(a, PayloadMismatch)]) == 7
    assert ProcessedJob.objects.get().args == winners[0].job.args


@committing
def test_call_that_loses_the_insert_inside_a_transaction_leaves_it_usable(
    transactional_db: None,
) -> None:
    def insert_first() -> None:
        assert Side(jobs.record.enqueue, tag="a").result().created

    if connection.vendor == "sqlite":
        insert_first()  # nobody can insert while our transaction has the one writer's lock
    with transaction.atomic():
        Ledger.objects.create(tag="before")
        if connection.vendor == "sqlite":
            outcome = jobs.record.enqueue(tag="a")
        else:
            with before_sql("INSERT", "dedupjobs_processedjob", action=insert_first):
                outcome = jobs.record.enqueue(tag="a")
        Ledger.objects.create(tag="after")
    assert outcome.kind is Kind.DUPLICATE
    assert set(Ledger.objects.values_list("tag", flat=True)) == {"before", "after"}


# ---- transactions


@committing
def test_call_in_a_transaction_reaches_redis_only_at_the_outermost_commit(
    transactional_db: None, redis_client: redis.Redis
) -> None:
    with transaction.atomic():
        with transaction.atomic():
            outcome = jobs.record.enqueue(tag="a")
            assert redis_client.dbsize() == 0
        assert outcome.created
        assert redis_client.dbsize() == 0
    assert messages(redis_client) == [outcome.job.dispatch_id]
    stored = redis_client.hget(f"rq:job:{outcome.job.dispatch_id}", "data")
    assert stored is not None  # RQ's message names the row and nothing else


@committing
def test_call_in_a_transaction_that_rolls_back_leaves_nothing_and_can_be_made_again(
    transactional_db: None, redis_client: redis.Redis
) -> None:
    with transaction.atomic():
        jobs.record.enqueue(tag="a")
        transaction.set_rollback(True)
    assert ProcessedJob.objects.count() == 0
    assert redis_client.dbsize() == 0
    assert jobs.record.enqueue(tag="a").created


@committing
@pytest.mark.parametrize("again", ["in the outer block", "after it"])
def test_call_in_a_savepoint_that_rolls_back_leaves_nothing_and_can_be_made_again(
    transactional_db: None, redis_client: redis.Redis, again: str
) -> None:
    with transaction.atomic(durable=True):
        with suppress(ZeroDivisionError), transaction.atomic():
            jobs.record.enqueue(tag="a", text="inner")
            raise ZeroDivisionError
        other = jobs.record.enqueue(tag="b")
        if again == "in the outer block":
            assert jobs.record.enqueue(tag="a", text="outer").created
    if again == "after it":
        assert messages(redis_client) == [other.job.dispatch_id]
        assert jobs.record.enqueue(tag="a", text="outer").created
    assert len(messages(redis_client)) == 2
    run_pending()
    assert set(Ledger.objects.values_list("tag", "note")) == {("a", "outer"), ("b", "")}


# Django 6.1 has renamed it.
create_savepoint = getattr(transaction, "savepoint_create", None) or transaction.savepoint


@committing
def test_call_rolled_back_to_a_manual_savepoint_can_be_made_again(
    transactional_db: None, redis_client: redis.Redis
) -> None:
    with transaction.atomic():
        savepoint = create_savepoint()
        jobs.record.enqueue(tag="a")
        transaction.savepoint_rollback(savepoint)
        transaction.clean_savepoints()
        assert jobs.record.enqueue(tag="a").created
    row = ProcessedJob.objects.get()
    assert row.dispatch_id in messages(redis_client)


@committing
def test_duplicate_in_a_transaction_leaves_it_usable(
    transactional_db: None, redis_client: redis.Redis
) -> None:
    jobs.record.enqueue(tag="a")
    with transaction.atomic():
        Ledger.objects.create(tag="before")
        assert jobs.record.enqueue(tag="a").kind is Kind.DUPLICATE
        with pytest.raises(PayloadMismatch):
            jobs.record.enqueue(tag="a", text="other")
        Ledger.objects.create(tag="after")
    assert Ledger.objects.count() == 2
    assert len(messages(redis_client)) == 1


class Winner:
    """A transaction on another connection that has enqueued the key and stays open."""

    def __init__(self, *, commits: bool) -> None:
        self._enqueued, self._end = threading.Event(), threading.Event()
        self._side = Side(self._run, commits)
        assert self._enqueued.wait(10)

    def _run(self, commits: bool) -> None:
        with transaction.atomic():
            assert jobs.record.enqueue(tag="a", text="winner").created
            self._enqueued.set()
            assert self._end.wait(10)
            transaction.set_rollback(not commits)

    def end(self) -> None:
        self._end.set()
        self._side.result()


def call_in_transaction() -> Outcome:
    with transaction.atomic():
        outcome = jobs.record.enqueue(tag="a", text="loser")
        Ledger.objects.create(tag="loser's own work")
    return outcome


@committing
@pytest.mark.parametrize("call", [jobs.record.enqueue, call_in_transaction])
def test_loser_that_waited_for_a_winner_who_rolls_back_wins(
    transactional_db: None, redis_client: redis.Redis, call: Any
) -> None:
    winner = Winner(commits=False)
    arguments = {} if call is call_in_transaction else {"tag": "a", "text": "loser"}
    loser = Side(call, **arguments)
    until_blocked(loser)
    winner.end()
    outcome = loser.result()
    assert outcome.created
    row = ProcessedJob.objects.get()
    assert (row.pk, json.loads(row.args)["text"]) == (outcome.job.pk, "loser")
    assert messages(redis_client) == [row.dispatch_id]


@committing
def test_loser_that_waited_for_a_winner_who_commits_is_told_duplicate(
    transactional_db: None, redis_client: redis.Redis
) -> None:
    winner = Winner(commits=True)
    loser = Side(jobs.record.enqueue, tag="a", text="winner")
    until_blocked(loser)
    winner.end()
    outcome = loser.result()
    assert outcome.kind is Kind.DUPLICATE
    assert outcome.job.pk == ProcessedJob.objects.get().pk
    assert len(messages(redis_client)) == 1


@committing
def test_loser_inside_a_transaction_that_waited_for_a_winner_who_commits_can_go_on(
    transactional_db: None,
) -> None:
    winner = Winner(commits=True)

    def call() -> Outcome:
        with transaction.atomic():
            outcome = jobs.record.enqueue(tag="a", text="winner")
            Ledger.objects.create(tag="loser's own work")
        return outcome

    loser = Side(call)
    until_blocked(loser)
    winner.end()
    assert loser.result().kind is Kind.DUPLICATE
    assert Ledger.objects.count() == 1


@committing
def test_other_hooks_run_and_the_row_waits_for_the_coordinator_when_redis_is_down(
    transactional_db: None, redis_down: None
) -> None:
    ran: list[str] = []
    with transaction.atomic():
        transaction.on_commit(lambda: ran.append("before"))
        outcome = jobs.record.enqueue(tag="a")
        transaction.on_commit(lambda: ran.append("after"))
    assert ran == ["before", "after"]
    row = job_row(outcome.job)
    assert (row.status, row.dispatch_id, row.dispatched_at) == ("PENDING", None, None)


@committing
def test_failed_hand_over_is_told_to_receivers(transactional_db: None, redis_down: None) -> None:
    heard: list[Any] = []

    def hear(sender: str, queue: str, count: int, **_: Any) -> None:
        heard.append((sender, queue, count))

    signals.hand_over_failed.connect(hear)
    try:
        jobs.record.enqueue(tag="a")
    finally:
        signals.hand_over_failed.disconnect(hear)
    assert heard == [("testapp.record", "default", 1)]


@pytest.fixture
def chain() -> Iterator[None]:
    """Enqueue "b" once "a" is enqueued, from a receiver, and "c" from a hook of the commit."""

    def follow(job: ProcessedJob, **_: Any) -> None:
        if job.key == "record:a":
            jobs.record.enqueue(tag="b")
            transaction.on_commit(lambda: jobs.record.enqueue(tag="c"))

    signals.job_enqueued.connect(follow)
    yield
    signals.job_enqueued.disconnect(follow)


@committing
def test_calls_from_hooks_of_a_commit_are_delivered_in_order(
    transactional_db: None, redis_client: redis.Redis, chain: None
) -> None:
    with transaction.atomic():
        jobs.record.enqueue(tag="a")
    ids = dict(ProcessedJob.objects.values_list("dispatch_id", "key"))
    assert [ids[i] for i in messages(redis_client)] == ["record:a", "record:b", "record:c"]


def test_calls_from_hooks_are_delivered_in_order_inside_a_test_case(
    redis_client: redis.Redis, chain: None, django_capture_on_commit_callbacks: Any
) -> None:
    with django_capture_on_commit_callbacks(execute=True):
        jobs.record.enqueue(tag="a")
    ids = dict(ProcessedJob.objects.values_list("dispatch_id", "key"))
    assert [ids[i] for i in messages(redis_client)] == ["record:a", "record:b", "record:c"]


@committing
def test_receiver_of_the_enqueued_signal_that_fails_harms_nobody(
    transactional_db: None, redis_client: redis.Redis
) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("a receiver's own fault")

    signals.job_enqueued.connect(fail)
    try:
        assert jobs.record.enqueue(tag="a").created
    finally:
        signals.job_enqueued.disconnect(fail)
    assert len(messages(redis_client)) == 1


# ---- what a call costs, and says


@pytest.mark.parametrize("status", [s for s in Status if EXPECTED["for ever"][s] != Kind.CREATED])
def test_duplicate_costs_one_statement(status: Status) -> None:
    put(jobs.record.enqueue(tag="a").job, status)
    with CaptureQueriesContext(connection) as captured:
        jobs.record.enqueue(tag="a")
    assert len(captured) == 1
    assert "FOR UPDATE" not in captured[0]["sql"]
    if connection.vendor != "postgresql":
        assert statements(captured) == ["SELECT job"]


@pytest.mark.skipif(connection.vendor != "postgresql", reason="others read by a statement alone")
def test_duplicate_locks_and_writes_nothing(transactional_db: None) -> None:
    jobs.record.enqueue(tag="a")
    with transaction.atomic():
        jobs.record.enqueue(tag="a")
        assert not _has_written()
        jobs.record.enqueue(tag="b")
        assert _has_written()


def _has_written() -> bool:
    """Whether the transaction has locked or changed a row: then it has a number."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_current_xact_id_if_assigned() IS NOT NULL")
        return bool(cursor.fetchone()[0])


def test_call_positional_or_by_keyword_in_any_order_is_the_same_work() -> None:
    first = positional.enqueue("a", "x")
    assert first.created
    assert positional.enqueue(text="x", tag="a").kind is Kind.DUPLICATE
    assert positional.enqueue("a", text="x").kind is Kind.DUPLICATE
    assert positional.enqueue("a").kind is Kind.DUPLICATE  # the default


@job(key="positional:{tag}", unique_for=FOREVER)
def positional(tag: str, text: str = "x") -> None:
    """Take arguments by position as well."""


def test_call_of_the_job_itself_runs_the_plain_function_and_leaves_no_row() -> None:
    assert jobs.record(tag="a", text="x") == "x"
    assert (Ledger.objects.count(), ProcessedJob.objects.count()) == (1, 0)


@pytest.mark.parametrize("word", ["delay", "apply_async", "send"])
def test_call_by_another_librarys_word_names_ours(word: str) -> None:
    with pytest.raises(AttributeError, match=r"testapp\.record.*\.enqueue"):
        getattr(jobs.record, word)(tag="a")


# ---- bad input: nothing is half-written


@job(key="any:{tag}", unique_for=FOREVER)
def take_anything(*, tag: Any, value: Any = None) -> None:
    """Accept what the tests throw at it."""


def refused(error: type[Exception], match: str, **arguments: Any) -> None:
    with pytest.raises(error, match=match):
        take_anything.enqueue(**arguments)


@pytest.fixture
def nothing_written(redis_client: redis.Redis) -> Iterator[None]:
    yield
    assert ProcessedJob.objects.count() == 0
    assert redis_client.dbsize() == 0


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "value=nan.*NaN"),
        ([1, float("inf")], r"value\[1\]=inf.*infinity"),
        ("a\x00b", "value: a NUL"),
        ("a\ud800", "value: a lone surrogate"),
        ({"k": {"n": "\x00"}}, r"value\['k'\]\['n'\].*NUL"),
        ({"\x00": 1}, "value: a NUL"),
        ({1: 2}, "value: dict key 1"),
        ({1, 2}, "value: .*set.*sorted list"),
        (object(), r"value: a builtins\.object can not be stored"),
        (lambda: None, "value: a builtins.function can not be stored"),
    ],
    ids=["nan", "inf", "nul", "surrogate", "deep", "key", "int key", "set", "object", "lambda"],
)
def test_argument_that_is_no_json_value_is_refused_by_name(value: Any, words: str) -> None:
    refused(ArgumentError, words, tag="a", value=value)
    refused(TypeError, words, tag="a", value=value)


@pytest.mark.usefixtures("nothing_written")
def test_model_instance_and_queryset_are_refused_with_the_advice_to_pass_keys() -> None:
    refused(ArgumentError, "value: a model instance.*User.*pass its pk", tag="a", value=User(pk=1))
    refused(ArgumentError, "value: a queryset.*pks", tag="a", value=User.objects.all())


@pytest.mark.usefixtures("nothing_written")
def test_open_file_and_connection_are_refused(tmp_path: Any) -> None:
    with (tmp_path / "f").open("w") as file:
        refused(ArgumentError, "value: a _io.TextIOWrapper can not be stored", tag="a", value=file)
    refused(ArgumentError, "value: ", tag="a", value=connection)


@pytest.mark.usefixtures("nothing_written")
def test_argument_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    refused(ArgumentError, "value", tag="a", value=endless)


@pytest.mark.usefixtures("nothing_written")
def test_integer_with_more_digits_than_python_prints_is_refused() -> None:
    refused(ArgumentError, "value", tag="a", value=10**5_000)


@pytest.mark.usefixtures("nothing_written")
def test_payload_over_the_limit_is_refused_with_both_sizes() -> None:
    words = "take 65,5.. bytes, MAX_PAYLOAD allows 65,536"
    refused(PayloadTooLarge, words, tag="a", value="x" * 65_536)
    with override_settings(DEDUPJOBS={"MAX_PAYLOAD": 100, "PUSH_TIMEOUT": 10}):
        refused(PayloadTooLarge, "MAX_PAYLOAD allows 100", tag="a", value="x" * 100)


@pytest.mark.parametrize("value", ["é" * 3_000, "\U0001f600" * 2_000])
def test_payload_within_the_limit_is_taken_whatever_its_letters(value: str) -> None:
    assert take_anything.enqueue(tag="a", value=value).created


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize("tag", [None, ""])
def test_empty_part_of_a_key_is_refused(tag: Any) -> None:
    refused(KeyValueError, f"tag={tag!r} stands in the key", tag=tag)


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize("arguments", [{}, {"tag": "a", "other": 1}], ids=str)
def test_call_that_does_not_fit_the_signature_is_refused_with_the_signature(
    arguments: dict[str, Any],
) -> None:
    refused(TypeError, r"take_anything\(\*, tag", **arguments)


@pytest.mark.usefixtures("nothing_written")
def test_job_on_a_queue_that_does_not_exist_is_refused_with_those_that_do() -> None:
    @job(key="nowhere:{tag}", unique_for=FOREVER, name="tests.nowhere", queue="nowhere")
    def nowhere(*, tag: str) -> None: ...

    try:
        with pytest.raises(UnknownQueue, match=r"'nowhere'.*default, high, low"):
            nowhere.enqueue(tag="a")
    finally:
        registry.forget("tests.nowhere")


def test_call_before_the_tables_are_migrated_says_what_to_run() -> None:
    with (
        tables_missing(),
        pytest.raises(NotMigrated, match=r"manage\.py migrate"),
        transaction.atomic(),
    ):
        jobs.record.enqueue(tag="a")


@pytest.mark.skipif(
    connection.vendor != "mysql", reason="elsewhere a text column holds every character"
)
@committing
def test_call_that_the_table_can_not_hold_is_an_error_and_leaves_no_row(
    transactional_db: None,
) -> None:
    """A table from before utf8mb4 must not store "?" in place of a tenant's name."""
    with latin_scopes():
        with pytest.raises(DatabaseError):
            jobs.record_for_tenant.enqueue(tenant="☃", tag="a")
        assert ProcessedJob.objects.count() == 0
        assert jobs.record_for_tenant.enqueue(tenant="snowman", tag="a").created


@contextmanager
def latin_scopes() -> Iterator[None]:
    change = (
        "ALTER TABLE dedupjobs_processedjob MODIFY scope VARCHAR(200) CHARACTER SET {} NOT NULL"
    )
    with connection.cursor() as cursor:
        cursor.execute(change.format("latin1"))
        try:
            yield
        finally:
            cursor.execute(change.format("utf8mb4"))


@pytest.mark.parametrize("length", [200, 10_000])
def test_key_of_any_length_is_taken_and_its_display_is_cut(length: int) -> None:
    row = take_anything.enqueue(tag="x" * length).job
    assert len(job_row(row).key) <= 200
    assert take_anything.enqueue(tag="x" * length).kind is Kind.DUPLICATE
    assert take_anything.enqueue(tag="x" * length + "y").created


def test_scope_longer_than_its_column_is_refused_by_name_on_every_database() -> None:
    assert jobs.record_for_tenant.enqueue(tenant="t" * 200, tag="a").created
    with pytest.raises(DedupJobsError, match="tenant"):
        jobs.record_for_tenant.enqueue(tenant="t" * 201, tag="a")


def test_job_enqueued_twice_in_a_row_runs_once() -> None:
    jobs.record.enqueue(tag="a")
    jobs.record.enqueue(tag="a")
    assert run_pending() == 1
    assert Ledger.objects.count() == 1


def test_message_of_a_job_that_has_already_run_does_nothing() -> None:
    row = jobs.record.enqueue(tag="a").job
    run_pending()
    assert runner.deliver(row.pk, row.generation, owner="late", lock=False) is None
    assert Ledger.objects.count() == 1


# ---- the jobs' tables in a database of their own, and reads that a router sends elsewhere

TWO_DATABASES = """
import sys, tests.settings as s
files = sys.argv[1:3]
s.DATABASES = {
    alias: {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": file,
        "OPTIONS": {"timeout": 20, "transaction_mode": "IMMEDIATE"},
    }
    for alias, file in zip(("default", "jobs"), files)
}
class Router:
    def db_for_read(self, model, **hints):
        return "default"  # a replica that lacks the jobs' tables altogether
    def db_for_write(self, model, **hints):
        return "jobs" if model._meta.app_label == "dedupjobs" else "default"
    def allow_migrate(self, db, app_label, **hints):
        return (app_label == "dedupjobs") == (db == "jobs")
s.DATABASE_ROUTERS = [Router()]
import django; django.setup()
import redis
from django.core.management import call_command
from django.db import transaction
from dedupjobs.coordinator import Coordinator
from dedupjobs.testing import run_pending
from tests.app import jobs
for alias in s.DATABASES:
    call_command("migrate", database=alias, run_syncdb=True, verbosity=0)
client = redis.Redis.from_url(s.RQ_URL)
count = lambda: client.llen("rq:queue:default")
with transaction.atomic(using="jobs"):
    with transaction.atomic(using="default"):
        assert jobs.record.enqueue(tag="a").created
    assert count() == 0, "pushed before the commit of the row's own alias"
assert count() == 1, "not pushed at the commit of the row's own alias"
with transaction.atomic(using="default"):
    with transaction.atomic(using="jobs"):
        assert jobs.record.enqueue(tag="b").created
    assert count() == 2, "waited for the commit of another alias"
assert not jobs.record.enqueue(tag="a").created
jobs.fail_once.enqueue(tag="c")
assert run_pending() == 3
Coordinator().tick()
print("done")
"""


@pytest.mark.large
def test_call_reaches_redis_at_the_commit_of_its_rows_own_database(
    tmp_path: Any, redis_client: redis.Redis
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_DATABASES, str(tmp_path / "a"), str(tmp_path / "b")],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "done", done.stderr
