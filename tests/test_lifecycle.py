"""Every arrow of the design: where it leads, and each of its guards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext

from dedupjobs import clock, keys, lifecycle
from dedupjobs.clock import DbNow
from dedupjobs.coordinator import Coordinator
from dedupjobs.endings import Error
from dedupjobs.lifecycle import Claim, Note, Place
from dedupjobs.models import AttemptOutcome, JobAttempt, ProcessedJob, Status
from dedupjobs.registry import FOREVER
from dedupjobs.testing import frozen_clock
from tests.app import jobs
from tests.rows import (
    Held,
    Pause,
    Side,
    alter,
    alter_attempt,
    at,
    attempt_row,
    before_sql,
    claimed,
    expire,
    has_row_locks,
    job_row,
    race,
    snapshot,
    statements,
    until_blocked,
)
from tests.sessions import needs_row_locks
from tests.waiting import until

pytestmark = pytest.mark.django_db
committing = pytest.mark.django_db(transaction=True)

NOTE = Note(
    error=Error(type="builtins.ValueError", message="no luck", traceback="Traceback…"),
    reason="because",
    run_time=1.5,
)
RERUN = {"rerun_args": keys.encode({"tag": "new"}), "rerun_fingerprint": "f" * 64}
NO_REQUESTS = {"cancel_requested": False, "hold_requested": False}
BUDGETS_USED = {"failures": 2, "lost_count": 1}
PLACE = Place(host="here", pid=1)


class PlugPulledError(Exception):
    """Raised at a probe in place of the process's death."""


def pull_the_plug() -> None:
    raise PlugPulledError


@pytest.fixture
def row() -> ProcessedJob:
    """A pending job."""
    return jobs.record.enqueue(tag="a").job


@pytest.fixture
def claim(row: ProcessedJob) -> Claim:
    """The claim of a running job whose code has begun."""
    return claimed(row)


def claim_again(row: ProcessedJob) -> Claim | None:
    """Try to claim as another delivery would."""
    return lifecycle.claim(row.pk, job_row(row).generation, owner=clock.token(), place=PLACE)


# ---- claim


def test_claim_of_a_pending_job_makes_it_run_and_opens_an_attempt(row: ProcessedJob) -> None:
    claim = lifecycle.claim(
        row.pk, 1, owner="me", place=Place(host="h", pid=7, rq_id=row.dispatch_id or "")
    )
    assert claim is not None
    job, attempt = job_row(row), attempt_row(claim)
    assert (job.status, job.attempts, job.version) == (Status.RUNNING, 1, row.version + 1)
    assert (attempt.number, attempt.generation, attempt.outcome) == (1, 1, None)
    assert (attempt.owner, attempt.host, attempt.pid) == ("me", "h", 7)
    assert attempt.rq_id == row.dispatch_id
    assert (claim.fence, claim.number, claim.args) == (attempt.pk, 1, row.args)
    assert attempt.lease_until - attempt.beat_at == pytest.approx(
        timedelta(seconds=60), abs=timedelta(seconds=1)
    )
    assert attempt.began_at is not None


def test_claim_of_a_retrying_job_that_is_due_makes_it_run(row: ProcessedJob) -> None:
    alter(row, status=Status.RETRYING, attempts=4)
    assert claimed(row).number == 5


@pytest.mark.parametrize("status", [s for s in Status if s not in ("PENDING", "RETRYING")])
def test_claim_of_a_job_that_does_not_wait_takes_nothing(row: ProcessedJob, status: Status) -> None:
    alter(row, status=status)
    before = snapshot()
    assert claim_again(row) is None
    assert snapshot() == before


def test_claim_of_a_running_job_whose_lease_is_over_takes_nothing(claim: Claim) -> None:
    expire(claim)
    assert lifecycle.claim(claim.job_pk, 1, owner="other", place=PLACE) is None
    assert JobAttempt.objects.count() == 1


@pytest.mark.parametrize("status", ["PENDING", "RETRYING"])
def test_claim_before_the_due_time_takes_nothing(row: ProcessedJob, status: str) -> None:
    alter(row, status=status, run_after=DbNow(30))
    assert claim_again(row) is None
    alter(row, run_after=DbNow(-0.1))
    assert claim_again(row) is not None


@pytest.mark.parametrize("generation", [1, 3])
def test_claim_with_another_generation_takes_nothing(row: ProcessedJob, generation: int) -> None:
    alter(row, generation=2)
    assert lifecycle.claim(row.pk, generation, owner="me", place=PLACE) is None
    assert JobAttempt.objects.count() == 0


@pytest.mark.parametrize("request_", ["cancel_requested", "hold_requested"])
def test_claim_while_a_request_waits_takes_nothing(row: ProcessedJob, request_: str) -> None:
    alter(row, **{request_: True})
    assert claim_again(row) is None
    alter(row, **NO_REQUESTS)
    assert claim_again(row) is not None


def test_claim_whose_attempt_can_not_be_inserted_leaves_the_job_waiting(row: ProcessedJob) -> None:
    claimed(jobs.record.enqueue(tag="b").job, owner="twice")
    with pytest.raises(IntegrityError), transaction.atomic():
        lifecycle.claim(row.pk, 1, owner="twice", place=PLACE)
    assert (job_row(row).status, job_row(row).attempts) == (Status.PENDING, 0)


@pytest.mark.parametrize("point", ["claim.before", "claim.uncommitted"])
def test_claim_that_dies_before_its_commit_leaves_the_job_waiting(
    row: ProcessedJob, point: str
) -> None:
    before = snapshot()
    with at(point, pull_the_plug), pytest.raises(PlugPulledError):
        lifecycle.claim(row.pk, 1, owner="me", place=PLACE)
    assert snapshot() == before


def test_claim_numbers_attempts_and_its_fence_grows_even_after_a_prune(row: ProcessedJob) -> None:
    fences = []
    for number in range(1, 5):
        claim = claimed(row)
        assert claim.number == number
        fences.append(claim.fence)
        lifecycle.snooze(claim, after=0)
        if number == 2:
            JobAttempt.objects.all().delete()
    assert fences == sorted(set(fences))


@committing
def test_claim_that_waited_for_a_new_payload_runs_the_new_payload(transactional_db: None) -> None:
    row = jobs.record.enqueue(tag="a", text="old").job
    new = keys.encode({"tag": "a", "text": "new"})
    with Held(row, args=new, version=row.version + 1) as other:
        claimer = Side(lifecycle.claim, row.pk, 1, owner="me", place=PLACE)
        until_blocked(claimer)
        other.commit()
        assert claimer.result().args == new


@committing
def test_claim_that_waited_for_a_cancellation_takes_nothing(transactional_db: None) -> None:
    row = jobs.record.enqueue(tag="a").job
    with Held(row, status=Status.CANCELLED) as other:
        claimer = Side(lifecycle.claim, row.pk, 1, owner="me", place=PLACE)
        until_blocked(claimer)
        other.commit()
        assert claimer.result() is None
    assert JobAttempt.objects.count() == 0


@committing
def test_claim_by_eight_at_once_is_won_by_one(transactional_db: None) -> None:
    row = jobs.record.enqueue(tag="a").job
    claims = race(*[lambda: claim_again(row)] * 8)
    assert sorted(c is not None for c in claims) == [False] * 7 + [True]
    assert JobAttempt.objects.count() == 1


def test_claim_and_settle_cost_few_statements_in_the_order_that_locks_demand(
    row: ProcessedJob,
) -> None:
    with CaptureQueriesContext(connection) as captured:
        claim = lifecycle.claim(row.pk, 1, owner="me", place=PLACE)
        assert claim is not None
        lifecycle.complete(claim, "null", unique_for=FOREVER)
    asked = ["SELECT job"] if connection.vendor == "mysql" else []  # its UPDATE returns no row
    assert statements(captured) == [
        "UPDATE job",  # the row is won, and its arguments are read,
        *asked,
        "INSERT attempt",  # and the fence is issued after that
        "UPDATE attempt",
        "UPDATE job",
    ]


def test_claim_by_owner_is_found_while_open_and_only_then(row: ProcessedJob) -> None:
    claim = claimed(row, owner="0a")
    assert lifecycle.claimed_by("0a") == [claim]
    assert lifecycle.claimed_by("0") == []
    assert lifecycle.claimed_by("0ab") == []
    lifecycle.snooze(claim, after=0)
    assert lifecycle.claimed_by("0a") == []


def test_claims_of_one_delivery_are_found_by_its_owner_in_pk_order(row: ProcessedJob) -> None:
    first = claimed(row, owner="0a.0")
    second = claimed(jobs.record.enqueue(tag="b").job, owner="0a.1")
    claimed(jobs.record.enqueue(tag="c").job, owner="0ab.0")
    assert lifecycle.claimed_by("0a") == [first, second]


# ---- begin


def test_begin_of_an_open_attempt_is_written_once(row: ProcessedJob) -> None:
    claim = claimed(row, begins=False)
    assert attempt_row(claim).began_at is None
    assert lifecycle.begin(claim) is True
    began_at = attempt_row(claim).began_at
    assert began_at is not None
    assert lifecycle.begin(claim) is False
    assert attempt_row(claim).began_at == began_at


def test_begin_of_an_attempt_that_was_reclaimed_is_refused(row: ProcessedJob) -> None:
    claim = claimed(row, begins=False)
    lifecycle.bury(claim.fence, "dead")
    assert lifecycle.begin(claim) is False
    assert attempt_row(claim).began_at is None


# ---- beat


@frozen_clock()
def test_beat_renews_the_lease_and_writes_progress_and_activity(claim: Claim) -> None:
    expire(claim)
    pulse = lifecycle.beat(claim.fence, lease=30, progress="[1, 2, null]", active=20)
    attempt, now = attempt_row(claim), lifecycle.database_now()
    assert pulse == lifecycle.Pulse()
    assert attempt.lease_until > now + timedelta(seconds=25)
    assert now - attempt.beat_at < timedelta(seconds=5)
    assert attempt.progress == "[1, 2, null]"
    assert attempt.active_at is not None
    assert timedelta(seconds=15) < now - attempt.active_at < timedelta(seconds=25)


def test_beat_without_news_keeps_the_progress(claim: Claim) -> None:
    alter_attempt(claim, progress="[1, 2, null]")
    lifecycle.beat(claim.fence, lease=30)
    assert attempt_row(claim).progress == "[1, 2, null]"


@pytest.mark.parametrize("outcome", AttemptOutcome.values)
def test_beat_of_an_ended_attempt_writes_nothing_and_says_whose_ending_it_was(
    claim: Claim, outcome: str
) -> None:
    alter_attempt(claim, outcome=outcome)
    before = snapshot()
    pulse = lifecycle.beat(claim.fence, lease=30, progress="[2, 2, null]")
    assert snapshot() == before
    assert pulse.over
    assert pulse.lost is (outcome in ("LOST", "RETURNED"))


@pytest.mark.parametrize("asked", [{"cancel_requested": True}, {"hold_requested": True}])
def test_beat_brings_what_an_operator_has_asked_for(claim: Claim, asked: dict[str, bool]) -> None:
    alter(claim, **asked)
    pulse = lifecycle.beat(claim.fence, lease=30)
    assert (pulse.cancel, pulse.hold) == ("cancel_requested" in asked, "hold_requested" in asked)


@needs_row_locks
@committing
@pytest.mark.usefixtures("step_by_step")
def test_beat_on_an_attempt_that_is_locked_does_not_wait_and_sees_it_alive(
    transactional_db: None,
) -> None:
    claim = claimed(jobs.record.enqueue(tag="a").job)
    with Pause("settle.uncommitted") as pause:
        settling = Side(lifecycle.complete, claim, "null", unique_for=FOREVER)
        pause.wait()
        beating = Side(lifecycle.beat, claim.fence, lease=30)
        assert beating.result(15) == lifecycle.Pulse()
        pause.go_on()
        assert settling.result() == Status.SUCCEEDED
    assert lifecycle.beat(claim.fence, lease=30) == lifecycle.Pulse(over=True)


@committing
def test_beat_against_a_reclaim_that_is_about_to_commit_learns_that_the_lease_is_lost(
    transactional_db: None,
) -> None:
    claim = claimed(jobs.record.enqueue(tag="a").job)
    beat_at = expire(claim)
    with Pause("reclaim.uncommitted") as pause:
        reclaiming = Side(lifecycle.reclaim, claim.fence, beat_at=beat_at, ahead_of=None, reason="")
        pause.wait()
        beating = Side(lifecycle.beat, claim.fence, lease=30)
        if has_row_locks:
            assert beating.result(15) == lifecycle.Pulse()  # not visible yet
        pause.go_on()
        assert reclaiming.result().outcome == "LOST"
        beating.result()
    assert lifecycle.beat(claim.fence, lease=30).lost
    assert attempt_row(claim).beat_at == beat_at


# ---- the endings: where each leads

ENDINGS: dict[str, Callable[[Claim], Status | None]] = {
    "complete": lambda c: lifecycle.complete(c, '"done"', unique_for=FOREVER, note=NOTE),
    "fail": lambda c: lifecycle.fail(c, after=60, note=NOTE),
    "give_up": lambda c: lifecycle.give_up(c, on_dead="reopen", note=NOTE),
    "give_up and block": lambda c: lifecycle.give_up(c, on_dead="block", note=NOTE),
    "snooze": lambda c: lifecycle.snooze(c, after=60, note=NOTE),
    "interrupt": lambda c: lifecycle.interrupt(c, on_lost="retry", note=NOTE),
    "interrupt and hold": lambda c: lifecycle.interrupt(c, on_lost="hold", note=NOTE),
    "unclaim": lambda c: lifecycle.unclaim(c, NOTE),
    "stop": lambda c: lifecycle.stop(c, requested=False, note=NOTE),
    "stop on request": lambda c: lifecycle.stop(c, requested=True, note=NOTE),
    "park": lambda c: lifecycle.park(c, "does not fit", NOTE),
}
every_ending = pytest.mark.parametrize("name", ENDINGS)


def claim_for(ending: str, row: ProcessedJob) -> Claim:
    """Claim so that the ending is allowed: unclaim is for code that never began."""
    return claimed(row, begins=ending != "unclaim")


@pytest.mark.parametrize(
    ("name", "status", "outcome", "failures"),
    [
        ("complete", "SUCCEEDED", "SUCCEEDED", 1),
        ("fail", "RETRYING", "FAILED", 2),
        ("give_up", "DEAD", "FAILED", 2),
        ("give_up and block", "DEAD", "FAILED", 2),
        ("snooze", "RETRYING", "SNOOZED", 1),
        ("interrupt", "PENDING", "INTERRUPTED", 1),
        ("interrupt and hold", "HELD", "INTERRUPTED", 1),
        ("unclaim", "PENDING", "RETURNED", 1),
        ("stop", "CANCELLED", "CANCELLED", 1),
        ("stop on request", "CANCELLED", "CANCELLED", 1),
        ("park", "HELD", "HELD", 1),
    ],
)
def test_ending_writes_attempt_and_job_and_counts_only_failures(
    row: ProcessedJob, name: str, status: str, outcome: str, failures: int
) -> None:
    alter(row, failures=1, lost_count=1, error_class="shop.Old")
    claim = claim_for(name, row)
    version = job_row(row).version
    assert ENDINGS[name](claim) == status
    job, attempt = job_row(row), attempt_row(claim)
    assert (job.status, job.failures, job.lost_count) == (status, failures, 1)
    last_failure = "builtins.ValueError" if failures > 1 else "shop.Old"
    assert job.error_class == ("" if status == "SUCCEEDED" else last_failure)
    assert (job.generation, job.attempts, job.version) == (1, 1, version + 1)
    assert (attempt.outcome, attempt.reason, attempt.run_time) == (outcome, "because", 1.5)
    assert (attempt.error_class, attempt.error_message) == ("builtins.ValueError", "no luck")
    assert attempt.ended_at is not None
    assert (job.finished_at is not None) is (status in ("SUCCEEDED", "DEAD", "CANCELLED"))


@pytest.mark.parametrize("name", ["fail", "snooze", "interrupt", "unclaim"])
def test_ending_that_makes_the_job_wait_again_forgets_its_message_and_sets_the_due_time(
    row: ProcessedJob, name: str
) -> None:
    claim = claim_for(name, row)
    ENDINGS[name](claim)
    job = job_row(row)
    assert (job.dispatch_id, job.dispatched_at) == (None, None)
    wait = 60 if name in ("fail", "snooze") else 0
    due = (job.run_after - lifecycle.database_now()).total_seconds()
    assert wait - 10 < due <= wait


@pytest.mark.parametrize("arrow", [lifecycle.fail, lifecycle.give_up])
def test_ending_by_time_out_is_recorded_as_such(claim: Claim, arrow: Any) -> None:
    extra = {"after": 1} if arrow is lifecycle.fail else {"on_dead": "reopen"}
    arrow(claim, note=NOTE, timed_out=True, **extra)
    assert attempt_row(claim).outcome == "TIMED_OUT"
    assert job_row(claim).error == "builtins.ValueError: no luck"


@pytest.mark.parametrize("name", ["complete", "give_up", "give_up and block", "stop", "park"])
def test_ending_that_settles_the_matter_clears_requests(row: ProcessedJob, name: str) -> None:
    claim = claim_for(name, row)
    alter(row, cancel_requested=True, hold_requested=True)
    assert ENDINGS[name](claim) is not None
    job = job_row(row)
    assert (job.cancel_requested, job.hold_requested) == (False, False)


@pytest.mark.parametrize(
    ("unique_for", "seconds"), [(FOREVER, None), (timedelta(hours=1), 3600), (None, 0)]
)
def test_complete_stores_the_result_and_holds_the_key_from_now(
    claim: Claim, unique_for: timedelta | None, seconds: int | None
) -> None:
    alter(claim, error="of an earlier attempt")
    lifecycle.complete(claim, '{"a":1}', unique_for=unique_for)
    job = job_row(claim)
    assert (job.result, job.error) == ('{"a":1}', "")
    if seconds is None:
        assert job.unique_until is None
    else:
        assert job.unique_until is not None
        held = (job.unique_until - lifecycle.database_now()).total_seconds()
        assert seconds - 10 < held <= seconds


def test_interrupt_of_code_that_never_began_waits_again_although_the_job_is_held_when_lost(
    row: ProcessedJob,
) -> None:
    claim = claimed(row, begins=False)
    assert lifecycle.interrupt(claim, on_lost="hold") == Status.PENDING


def test_unclaim_of_code_that_has_begun_writes_nothing(claim: Claim) -> None:
    before = snapshot()
    assert lifecycle.unclaim(claim) is None
    assert snapshot() == before


def test_unclaim_after_a_late_begin_writes_nothing(row: ProcessedJob) -> None:
    claim = claimed(row, begins=False)
    assert lifecycle.begin(claim)
    before = snapshot()
    assert lifecycle.unclaim(claim) is None
    assert snapshot() == before


# ---- the endings: the door that each passes


@every_ending
@pytest.mark.parametrize("rerun", [{}, RERUN], ids=["alone", "rerun waits"])
def test_ending_of_an_attempt_that_has_ended_writes_nothing(
    row: ProcessedJob, name: str, rerun: dict[str, Any]
) -> None:
    claim = claim_for(name, row)
    alter(row, **rerun)
    alter_attempt(claim, outcome="SNOOZED", reason="earlier")
    before = snapshot()
    assert ENDINGS[name](claim) is None
    assert snapshot() == before


@every_ending
@pytest.mark.parametrize("rerun", [{}, RERUN], ids=["alone", "rerun waits"])
def test_ending_of_a_job_that_has_a_newer_attempt_writes_nothing(
    row: ProcessedJob, name: str, rerun: dict[str, Any]
) -> None:
    claim = claim_for(name, row)
    alter(row, attempts=2, **rerun)
    before = snapshot()
    assert ENDINGS[name](claim) is None
    assert snapshot() == before


@every_ending
@pytest.mark.parametrize(
    "asked", [{}, {"cancel_requested": True}, RERUN], ids=["alone", "cancel waits", "rerun waits"]
)
def test_ending_of_a_job_that_does_not_run_writes_nothing(
    row: ProcessedJob, name: str, asked: dict[str, Any]
) -> None:
    claim = claim_for(name, row)
    for status in set(Status) - {Status.RUNNING}:
        alter(row, status=status, **asked)
        before = snapshot()
        assert ENDINGS[name](claim) is None, status
        assert snapshot() == before, status


@every_ending
def test_ending_locks_the_attempt_before_the_job(row: ProcessedJob, name: str) -> None:
    claim = claim_for(name, row)
    with CaptureQueriesContext(connection) as captured:
        ENDINGS[name](claim)
    assert statements(captured) == ["UPDATE attempt", "UPDATE job"]


@every_ending
def test_ending_that_dies_before_its_commit_leaves_nothing(row: ProcessedJob, name: str) -> None:
    claim = claim_for(name, row)
    before = snapshot()
    for point in ("settle.before", "settle.between", "settle.uncommitted"):
        with at(point, pull_the_plug), pytest.raises(PlugPulledError):
            ENDINGS[name](claim)
        assert snapshot() == before, point


@committing
def test_complete_twice_at_once_is_written_once(transactional_db: None) -> None:
    claim = claimed(jobs.record.enqueue(tag="a").job)
    complete = ENDINGS["complete"]
    answers = race(*[lambda: complete(claim)] * 4)
    assert sorted(answers, key=str) == [None, None, None, Status.SUCCEEDED]


# ---- a rerun that waits


@pytest.mark.parametrize("name", ["complete", "give_up", "stop"])
def test_ending_with_a_rerun_waiting_runs_it_next_in_a_new_generation_with_fresh_budgets(
    row: ProcessedJob, name: str
) -> None:
    claim = claim_for(name, row)
    job = alter(row, error="old", **RERUN, **BUDGETS_USED)
    assert ENDINGS[name](claim) == Status.PENDING
    assert attempt_row(claim).outcome is not None
    taken = job_row(row)
    assert (taken.status, taken.generation, taken.version) == ("PENDING", 2, job.version + 1)
    assert (taken.args, taken.fingerprint) == (RERUN["rerun_args"], RERUN["rerun_fingerprint"])
    assert (taken.rerun_args, taken.rerun_fingerprint) == (None, None)
    assert (taken.failures, taken.lost_count, taken.error) == (0, 0, "")
    assert (taken.dispatch_id, taken.dispatched_at, taken.finished_at) == (None, None, None)
    assert (taken.cancel_requested, taken.hold_requested) == (False, False)
    assert claimed(row).args == RERUN["rerun_args"]


def test_complete_with_a_rerun_waiting_clears_requests(claim: Claim) -> None:
    alter(claim, hold_requested=True, **RERUN)
    assert ENDINGS["complete"](claim) == Status.PENDING
    assert job_row(claim).hold_requested is False


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("give_up and block", "DEAD"),
        ("fail", "RETRYING"),
        ("snooze", "RETRYING"),
        ("interrupt", "PENDING"),
        ("interrupt and hold", "HELD"),
        ("unclaim", "PENDING"),
        ("park", "HELD"),
    ],
)
def test_ending_that_is_not_final_or_blocks_keeps_the_waiting_rerun(
    row: ProcessedJob, name: str, status: str
) -> None:
    claim = claim_for(name, row)
    alter(row, **RERUN)
    assert ENDINGS[name](claim) == status
    job = job_row(row)
    assert (job.generation, job.args) == (1, row.args)
    assert (job.rerun_args, job.rerun_fingerprint) == tuple(RERUN.values())


def test_stop_on_request_drops_the_waiting_rerun_and_says_so(claim: Claim) -> None:
    alter(claim, cancel_requested=True, **RERUN)
    assert ENDINGS["stop on request"](claim) == Status.CANCELLED
    job = job_row(claim)
    assert (job.rerun_args, job.rerun_fingerprint, job.generation) == (None, None, 1)
    assert "rerun was dropped" in job.error
    assert (job.cancel_requested, job.hold_requested) == (False, False)


def test_stop_on_request_without_a_rerun_names_none(claim: Claim) -> None:
    ENDINGS["stop on request"](claim)
    assert job_row(claim).error == "cancelled on request"


@committing
def test_complete_that_meets_a_rerun_at_the_last_moment_takes_it_up(transactional_db: None) -> None:
    claim = claimed(jobs.record.enqueue(tag="a").job)
    with Pause("settle.before") as pause:
        completing = Side(ENDINGS["complete"], claim)
        pause.wait()
        alter(claim, **RERUN)
        pause.go_on()
        assert completing.result() == Status.PENDING
    assert job_row(claim).args == RERUN["rerun_args"]


# ---- requests


WAITING_ENDINGS = ["fail", "snooze", "interrupt", "unclaim"]


@pytest.mark.parametrize("name", WAITING_ENDINGS)
@pytest.mark.parametrize(
    ("cancel", "hold", "status"),
    [(True, False, "CANCELLED"), (False, True, "HELD"), (True, True, "CANCELLED")],
    ids=["cancel", "hold", "both"],
)
def test_ending_obeys_a_request_instead_of_waiting_again(
    row: ProcessedJob, name: str, cancel: bool, hold: bool, status: str
) -> None:
    claim = claim_for(name, row)
    alter(row, cancel_requested=cancel, hold_requested=hold)
    assert ENDINGS[name](claim) == status
    job = job_row(row)
    assert (job.status, job.cancel_requested, job.hold_requested) == (status, False, False)
    assert job.failures == (1 if name == "fail" else 0)
    assert (job.finished_at is not None) is (status == "CANCELLED")
    assert "on request" in job.error
    assert attempt_row(claim).outcome is not None


@pytest.mark.parametrize("name", WAITING_ENDINGS)
def test_ending_that_obeys_a_cancel_drops_the_waiting_rerun_and_says_so(
    row: ProcessedJob, name: str
) -> None:
    claim = claim_for(name, row)
    alter(row, cancel_requested=True, **RERUN)
    assert ENDINGS[name](claim) == Status.CANCELLED
    assert job_row(row).rerun_args is None
    assert "rerun was dropped" in job_row(row).error


@pytest.mark.parametrize("name", WAITING_ENDINGS)
def test_ending_that_obeys_a_hold_keeps_the_waiting_rerun(row: ProcessedJob, name: str) -> None:
    claim = claim_for(name, row)
    alter(row, hold_requested=True, **RERUN)
    assert ENDINGS[name](claim) == Status.HELD
    assert job_row(row).rerun_args == RERUN["rerun_args"]


# ---- COMMIT without a reply, and late endings


def test_outcome_of_an_open_attempt_is_none_and_of_an_ended_one_its_ending(claim: Claim) -> None:
    assert lifecycle.outcome_of(claim.fence) is None
    ENDINGS["snooze"](claim)
    assert lifecycle.outcome_of(claim.fence) == "SNOOZED"


@committing
@pytest.mark.usefixtures("step_by_step")
def test_outcome_of_an_attempt_whose_ending_is_about_to_commit_waits_for_it(
    transactional_db: None,
) -> None:
    claim = claimed(jobs.record.enqueue(tag="a").job)
    with Pause("settle.uncommitted") as pause:
        settling = Side(ENDINGS["complete"], claim)
        pause.wait()
        asking = Side(lifecycle.outcome_of, claim.fence)
        until_blocked(asking)
        pause.go_on()
        assert asking.result() == "SUCCEEDED"
        settling.result()


def test_note_of_a_late_ending_leaves_the_outcome_and_is_written_once(claim: Claim) -> None:
    lifecycle.bury(claim.fence, "dead")
    lifecycle.note_late(claim.fence, AttemptOutcome.SUCCEEDED)
    lifecycle.note_late(claim.fence, AttemptOutcome.FAILED)
    attempt = attempt_row(claim)
    assert (attempt.outcome, attempt.late_ending) == ("LOST", "SUCCEEDED")


def test_note_of_a_late_ending_on_an_open_attempt_writes_nothing(claim: Claim) -> None:
    lifecycle.note_late(claim.fence, AttemptOutcome.SUCCEEDED)
    assert attempt_row(claim).late_ending == ""


# ---- bury


def test_bury_takes_a_live_lease_and_counts_the_loss(claim: Claim) -> None:
    version = job_row(claim).version
    lost = lifecycle.bury(claim.fence, "its horse was killed")
    assert lost is not None
    assert (lost.outcome, lost.status, lost.job_pk) == ("LOST", "RETRYING", claim.job_pk)
    job, attempt = job_row(claim), attempt_row(claim)
    assert (attempt.outcome, attempt.reason) == ("LOST", "its horse was killed")
    assert attempt.ended_at is not None
    assert (job.status, job.lost_count, job.failures) == ("RETRYING", 1, 0)
    assert (job.dispatch_id, job.dispatched_at, job.version) == (None, None, version + 1)
    assert job.run_after <= lifecycle.database_now()


def test_bury_of_code_that_never_began_costs_nothing(row: ProcessedJob) -> None:
    alter(row, lost_count=2)
    claim = claimed(row, begins=False)
    lost = lifecycle.bury(claim.fence, "")
    assert lost is not None
    assert (lost.outcome, lost.status) == ("RETURNED", "RETRYING")
    assert job_row(row).lost_count == 2


@every_ending
def test_bury_after_an_ending_writes_nothing(row: ProcessedJob, name: str) -> None:
    claim = claim_for(name, row)
    ENDINGS[name](claim)
    before = snapshot()
    assert lifecycle.bury(claim.fence, "") is None
    assert snapshot() == before


@every_ending
def test_ending_after_a_bury_writes_nothing(row: ProcessedJob, name: str) -> None:
    claim = claim_for(name, row)
    lifecycle.bury(claim.fence, "dead")
    before = snapshot()
    assert ENDINGS[name](claim) is None
    assert snapshot() == before


@every_ending
def test_ending_of_the_first_attempt_while_the_second_runs_writes_nothing(
    row: ProcessedJob, name: str
) -> None:
    first = claim_for(name, row)
    lifecycle.bury(first.fence, "dead")
    second = claimed(row)
    before = snapshot()
    assert ENDINGS[name](first) is None
    assert snapshot() == before
    assert ENDINGS["complete"](second) == Status.SUCCEEDED


# ---- reclaim


def reclaim(claim: Claim, **changes: Any) -> lifecycle.Lost | None:
    """Reclaim as a coordinator does that has just read the attempt."""
    facts = {"beat_at": attempt_row(claim).beat_at, "ahead_of": None, "reason": "no heartbeat"}
    return lifecycle.reclaim(claim.fence, **(facts | changes))


def test_reclaim_of_an_expired_attempt_makes_the_job_due_at_once(claim: Claim) -> None:
    expire(claim)
    lost = reclaim(claim)
    assert lost is not None
    assert (lost.outcome, lost.status) == ("LOST", "RETRYING")
    job = job_row(claim)
    assert (job.status, job.lost_count, job.failures, job.error) == (
        "RETRYING",
        1,
        0,
        "no heartbeat",
    )
    assert claimed(job).number == 2


def test_reclaim_of_a_lease_that_lives_writes_nothing(claim: Claim) -> None:
    before = snapshot()
    assert reclaim(claim) is None
    assert snapshot() == before


def test_reclaim_of_an_attempt_that_has_beaten_since_it_was_watched_writes_nothing(
    claim: Claim,
) -> None:
    watched = expire(claim)
    # A beat whose new lease is over as well: only the other witness can save it.
    alter_attempt(claim, beat_at=watched + timedelta(seconds=1))
    before = snapshot()
    assert reclaim(claim, beat_at=watched) is None
    assert snapshot() == before


def test_reclaim_that_lost_against_a_beat_between_its_look_and_its_update_writes_nothing(
    claim: Claim,
) -> None:
    beat_at = expire(claim)

    def renew() -> None:  # where no row lock protects the look, as on a database without any
        alter_attempt(claim, lease_until=DbNow(60))

    with before_sql("UPDATE dedupjobs_jobattempt", "reason", action=renew):
        assert reclaim(claim, beat_at=beat_at) is None
    assert attempt_row(claim).outcome is None
    assert job_row(claim).status == Status.RUNNING


@pytest.mark.parametrize(("ahead_of", "taken"), [(None, False), (7200.0, False), (60.0, True)])
def test_reclaim_of_a_lease_too_far_ahead_takes_only_what_no_right_clock_has_written(
    claim: Claim, ahead_of: float | None, taken: bool
) -> None:
    alter_attempt(claim, lease_until=DbNow(3600))
    assert (reclaim(claim, ahead_of=ahead_of) is not None) is taken
    assert attempt_row(claim).outcome == ("LOST" if taken else None)


def test_reclaim_of_an_attempt_that_has_ended_writes_nothing(claim: Claim) -> None:
    expire(claim)
    alter_attempt(claim, outcome="INTERRUPTED")
    before = snapshot()
    assert reclaim(claim) is None
    assert snapshot() == before


def test_reclaim_of_code_that_never_began_costs_nothing(row: ProcessedJob) -> None:
    alter(row, lost_count=2)
    claim = claimed(row, begins=False)
    expire(claim)
    lost = reclaim(claim)
    assert lost is not None
    assert (lost.outcome, lost.status) == ("RETURNED", "RETRYING")
    assert (attempt_row(claim).outcome, job_row(row).lost_count) == ("RETURNED", 2)


@pytest.mark.parametrize(
    ("newer", "job_status"),
    [({"attempts": 2}, "RUNNING"), ({"status": Status.PENDING}, "PENDING")],
    ids=["newer attempt", "not running"],
)
def test_reclaim_of_an_attempt_that_is_not_the_jobs_own_leaves_the_job(
    claim: Claim, newer: dict[str, Any], job_status: str
) -> None:
    alter(claim, **newer)
    expire(claim)
    before = job_row(claim)
    reclaim(claim)
    after = job_row(claim)
    assert (after.status, after.version) == (job_status, before.version)


def test_reclaim_that_uses_up_the_budget_makes_the_job_dead(row: ProcessedJob) -> None:
    for number, status in enumerate(["RETRYING", "RETRYING", "DEAD"], 1):
        claim = claimed(row)
        expire(claim)
        lost = reclaim(claim)
        assert lost is not None
        assert (lost.status, job_row(row).lost_count) == (status, number)
    assert job_row(row).finished_at is not None


def test_reclaim_that_makes_the_job_dead_takes_up_a_waiting_rerun(claim: Claim) -> None:
    alter(claim, lost_count=2, **RERUN)
    expire(claim)
    assert reclaim(claim).status == Status.PENDING
    job = job_row(claim)
    assert (job.generation, job.args, job.lost_count) == (2, RERUN["rerun_args"], 0)


def test_reclaim_that_makes_a_blocking_job_dead_keeps_the_waiting_rerun() -> None:
    claim = claimed(jobs.fail_and_block.enqueue(tag="a").job)
    alter(claim, lost_count=2, **RERUN)
    expire(claim)
    assert reclaim(claim).status == Status.DEAD
    assert job_row(claim).rerun_args == RERUN["rerun_args"]


def test_reclaim_that_makes_the_job_dead_clears_requests(claim: Claim) -> None:
    alter(claim, lost_count=2, hold_requested=True)
    expire(claim)
    assert reclaim(claim).status == Status.DEAD
    assert job_row(claim).hold_requested is False


@pytest.mark.parametrize(
    ("cancel", "hold", "status"),
    [(True, False, "CANCELLED"), (False, True, "HELD"), (True, True, "CANCELLED")],
    ids=["cancel", "hold", "both"],
)
@pytest.mark.parametrize("begins", [True, False], ids=["begun", "not begun"])
def test_reclaim_obeys_a_request_instead_of_a_retry(
    row: ProcessedJob, begins: bool, cancel: bool, hold: bool, status: str
) -> None:
    claim = claimed(row, begins=begins)
    alter(row, cancel_requested=cancel, hold_requested=hold)
    expire(claim)
    lost = reclaim(claim)
    assert lost is not None
    assert lost.status == status
    job = job_row(row)
    assert (job.status, job.cancel_requested, job.hold_requested) == (status, False, False)
    assert job.lost_count == int(begins)


def test_reclaim_that_obeys_a_cancel_drops_the_waiting_rerun_and_says_so(claim: Claim) -> None:
    alter(claim, cancel_requested=True, **RERUN)
    expire(claim)
    assert reclaim(claim).status == Status.CANCELLED
    assert job_row(claim).rerun_args is None
    assert "rerun was dropped" in job_row(claim).error


@pytest.mark.parametrize("cancel", [False, True], ids=["alone", "cancel waits"])
def test_reclaim_of_a_job_that_is_held_when_lost_waits_for_a_person_also_before_a_cancel(
    cancel: bool,
) -> None:
    claim = claimed(jobs.wait_carefully.enqueue(tag="a", release="/").job)
    alter(claim, cancel_requested=cancel)
    expire(claim)
    lost = reclaim(claim)
    assert lost is not None
    assert (lost.outcome, lost.status) == ("LOST", "HELD")
    assert job_row(claim).lost_count == 1


def test_reclaim_of_a_job_that_is_held_when_lost_but_never_began_makes_it_wait_again() -> None:
    claim = claimed(jobs.wait_carefully.enqueue(tag="a", release="/").job, begins=False)
    expire(claim)
    assert reclaim(claim).status == Status.RETRYING


def test_reclaim_that_dies_before_its_commit_leaves_nothing(claim: Claim) -> None:
    expire(claim)
    before = snapshot()
    with at("reclaim.uncommitted", pull_the_plug), pytest.raises(PlugPulledError):
        reclaim(claim)
    assert snapshot() == before


@committing
def test_reclaim_of_a_job_that_a_business_transaction_holds_skips_it(
    transactional_db: None,
) -> None:
    claim = claimed(jobs.record.enqueue(tag="a").job)
    expire(claim)
    with Held(claim) as business:
        reclaiming = Side(reclaim, claim)
        if has_row_locks:
            assert reclaiming.result(15) is None
            assert attempt_row(claim).outcome is None
        business.commit()
        first = reclaiming.result()  # SQLite's one writer was waited for
    assert (first or reclaim(claim)).status == Status.RETRYING
    assert JobAttempt.objects.filter(outcome="LOST").count() == 1


@committing
@pytest.mark.usefixtures("step_by_step")
def test_reclaim_of_an_attempt_that_is_being_settled_leaves_it_its_ending(
    transactional_db: None,
) -> None:
    claim = claimed(jobs.record.enqueue(tag="a").job)
    expire(claim)
    with Pause("settle.between") as pause:
        settling = Side(ENDINGS["complete"], claim)
        pause.wait()
        reclaiming = Side(reclaim, claim)
        if has_row_locks:
            assert reclaiming.result(15) is None
        pause.go_on()
        assert settling.result() == Status.SUCCEEDED
        assert reclaiming.result() is None
    assert (job_row(claim).status, attempt_row(claim).outcome) == ("SUCCEEDED", "SUCCEEDED")


@committing
@pytest.mark.large
def test_ending_that_waited_for_a_reclaim_writes_nothing(transactional_db: None) -> None:
    for name, end in ENDINGS.items():
        claim = claim_for(name, jobs.record.enqueue(tag=name).job)
        expire(claim)
        with Pause("reclaim.uncommitted") as pause:
            reclaiming = Side(reclaim, claim)
            pause.wait()
            settling = Side(end, claim)
            until_blocked(settling)
            pause.go_on()
            assert reclaiming.result().status == Status.RETRYING, name
            assert settling.result() is None, name
        assert job_row(claim).status == Status.RETRYING, name


@committing
def test_reclaim_by_four_at_once_counts_one_loss(transactional_db: None) -> None:
    claim = claimed(jobs.record.enqueue(tag="a").job)
    expire(claim)
    answers = race(*[lambda: reclaim(claim)] * 4)
    assert [a.status for a in answers if a] == [Status.RETRYING]
    assert job_row(claim).lost_count == 1


def sweep(coordinator: Coordinator, count: int) -> None:
    """Let a coordinator watch and reclaim until it has taken ``count`` attempts."""
    taken: list[Any] = []

    def look() -> bool:
        taken.extend(coordinator.reclaim())
        return len(taken) >= count

    until(look, what=f"{count} attempts reclaimed")


@committing
def test_sweep_with_a_locked_row_takes_all_others(transactional_db: None) -> None:
    claims = [claimed(jobs.record.enqueue(tag=tag).job) for tag in "abc"]
    for claim in claims:
        expire(claim)
        alter_attempt(claim, beat_at=attempt_row(claim).lease_until - timedelta(seconds=0.1))
    with Held(claims[0]) as business:
        if not has_row_locks:
            business.commit()  # one writer: no sweep is possible before
        sweep(Coordinator(), 2 if has_row_locks else 3)
        assert [job_row(c).status for c in claims[1:]] == ["RETRYING", "RETRYING"]


@committing
def test_sweep_with_a_row_that_the_database_refuses_takes_all_others(
    transactional_db: None,
) -> None:
    claims = [claimed(jobs.record.enqueue(tag=tag).job) for tag in "abc"]
    for claim in claims:
        expire(claim)
        alter_attempt(claim, beat_at=attempt_row(claim).lease_until - timedelta(seconds=0.1))
    with endings_refused(claims[0]):
        sweep(Coordinator(), 2)
    assert [job_row(c).status for c in claims] == ["RUNNING", "RETRYING", "RETRYING"]


REFUSAL = {
    "postgresql": (
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'refused'; END $$",
        "CREATE TRIGGER refuse BEFORE UPDATE ON dedupjobs_jobattempt "
        "FOR EACH ROW WHEN ({when}) EXECUTE FUNCTION refuse()",
    ),
    "mysql": (
        "CREATE TRIGGER refuse BEFORE UPDATE ON dedupjobs_jobattempt "
        "FOR EACH ROW IF {when} THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'refused'; END IF",
    ),
    "sqlite": (
        "CREATE TRIGGER refuse BEFORE UPDATE ON dedupjobs_jobattempt "
        "WHEN {when} BEGIN SELECT RAISE(ABORT, 'refused'); END",
    ),
}
PERMISSION = {
    "postgresql": ("DROP FUNCTION refuse CASCADE",),
    "mysql": ("DROP TRIGGER refuse",),
    "sqlite": ("DROP TRIGGER refuse",),
}


@contextmanager
def endings_refused(claim: Claim) -> Iterator[None]:
    """Let the database raise when this attempt ends."""
    when = f"NEW.id = {claim.fence} AND NEW.outcome IS NOT NULL"
    with connection.cursor() as cursor:
        for sql in REFUSAL[connection.vendor]:
            cursor.execute(sql.format(when=when))
        try:
            yield
        finally:
            for sql in PERMISSION[connection.vendor]:
                cursor.execute(sql)


# ---- a business transaction that holds the job's row open


@committing
def test_business_transaction_that_holds_the_row_lets_its_job_beat_and_settle(
    transactional_db: None,
) -> None:
    claim = claimed(jobs.record.enqueue(tag="a").job)
    watched = expire(claim)
    with Held(claim) as business:
        beating = Side(lifecycle.beat, claim.fence, lease=60)
        if has_row_locks:
            assert beating.result(15) == lifecycle.Pulse()
            assert attempt_row(claim).lease_until > lifecycle.database_now()
            assert reclaim(claim, beat_at=watched) is None
        settling = Side(ENDINGS["complete"], claim)
        until_blocked(settling)
        business.commit()
        assert settling.result() == Status.SUCCEEDED
        assert not beating.result().lost
    assert job_row(claim).duplicates == 1


@committing
def test_business_transaction_that_leaves_a_rerun_while_its_job_settles_gets_it_run(
    transactional_db: None,
) -> None:
    claim = claimed(jobs.record.enqueue(tag="a").job)
    with Held(claim, **RERUN) as business:
        settling = Side(ENDINGS["complete"], claim)
        until_blocked(settling)
        business.commit()
        assert settling.result() == Status.PENDING
    job = job_row(claim)
    assert (job.generation, job.args, job.rerun_args) == (2, RERUN["rerun_args"], None)


# ---- an operator's arrows

OPERATORS: dict[str, Callable[[int, int], Status | None]] = {
    "cancel": lifecycle.cancel,
    "hold": lifecycle.hold,
    "retry": lifecycle.retry,
    "unhold": lifecycle.unhold,
}
LEADS_TO = {
    ("cancel", "PENDING"): "CANCELLED",
    ("cancel", "RETRYING"): "CANCELLED",
    ("cancel", "HELD"): "CANCELLED",
    ("cancel", "RUNNING"): "RUNNING",
    ("hold", "PENDING"): "HELD",
    ("hold", "RETRYING"): "HELD",
    ("hold", "RUNNING"): "RUNNING",
    ("retry", "DEAD"): "PENDING",
    ("retry", "HELD"): "PENDING",
    ("retry", "CANCELLED"): "PENDING",
    ("retry", "RETRYING"): "PENDING",
    ("unhold", "HELD"): "PENDING",
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("rerun", [{}, RERUN], ids=["alone", "rerun waits"])
def test_operators_arrow_leads_from_its_states_and_from_no_other(
    row: ProcessedJob, name: str, rerun: dict[str, Any]
) -> None:
    for status in Status:
        job = alter(row, status=status, attempts=1, **rerun)
        before = snapshot()
        expected = LEADS_TO.get((name, status))
        assert OPERATORS[name](row.pk, job.version) == expected, status
        if expected is None:
            assert snapshot() == before, status
        else:
            now = job_row(row)
            assert (now.status, now.version) == (expected, job.version + 1), status


@pytest.mark.parametrize("rerun", [{}, RERUN], ids=["alone", "rerun waits"])
def test_operators_arrow_on_a_row_that_has_moved_since_writes_nothing(
    row: ProcessedJob, rerun: dict[str, Any]
) -> None:
    for name, status in LEADS_TO:
        job = alter(row, status=status, version=7, **rerun)
        before = snapshot()
        assert OPERATORS[name](row.pk, job.version - 1) is None, (name, status)
        assert snapshot() == before, (name, status)


def test_cancel_of_a_waiting_job_frees_its_key_and_its_message(row: ProcessedJob) -> None:
    lifecycle.cancel(row.pk, row.version, "no longer wanted")
    job = job_row(row)
    assert (job.error, job.dispatch_id, job.dispatched_at) == ("no longer wanted", None, None)
    assert job.finished_at is not None
    assert jobs.record.enqueue(tag="a").created


def test_cancel_drops_the_waiting_rerun_and_says_so(row: ProcessedJob) -> None:
    alter(row, **RERUN)
    lifecycle.cancel(row.pk, row.version, "no longer wanted")
    job = job_row(row)
    assert (job.rerun_args, job.rerun_fingerprint) == (None, None)
    assert job.error == "no longer wanted; a waiting rerun was dropped"


def test_cancel_of_a_running_job_asks_and_its_end_obeys(claim: Claim) -> None:
    assert lifecycle.cancel(claim.job_pk, job_row(claim).version) == Status.RUNNING
    job = job_row(claim)
    assert (job.cancel_requested, job.hold_requested) == (True, False)
    assert ENDINGS["fail"](claim) == Status.CANCELLED


def test_hold_of_a_running_job_asks_and_its_end_obeys(claim: Claim) -> None:
    assert lifecycle.hold(claim.job_pk, job_row(claim).version) == Status.RUNNING
    job = job_row(claim)
    assert (job.cancel_requested, job.hold_requested) == (False, True)
    assert ENDINGS["snooze"](claim) == Status.HELD


def test_hold_of_a_waiting_job_keeps_workers_away_until_it_is_lifted(row: ProcessedJob) -> None:
    lifecycle.hold(row.pk, row.version, "month end")
    assert job_row(row).error == "month end"
    assert claim_again(row) is None
    assert lifecycle.unhold(row.pk, job_row(row).version) == Status.PENDING
    assert claim_again(row) is not None


@pytest.mark.parametrize(("name", "status"), [p for p in LEADS_TO if p[0] in ("retry", "unhold")])
def test_retry_and_unhold_go_on_in_the_same_generation_with_fresh_budgets(
    row: ProcessedJob, name: str, status: str
) -> None:
    job = alter(
        row,
        status=status,
        attempts=3,
        run_after=DbNow(3600),
        error="old",
        cancel_requested=True,
        hold_requested=True,
        finished_at=DbNow(),
        **BUDGETS_USED,
    )
    assert OPERATORS[name](row.pk, job.version) == Status.PENDING
    job = job_row(row)
    assert (job.generation, job.attempts, job.args) == (1, 3, row.args)
    assert (job.failures, job.lost_count, job.error, job.finished_at) == (0, 0, "", None)
    assert (job.cancel_requested, job.hold_requested) == (False, False)
    assert (job.dispatch_id, job.dispatched_at) == (None, None)
    assert claim_again(row) is not None  # due now


@pytest.mark.parametrize(("name", "status"), [p for p in LEADS_TO if p[0] in ("retry", "unhold")])
def test_retry_and_unhold_take_up_a_waiting_rerun(
    row: ProcessedJob, name: str, status: str
) -> None:
    job = alter(row, status=status, attempts=3, **BUDGETS_USED, **RERUN)
    assert OPERATORS[name](row.pk, job.version) == Status.PENDING
    job = job_row(row)
    assert (job.generation, job.args, job.rerun_args) == (2, RERUN["rerun_args"], None)
    assert (job.failures, job.lost_count) == (0, 0)


@committing
def test_retry_by_four_at_once_is_one_arrow(transactional_db: None) -> None:
    row = alter(jobs.record.enqueue(tag="a").job, status=Status.DEAD)
    answers = race(*[lambda: lifecycle.retry(row.pk, row.version)] * 4)
    assert sorted(answers, key=str) == [None, None, None, Status.PENDING]
    assert job_row(row).version == row.version + 1


# ---- hand-over


def test_mark_sent_gives_a_waiting_row_a_new_id(row: ProcessedJob) -> None:
    sent_as = lifecycle.mark_sent(row.pk, row.version, row.dispatch_id)
    assert sent_as not in (None, row.dispatch_id)
    assert job_row(row).dispatch_id == sent_as


def test_mark_sent_by_two_who_read_the_same_row_is_won_by_one(row: ProcessedJob) -> None:
    assert lifecycle.mark_sent(row.pk, row.version, row.dispatch_id) is not None
    before = snapshot()
    assert lifecycle.mark_sent(row.pk, row.version, row.dispatch_id) is None
    assert snapshot() == before


def test_mark_sent_of_a_row_without_an_id_by_two_is_won_by_one(row: ProcessedJob) -> None:
    alter(row, dispatch_id=None, dispatched_at=None)
    assert lifecycle.mark_sent(row.pk, row.version, None) is not None
    assert lifecycle.mark_sent(row.pk, row.version, None) is None


def test_mark_sent_of_a_row_that_has_moved_on_writes_nothing(row: ProcessedJob) -> None:
    alter(row, version=row.version + 1)
    before = snapshot()
    assert lifecycle.mark_sent(row.pk, row.version, row.dispatch_id) is None
    assert snapshot() == before


@pytest.mark.parametrize("status", [s for s in Status if s not in ("PENDING", "RETRYING")])
def test_mark_sent_of_a_row_that_does_not_wait_writes_nothing(
    row: ProcessedJob, status: Status
) -> None:
    alter(row, status=status)
    before = snapshot()
    assert lifecycle.mark_sent(row.pk, row.version, row.dispatch_id) is None
    assert snapshot() == before


def test_mark_unsent_forgets_exactly_the_hand_overs_named(row: ProcessedJob) -> None:
    other = jobs.record.enqueue(tag="b").job
    assert lifecycle.mark_unsent([row.dispatch_id or ""]) == 1
    assert (job_row(row).dispatch_id, job_row(row).dispatched_at) == (None, None)
    assert job_row(other).dispatch_id == other.dispatch_id


@pytest.mark.parametrize("status", [s for s in Status if s not in ("PENDING", "RETRYING")])
def test_mark_unsent_of_a_row_that_does_not_wait_writes_nothing(
    row: ProcessedJob, status: Status
) -> None:
    alter(row, status=status)
    assert lifecycle.mark_unsent([row.dispatch_id or ""]) == 0
    assert job_row(row).dispatch_id == row.dispatch_id


@committing
@pytest.mark.parametrize("act", ["mark_sent", "mark_unsent"])
def test_mark_of_a_row_that_a_business_transaction_holds_does_not_wait(
    transactional_db: None, act: str
) -> None:
    row = jobs.record.enqueue(tag="a").job

    def mark() -> Any:
        if act == "mark_sent":
            return lifecycle.mark_sent(row.pk, row.version, row.dispatch_id)
        return lifecycle.mark_unsent([row.dispatch_id or ""])

    with Held(row) as business:
        marking = Side(mark)
        if has_row_locks:
            assert not marking.result(15)
            assert job_row(row).dispatch_id == row.dispatch_id
        business.commit()
        first = marking.result()  # SQLite's one writer was waited for
    assert first or mark()


def test_mark_unsent_of_more_ids_than_one_statement_carries_forgets_all(row: ProcessedJob) -> None:
    ids = [f"unknown-{number}" for number in range(1_200)]
    assert lifecycle.mark_unsent([*ids, row.dispatch_id or ""]) == 1
    assert job_row(row).dispatch_id is None
