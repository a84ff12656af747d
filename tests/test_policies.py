"""What a call does: every state of its key × every policy, and then all of it at the same time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import redis
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext

from dedupjobs import clock, lifecycle, operations, runner
from dedupjobs.client import Outcome
from dedupjobs.clock import DbNow
from dedupjobs.coordinator import Coordinator
from dedupjobs.endings import Error
from dedupjobs.exceptions import DedupJobsError, JobConflict, PayloadMismatch
from dedupjobs.lifecycle import Claim, Note
from dedupjobs.lifecycle.calls import DEADLOCKS
from dedupjobs.lifecycle.rows import codes
from dedupjobs.models import (
    WAITING,
    AttemptOutcome,
    JobAttempt,
    Kind,
    Operation,
    ProcessedJob,
    Status,
)
from dedupjobs.registry import Job
from dedupjobs.testing import frozen_clock, run_pending
from tests.app import jobs
from tests.app.models import Ledger
from tests.processes import Spawned
from tests.rows import Pause, Side, alter, at, before_sql, claimed, expire, job_row, race
from tests.sessions import needs_row_locks
from tests.waiting import until

committing = pytest.mark.django_db(transaction=True)

PATIENCE = 30.0  # seconds; the machine may be busy
BROKEN = Note(error=Error(type="ValueError", message="no luck", traceback=""))
READ = "WITH" if connection.vendor == "postgresql" else "SELECT"  # or an INSERT, if there is none

# ---- the table: DESIGN §3 and §9, docs/policies.md

# A is what the row was made with, B is another call's payload; the digit behind it is the
# generation that it runs in. "then" is what workers run after the call until nothing waits; what
# a test has claimed by hand before the call succeeds first, and is not listed.
#
# "held" is nothing, but for the version: these tests run in a transaction, which has to keep what
# it relies on. Outside of one not even that is written, as a test below the table shows.
#
# A line without a state belongs to the state above. Its policies: words of one kind are
# alternatives, and each kind that is named has to fit. An error stands before the kind of the
# outcome that it carries.
TABLE = """
state              | policies                | same call                  then  | other arguments            then
-------------------+-------------------------+----------------------------------+---------------------------------
absent             | any                     | CREATED            made    A1    | CREATED            made    B1

PENDING untried    | return                  | DUPLICATE          nothing A1    | Mismatch DUPLICATE nothing A1
                   | raise                   | Conflict DUPLICATE nothing A1    | Mismatch DUPLICATE nothing A1
                   | replace rerun           | DUPLICATE          held    A1    | REPLACED           renewed B1
                   | debounce                | DEBOUNCED          put-off A1    | DEBOUNCED          put-off B1

PENDING again      | return                  | DUPLICATE          nothing A2    | Mismatch DUPLICATE nothing A2
                   | raise                   | Conflict DUPLICATE nothing A2    | Mismatch DUPLICATE nothing A2
                   | replace rerun           | DUPLICATE          held    A2    | REPLACED           renewed B2
                   | debounce                | DEBOUNCED          put-off A2    | DEBOUNCED          put-off B2

PENDING tried      | return                  | DUPLICATE          nothing A1    | Mismatch DUPLICATE nothing A1
                   | raise                   | Conflict DUPLICATE nothing A1    | Mismatch DUPLICATE nothing A1
                   | replace                 | DUPLICATE          nothing A1    | DUPLICATE          nothing A1
                   | rerun                   | RERUN              asked   A1 A2 | RERUN              asked   A1 B2
                   | debounce                | DEBOUNCED          asked   A1 A2 | DEBOUNCED          asked   A1 B2

RUNNING            | return                  | DUPLICATE          nothing -     | Mismatch DUPLICATE nothing -
                   | raise                   | Conflict DUPLICATE nothing -     | Mismatch DUPLICATE nothing -
                   | replace                 | DUPLICATE          nothing -     | DUPLICATE          nothing -
                   | rerun                   | RERUN              asked   A2    | RERUN              asked   B2
                   | debounce                | DEBOUNCED          asked   A2    | DEBOUNCED          asked   B2

RUNNING stopping   | return                  | DUPLICATE          nothing -     | Mismatch DUPLICATE nothing -
                   | raise                   | Conflict DUPLICATE nothing -     | Mismatch DUPLICATE nothing -
                   | replace                 | DUPLICATE          nothing -     | DUPLICATE          nothing -
                   | rerun debounce          | BLOCKED            nothing -     | BLOCKED            nothing -

RETRYING           | return                  | DUPLICATE          nothing A1    | Mismatch DUPLICATE nothing A1
                   | raise                   | Conflict DUPLICATE nothing A1    | Mismatch DUPLICATE nothing A1
                   | replace                 | DUPLICATE          nothing A1    | DUPLICATE          nothing A1
                   | rerun                   | RERUN              asked   A1 A2 | RERUN              asked   A1 B2
                   | debounce                | DEBOUNCED          asked   A1 A2 | DEBOUNCED          asked   A1 B2

SUCCEEDED window   | forever window          | REPLAYED           nothing -     | Mismatch REPLAYED  nothing -
                   | active                  | CREATED            reopened A2   | CREATED            reopened B2
SUCCEEDED over     | any                     | CREATED            reopened A2   | CREATED            reopened B2
SUCCEEDED for ever | forever window          | REPLAYED           nothing -     | Mismatch REPLAYED  nothing -
                   | active                  | CREATED            reopened A2   | CREATED            reopened B2
SUCCEEDED pruned   | forever window          | REPLAYED           nothing -     | Mismatch REPLAYED  nothing -
                   | active                  | CREATED            reopened A2   | CREATED            reopened B2

DEAD               | reopen                  | CREATED            reopened A1   | CREATED            reopened B2
                   | block                   | BLOCKED            nothing -     | Mismatch BLOCKED   nothing -
DEAD pruned        | reopen                  | CREATED            made    A1    | CREATED            made    B1
                   | block                   | BLOCKED            nothing -     | Mismatch BLOCKED   nothing -

CANCELLED untried  | any                     | CREATED            reopened A1   | CREATED            reopened B1
CANCELLED tried    | any                     | CREATED            reopened A1   | CREATED            reopened B2

HELD               | any                     | BLOCKED            nothing -     | Mismatch BLOCKED   nothing -
HELD tried         | any                     | BLOCKED            nothing -     | Mismatch BLOCKED   nothing -
"""  # noqa: E501 - a table

POLICIES = list(jobs.MATRIX)
DIMENSIONS = (set(jobs.CONFLICTS), {"reopen", "block"}, set(jobs.WINDOWS))


@dataclass(frozen=True, kw_only=True)
class Then:
    """What a call is answered with, what that does to its row, and what runs afterwards."""

    error: str
    kind: Kind
    change: str
    runs: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> Then:
        words = text.split()
        error = words.pop(0) if words[0] in ("Mismatch", "Conflict") else ""
        kind, change, *runs = words
        return cls(
            error=error, kind=Kind(kind), change=change, runs=tuple(r for r in runs if r != "-")
        )


@dataclass(frozen=True, kw_only=True)
class Line:
    state: str
    policies: str
    same: Then
    other: Then

    def fits(self, policy: tuple[str, ...]) -> bool:
        named = set(self.policies.split()) - {"any"}
        return all(
            word in named or not named & kind for word, kind in zip(policy, DIMENSIONS, strict=True)
        )


def _lines() -> Iterator[Line]:
    state = ""
    for text in filter(str.strip, TABLE.splitlines()[3:]):
        first, policies, same, other = (cell.strip() for cell in text.split("|"))
        state = first or state
        yield Line(state=state, policies=policies, same=Then.read(same), other=Then.read(other))


LINES = list(_lines())
STATES = list(dict.fromkeys(line.state for line in LINES))


def expected(state: str, policy: tuple[str, ...]) -> Line:
    (line,) = (line for line in LINES if line.state == state and line.fits(policy))
    return line


def test_table_says_one_thing_about_each_state_and_policy() -> None:
    known = set().union(*DIMENSIONS, {"any"})
    assert all(set(line.policies.split()) <= known for line in LINES)
    for state, policy in product(STATES, POLICIES):
        fitting = [line for line in LINES if line.state == state and line.fits(policy)]
        assert len(fitting) == 1, (state, policy, fitting)


# ---- rows in each state, made as the lifecycle makes them


def make(state: str, specimen: Job[..., Any], tag: str) -> Claim | None:
    """Put a key into a state; return the open claim of a RUNNING one."""
    if state == "absent":
        return None
    row = specimen.enqueue(tag=tag, text="A").job
    alter(row, run_after=DbNow(-1))  # a debounced one is due
    return _MAKERS[state](row)


def _again(row: ProcessedJob) -> None:
    claim = claimed(row)
    alter(row, rerun_args=row.args, rerun_fingerprint=row.fingerprint)
    assert lifecycle.complete(claim, "null", unique_for=None) == Status.PENDING
    alter(row, run_after=DbNow(-1))


def _tried(row: ProcessedJob) -> None:
    lifecycle.interrupt(claimed(row), on_lost="retry")


def _stopping(row: ProcessedJob) -> Claim:
    claim = claimed(row)
    assert lifecycle.cancel(row.pk, job_row(row).version) == Status.RUNNING
    return claim


def _retrying(row: ProcessedJob) -> None:
    lifecycle.fail(claimed(row), after=0, note=BROKEN)


def _succeeded(**columns: Any) -> Callable[[ProcessedJob], None]:
    def make_succeeded(row: ProcessedJob) -> None:
        lifecycle.complete(claimed(row), '"result"', unique_for=None)
        alter(row, **columns)

    return make_succeeded


def _pruned(row: ProcessedJob) -> None:
    alter(row, finished_at=DbNow(-10))
    lifecycle.prune(row.name, older_than=5, limit=10)


def _succeeded_and_pruned(row: ProcessedJob) -> None:
    _succeeded(unique_until=None)(row)
    _pruned(row)
    assert job_row(row).is_tombstone


def _dead(row: ProcessedJob) -> None:
    lifecycle.give_up(claimed(row), on_dead="reopen", note=BROKEN)


def _dead_and_pruned(row: ProcessedJob) -> None:
    _dead(row)
    _pruned(row)


def _operated(arrow: Callable[..., Any], *, tried: bool) -> Callable[[ProcessedJob], None]:
    def operate(row: ProcessedJob) -> None:
        if tried:
            _tried(row)
        assert arrow(row.pk, job_row(row).version)

    return operate


_MAKERS: dict[str, Callable[[ProcessedJob], Claim | None]] = {
    "PENDING untried": lambda row: None,
    "PENDING again": _again,
    "PENDING tried": _tried,
    "RUNNING": claimed,
    "RUNNING stopping": _stopping,
    "RETRYING": _retrying,
    "SUCCEEDED window": _succeeded(unique_until=DbNow(60)),
    "SUCCEEDED over": _succeeded(unique_until=DbNow(-0.1)),
    "SUCCEEDED for ever": _succeeded(unique_until=None),
    "SUCCEEDED pruned": _succeeded_and_pruned,
    "DEAD": _dead,
    "DEAD pruned": _dead_and_pruned,
    "CANCELLED untried": _operated(lifecycle.cancel, tried=False),
    "CANCELLED tried": _operated(lifecycle.cancel, tried=True),
    "HELD": _operated(lifecycle.hold, tried=False),
    "HELD tried": _operated(lifecycle.hold, tried=True),
}


def drive(*claims: Claim | None) -> tuple[str, ...]:
    """Let open claims succeed, then run all that waits as soon as it may; return a's notes."""
    for claim in filter(None, claims):
        assert lifecycle.complete(claim, "null", unique_for=None)
    while ProcessedJob.objects.filter(status__in=WAITING).update(run_after=DbNow(-1)):
        assert run_pending()
    return notes()


def notes(tag: str = "a") -> tuple[str, ...]:
    return tuple(Ledger.objects.filter(tag=tag).order_by("pk").values_list("note", flat=True))


def columns(tag: str = "a") -> dict[str, Any] | None:
    """Return all that the key's row holds, or None."""
    return ProcessedJob.objects.filter(key__endswith=f":{tag}").values().first()


def ask(specimen: Job[..., Any], **call: Any) -> tuple[str, Outcome]:
    """Call, and return the name of the error and the outcome."""
    try:
        return "", specimen.enqueue(**call)
    except JobConflict as error:
        return "Conflict", error.outcome
    except PayloadMismatch as error:
        return "Mismatch", error.outcome


@pytest.mark.django_db
@pytest.mark.parametrize("text", ["A", "B"], ids=["same call", "other arguments"])
@pytest.mark.parametrize("conflict", jobs.CONFLICTS)
@pytest.mark.parametrize("state", STATES)
def test_call_on_a_key_in_any_state_under_any_policy_does_what_the_table_says(
    state: str, conflict: str, text: str
) -> None:
    policies = {policy: " ".join(policy) for policy in POLICIES if policy[0] == conflict}
    lines = {policy: expected(state, policy) for policy in policies}
    then = {policy: line.same if text == "A" else line.other for policy, line in lines.items()}
    claims = [make(state, jobs.MATRIX[policy], tag) for policy, tag in policies.items()]
    attempts = list(JobAttempt.objects.values())
    before = {policy: columns(tag) for policy, tag in policies.items()}
    told = {p: ask(jobs.MATRIX[p], tag=tag, text=text) for p, tag in policies.items()}
    assert {p: (error, outcome.kind) for p, (error, outcome) in told.items()} == {
        p: (t.error, t.kind) for p, t in then.items()
    }
    assert ProcessedJob.objects.count() == len(policies)
    assert list(JobAttempt.objects.values()) == attempts
    for policy, tag in policies.items():
        after = columns(tag)
        assert after is not None
        assert told[policy][1].job.pk == after["id"]
        assert told[policy][1].created is (then[policy].kind is Kind.CREATED)
        check_change(then[policy].change, before[policy], after, text)
    drive(*claims)
    assert {p: notes(tag) for p, tag in policies.items()} == {p: t.runs for p, t in then.items()}


def check_change(
    change: str, before: dict[str, Any] | None, after: dict[str, Any], text: str
) -> None:
    """Compare a row before and after a call with what the arrow of DESIGN §3 may write."""
    if change == "nothing":
        assert after == before
        return
    if change == "held":
        assert before is not None
        assert after == {**before, "version": before["version"] + 1}
        return
    payload = after["rerun_args"] if change == "asked" else after["args"]
    assert json.loads(payload)["text"] == text
    if before is None:
        assert change == "made"
        assert (after["status"], after["generation"], after["version"]) == ("PENDING", 1, 0)
        assert (after["attempts"], after["rerun_args"]) == (0, None)
        return
    assert after["version"] == before["version"] + 1
    changed = {name for name in after if after[name] != before[name]} - {"version"}
    if change == "asked":
        assert changed == {"rerun_args", "rerun_fingerprint", "rerun_name", "rerun_queue"}
        return
    assert (after["status"], after["rerun_args"], after["error"]) == ("PENDING", None, "")
    if change == "reopened":
        assert (after["failures"], after["lost_count"], after["attempts"]) == (
            *(0, 0),
            before["attempts"],
        )
        assert (after["finished_at"], after["unique_until"], after["result"]) == (None,) * 3
    else:
        moving = {"args", "fingerprint", "dispatch_id", "dispatched_at", "run_after"}
        assert changed <= moving  # not its deadline, nor what it has been through
    _check_due(before, after)


def _check_due(before: dict[str, Any], after: dict[str, Any]) -> None:
    if "debounce" in after["name"]:
        assert before["run_after"] < after["run_after"] < after["debounce_deadline"]
        assert after["dispatched_at"] is None  # due later: the coordinator sends it then
    else:
        assert after["dispatch_id"] not in (None, before["dispatch_id"])  # RQ forgets by id


@committing
@pytest.mark.parametrize("conflict", ["replace", "rerun"])
def test_same_call_on_an_untried_row_costs_one_read_and_no_write(
    transactional_db: None, conflict: str
) -> None:
    specimen = jobs.MATRIX[conflict, "reopen", "active"]
    specimen.enqueue(tag="a", text="A")
    with CaptureQueriesContext(
        connection,
    ) as captured:
        assert specimen.enqueue(tag="a", text="A").kind is Kind.DUPLICATE
    assert [query["sql"].split()[0] for query in captured.captured_queries] == [READ]


@committing
def test_rerun_that_asks_for_what_waits_already_costs_one_read_and_no_write(
    transactional_db: None,
) -> None:
    claimed(jobs.keep_last.enqueue(tag="a", text="A").job)
    jobs.keep_last.enqueue(tag="a", text="B")
    with CaptureQueriesContext(connection) as captured:
        assert jobs.keep_last.enqueue(tag="a", text="B").kind is Kind.RERUN
    assert [query["sql"].split()[0] for query in captured.captured_queries] == [READ]


# ---- keep-last: each way a run can end while another one is asked for


@dataclass(frozen=True, kw_only=True)
class End:
    """An ending, the job it is told of, and what becomes of the row and of a waiting rerun."""

    job: Job[..., Any]
    end: Callable[[Claim], Any]
    status: Status
    generation: int
    runs: tuple[str, ...]
    request: str = ""  # an operator's, before the ending
    release: str = ""  # an operator's act without which nothing runs


def _lose(claim: Claim) -> None:
    beat_at = expire(claim)
    assert lifecycle.reclaim(claim.fence, beat_at=beat_at, ahead_of=None, reason="lost")


def _complete(claim: Claim) -> None:
    lifecycle.complete(claim, '"stale"', unique_for=None)


def _fail(claim: Claim) -> None:
    lifecycle.fail(claim, after=0, note=BROKEN)


def _give_up(on_dead: str) -> Callable[[Claim], None]:
    def give_up(claim: Claim) -> None:
        lifecycle.give_up(claim, on_dead=on_dead, note=BROKEN)

    return give_up


def _park(claim: Claim) -> None:
    lifecycle.park(claim, "a person is needed")


def _interrupt(claim: Claim) -> None:
    lifecycle.interrupt(claim, on_lost="retry")


def _interrupt_held(claim: Claim) -> None:
    lifecycle.interrupt(claim, on_lost="hold", note=Note(reason="shutdown"))


def _snooze(claim: Claim) -> None:
    lifecycle.snooze(claim, after=0)


def _stop(*, requested: bool) -> Callable[[Claim], None]:
    def stop(claim: Claim) -> None:
        lifecycle.stop(claim, requested=requested, note=Note(reason="no need"))

    return stop


LAST, FRAGILE, BLOCKING, CAREFUL = (
    jobs.keep_last,
    jobs.keep_last_fragile,
    jobs.keep_last_blocking,
    jobs.keep_last_careful,
)
PENDING, RETRYING, DEAD, CANCELLED, HELD = (
    Status.PENDING,
    Status.RETRYING,
    Status.DEAD,
    Status.CANCELLED,
    Status.HELD,
)
OLD_THEN_NEW, NEW, NOTHING = ("old", "newest"), ("newest",), ()


def _end(
    job: Job[..., Any],
    end: Callable[[Claim], Any],
    status: Status,
    generation: int,
    runs: tuple[str, ...],
    **more: str,
) -> End:
    return End(job=job, end=end, status=status, generation=generation, runs=runs, **more)


# From RUNNING to a final state: the rerun is taken up. To a waiting one: it goes on waiting.
ENDS = {
    "succeeds": _end(LAST, _complete, PENDING, 2, NEW),
    "fails": _end(LAST, _fail, RETRYING, 1, OLD_THEN_NEW),
    "snoozes": _end(LAST, _snooze, RETRYING, 1, OLD_THEN_NEW),
    "is interrupted": _end(LAST, _interrupt, PENDING, 1, OLD_THEN_NEW),
    "dies": _end(LAST, _give_up("reopen"), PENDING, 2, NEW),
    "dies and blocks": _end(BLOCKING, _give_up("block"), DEAD, 1, NEW, release="retry"),
    "is reclaimed": _end(LAST, _lose, RETRYING, 1, OLD_THEN_NEW),
    "is reclaimed and dies": _end(FRAGILE, _lose, PENDING, 2, NEW),
    "is reclaimed, dies, blocks": _end(BLOCKING, _lose, DEAD, 1, NEW, release="retry"),
    "is reclaimed and held": _end(CAREFUL, _lose, HELD, 1, NEW, release="unhold"),
    "is interrupted and held": _end(CAREFUL, _interrupt_held, HELD, 1, NEW, release="unhold"),
    "is parked": _end(LAST, _park, HELD, 1, NEW, release="unhold"),
    "stops itself": _end(LAST, _stop(requested=False), PENDING, 2, NEW),
    "stops on request": _end(LAST, _stop(requested=True), CANCELLED, 1, NOTHING, request="cancel"),
    "fails, cancelled": _end(LAST, _fail, CANCELLED, 1, NOTHING, request="cancel"),
    "snoozes, cancelled": _end(LAST, _snooze, CANCELLED, 1, NOTHING, request="cancel"),
    "is interrupted, cancelled": _end(LAST, _interrupt, CANCELLED, 1, NOTHING, request="cancel"),
    "is reclaimed, cancelled": _end(LAST, _lose, CANCELLED, 1, NOTHING, request="cancel"),
    "succeeds, cancelled": _end(LAST, _complete, PENDING, 2, NEW, request="cancel"),
    "dies, cancelled": _end(LAST, _give_up("reopen"), PENDING, 2, NEW, request="cancel"),
    "fails, held": _end(LAST, _fail, HELD, 1, NEW, request="hold", release="unhold"),
    "is reclaimed, held": _end(LAST, _lose, HELD, 1, NEW, request="hold", release="unhold"),
    "succeeds, held": _end(LAST, _complete, PENDING, 2, NEW, request="hold"),
}


@pytest.mark.django_db
@pytest.mark.parametrize("how", ENDS)
def test_reruns_asked_for_during_a_run_are_one_run_however_it_ends(how: str) -> None:
    end = ENDS[how]
    row = end.job.enqueue(tag="a", text="old").job
    claim = claimed(row)
    for number in range(5):
        assert end.job.enqueue(tag="a", text=f"{number}").kind is Kind.RERUN
    assert end.job.enqueue(tag="a", text="newest").kind is Kind.RERUN
    if end.request:
        act = getattr(operations, end.request)
        assert act(job_row(row), by="ops", reason="why") == Status.RUNNING
    if end.request == "cancel":  # what comes now would be dropped unseen
        assert end.job.enqueue(tag="a", text="late").kind is Kind.BLOCKED
    end.end(claim)
    ended = job_row(row)
    assert (ended.status, ended.generation) == (end.status, end.generation)
    if end.release:
        assert drive() == ()
        assert getattr(operations, end.release)(job_row(row), by="ops") == Status.PENDING
    assert drive() == end.runs
    last = job_row(row)
    if end.status == CANCELLED:
        assert (last.status, last.rerun_args, last.rerun_fingerprint) == (CANCELLED, None, None)
        assert "a waiting rerun was dropped" in last.error
    else:
        assert (last.status, last.generation, last.rerun_args) == (Status.SUCCEEDED, 2, None)
        assert (last.cancel_requested, last.hold_requested) == (False, False)


@pytest.mark.django_db
@pytest.mark.parametrize("how", [how for how, end in ENDS.items() if end.generation == 2])
def test_taken_up_rerun_starts_like_a_new_call(how: str) -> None:
    end = ENDS[how]
    row = end.job.enqueue(tag="a", text="old").job
    claim = claimed(row)
    alter(row, failures=1)
    end.job.enqueue(tag="a", text="newest")
    if end.request:
        getattr(operations, end.request)(job_row(row), by="ops")
    end.end(claim)
    taken = job_row(row)
    assert json.loads(taken.args)["text"] == "newest"
    assert taken.fingerprint == end.job.enqueue(tag="a", text="newest").job.fingerprint
    assert (taken.failures, taken.lost_count, taken.error) == (0, 0, "")
    assert (taken.cancel_requested, taken.hold_requested, taken.result) == (False, False, None)
    assert (taken.dispatch_id, taken.dispatched_at) == (None, None)
    assert taken.run_after <= lifecycle.database_now()


@pytest.mark.django_db
@pytest.mark.parametrize("state", ["RETRYING", "HELD"])
def test_cancellation_drops_a_waiting_rerun_and_the_audit_names_it(state: str) -> None:
    row = jobs.keep_last.enqueue(tag="a", text="old").job
    claim = claimed(row)
    jobs.keep_last.enqueue(tag="a", text="newest")
    _fail(claim) if state == "RETRYING" else _park(claim)
    assert job_row(row).status == state
    assert operations.cancel(job_row(row), by="ops", reason="over") == Status.CANCELLED
    after = job_row(row)
    assert (after.rerun_args, after.rerun_fingerprint) == (None, None)
    assert "over" in after.error
    assert "a waiting rerun was dropped" in after.error
    assert drive() == ()
    assert "rerun" in Operation.objects.get().reason  # the row's words do not outlive a reopen


@pytest.mark.django_db
def test_operators_retry_takes_the_waiting_rerun_instead_of_the_failed_payload() -> None:
    row = jobs.keep_last.enqueue(tag="a", text="old").job
    claim = claimed(row)
    jobs.keep_last.enqueue(tag="a", text="newest")
    lifecycle.fail(claim, after=3600, note=BROKEN)
    assert operations.retry(job_row(row), by="ops") == Status.PENDING
    assert job_row(row).generation == 2
    assert run_pending() == 1
    assert notes() == ("newest",)


@pytest.mark.django_db
def test_call_that_is_told_duplicate_under_replace_changes_nothing_of_what_runs() -> None:
    specimen = jobs.MATRIX["replace", "reopen", "active"]
    claim = claimed(specimen.enqueue(tag="a", text="A").job)
    outcome = specimen.enqueue(tag="a", text="B")
    assert outcome.kind is Kind.DUPLICATE
    assert "RUNNING" in outcome.reason
    assert drive(claim) == ()


@pytest.mark.large
@committing
def test_thousand_triggers_during_a_run_are_one_more_run_with_the_newest_payload(
    transactional_db: None, redis_client: redis.Redis
) -> None:
    row = jobs.keep_last.enqueue(tag="a", text="first").job
    claim = claimed(row)
    kinds: list[Kind] = []

    def trigger(side: str) -> None:
        for number in range(500):
            kinds.append(jobs.keep_last.enqueue(tag="a", text=f"{side}{number}").kind)

    sides = [Side(trigger, side) for side in "xy"]
    for side in sides:
        side.result(90)
    kinds.append(jobs.keep_last.enqueue(tag="a", text="newest").kind)
    assert kinds == [Kind.RERUN] * 1_001
    assert redis_client.llen("rq:queue:default") == 1  # nothing to run, so nothing to say
    assert drive(claim) == ("newest",)
    assert (job_row(row).generation, job_row(row).attempts) == (2, 2)


@committing
def test_trigger_at_the_instant_at_which_the_run_ends_is_not_lost(transactional_db: None) -> None:
    """The run ends between the call's read and its UPDATE: 0 rows, and the call looks again."""
    row = jobs.keep_last.enqueue(tag="a", text="old").job
    claim = claimed(row)
    with at("rerun.before", lambda: Side(_complete, claim).result()):
        outcome = jobs.keep_last.enqueue(tag="a", text="newest")
    assert (outcome.kind, outcome.job.generation) == (Kind.CREATED, 2)
    assert drive() == ("newest",)


@committing
def test_trigger_that_meets_a_key_reopened_meanwhile_replaces_what_waits_there(
    transactional_db: None,
) -> None:
    """The row has another generation now, in which nothing has run: no rerun, a replace."""
    row = jobs.keep_last.enqueue(tag="a", text="old").job
    claim = claimed(row)

    def end_and_reopen() -> None:
        _complete(claim)
        assert jobs.keep_last.enqueue(tag="a", text="earlier").created

    with at("rerun.before", lambda: Side(end_and_reopen).result()):
        outcome = jobs.keep_last.enqueue(tag="a", text="newest")
    assert (outcome.kind, outcome.job.generation) == (Kind.REPLACED, 2)
    assert drive() == ("newest",)


@committing
@pytest.mark.parametrize("point", ["settle.before", "settle.between", "settle.uncommitted"])
@pytest.mark.usefixtures("step_by_step")
def test_trigger_at_any_point_of_the_settle_is_not_lost(transactional_db: None, point: str) -> None:
    row = jobs.keep_last.enqueue(tag="a", text="old").job
    claim = claimed(row)
    with Pause(point) as pause:
        ending = Side(_complete, claim)
        pause.wait()
        call = Side(jobs.keep_last.enqueue, tag="a", text="newest")
        call.join(0.3)  # blocked where the ending has locked the row
        pause.go_on()
        kind = call.result(PATIENCE).kind
        ending.result(PATIENCE)
    assert kind in (Kind.RERUN, Kind.CREATED)
    assert drive() == ("newest",)


@committing
def test_trigger_in_an_open_transaction_is_not_lost_although_its_payload_waits_already(
    transactional_db: None,
) -> None:
    """What the transaction changes must be seen by a run that starts after its commit."""
    row = jobs.count_news.enqueue(tag="a").job
    claim = claimed(row)
    jobs.count_news.enqueue(tag="a")
    with transaction.atomic():
        Ledger.objects.create(tag="a-news")
        assert jobs.count_news.enqueue(tag="a").kind is Kind.RERUN
        worker = Side(_complete_and_run, claim)
        worker.join(1)  # blocked by our transaction, or past it
    worker.result(PATIENCE)
    assert drive()[-1] == "1"


@committing
def test_trigger_in_an_open_transaction_is_not_lost_although_the_same_call_waits(
    transactional_db: None,
) -> None:
    jobs.count_news.enqueue(tag="a")
    with transaction.atomic():
        Ledger.objects.create(tag="a-news")
        jobs.count_news.enqueue(tag="a")
        worker = Side(run_pending)
        worker.join(1)
    worker.result(PATIENCE)
    assert drive()[-1] == "1"


def _complete_and_run(claim: Claim) -> None:
    _complete(claim)
    run_pending()


# ---- replace against a claim


@committing
def test_replace_before_a_claim_gives_it_the_new_arguments(transactional_db: None) -> None:
    row = jobs.replace.enqueue(tag="a", text="old").job
    with at("claim.before", lambda: _replaced(row)):
        assert run_pending() == 1
    assert notes() == ("new",)


def _replaced(row: ProcessedJob) -> None:
    outcome = Side(jobs.replace.enqueue, tag="a", text="new").result()
    assert (outcome.kind, outcome.job.generation) == (Kind.REPLACED, row.generation)


@committing
@pytest.mark.usefixtures("step_by_step")
def test_replace_while_a_claim_is_uncommitted_waits_and_is_told_duplicate(
    transactional_db: None,
) -> None:
    jobs.replace.enqueue(tag="a", text="old")
    with Pause("claim.uncommitted") as pause:
        worker = Side(run_pending)
        pause.wait()
        call = Side(jobs.replace.enqueue, tag="a", text="new")
        call.join(0.3)
        assert call.is_alive()  # or it would have answered before it could know
        pause.go_on()
        outcome = call.result(PATIENCE)
        assert worker.result(PATIENCE) >= 1
    # Told DUPLICATE of the old run, or CREATED if that was over already; never REPLACED.
    assert outcome.kind in (Kind.DUPLICATE, Kind.CREATED)
    drive()
    assert notes() == (("old",) if outcome.kind is Kind.DUPLICATE else ("old", "new"))


@committing
def test_claim_between_the_read_and_the_write_of_a_replace_makes_it_look_again(
    transactional_db: None,
) -> None:
    row = jobs.replace.enqueue(tag="a", text="old").job
    claims: list[Claim] = []
    with at("replace.before", lambda: claims.append(Side(claimed, row).result())):
        outcome = jobs.replace.enqueue(tag="a", text="new")
    assert outcome.kind is Kind.DUPLICATE
    assert json.loads(claims[0].args)["text"] == "old"
    assert json.loads(job_row(row).args)["text"] == "old"


@committing
def test_second_replace_between_the_read_and_the_write_of_a_first_is_overwritten_by_it(
    transactional_db: None,
) -> None:
    row = jobs.replace.enqueue(tag="a", text="old").job
    others: list[Kind] = []

    def replace_too() -> None:
        others.append(Side(jobs.replace.enqueue, tag="a", text="earlier").result().kind)

    with at("replace.before", replace_too):
        assert jobs.replace.enqueue(tag="a", text="later").kind is Kind.REPLACED
    assert others == [Kind.REPLACED]
    assert job_row(row).version == row.version + 2
    assert drive() == ("later",)


@committing
def test_row_that_has_moved_on_right_after_its_replace_breaks_no_hand_over(
    transactional_db: None, caplog: pytest.LogCaptureFixture
) -> None:
    row = jobs.replace.enqueue(tag="a", text="old").job

    def claim_and_interrupt(execute: Any, sql: str, *args: Any) -> Any:
        answer = execute(sql, *args)
        if sql.startswith("UPDATE"):
            Side(_tried, row).result()  # it has no message any more
        return answer

    with connection.execute_wrapper(claim_and_interrupt):
        assert jobs.replace.enqueue(tag="a", text="new").kind is Kind.REPLACED
    assert [r.getMessage() for r in caplog.records if "on_commit" in r.getMessage()] == []
    assert drive() == ("new",)


@committing
def test_message_of_a_payload_that_was_replaced_runs_the_new_one_once(
    transactional_db: None, redis_client: redis.Redis
) -> None:
    row = jobs.replace.enqueue(tag="a", text="old").job
    new = jobs.replace.enqueue(tag="a", text="new").job
    queued = [i.decode() for i in redis_client.lrange("rq:queue:default", 0, -1)]
    assert queued == [row.dispatch_id, new.dispatch_id]
    for owner in ("first message", "second message"):
        runner.deliver(row.pk, row.generation, owner=owner)
    assert notes() == ("new",)


def play(specimen: Job[..., Any], calls: int) -> list[tuple[int, Kind]]:
    """
    Call with 0, 1, 2 … while two workers run what waits; return the answers.

    Each answer that accepts is noted as "accepted n" right after it was given.
    """
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            run_pending(name=specimen.name)

    workers = [Side(work) for _ in range(2)]
    answers = []
    try:
        for number in range(calls):
            kind = specimen.enqueue(tag="a", text=str(number)).kind
            if kind is not Kind.DUPLICATE:
                Ledger.objects.create(tag="a", note=f"accepted {number}")
            answers.append((number, kind))
    finally:
        over.set()
        for worker in workers:
            worker.result(PATIENCE)
    drive()
    return answers


@committing
@pytest.mark.parametrize("specimen", [jobs.keep_last, jobs.replace], ids=["rerun", "replace"])
def test_newest_payload_accepted_while_workers_run_is_the_last_one_run(
    transactional_db: None, specimen: Job[..., Any]
) -> None:
    answers = dict(play(specimen, 40))
    accepted = [number for number, kind in answers.items() if kind is not Kind.DUPLICATE]
    ran = [int(note) for note in notes() if not note.startswith("accepted")]
    assert ran[-1] == accepted[-1]
    assert ran == sorted(set(ran))  # in the order of the calls, and none twice
    assert set(ran) <= set(accepted)
    if specimen is jobs.keep_last:
        assert len(accepted) == 40  # none is turned away
    newest = -1
    for note in notes():
        if note.startswith("accepted"):
            newest = int(note.removeprefix("accepted "))
        elif answers.get(newest) in (Kind.REPLACED, Kind.CREATED):
            assert int(note) >= newest, notes()  # what was replaced never runs after the answer


# ---- debounce


@committing
@frozen_clock()
def test_debounced_calls_put_the_run_off_but_never_past_max_wait(transactional_db: None) -> None:
    first = jobs.debounced_slowly.enqueue(tag="a", text="0")
    deadline = first.job.debounce_deadline
    assert deadline is not None
    dues = [first.job.run_after]
    assert 29 < (dues[0] - first.job.created_at).total_seconds() < 31
    assert 59 < (deadline - first.job.created_at).total_seconds() < 61
    for back in (10, 10, 10, 60):  # the time that passes between two calls
        _pass(first.job, back)
        outcome = jobs.debounced_slowly.enqueue(tag="a", text=f"{back}")
        assert outcome.kind is Kind.DEBOUNCED
        row = job_row(first.job)
        left = (row.debounce_deadline - lifecycle.database_now()).total_seconds()
        due_in = (row.run_after - lifecycle.database_now()).total_seconds()
        assert due_in == pytest.approx(min(30, left), abs=2)
        assert row.run_after <= row.debounce_deadline
    assert run_pending() == 1  # the deadline has passed
    assert notes() == ("60",)


def _pass(row: ProcessedJob, seconds: float) -> None:
    """Let the row be older."""
    now = job_row(row)
    assert now.debounce_deadline is not None
    shift = clock.timedelta(seconds=seconds)
    alter(row, run_after=now.run_after - shift, debounce_deadline=now.debounce_deadline - shift)


@committing
def test_debounced_calls_without_max_wait_put_the_run_off_each_time(
    transactional_db: None,
) -> None:
    row = jobs.debounced_for_ever.enqueue(tag="a", text="0").job
    assert row.debounce_deadline is None
    alter(row, run_after=DbNow(-100))
    jobs.debounced_for_ever.enqueue(tag="a", text="1")
    assert job_row(row).run_after > lifecycle.database_now()


@committing
def test_debounced_calls_run_once_with_the_newest_payload_once_calls_have_stopped(
    transactional_db: None, redis_client: redis.Redis
) -> None:
    for number in range(3):
        row = jobs.debounced_slowly.enqueue(tag="a", text=str(number)).job
        assert run_pending() == 0
    alter(row, run_after=DbNow())  # nobody has called for 30 s
    coordinator = Coordinator()
    until(lambda: coordinator.tick().handed_over, PATIENCE)
    assert redis_client.llen("rq:queue:default") == 1
    assert run_pending() == 1
    assert notes() == ("2",)


@committing
@frozen_clock()
def test_debounced_call_during_a_run_waits_again_once_that_is_over(transactional_db: None) -> None:
    row = jobs.debounced_slowly.enqueue(tag="a", text="0").job
    alter(row, run_after=DbNow(-1))
    claim = claimed(row)
    for text in ("1", "2"):
        assert jobs.debounced_slowly.enqueue(tag="a", text=text).kind is Kind.DEBOUNCED
    assert lifecycle.complete(claim, "null", unique_for=None) == Status.PENDING
    taken, now = job_row(row), lifecycle.database_now()
    assert taken.debounce_deadline is not None
    assert (taken.run_after - now).total_seconds() == pytest.approx(30, abs=2)
    assert (taken.debounce_deadline - now).total_seconds() == pytest.approx(60, abs=2)
    assert run_pending() == 0
    assert jobs.debounced_slowly.enqueue(tag="a", text="3").kind is Kind.DEBOUNCED
    assert drive() == ("3",)


@committing
def test_claim_between_the_read_and_the_write_of_a_debounced_call_leads_to_another_run(
    transactional_db: None,
) -> None:
    row = jobs.debounced_slowly.enqueue(tag="a", text="old").job
    alter(row, run_after=DbNow(-1))
    claims: list[Claim] = []
    with at("replace.before", lambda: claims.append(Side(claimed, row).result())):
        outcome = jobs.debounced_slowly.enqueue(tag="a", text="new")
    assert outcome.kind is Kind.DEBOUNCED
    assert drive(claims[0]) == ("new",)


# ---- all at once


@committing
def test_threads_with_mixed_policies_on_one_key_leave_one_row_and_one_payload(
    transactional_db: None,
) -> None:
    calls = [
        lambda conflict=conflict, number=number: jobs.RACING[conflict].enqueue(
            tag="a", text=f"{conflict}{number}:"
        )
        for conflict in jobs.RACING
        for number in range(2)
    ]
    names = [f"{conflict}{number}:" for conflict in jobs.RACING for number in range(2)]
    answers = {
        name: answer.outcome if isinstance(answer, JobConflict) else answer
        for name, answer in zip(names, race(*calls), strict=True)
    }
    assert len({answer.job.pk for answer in answers.values()}) == 1
    stays = _payload_of_race({name: answer.kind for name, answer in answers.items()}, "a")
    assert drive() == (f"{stays}1",)


def _payload_of_race(kinds: dict[str, Kind], tag: str) -> str:
    """Check what calls that met on a fresh key were told; return the payload that has to run."""
    assert list(kinds.values()).count(Kind.CREATED) == 1, kinds
    for name, kind in kinds.items():
        told = {
            "return": {Kind.CREATED, Kind.DUPLICATE},
            "raise": {Kind.CREATED, Kind.DUPLICATE},
            "replace": {Kind.CREATED, Kind.REPLACED},
            "rerun": {Kind.CREATED, Kind.REPLACED},
            "debounce": {Kind.CREATED, Kind.DEBOUNCED},
        }[name.rstrip(":0123456789")]
        assert kind in told, kinds
    changed = [n for n, kind in kinds.items() if kind in (Kind.REPLACED, Kind.DEBOUNCED)]
    row = ProcessedJob.objects.get(key=tag)
    # One change of the row for each answer that says so, and the last of them stays.
    assert (row.status, row.version, row.generation) == (Status.PENDING, len(changed), 1)
    stays: str = json.loads(row.args)["text"]
    assert stays in (changed or [n for n, kind in kinds.items() if kind is Kind.CREATED])
    return stays


RACER = """
import json, time, redis
from django.conf import settings
from dedupjobs.exceptions import JobConflict
from tests.app import jobs

client = redis.Redis.from_url(settings.CACHE_URL)
deadline = time.monotonic() + 60

def meet(point, pause=0.0):
    client.incr(point)
    while int(client.get(point)) < {racers}:
        assert time.monotonic() < deadline, point
        time.sleep(pause)

meet("racers", 0.01)  # some are still being imported
for number in range({rounds}):
    meet("racers:%d" % number)
    try:
        outcome = jobs.RACING["{conflict}"].enqueue(tag="key-%d" % number, text="{conflict}:")
    except JobConflict as error:
        outcome = error.outcome
    print("answer", json.dumps([number, "{conflict}:", outcome.kind]), flush=True)
print("finished", flush=True)
"""


@pytest.mark.large
@committing
def test_processes_with_mixed_policies_on_one_key_leave_one_row_and_one_payload(
    spawn: Callable[..., Spawned],
) -> None:
    conflicts, rounds = ("return", "replace", "rerun", "debounce"), 15
    racers = [
        spawn(
            "shell",
            "--no-imports",
            "-c",
            RACER.format(racers=len(conflicts), rounds=rounds, conflict=conflict),
        )
        for conflict in conflicts
    ]
    for racer in racers:
        racer.wait_for_output("finished", 60)
    told: dict[int, dict[str, Kind]] = {number: {} for number in range(rounds)}
    for line in "\n".join(racer.output for racer in racers).splitlines():
        if line.startswith("answer "):
            number, name, kind = json.loads(line.removeprefix("answer "))
            told[number][name] = Kind(kind)
    assert ProcessedJob.objects.count() == rounds
    stay = {n: _payload_of_race(kinds, f"key-{n}") for n, kinds in told.items()}
    drive()
    assert {n: notes(f"key-{n}") for n in stay} == {n: (f"{s}1",) for n, s in stay.items()}
    assert not [racer for racer in racers if "Traceback" in racer.output]


@committing
def test_calls_on_one_key_whose_transactions_roll_back_at_random_fail_nobody(
    transactional_db: None,
) -> None:
    """On MariaDB losers that wait at the insert get deadlocks when the winner rolls back."""
    answers: list[Kind] = []

    def call_and_roll_back() -> None:
        for number in range(15):
            with transaction.atomic():
                jobs.record.enqueue(tag=f"key-{number}", text="x")
                transaction.set_rollback(True)

    def call() -> None:
        for number in range(15):
            answers.append(jobs.record.enqueue(tag=f"key-{number}", text="x").kind)

    errors = race(call_and_roll_back, call, call_and_roll_back, call, call_and_roll_back, call)
    assert [e for e in errors[1::2] if e is not None] == []
    # Inside a transaction the database may make one its victim, with a typed error.
    assert [e for e in errors[::2] if not isinstance(e, (DedupJobsError, type(None)))] == []
    assert ProcessedJob.objects.count() == 15
    assert answers.count(Kind.CREATED) == 15


@committing
@needs_row_locks
@pytest.mark.parametrize("inside", [False, True], ids=["autocommit", "in a transaction"])
def test_losers_that_wait_at_the_insert_of_a_winner_who_rolls_back_are_answered(
    transactional_db: None, inside: bool
) -> None:
    """MariaDB has a deadlock here: DESIGN wants a retry, or a typed error in a transaction."""
    ready, inserted = threading.Barrier(3), threading.Event()

    def wait_for_the_winner() -> None:
        ready.wait(PATIENCE)
        assert inserted.wait(PATIENCE)

    def lose() -> Kind:
        with before_sql("INSERT", "processedjob", action=wait_for_the_winner):
            if not inside:
                return jobs.record.enqueue(tag="a").kind
            with transaction.atomic():
                return jobs.record.enqueue(tag="a").kind

    losers = [Side(lose), Side(lose)]
    with transaction.atomic():
        ready.wait(PATIENCE)
        assert jobs.record.enqueue(tag="a").created
        inserted.set()
        for loser in losers:
            loser.join(0.5)  # both wait for our row now
            assert loser.is_alive()
        transaction.set_rollback(True)
    answers = []
    for loser in losers:
        try:
            answers.append(str(loser.result(PATIENCE)))
        except DedupJobsError:
            assert inside
            answers.append("error")
    assert sorted(answers) in (["CREATED", "DUPLICATE"], ["CREATED", "error"])
    assert ProcessedJob.objects.count() == 1


def _is_called(text: str) -> bool:
    """Call; if the row has moved at each try, the caller is to try again."""
    try:
        jobs.keep_last.enqueue(tag="a", text=text)
    except DedupJobsError as error:
        if "moved by others 10 times" not in str(error):
            raise
        return False
    return True


@committing
def test_reopen_and_rerun_and_operators_at_once_leave_a_row_that_all_can_explain(
    transactional_db: None, tmp_path: Path
) -> None:
    """Whatever order the arrows come in: one row, attempts without gaps, the last call runs."""
    row = jobs.keep_last.enqueue(tag="a", text="0").job

    def operate() -> None:
        for number in range(10):
            seen = job_row(row)
            arrow = (lifecycle.hold, lifecycle.unhold, lifecycle.retry)[number % 3]
            try:
                arrow(seen.pk, seen.version)
            except OperationalError as error:  # MariaDB may end any statement for another's sake
                if not codes(error) & DEADLOCKS:
                    raise

    def call() -> None:
        for number in range(10):
            until(partial(_is_called, str(number + 1)), PATIENCE)

    errors = race(operate, call, run_pending, operate, call)
    assert [
        e for e in errors if isinstance(e, Exception) and not isinstance(e, PayloadMismatch)
    ] == []
    if job_row(row).status == Status.HELD:
        lifecycle.unhold(row.pk, job_row(row).version)
    jobs.keep_last.enqueue(tag="a", text="last")
    drive()
    assert notes()[-1] == "last"
    numbers = list(JobAttempt.objects.order_by("pk").values_list("number", flat=True))
    assert numbers == list(range(1, len(numbers) + 1))
    assert set(JobAttempt.objects.values_list("outcome", flat=True)) == {AttemptOutcome.SUCCEEDED}
