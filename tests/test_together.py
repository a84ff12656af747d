"""A claim and an ending as one statement each: they write what the steps write, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import F

from dedupjobs import FOREVER, clock, job, lifecycle, operations
from dedupjobs.lifecycle import Claim, Note, Place, together
from dedupjobs.models import JobAttempt, ProcessedJob, Status
from tests import live, sessions
from tests.app import jobs
from tests.app.models import Ledger
from tests.live import deliver
from tests.rows import Held, Side, at, before_sql

pytestmark = pytest.mark.django_db(transaction=True)

PLACE = Place(host="h" * 300, pid=7, rq_id="r" * 300, lock_wait=0.25)
MOMENTS = {
    ProcessedJob: (
        "created_at",
        "started_at",
        "finished_at",
        "unique_until",
        "debounce_deadline",
    ),
    JobAttempt: ("lease_until", "beat_at", "claimed_at", "began_at", "ended_at"),
}


@job(key="leased:{tag}", unique_for=FOREVER, lease=600)
def leased_for_long(*, tag: str) -> None: ...


def claimed(row: ProcessedJob) -> Claim:
    claim = lifecycle.claim(row.pk, row.generation, owner=clock.token(), place=PLACE)
    assert claim is not None
    return claim


def both_ways(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[str], tuple[int, Any]]
) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """Return (answer, job's columns, attempt's columns) of the act in one statement, in steps."""
    found = []
    for tag, allowed in (("a", True), ("b", False)):
        monkeypatch.setattr(together, "allowed", allowed)
        pk, answer = act(tag)
        found.append((answer, *(columns(model, pk, tag) for model in (ProcessedJob, JobAttempt))))
    return found[0], found[1]


def columns(model: Any, pk: int, tag: str) -> dict[str, Any]:
    """Return the row's columns, with moments as whether they are there, without what is unique."""
    row = model.objects.get(**{"pk" if model is ProcessedJob else "job_id": pk})
    found = {f.attname: getattr(row, f.attname) for f in model._meta.concrete_fields}
    for name in ("id", "job_id", "owner", "key", "key_hash", "args", "fingerprint", "dispatch_id"):
        found.pop(name, None)
    for name in ("run_after", "enqueued_at", "dispatched_at", "queue_delay"):
        found.pop(name, None)
    return {n: v is not None if n in MOMENTS[model] else v for n, v in found.items()}


@pytest.mark.parametrize(
    "call",
    [
        lambda tag: jobs.record.enqueue(tag=tag),
        lambda tag: jobs.record.enqueue(tag="it's 100 % \u20ac " + tag),
        lambda tag: jobs.record.using(run_after=3600).enqueue(tag=tag),
        lambda tag: jobs.record.using(run_after=datetime(2400, 1, 1, tzinfo=UTC)).enqueue(tag=tag),
        lambda tag: jobs.debounced_slowly.enqueue(tag=tag, text="x"),
    ],
    ids=["plain", "odd", "later", "at", "debounced"],
)
def test_call_writes_and_answers_what_the_steps_do(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[str], Any]
) -> None:
    found = []
    for tag, allowed in (("a", True), ("b", False)):
        monkeypatch.setattr(together, "allowed", allowed)
        made, again = call(tag), call(tag)
        assert (made.created, again.job.pk) == (True, made.job.pk)
        known = {name for name in vars(made.job) if name[0] != "_"}
        seen = {name for name in vars(again.job) if name[0] != "_"}
        kept = columns(ProcessedJob, made.job.pk, tag)
        found.append((again.kind, known, seen, made.job.run_after.tzinfo, kept))
    assert found[0] == found[1]


@pytest.mark.parametrize("begins", [True, False])
def test_claim_writes_what_the_steps_write(monkeypatch: pytest.MonkeyPatch, begins: bool) -> None:
    def act(tag: str) -> tuple[int, Any]:
        row = jobs.record.enqueue(tag=tag).job
        claim = lifecycle.claim(row.pk, 1, owner=clock.token(), place=PLACE, begins=begins)
        assert claim is not None
        return row.pk, {
            name: getattr(claim, name)
            for name in Claim.__slots__
            if name not in ("job_pk", "fence", "owner", "key", "key_hash", "args", "queue_delay")
        }

    one, steps = both_ways(monkeypatch, act)
    assert one == steps


@pytest.mark.parametrize(
    ("unique_for", "result", "note"),
    [
        (FOREVER, "null", lifecycle.NO_NOTE),
        (None, '"x"', Note(run_time=1.5)),
        (timedelta(days=2), "[1]", Note(reason="it's 100 % \u20ac", run_time=0.0)),
    ],
)
def test_success_writes_what_the_steps_write(
    monkeypatch: pytest.MonkeyPatch, unique_for: Any, result: str, note: Note
) -> None:
    def act(tag: str) -> tuple[int, Any]:
        row = jobs.record.enqueue(tag=tag).job
        claim = claimed(row)
        return row.pk, lifecycle.complete(claim, result, unique_for=unique_for, note=note)

    one, steps = both_ways(monkeypatch, act)
    assert one == steps
    assert one[0] == Status.SUCCEEDED


def test_delay_and_lease_are_those_of_the_job() -> None:
    for specimen, lease in ((jobs.record, 60), (leased_for_long, 600)):
        row = specimen.enqueue(tag="a").job
        ProcessedJob.objects.filter(pk=row.pk).update(
            run_after=F("run_after") - timedelta(seconds=30),
            enqueued_at=F("enqueued_at") - timedelta(seconds=20),
        )
        claim = claimed(row)
        attempt = JobAttempt.objects.get(pk=claim.fence)
        assert claim.queue_delay == attempt.queue_delay
        assert 20 <= (claim.queue_delay or 0) < 30
        leased = (attempt.lease_until - attempt.beat_at).total_seconds()
        assert leased == pytest.approx(lease, abs=1)


def test_job_that_was_due_in_the_future_of_another_clock_has_no_negative_delay() -> None:
    row = jobs.record.enqueue(tag="a").job
    ProcessedJob.objects.filter(pk=row.pk).update(enqueued_at=F("enqueued_at") + timedelta(hours=1))
    assert claimed(row).queue_delay == 0


@pytest.mark.parametrize(
    "change",
    [
        {"status": Status.RUNNING},
        {"status": Status.SUCCEEDED},
        {"generation": 2},
        {"cancel_requested": True},
        {"hold_requested": True},
        {"run_after": datetime(2999, 1, 1, tzinfo=UTC)},
    ],
)
def test_claim_takes_nothing_that_is_not_its_own(change: dict[str, Any]) -> None:
    row = jobs.record.enqueue(tag="a").job
    ProcessedJob.objects.filter(pk=row.pk).update(**change)
    before = ProcessedJob.objects.values().get()
    assert lifecycle.claim(row.pk, 1, owner="o", place=PLACE) is None
    assert ProcessedJob.objects.values().get() == before
    assert not JobAttempt.objects.exists()


def test_attempt_that_can_not_be_made_leaves_the_job_waiting() -> None:
    first, second = (jobs.record.enqueue(tag=tag).job for tag in "ab")
    assert lifecycle.claim(first.pk, 1, owner="the same", place=PLACE) is not None
    with pytest.raises(Exception, match="dedupjobs_one_owner"):
        lifecycle.claim(second.pk, 1, owner="the same", place=PLACE)
    second.refresh_from_db()
    assert (second.status, second.attempts) == (Status.PENDING, 0)


def test_of_two_claims_at_once_one_wins() -> None:
    row = jobs.record.enqueue(tag="a").job
    with Held(row):
        sides = [Side(lifecycle.claim, row.pk, 1, owner=o, place=PLACE) for o in "ab"]
        sessions.until_one_waits()
    claims = [side.result() for side in sides]
    assert sorted(claim is None for claim in claims) == [False, True]
    assert JobAttempt.objects.count() == 1


def test_success_of_an_attempt_that_was_ended_by_another_writes_nothing() -> None:
    claim = claimed(jobs.record.enqueue(tag="a").job)
    assert lifecycle.bury(claim.fence, "gone") is not None
    before = [list(model.objects.values()) for model in (ProcessedJob, JobAttempt)]
    assert lifecycle.complete(claim, "1", unique_for=FOREVER) is None
    assert [list(model.objects.values()) for model in (ProcessedJob, JobAttempt)] == before


def test_request_that_waits_is_obeyed_step_by_step() -> None:
    row = jobs.keep_last.enqueue(tag="a", text="old").job
    claim = claimed(row)
    jobs.keep_last.enqueue(tag="a", text="new")
    with before_sql("UPDATE dedupjobs_jobattempt SET outcome", action=lambda: None):
        assert lifecycle.complete(claim, "1", unique_for=FOREVER) == Status.PENDING
    assert JobAttempt.objects.get().outcome == "SUCCEEDED"
    row.refresh_from_db()
    assert (row.status, row.generation, row.args) == (Status.PENDING, 2, row.args)


def test_request_that_commits_while_the_success_waits_for_it_is_not_lost() -> None:
    row = jobs.keep_last.enqueue(tag="a", text="old").job
    claim = claimed(row)

    def call() -> Any:
        with transaction.atomic():
            outcome = jobs.keep_last.enqueue(tag="a", text="new")
            sides.append(Side(lifecycle.complete, claim, "1", unique_for=FOREVER))
            sessions.until_one_waits()
        return outcome

    sides: list[Any] = []
    call()
    assert sides[0].result() == Status.PENDING
    row.refresh_from_db()
    assert (row.status, row.generation) == (Status.PENDING, 2)
    assert JobAttempt.objects.get().outcome == "SUCCEEDED"


def test_cancel_that_is_asked_meanwhile_meets_a_success() -> None:
    row = jobs.record.enqueue(tag="a").job
    claim = claimed(row)
    row.refresh_from_db()
    operations.cancel(row, by="op")
    assert lifecycle.complete(claim, "1", unique_for=FOREVER) == Status.SUCCEEDED
    row.refresh_from_db()
    assert (row.status, row.cancel_requested) == (Status.SUCCEEDED, False)


def test_inside_a_transaction_the_steps_go_one_by_one_and_break_nothing() -> None:
    row = jobs.keep_last.enqueue(tag="a", text="old").job
    claim = claimed(row)
    jobs.keep_last.enqueue(tag="a", text="new")
    with transaction.atomic():
        assert not together.serves_alone("default")
        assert lifecycle.complete(claim, "1", unique_for=FOREVER) == Status.PENDING
        assert ProcessedJob.objects.count() == 1  # the transaction takes more


# ---- a connection that breaks


@pytest.fixture
def reconnected(transactional_db: None) -> Any:
    """Let the connection be opened anew, so that a proxy gets it, and after the test again."""
    connection.close()
    yield
    connection.close()


@pytest.mark.parametrize("word", [b"WITH taken", b"WITH open"])
@pytest.mark.parametrize("reaches", [True, False])
def test_statement_without_a_reply_is_looked_for_or_sent_again(
    reconnected: None, word: bytes, reaches: bool
) -> None:
    row = jobs.record.enqueue(tag="a").job
    with live.through_proxy() as proxy:
        (proxy.swallow_reply_to if reaches else proxy.cut_before)(word)
        assert deliver(row) == Status.SUCCEEDED
        assert proxy.swallowed.is_set()
    assert JobAttempt.objects.get().outcome == "SUCCEEDED"
    assert Ledger.objects.count() == 1


@pytest.mark.parametrize("point", ["claim.before", "settle.before"])
def test_statement_whose_session_has_ended_is_sent_again(point: str) -> None:
    row = jobs.record.enqueue(tag="a").job
    own = sessions.own()
    with at(point, lambda: sessions.terminate(own)):
        assert deliver(row) == Status.SUCCEEDED
    assert JobAttempt.objects.get().outcome == "SUCCEEDED"
    assert Ledger.objects.count() == 1
