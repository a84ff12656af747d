"""Many calls at once: few statements, and each call is answered as if it had come alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.conf import settings
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext, override_settings

from dedupjobs import dispatch, lifecycle, registry
from dedupjobs.clock import DbNow
from dedupjobs.exceptions import (
    ArgumentError,
    JobConflict,
    KeyValueError,
    PayloadMismatch,
    PayloadTooLarge,
    TransactionLost,
    UnknownQueue,
)
from dedupjobs.lifecycle.calls import CHUNK
from dedupjobs.models import Kind, ProcessedJob, Status
from dedupjobs.testing import run_pending
from tests.app import jobs
from tests.app.models import Ledger
from tests.rows import alter, claimed, job_row, race

committing = pytest.mark.django_db(transaction=True)

PER_CHUNK = 8  # statements for up to CHUNK calls, whatever becomes of them


@pytest.fixture
def patient_push() -> Iterator[None]:
    """Let a call wait for Redis as long as its messages take."""
    with override_settings(DEDUPJOBS={"PUSH_TIMEOUT": 20}):
        dispatch.forget_clients()
        yield
    dispatch.forget_clients()


def statements(captured: CaptureQueriesContext) -> list[str]:
    """Return the verbs of what was sent, without transaction control."""
    verbs = [query["sql"].split()[0].upper() for query in captured.captured_queries]
    return [verb for verb in verbs if verb in ("SELECT", "INSERT", "UPDATE", "DELETE")]


def kinds(outcomes: list[Any]) -> list[Kind]:
    return [outcome.kind for outcome in outcomes]


def nothing_in_redis() -> bool:
    """Tell whether neither RQ's database nor the cache's holds any key."""
    sizes = []
    for url in (settings.RQ_URL, settings.CACHE_URL):
        with redis.Redis.from_url(url) as client:
            sizes.append(client.dbsize())
    return sizes == [0, 0]


# ---- S-077


@pytest.mark.large
@committing
def test_ten_thousand_calls_with_duplicates_make_a_row_per_key_in_few_statements(
    transactional_db: None,
) -> None:
    """A tenth is in the table already, another tenth comes twice within the batch."""
    calls = [{"tag": f"key-{n}"} for n in range(9_000)]
    there = jobs.record_again.enqueue_many(calls[:1_000])
    calls += calls[1_000:2_000]
    with CaptureQueriesContext(connection) as captured:
        outcomes = jobs.record_again.enqueue_many(calls)
    assert kinds(there) == [Kind.CREATED] * 1_000
    assert kinds(outcomes) == (
        [Kind.DUPLICATE] * 1_000 + [Kind.CREATED] * 8_000 + [Kind.DUPLICATE] * 1_000
    )
    assert ProcessedJob.objects.count() == 9_000
    keys = [outcome.job.key for outcome in outcomes]
    assert keys == [f"again:{call['tag']}" for call in calls]
    assert [o.job.pk for o in outcomes[9_000:]] == [o.job.pk for o in outcomes[1_000:2_000]]
    sent = statements(captured)
    inserts = 8_000 / connection.ops.bulk_batch_size(
        [f for f in ProcessedJob._meta.concrete_fields if not f.primary_key],
        [None] * CHUNK,
    )
    most = PER_CHUNK * math.ceil(10_000 / CHUNK) + 2 * inserts
    assert len(sent) <= most, Counter(sent)


@committing
@pytest.mark.parametrize("inside", [False, True], ids=["autocommit", "in a transaction"])
def test_statements_do_not_grow_with_the_number_of_duplicates(
    transactional_db: None, inside: bool
) -> None:
    calls = [{"tag": f"key-{n}"} for n in range(100)]
    jobs.record_again.enqueue_many(calls)

    def count(batch: list[dict[str, Any]]) -> int:
        with CaptureQueriesContext(connection) as captured:
            if inside:
                with transaction.atomic():
                    jobs.record_again.enqueue_many(batch)
            else:
                jobs.record_again.enqueue_many(batch)
        return len(statements(captured))

    assert count(calls * 4) <= count(calls[:1]) + 2


# ---- each call is answered as if it had come alone


@pytest.mark.django_db
def test_outcomes_come_in_the_order_of_the_calls_whatever_the_order_of_the_keys() -> None:
    tags = ["delta", "alpha", "charlie", "alpha", "bravo", "delta"]
    outcomes = jobs.record.enqueue_many([{"tag": tag} for tag in tags])
    assert [outcome.job.key for outcome in outcomes] == [f"record:{tag}" for tag in tags]
    assert kinds(outcomes) == [
        *(Kind.CREATED, Kind.CREATED, Kind.CREATED),
        *(Kind.DUPLICATE, Kind.CREATED, Kind.DUPLICATE),
    ]
    assert all(outcome.error is None for outcome in outcomes)


@pytest.mark.django_db
def test_calls_on_keys_in_every_state_get_what_single_calls_get() -> None:
    def put(tag: str) -> ProcessedJob:
        return jobs.record.enqueue(tag=tag).job

    put("pending")
    claimed(put("running"))
    lifecycle.complete(claimed(put("succeeded")), "null", unique_for=registry.FOREVER)
    dead = put("dead")
    lifecycle.give_up(claimed(dead), on_dead="reopen", note=lifecycle.NO_NOTE)
    lifecycle.cancel(put("cancelled").pk, 0)
    lifecycle.hold(put("held").pk, 0)
    tags = ["held", "cancelled", "dead", "succeeded", "running", "pending", "absent", "dead"]
    outcomes = jobs.record.enqueue_many({"tag": tag} for tag in tags)
    assert kinds(outcomes) == [
        *(Kind.BLOCKED, Kind.CREATED, Kind.CREATED, Kind.REPLAYED),
        *(Kind.DUPLICATE, Kind.DUPLICATE, Kind.CREATED, Kind.DUPLICATE),
    ]
    assert job_row(dead).status == Status.PENDING


@pytest.mark.django_db
def test_mismatch_of_one_call_is_its_outcomes_error_and_hides_no_other() -> None:
    jobs.record.enqueue(tag="old", text="x")
    outcomes = jobs.record.enqueue_many(
        [
            {"tag": "new", "text": "x"},
            {"tag": "old", "text": "y"},
            {"tag": "new", "text": "y"},
            {"tag": "last", "text": "x"},
        ]
    )
    assert kinds(outcomes) == [Kind.CREATED, Kind.DUPLICATE, Kind.DUPLICATE, Kind.CREATED]
    assert [type(outcome.error) for outcome in outcomes] == [
        *(type(None), PayloadMismatch, PayloadMismatch, type(None)),
    ]
    mismatch = outcomes[1].error
    assert isinstance(mismatch, PayloadMismatch)
    assert mismatch.differing == ("text",)
    with pytest.raises(PayloadMismatch):
        outcomes[1].raise_for_conflict()
    assert run_pending() == 3


@pytest.mark.django_db
def test_conflict_under_raise_is_its_outcomes_error() -> None:
    outcomes = jobs.record_strict.enqueue_many([{"tag": "a"}, {"tag": "a"}, {"tag": "b"}])
    assert kinds(outcomes) == [Kind.CREATED, Kind.DUPLICATE, Kind.CREATED]
    assert isinstance(outcomes[1].error, JobConflict)
    assert [outcome.error for outcome in outcomes[::2]] == [None, None]


@pytest.mark.django_db
def test_newest_payload_of_a_batch_runs_under_replace_and_rerun() -> None:
    batch = [{"tag": "a", "text": text} for text in ("1", "2", "3")]
    assert kinds(jobs.replace.enqueue_many(batch)) == [
        *(Kind.CREATED, Kind.REPLACED, Kind.REPLACED),
    ]
    claim = claimed(jobs.keep_last.enqueue(tag="a", text="0").job)
    assert kinds(jobs.keep_last.enqueue_many(batch)) == [Kind.RERUN] * 3
    lifecycle.complete(claim, "null", unique_for=None)
    run_pending()
    assert sorted(Ledger.objects.values_list("note", flat=True)) == ["3", "3"]


@pytest.mark.django_db
def test_calls_without_a_key_are_all_created() -> None:
    outcomes = jobs.record_always.enqueue_many([{"tag": "a"}] * 3)
    assert kinds(outcomes) == [Kind.CREATED] * 3
    assert len({outcome.job.pk for outcome in outcomes}) == 3


@pytest.mark.django_db
def test_variant_of_a_job_enqueues_many_with_its_queue_and_due_time() -> None:
    later = jobs.record.using(queue_name="low", run_after=60)
    outcomes = later.enqueue_many([{"tag": "a"}, {"tag": "b"}])
    assert {o.job.queue for o in outcomes} == {"low"}
    assert run_pending() == 0


@pytest.mark.django_db
def test_empty_batch_is_answered_without_a_statement() -> None:
    with CaptureQueriesContext(connection) as captured:
        assert jobs.record.enqueue_many([]) == []
    assert statements(captured) == []


# ---- what is refused, before anything is written


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"tag": "b", "typo": 1}, TypeError, "typo"),
        ({}, TypeError, "tag"),
        ({"tag": ""}, KeyValueError, "tag"),
        ({"tag": "b", "text": {1, 2}}, ArgumentError, "text"),
        ({"tag": "b", "text": "x" * 70_000}, PayloadTooLarge, "MAX_PAYLOAD"),
        (("b",), ArgumentError, "takes dicts of keyword arguments, not tuple"),
        ("b", ArgumentError, "not str"),
        (None, ArgumentError, "not NoneType"),
    ],
    ids=str,
)
def test_wrong_call_among_right_ones_is_refused_before_anything_is_written(
    wrong: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        jobs.record.enqueue_many([{"tag": "a"}, wrong, {"tag": "c"}])
    assert not ProcessedJob.objects.exists()


@pytest.mark.django_db
def test_batch_for_a_queue_that_does_not_exist_is_refused_before_anything_is_written() -> None:
    with pytest.raises(UnknownQueue, match="nowhere"):
        jobs.record.using(queue_name="nowhere").enqueue_many([{"tag": "a"}])
    assert not ProcessedJob.objects.exists()


# ---- transactions


@committing
def test_batch_reaches_redis_only_at_the_outermost_commit(
    transactional_db: None, redis_client: redis.Redis, patient_push: None
) -> None:
    calls = [{"tag": f"key-{n}"} for n in range(120)]
    with transaction.atomic():
        with transaction.atomic():
            outcomes = jobs.record.enqueue_many(calls)
        assert nothing_in_redis()
    queued = [i.decode() for i in redis_client.lrange("rq:queue:default", 0, -1)]
    assert set(queued) == {outcome.job.dispatch_id for outcome in outcomes}
    assert len(queued) == 2, "a hundred rows share a message"


@committing
def test_duplicates_of_a_batch_reach_redis_only_at_the_outermost_commit(
    transactional_db: None, patient_push: None
) -> None:
    """A transaction that talks to Redis keeps its locks for as long as Redis takes."""
    with transaction.atomic():
        jobs.record.enqueue_many([{"tag": "a"}, {"tag": "a"}])
        assert nothing_in_redis()
    assert not nothing_in_redis()


@committing
def test_batch_that_is_rolled_back_leaves_nothing_and_can_be_made_again(
    transactional_db: None,
) -> None:
    calls = [{"tag": "a"}, {"tag": "b"}]
    with transaction.atomic():
        jobs.record.enqueue_many(calls)
        transaction.set_rollback(True)
    assert not ProcessedJob.objects.exists()
    assert nothing_in_redis()
    assert kinds(jobs.record.enqueue_many(calls)) == [Kind.CREATED] * 2


# ---- two batches at once


def _batch(reverse: bool, *, size: int = 600, text: str = "x") -> Callable[[], list[Kind]]:
    calls = [{"tag": f"key-{n}", "text": text} for n in range(size)]
    return lambda: kinds(jobs.record.enqueue_many(calls[::-1] if reverse else calls))


@committing
@pytest.mark.parametrize("inside", [False, True], ids=["autocommit", "in a transaction"])
def test_two_opposite_batches_at_once_make_one_row_a_key_and_no_deadlock(
    transactional_db: None, inside: bool
) -> None:
    def run(batch: Callable[[], list[Kind]]) -> Callable[[], list[Kind]]:
        def run_in_transaction() -> list[Kind]:
            with transaction.atomic():
                return batch()

        return run_in_transaction if inside else batch

    answers = race(run(_batch(False)), run(_batch(True)))
    assert [answer for answer in answers if isinstance(answer, Exception)] == []
    told = Counter(zip(answers[0], answers[1][::-1], strict=True))
    assert set(told) <= {(Kind.CREATED, Kind.DUPLICATE), (Kind.DUPLICATE, Kind.CREATED)}
    assert ProcessedJob.objects.count() == told.total() == 600


@committing
def test_opposite_batches_that_change_rows_in_transactions_do_not_deadlock(
    transactional_db: None,
) -> None:
    """New keys, rows to reopen and rows to replace, all mixed, and each transaction keeps locks."""
    calls = [{"tag": f"key-{n:02}", "text": "0"} for n in range(60)]
    for number, outcome in enumerate(jobs.replace.enqueue_many(calls[::2])):
        if number % 2:
            alter(outcome.job, status=Status.DEAD, attempts=1)

    def change(text: str, step: int) -> Callable[[], list[Kind]]:
        def change_in_transaction() -> list[Kind]:
            with transaction.atomic():
                batch = [{**call, "text": text} for call in calls[::step]]
                return kinds(jobs.replace.enqueue_many(batch))

        def repeat_if_told() -> list[Kind]:
            try:
                return change_in_transaction()
            except TransactionLost:
                assert connection.vendor == "mysql", "its gap locks are wider than the keys"
                return repeat_if_told()

        return repeat_if_told

    answers = race(change("1", 1), change("2", -1), change("3", 1))
    assert [answer for answer in answers if isinstance(answer, Exception)] == []
    assert {kind for answer in answers for kind in answer} == {Kind.CREATED, Kind.REPLACED}
    assert ProcessedJob.objects.count() == 60
    # All of the last one's payloads stay, since each transaction had locked what it changed.
    assert len(set(ProcessedJob.objects.values_list("args", flat=True))) == 60
    texts = {row.args.split('"text":')[1] for row in ProcessedJob.objects.all()}
    assert len(texts) == 1


@committing
def test_batch_against_single_calls_on_the_same_keys_creates_each_once(
    transactional_db: None,
) -> None:
    def single() -> list[Kind]:
        return [jobs.record.enqueue(tag=f"key-{n}", text="x").kind for n in range(60)]

    answers = race(_batch(True, size=60), single, _batch(False, size=60))
    assert [answer for answer in answers if isinstance(answer, Exception)] == []
    assert sum(answer.count(Kind.CREATED) for answer in answers) == 60
    ProcessedJob.objects.update(run_after=DbNow(-1))
    assert run_pending() == 60
    assert Ledger.objects.count() == 60
