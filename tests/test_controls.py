"""Live controls: each kind, what it keeps waiting, and what is refused with its cure."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import OperationalError, connection, connections

from dedupjobs import (
    asides,
    cache,
    clock,
    controls,
    criteria,
    interrupts,
    invalidation,
    levers,
    lifecycle,
    locks,
    operations,
    probes,
    registry,
    runner,
    signals,
)
from dedupjobs.batches import crew
from dedupjobs.controls import Rule
from dedupjobs.coordinator import Coordinator
from dedupjobs.exceptions import ControlError, JobConflict, NoResult, TimeoutReached
from dedupjobs.heartbeat import Heart
from dedupjobs.levers import Wish
from dedupjobs.models import (
    Aim,
    AttemptOutcome,
    Control,
    ControlKind,
    JobAttempt,
    Kind,
    ProcessedJob,
    Status,
)
from dedupjobs.testing import run_pending
from tests import live
from tests.app import jobs, tasks
from tests.app.models import Ledger
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

WHO = {"by": "anna", "reason": "an incident"}
DRAIN, FILTER, PAUSE = ControlKind.DRAIN, ControlKind.FILTER, ControlKind.PAUSE


def put(kind: str, value: float | None = None, *, holds: bool = False, **about: Any) -> Control:
    """Put a control in force: ``put("lease", 5, job="testapp.record")``."""
    lasts = about.pop("lasts", None)
    ((aim, target),) = about.items()
    wish = Wish(kind=kind, aim=aim, target=target, value=value, holds=holds, lasts=lasts)
    return levers.add(wish, **WHO)


def end(control: Control) -> None:
    levers.end(control.pk, **WHO)


def tick() -> None:
    """One round of a coordinator that has just started and ends again."""
    coordinator = Coordinator()
    assert coordinator.tick().leads
    locks.resign(coordinator.owner)


def begin(outcome: Any) -> lifecycle.Claim:
    """Claim the row as a worker would, and leave it running."""
    row = live.row_of(outcome)
    controls.current()
    claim = runner._claim(row.pk, row.generation, clock.token(), lifecycle.Place())
    assert claim is not None
    return claim


def succeed(claim: lifecycle.Claim) -> None:
    """End a claim as the runner does."""
    assert lifecycle.complete(claim, "null", unique_for=None)
    asides.freed(claim)


def open_attempts() -> int:
    return JobAttempt.objects.filter(outcome=None).count()


def is_aside(outcome: Any) -> bool:
    return lifecycle.is_aside(live.row_of(outcome))


# ---- pauses


@pytest.mark.parametrize("about", [{"queue": "default"}, {"job": "testapp.record"}], ids=str)
def test_paused_job_waits_without_an_attempt_and_runs_at_once_when_the_pause_ends(
    about: dict[str, str],
) -> None:
    pause = put(PAUSE, **about)
    outcome = jobs.record.enqueue(tag="a")
    assert live.work_off() == 1
    row = live.row_of(outcome)
    assert (row.status, row.attempts, row.failures, row.lost_count) == (Status.PENDING, 0, 0, 0)
    assert is_aside(outcome)
    assert live.locks_left() == []
    end(pause)
    tick()
    assert live.work_off() == 1
    assert live.row_of(outcome).status == Status.SUCCEEDED
    assert live.outcomes(outcome) == [AttemptOutcome.SUCCEEDED]


def test_coordinator_lets_paused_rows_wait_and_sends_no_copies() -> None:
    put(PAUSE, queue="default")
    jobs.record.enqueue(tag="a")
    live.work_off()
    with live.brisk(RESEND_AFTER=0.001):
        coordinator = Coordinator()
        for _ in range(3):
            done = coordinator.tick()
            assert (done.handed_over, done.resent) == (0, 0)
    assert live.queued() == []


def test_coordinator_sets_aside_what_comes_due_in_a_pause_without_waking_a_worker() -> None:
    pause = put(PAUSE, queue="default")
    outcomes = [jobs.record.enqueue(tag=tag) for tag in "ab"]
    for outcome in outcomes:
        live.unsent(outcome)
    with live.rq_client() as client:
        client.flushdb()
    tick()
    assert live.queued() == []
    assert all(is_aside(outcome) for outcome in outcomes)
    end(pause)
    tick()
    live.work_off()
    assert {live.row_of(outcome).status for outcome in outcomes} == {Status.SUCCEEDED}


def test_what_was_set_aside_counts_as_waiting_and_not_as_due() -> None:
    put(PAUSE, queue="default")
    jobs.record.enqueue(tag="a")
    assert criteria.backlog("default", most=10).due == 1
    live.work_off()
    backlog = criteria.backlog("default", most=10)
    assert (backlog.waiting, backlog.due, backlog.oldest) == (1, 0, None)


def test_pause_of_one_queue_leaves_others_alone() -> None:
    put(PAUSE, queue="low")
    outcome = jobs.record.enqueue(tag="a")
    low = jobs.record_low.enqueue(tag="b")
    live.work_off()
    live.work_off("low")
    assert (live.row_of(outcome).status, is_aside(low)) == (Status.SUCCEEDED, True)


def test_retry_that_comes_due_in_a_pause_waits_for_its_end() -> None:
    outcome = jobs.fail.enqueue(tag="a", times=1)
    live.work_off()
    pause = put(PAUSE, job="testapp.fail")
    live.unsent(outcome)
    tick()
    assert live.work_off() == 0
    assert is_aside(outcome)
    assert live.row_of(outcome).failures == 1
    end(pause)
    tick()
    live.work_off()
    assert live.row_of(outcome).status == Status.SUCCEEDED


def test_run_now_of_a_paused_job_waits_for_a_worker() -> None:
    pause = put(PAUSE, job="testapp.record")
    outcome = jobs.record.run_now(tag="a")
    assert (outcome.kind, outcome.job.status) == (Kind.CREATED, Status.PENDING)
    assert not Ledger.objects.exists()
    end(pause)
    tick()
    live.work_off()
    assert live.row_of(outcome).status == Status.SUCCEEDED


class Died(BaseException):
    """The worker is gone, in the middle of what it did."""


def test_worker_that_dies_before_it_sets_a_row_aside_loses_nothing() -> None:
    pause = put(PAUSE, queue="default")
    outcome = jobs.record.enqueue(tag="a")

    def die(point: str) -> None:
        if point == "set_aside.before":
            probes.hook = None
            raise Died

    probes.hook = die
    try:
        with pytest.raises(Died):
            live.work_off()
    finally:
        probes.hook = None
    assert not is_aside(outcome)
    live.sent_ago(outcome, 60)
    tick()  # its message is lost, which the coordinator sees as ever
    live.work_off()
    assert is_aside(outcome)
    assert live.row_of(outcome).attempts == 0
    end(pause)
    tick()
    live.work_off()
    assert live.row_of(outcome).status == Status.SUCCEEDED


def test_second_message_of_a_row_that_was_set_aside_is_dropped() -> None:
    put(PAUSE, queue="default")
    outcome = jobs.record.enqueue(tag="a")
    live.work_off()
    marked = live.row_of(outcome).dispatch_id
    controls.forget()
    live.deliver(live.row_of(outcome))
    assert live.row_of(outcome).dispatch_id == marked
    assert (live.row_of(outcome).status, live.row_of(outcome).attempts) == (Status.PENDING, 0)


def test_person_may_cancel_what_was_set_aside_and_its_mark_goes() -> None:
    put(PAUSE, queue="default")
    outcome = jobs.record.enqueue(tag="a")
    live.work_off()
    operations.cancel(live.row_of(outcome), **WHO)
    tick()
    assert lifecycle.marks(most=10) == []


def test_row_that_ran_with_its_mark_loses_it() -> None:
    pause = put(PAUSE, queue="default")
    outcome = jobs.record.enqueue(tag="a")
    live.work_off()
    end(pause)
    controls.forget()
    live.deliver(live.row_of(outcome))  # a message that was slower than the pause
    assert live.row_of(outcome).status == Status.SUCCEEDED
    tick()
    assert lifecycle.marks(most=10) == []
    assert live.row_of(outcome).dispatched_at is None


def test_own_jobs_run_in_a_paused_queue_so_that_people_can_clean_up() -> None:
    pause = put(PAUSE, queue="default")
    assert controls.current().pause("dedupjobs.bulk", "default") is None
    end(pause)
    put(DRAIN, all="")
    assert controls.current().rules
    call = jobs.record.call_of({"tag": "a", "text": ""}, unkeyed="")
    assert controls.known().ingress(call) is not None
    assert controls.known().ingress(_named(call, "dedupjobs.bulk")) is None


def _named(call: Any, name: str) -> Any:
    from dataclasses import replace

    return replace(call, name=name)


@pytest.mark.parametrize("about", [{"queue": "default"}, {"job": "testapp.record"}], ids=str)
def test_rows_of_one_message_are_all_set_aside_and_all_run_after_the_pause(
    about: dict[str, str],
) -> None:
    pause = put(PAUSE, **about)
    outcomes = jobs.record.enqueue_many([{"tag": tag} for tag in "abc"])
    assert live.work_off() == 1
    assert all(is_aside(outcome) for outcome in outcomes)
    assert not JobAttempt.objects.exists()
    end(pause)
    tick()
    live.work_off()
    assert {live.row_of(outcome).status for outcome in outcomes} == {Status.SUCCEEDED}


def test_rows_of_one_message_heed_the_limit_of_their_job() -> None:
    claim = begin(jobs.run_one_per_tenant.enqueue(tag="a", tenant=1))
    live.work_off()
    calls = [{"tag": tag, "tenant": tenant} for tag, tenant in (("b", 1), ("c", 2), ("d", 1))]
    outcomes = jobs.run_one_per_tenant.enqueue_many(calls)
    live.work_off()
    assert [is_aside(outcome) for outcome in outcomes] == [True, False, True]
    assert live.row_of(outcomes[1]).status == Status.SUCCEEDED
    succeed(claim)
    live.work_off()
    assert {live.row_of(outcome).status for outcome in outcomes} == {Status.SUCCEEDED}


# ---- leases, time-outs, attempts


def test_lease_that_is_set_is_that_of_the_next_claim() -> None:
    put("lease", 600, job="testapp.record")
    outcome = jobs.record.enqueue(tag="a")
    begin(outcome)
    attempt = live.attempt(outcome)
    assert 590 < (attempt.lease_until - attempt.claimed_at).total_seconds() < 610


def test_lease_that_is_set_reaches_a_running_attempt_at_its_next_beat_and_back() -> None:
    outcome = jobs.record.enqueue(tag="a")
    claim = begin(outcome)
    heart = Heart(
        job_pk=claim.job_pk, fence=claim.fence, owner=claim.owner, name=claim.name, lease=60
    )
    heart.tick()
    assert _leased(outcome) == 60
    control = put("lease", 900, job="testapp.record")
    heart.tick()
    assert (_leased(outcome), heart.lease) == (900, 900)
    end(control)
    heart.tick()
    assert _leased(outcome) == 60


def _leased(outcome: Any) -> int:
    attempt = live.attempt(outcome)
    return round((attempt.lease_until - attempt.beat_at).total_seconds())


def test_time_out_that_is_set_cuts_the_next_run() -> None:
    put("timeout", 0.3, job="testapp.hang")
    with live.changed(DEDUPJOBS={"PUSH_TIMEOUT": 5.0}):
        outcome = jobs.hang.enqueue(tag="a", how="sleep")
        live.work_off()
    assert live.outcomes(outcome) == [AttemptOutcome.TIMED_OUT]
    assert "0.3 s" in live.attempt(outcome).error_message


def test_time_out_can_be_changed_while_code_runs_in_a_thread() -> None:
    cutter, begun = interrupts.Cutter(60), threading.Event()

    def run() -> None:
        with interrupts.armed(cutter):
            begun.set()
            until(lambda: False, live.PATIENCE, what="the time is up")

    def shorten() -> None:
        begun.wait(live.PATIENCE)
        cutter.retime(0.2)

    with ThreadPoolExecutor(1) as pool:
        shortened = pool.submit(shorten)
        with pytest.raises(TimeoutReached, match=r"its time-out of 0.2 s"):
            crew.run(run, 1)
        shortened.result(live.PATIENCE)


def test_attempt_limit_that_is_set_ends_a_job_sooner_and_later() -> None:
    control = put("max_attempts", 1, job="testapp.fail")
    first = jobs.fail.enqueue(tag="a")
    live.work_off()
    assert live.row_of(first).status == Status.DEAD
    end(control)
    put("max_attempts", 4, job="testapp.fail")
    second = jobs.fail.enqueue(tag="b", times=3)
    run_pending(retries=True)
    assert live.row_of(second).status == Status.SUCCEEDED
    assert live.row_of(second).failures == 3
    assert operations.limit_of(live.row_of(second)) == 4


def test_limit_of_one_row_goes_before_that_of_its_job() -> None:
    put("max_attempts", 1, job="testapp.fail")
    outcome = jobs.fail.enqueue(tag="a", times=1)
    operations.limit(live.row_of(outcome), limit=3, **WHO)
    run_pending(retries=True)
    assert live.row_of(outcome).status == Status.SUCCEEDED


# ---- limits


def test_job_has_no_more_open_attempts_than_its_limit() -> None:
    outcomes = [jobs.run_two_at_a_time.enqueue(tag=tag) for tag in "abc"]
    claims = [begin(outcome) for outcome in outcomes[:2]]
    assert live.deliver(live.row_of(outcomes[2])) is None
    row = live.row_of(outcomes[2])
    assert (row.status, row.attempts, row.failures) == (Status.PENDING, 0, 0)
    assert is_aside(outcomes[2])
    tick()
    assert is_aside(outcomes[2]), "there is no room yet"
    succeed(claims[0])
    assert not is_aside(outcomes[2])
    live.work_off()
    assert live.row_of(outcomes[2]).status == Status.SUCCEEDED


def test_groups_have_room_of_their_own() -> None:
    first = jobs.run_one_per_tenant.enqueue(tag="a", tenant=1)
    same = jobs.run_one_per_tenant.enqueue(tag="b", tenant=1)
    other = jobs.run_one_per_tenant.enqueue(tag="c", tenant=2)
    begin(first)
    live.deliver(live.row_of(same))
    live.deliver(live.row_of(other))
    assert is_aside(same)
    assert live.row_of(other).status == Status.SUCCEEDED


def test_limit_that_is_set_counts_those_that_run_already() -> None:
    first = jobs.run_in_group.enqueue(tag="a", tenant=7)
    claim = begin(first)
    control = put("concurrency", 1, group="tenant:7")
    second = jobs.run_in_group.enqueue(tag="b", tenant=7)
    live.work_off()
    assert is_aside(second)
    end(control)
    tick()
    live.work_off()
    assert live.row_of(second).status == Status.SUCCEEDED
    succeed(claim)


def test_limit_of_a_job_that_declares_none_can_be_set() -> None:
    first = jobs.record.enqueue(tag="a")
    claim = begin(first)
    put("concurrency", 1, job="testapp.record")
    second = jobs.record.enqueue(tag="b")
    live.deliver(live.row_of(second))
    assert is_aside(second)
    succeed(claim)
    live.work_off()
    assert live.row_of(second).status == Status.SUCCEEDED


def test_limit_that_is_set_goes_before_the_declared_one() -> None:
    put("concurrency", 3, group="tenant:1")
    outcomes = [jobs.run_one_per_tenant.enqueue(tag=tag, tenant=1) for tag in "abcd"]
    for outcome in outcomes[:3]:
        begin(outcome)
    live.deliver(live.row_of(outcomes[3]))
    assert is_aside(outcomes[3])


def test_jobs_with_the_same_template_share_their_groups() -> None:
    begin(jobs.run_in_group.enqueue(tag="a", tenant=5))
    other = jobs.run_one_per_tenant.enqueue(tag="b", tenant=5)
    live.deliver(live.row_of(other))
    assert is_aside(other)


def test_run_that_ends_wakes_the_next_row_of_its_group(tmp_path: Path) -> None:
    release = tmp_path / "release"
    first = jobs.run_one_per_tenant.enqueue(tag="a", tenant=1, release=str(release))
    second = jobs.run_one_per_tenant.enqueue(tag="b", tenant=1)

    def run() -> None:
        try:
            live.deliver(live.row_of(first))
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            live.begun("a")
            live.deliver(live.row_of(second))
            assert is_aside(second)
        finally:
            release.touch()
        running.result(live.PATIENCE)
    assert not is_aside(second)


def test_two_endings_at_once_recall_two_rows() -> None:
    claims = [begin(jobs.run_two_at_a_time.enqueue(tag=tag)) for tag in "ab"]
    waiting = [jobs.run_two_at_a_time.enqueue(tag=tag) for tag in "cd"]
    for outcome in waiting:
        live.deliver(live.row_of(outcome))
    for claim in claims:
        assert lifecycle.complete(claim, "null", unique_for=None)
    first = lifecycle.jobs().filter(pk=live.row_of(waiting[0]).pk)

    def taken_by_another(point: str) -> None:
        if point == "mark_sent.before":
            probes.hook = None
            assert first.update(dispatch_id="dedupjobs_other", dispatched_at=clock.utcnow())

    probes.hook = taken_by_another
    try:
        assert asides.freed(claims[0]) == 1
    finally:
        probes.hook = None
    assert not is_aside(waiting[1]), "the next one was recalled instead"


def test_sweep_comes_to_every_group_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asides, "MOST_MARKS", 2)
    claims = [begin(jobs.run_one_per_tenant.enqueue(tag=f"a{n}", tenant=n)) for n in range(5)]
    waiting = [jobs.run_one_per_tenant.enqueue(tag=f"b{n}", tenant=n) for n in range(5)]
    for outcome in waiting:
        live.deliver(live.row_of(outcome))
    marks = lifecycle.marks(most=10)
    by_mark = {live.row_of(outcome).dispatch_id: n for n, outcome in enumerate(waiting)}
    last = by_mark[marks[-1]]  # all groups before it stay full
    assert lifecycle.complete(claims[last], "null", unique_for=None)
    sweep = asides.Sweep()
    assert sum(sweep.do(rooms=True, most=10) for _ in range(4)) == 1
    assert [is_aside(outcome) for outcome in waiting].index(False) == last


@pytest.mark.parametrize("ending", ["fail", "lost", "interrupted"])
def test_every_ending_frees_the_room(ending: str) -> None:
    first = jobs.run_one_per_tenant.enqueue(tag="a", tenant=1)
    second = jobs.run_one_per_tenant.enqueue(tag="b", tenant=1)
    claim = begin(first)
    live.deliver(live.row_of(second))
    assert is_aside(second)
    if ending == "fail":
        assert lifecycle.fail(claim, after=60, note=lifecycle.NO_NOTE)
        asides.freed(claim)
    elif ending == "interrupted":
        assert lifecycle.interrupt(claim, on_lost="retry", note=lifecycle.NO_NOTE)
        asides.freed(claim)
    else:
        live.set_lease(claim.fence, beat_at=-0.4, lease_until=-0.1)
        _reclaim()
    live.work_off()
    assert live.row_of(second).status == Status.SUCCEEDED


def _reclaim() -> None:
    with live.brisk():
        coordinator = Coordinator()
        until(lambda: coordinator.tick().lost, what="the dead attempt is taken")
        until(lambda: coordinator.tick() and live.queued(), what="the next one is recalled")


def test_room_that_is_freed_while_a_row_is_set_aside_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claim = begin(jobs.run_one_per_tenant.enqueue(tag="a", tenant=1))
    second = jobs.run_one_per_tenant.enqueue(tag="b", tenant=1)

    def free_it(point: str) -> None:
        if point == "set_aside.before":
            monkeypatch.setattr(probes, "hook", None)
            succeed(claim)  # finds nobody to wake: the row is not aside yet

    monkeypatch.setattr(probes, "hook", free_it)
    live.deliver(live.row_of(second))
    assert not is_aside(second), "it has looked again"
    live.work_off()
    assert live.row_of(second).status == Status.SUCCEEDED


def test_row_that_is_handed_over_meanwhile_is_not_set_aside() -> None:
    begin(jobs.run_one_per_tenant.enqueue(tag="a", tenant=1))
    second = jobs.run_one_per_tenant.enqueue(tag="b", tenant=1)

    def send_again(point: str) -> None:
        if point == "set_aside.before":
            probes.hook = None
            row = live.row_of(second)
            assert lifecycle.mark_sent(row.pk, row.version, row.dispatch_id)

    probes.hook = send_again
    try:
        live.deliver(live.row_of(second))
    finally:
        probes.hook = None
    assert not is_aside(second), "the other message will find out by itself"


def test_many_claims_at_once_never_pass_the_limit() -> None:
    number = 4 if connection.vendor == "sqlite" else 8
    outcomes = [jobs.run_two_at_a_time.enqueue(tag=f"t{i}") for i in range(number)]
    rows = [live.row_of(outcome) for outcome in outcomes]
    ready = threading.Barrier(number)

    def claim(row: ProcessedJob) -> bool:
        try:
            ready.wait(live.PATIENCE)
            runner._claim(row.pk, row.generation, clock.token(), lifecycle.Place())
        except lifecycle.Refused:
            return False
        finally:
            connections.close_all()
        return True

    with ThreadPoolExecutor(number) as pool:
        taken = list(pool.map(claim, rows))
    assert sum(taken) == 2
    assert open_attempts() == 2


def test_jobs_of_a_limit_all_run_with_nobody_but_workers_to_wake_them(
    django_db_blocker: Any,
) -> None:
    outcomes = [jobs.run_two_at_a_time.enqueue(tag=f"t{i}") for i in range(12)]
    most, stop = [0], threading.Event()

    def work() -> None:
        try:
            while not stop.is_set():
                _work_off_one()
                most[0] = max(most[0], open_attempts())
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        working = [pool.submit(work) for _ in range(4)]
        try:
            for outcome in outcomes:
                live.wait_for(outcome)
        finally:
            stop.set()
        for one in working:
            one.result(live.PATIENCE)
    assert 1 <= most[0] <= 2
    assert [live.outcomes(outcome) for outcome in outcomes] == [[AttemptOutcome.SUCCEEDED]] * 12


def _work_off_one() -> None:
    with live.rq_client() as client:
        popped = client.lpop("rq:queue:default")
    if popped is not None:
        row = ProcessedJob.objects.filter(dispatch_id=popped).first()
        if row is not None:
            live.deliver(row)


# ---- calls


@pytest.mark.parametrize(
    "about",
    [{"key": "record:a"}, {"prefix": "record:"}, {"job": "testapp.record"}],
    ids=str,
)
def test_filter_turns_calls_away_without_asking_the_database(
    about: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controls, "DEAF", 60.0)
    control = put(FILTER, **about)
    jobs.record_again.enqueue(tag="a")  # reads what is in force
    queries = _queries(lambda: jobs.record.enqueue(tag="a"))
    assert queries == []
    outcome = jobs.record.enqueue(tag="a")
    assert (outcome.kind, outcome.control, outcome.job.pk) == (Kind.BLOCKED, control.pk, None)
    assert (outcome.job.key, outcome.job.name) == ("record:a", "testapp.record")
    assert outcome.reason.startswith(f"turned away by control {control.pk} (filter ")
    assert "anna: an incident" in outcome.reason
    assert not ProcessedJob.objects.filter(name="testapp.record").exists()
    end(control)
    assert jobs.record.enqueue(tag="a").kind is Kind.CREATED


def _queries(act: Any) -> list[str]:
    from django.test.utils import CaptureQueriesContext

    with CaptureQueriesContext(connection) as found:
        act()
    return [query["sql"] for query in found]


def test_filter_by_scope_is_about_one_tenant() -> None:
    put(FILTER, scope="north")
    assert jobs.record_for_tenant.enqueue(tenant="north", tag="a").kind is Kind.BLOCKED
    assert jobs.record_for_tenant.enqueue(tenant="south", tag="a").kind is Kind.CREATED


def test_filter_by_a_keys_hash_is_about_that_key() -> None:
    put(FILTER, key=jobs.record.identity_of({"tag": "x" * 500}))
    assert jobs.record.enqueue(tag="x" * 500).kind is Kind.BLOCKED
    assert jobs.record.enqueue(tag="x" * 501).kind is Kind.CREATED


def test_filter_that_holds_accepts_calls_and_lets_none_run() -> None:
    control = put(FILTER, prefix="record:", holds=True)
    outcome = jobs.record.enqueue(tag="a")
    assert (outcome.kind, outcome.created, outcome.control) == (Kind.CREATED, True, control.pk)
    assert outcome.job.status == live.row_of(outcome).status == Status.HELD
    assert "runs once somebody unholds it" in outcome.reason
    assert live.queued() == []
    assert jobs.record.enqueue(tag="a").kind is Kind.BLOCKED
    operations.unhold(live.row_of(outcome), **WHO)
    live.work_off()
    assert live.row_of(outcome).status == Status.SUCCEEDED
    assert jobs.record.enqueue(tag="a").kind is Kind.REPLAYED


def test_call_that_can_not_be_held_is_turned_away_and_changes_nothing(tmp_path: Path) -> None:
    first = jobs.rerun.enqueue(tag="a", text="old")
    begin(first)
    put(FILTER, prefix="rerun:", holds=True)
    outcome = jobs.rerun.enqueue(tag="a", text="new")
    assert outcome.kind is Kind.BLOCKED
    assert live.row_of(first).rerun_args is None
    assert not live.row_of(first).hold_requested


def test_filter_that_turns_away_goes_before_one_that_holds() -> None:
    put(FILTER, job="testapp.record", holds=True)
    put(FILTER, key="record:a")
    assert jobs.record.enqueue(tag="a").job.pk is None
    assert jobs.record.enqueue(tag="b").job.status == Status.HELD


def test_many_calls_are_answered_in_their_order_whatever_is_turned_away() -> None:
    put(FILTER, key="record:b")
    put(FILTER, key="record:c", holds=True)
    outcomes = jobs.record.enqueue_many([{"tag": tag} for tag in "abcd"])
    assert [o.kind for o in outcomes] == [Kind.CREATED, Kind.BLOCKED, Kind.CREATED, Kind.CREATED]
    assert [o.job.key for o in outcomes] == [f"record:{tag}" for tag in "abcd"]
    assert live.row_of(outcomes[2]).status == Status.HELD
    live.work_off()
    statuses = dict(ProcessedJob.objects.values_list("key", "status"))
    assert statuses == {
        "record:a": Status.SUCCEEDED,
        "record:c": Status.HELD,
        "record:d": Status.SUCCEEDED,
    }


def test_drain_lets_run_what_waits_and_turns_new_calls_away() -> None:
    waiting = jobs.record.enqueue(tag="a")
    control = put(DRAIN, all="")
    assert jobs.record.enqueue(tag="b").kind is Kind.BLOCKED
    assert levers.progress(control) == "1 waiting, 0 running"
    live.work_off()
    assert live.row_of(waiting).status == Status.SUCCEEDED
    assert levers.progress(control) == "0 waiting, 0 running"


def test_drain_of_a_queue_is_about_the_queue_of_the_call() -> None:
    put(DRAIN, queue="low")
    assert jobs.record_low.enqueue(tag="a").kind is Kind.BLOCKED
    assert jobs.record.using(queue_name="low").enqueue(tag="a").kind is Kind.BLOCKED
    assert jobs.record.enqueue(tag="a").kind is Kind.CREATED


def test_run_now_that_is_turned_away_runs_nothing() -> None:
    put(FILTER, job="testapp.record")
    assert jobs.record.run_now(tag="a").kind is Kind.BLOCKED
    assert not Ledger.objects.exists()


def test_outcome_of_a_call_that_was_turned_away_has_no_result_and_no_holder() -> None:
    put(FILTER, job="testapp.record")
    outcome = jobs.record.enqueue(tag="a")
    assert outcome.holder is None
    with pytest.raises(NoResult, match="'record:a': turned away by control"):
        outcome.result(timeout=1)
    with pytest.raises(JobConflict, match="turned away by control"):
        outcome.raise_for_conflict()


def test_task_that_is_turned_away_raises_since_there_is_no_result_to_show() -> None:
    put(DRAIN, all="")
    with pytest.raises(JobConflict, match="turned away by control"):
        tasks.record.enqueue("a")


# ---- the status cache


def test_bypass_lets_calls_ask_the_database_alone() -> None:
    jobs.record.enqueue(tag="a")
    run_pending()
    jobs.record.enqueue(tag="a")
    jobs.record.enqueue(tag="a")
    assert jobs.record.status(tag="a") == Status.SUCCEEDED
    # What no process of ours would do: the cache and the database differ.
    ProcessedJob.objects.filter(key="record:a").update(status=Status.DEAD)
    assert jobs.record.enqueue(tag="a").kind is Kind.REPLAYED
    control = put("bypass_cache", job="testapp.record")
    assert jobs.record.status(tag="a") == Status.DEAD
    assert jobs.record.enqueue(tag="a").kind is Kind.CREATED
    end(control)
    assert cache.is_on()


# ---- in force, and for how long


def test_control_ends_by_itself_when_its_time_is_up() -> None:
    control = put(FILTER, job="testapp.record", lasts=3)
    assert jobs.record.enqueue(tag="a").kind is Kind.BLOCKED
    until(lambda: jobs.record.enqueue(tag="a").created, what="the filter is over")

    def is_written_down() -> bool:
        tick()
        control.refresh_from_db()
        return control.ended_at is not None

    with live.brisk():
        until(is_written_down, what="its end is written down")
    assert (control.end_reason, control.ended_by, control.place) == ("expired", "", None)
    assert control.ended_at == control.until
    put(FILTER, job="testapp.record")  # its place is free


def test_expired_control_is_not_believed_between_two_readings() -> None:
    rule = Rule(
        pk=1, kind=PAUSE, aim=Aim.JOB, target="testapp.record", value=None, holds=False,
        by="anna", reason="", ends=clock.monotonic(),
    )  # fmt: skip
    controls._belief.force = controls.InForce.of([rule])
    assert controls.known().rules == ()


def test_controls_work_while_redis_is_down() -> None:
    with live.changed(
        **live.redis_at("redis://127.0.0.1:1"), DEDUPJOBS={"PUSH_TIMEOUT": 0.1, "LOCK_TIMEOUT": 0.1}
    ):
        control = put(FILTER, job="testapp.record")
        assert jobs.record.enqueue(tag="a").kind is Kind.BLOCKED
        end(control)
        assert jobs.record.enqueue(tag="a").kind is Kind.CREATED
        put(PAUSE, job="testapp.record")
        row = ProcessedJob.objects.get(name="testapp.record")
        assert live.deliver(row) is None
        assert ProcessedJob.objects.get(pk=row.pk).attempts == 0


def test_what_was_in_force_stays_so_while_the_database_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(FILTER, job="testapp.record")
    assert len(controls.current().rules) == 1

    def refuse(begun: float) -> Iterator[Rule]:
        raise OperationalError("the database is away")

    monkeypatch.setattr(controls, "_rules", refuse)
    controls.ring()
    assert len(controls.current().rules) == 1


def slip_in() -> None:
    """Put a pause in force without telling anybody."""
    where = {"kind": PAUSE, "aim": Aim.QUEUE, "target": "default", "place": "somewhere"}
    Control.objects.create(created_at=clock.utcnow(), **where, **WHO)


def test_process_asks_again_soon_though_nobody_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "_bell", controls._Bell())  # a worker's, of an earlier test
    now = clock.monotonic()
    monkeypatch.setattr(controls, "clock", SimpleNamespace(monotonic=lambda: now))
    controls.hear(False)
    assert controls.current().rules == ()
    slip_in()
    now += controls.DEAF - 0.01
    assert controls.current().rules == ()
    now += 0.02
    assert len(controls.current().rules) == 1


def test_process_that_hears_asks_at_once() -> None:
    controls.hear(True)
    try:
        assert controls.current().rules == ()
        slip_in()
        assert controls.current().rules == ()
        invalidation.handle(_message())
        assert len(controls.current().rules) == 1
    finally:
        controls.hear(False)


def _message() -> str:
    message = invalidation.Message(
        key="", name="", scope="", version=0, event=invalidation.CONTROLS
    )
    return invalidation._signed(message)


def test_change_is_told_to_receivers_after_the_commit() -> None:
    told: list[tuple[str, int, str]] = []

    def hear(what: str, control: Control, by: str, **_: Any) -> None:
        told.append((what, control.pk, by))

    signals.control_changed.connect(hear)
    try:
        control = put(PAUSE, queue="default")
        end(control)
    finally:
        signals.control_changed.disconnect(hear)
    assert told == [("added", control.pk, "anna"), ("ended", control.pk, "anna")]


def test_story_of_a_row_names_what_is_in_force_and_why_it_waits() -> None:
    control = put(PAUSE, queue="default")
    outcome = jobs.record.enqueue(tag="a")
    live.work_off()
    said = StringIO()
    call_command("dedupjobs_explain", str(outcome.job.pk), stdout=said)
    assert f"In force: control {control.pk} (pause --queue default), set by anna" in said.getvalue()
    assert "RQ: no message: the row is set aside until it may run" in said.getvalue()
    assert f"set aside: paused by control {control.pk}" in said.getvalue()


# ---- what makes no sense


def test_two_controls_of_one_place_contradict_each_other_unless_one_replaces_the_other() -> None:
    first = put("lease", 90, job="testapp.record")
    with pytest.raises(ControlError, match=f"Control {first.pk} is in force there already: lease"):
        put("lease", 120, job="testapp.record")
    wish = Wish(kind="lease", aim="job", target="testapp.record", value=120)
    second = levers.add(wish, replaces=True, **WHO)
    first.refresh_from_db()
    assert (first.place, first.end_reason) == (None, "replaced: an incident")
    assert controls.current().options_of("testapp.record").lease == 120
    assert second.pk != first.pk


def test_filter_that_turns_away_contradicts_one_that_holds() -> None:
    put(FILTER, prefix="record:")
    with pytest.raises(ControlError, match="in force there already"):
        put(FILTER, prefix="record:", holds=True)


@pytest.mark.skipif(connection.vendor != "sqlite", reason="others have more than one writer")
@pytest.mark.parametrize(("kind", "value"), [("lease", 40), ("timeout", 25), ("timeout", None)])
def test_time_that_would_keep_an_atomic_jobs_beats_out_is_refused(
    kind: str, value: float | None
) -> None:
    with pytest.raises(ControlError, match="shorter than a third of its lease"):
        put(kind, value, job="testapp.record_atomically")
    put(kind, 90 if kind == "lease" else 10, job="testapp.record_atomically")


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"prefix": "order:*"}, "looks like a pattern with wildcards"),
        ({"prefix": "^order"}, "looks like a pattern with wildcards"),
        ({"key": "order:.*"}, "looks like a pattern with wildcards"),
        ({"key": " "}, "names nothing"),
        ({"key": "x" * 201}, "give 1 to 200 characters"),
        ({"key": "x" * 199 + "…"}, "give the key's hash"),
        ({"scope": "{tenant_id}"}, "is a template"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_pattern_that_can_not_be_meant_is_refused(about: dict[str, str], words: str) -> None:
    with pytest.raises(ControlError, match=words):
        put(FILTER, **about)


def test_key_with_signs_that_patterns_have_can_be_filtered() -> None:
    put(FILTER, key="record:https://a/?b=%20*c")
    assert jobs.record.enqueue(tag="https://a/?b=%20*c").kind is Kind.BLOCKED


def test_drain_contradicts_a_pause() -> None:
    put(PAUSE, queue="default")
    with pytest.raises(ControlError, match="a pause lets nothing run"):
        put(DRAIN, queue="default")


def test_drain_of_everything_and_a_pause_of_anything_contradict_each_other() -> None:
    everything = put(DRAIN, all="")
    with pytest.raises(ControlError, match="a pause lets nothing run"):
        put(PAUSE, job="testapp.record")
    end(everything)
    put(PAUSE, queue="default")
    with pytest.raises(ControlError, match="a pause lets nothing run"):
        put(DRAIN, all="")
    put(DRAIN, queue="low")  # which no pause is about


def test_of_two_equal_controls_at_once_one_is_refused() -> None:
    ready = threading.Barrier(2)

    def add(_: int) -> bool:
        try:
            ready.wait(live.PATIENCE)
            put(PAUSE, queue="default")
        except ControlError:
            return False
        finally:
            connections.close_all()
        return True

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(add, range(2))) == [False, True]
    assert Control.objects.count() == 1


def test_control_that_has_ended_can_not_be_ended_again() -> None:
    control = put(PAUSE, queue="default")
    end(control)
    with pytest.raises(ControlError, match="has ended already, at 20"):
        end(control)


@pytest.fixture
def renamed() -> Iterator[registry.Job[..., Any]]:
    decorate = registry.job(
        key="{tag}", unique_for=None, name="testapp.renamed", aliases=("testapp.former",)
    )
    yield decorate(jobs.record.func)
    registry.forget("testapp.renamed")


def test_control_by_a_former_name_is_about_the_job(renamed: registry.Job[..., Any]) -> None:
    put(PAUSE, job="testapp.former")
    assert Control.objects.get().target == "testapp.renamed"
    outcome = renamed.enqueue(tag="a")
    ProcessedJob.objects.filter(pk=outcome.job.pk).update(name="testapp.former")
    live.deliver(live.row_of(outcome))
    assert is_aside(outcome)


# ---- the command


def command(*words: str) -> str:
    said = StringIO()
    call_command("dedupjobs_control", *words, stdout=said)
    return said.getvalue()


def test_command_adds_lists_and_ends() -> None:
    assert command() == "No control is in force.\n"
    who = ("--by", "anna", "--reason", "SMTP is down")
    jobs.record.enqueue(tag="a")
    said = command("pause", "--queue", "default", "--for", "30m", *who)
    control = Control.objects.get()
    assert said.startswith(f"In force: #{control.pk} pause --queue default  since 20")
    assert "by anna: SMTP is down  (1 waiting, 0 running)" in said
    assert abs(control.until - control.created_at - timedelta(minutes=30)) < timedelta(seconds=1)
    assert command("--list") == said.removeprefix("In force: ")
    assert json.loads(command("list", "--json"))["target"] == "default"
    ended = command("end", str(control.pk), "--by", "bob", "--reason", "it is up")
    assert "by bob: it is up]" in ended
    assert command() == "No control is in force.\n"
    assert "by bob: it is up]" in command("list", "--all")


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("lease 5m --job testapp.record", 300),
        ("timeout 90 --job testapp.record", 90),
        ("timeout none --job testapp.record", None),
        ("max-attempts 9 --job testapp.record", 9),
        ("concurrency 3 --group tenant:7", 3),
        ("filter --prefix order: --hold", None),
        ("drain --all", None),
        ("bypass-cache --all", None),
    ],
)
def test_command_knows_every_kind(words: str, value: float | None) -> None:
    said = command(*words.split(), "--by", "anna", "--reason", "a test")
    assert Control.objects.get().value == value
    assert len(controls.current().rules) == 1
    assert said.startswith("In force: #")


def test_command_names_what_contradicts() -> None:
    command("pause", "--queue", "default", "--by", "anna", "--reason", "one")
    with pytest.raises(CommandError, match=r"by anna: one\). End it, or say"):
        command("pause", "--queue", "default", "--by", "bob", "--reason", "two")
    command("pause", "--queue", "default", "--by", "bob", "--reason", "two", "--replace")
    assert [c.by for c in controls.in_force()] == ["bob"]
