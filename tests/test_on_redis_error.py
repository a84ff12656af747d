"""on_redis_error: what a job does while no lock can be had. Its queue's Redis is well meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings

from dedupjobs import FOREVER, batches, lifecycle, locks, registry
from dedupjobs.asides import LATEST, SOONEST, Sweep
from dedupjobs.coordinator import Coordinator
from dedupjobs.exceptions import JobConflict
from dedupjobs.models import Kind, ProcessedJob, Status
from dedupjobs.registry import job
from dedupjobs.schedule import Schedule
from dedupjobs.story import telling
from dedupjobs.testing import captured_jobs, inline, run_pending, simulate_redis_loss
from tests import live
from tests.app import jobs
from tests.live import Spawn
from tests.proxy import Proxy
from tests.servers import HOST, Valkey
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)


@dataclass
class Apart:
    """A server for locks alone, which can be taken away."""

    valkey: Valkey
    proxy: Proxy

    def away(self) -> None:
        self.proxy.refuse()
        self.proxy.cut()

    def back(self) -> None:
        self.proxy.pass_through()

    def as_replica(self) -> None:
        with self.valkey.client() as client:
            client.replicaof(HOST, 1)

    def as_primary(self) -> None:
        with self.valkey.client() as client:
            client.replicaof("NO", "ONE")


@pytest.fixture
def apart() -> Iterator[Apart]:
    with Valkey() as valkey, Proxy(valkey.port) as proxy:
        url = f"redis://{HOST}:{proxy.port}/0"
        caches = {
            **settings.CACHES,
            "locks": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url},
        }
        ours = {**live.BRISK, "LOCK_CACHE": "locks", "LOCK_TIMEOUT": 5, "PUSH_TIMEOUT": 5}
        with live.changed(CACHES=caches, DEDUPJOBS=ours):
            yield Apart(valkey, proxy)


def untouched(outcome: Any) -> ProcessedJob:
    """Return the row, on which nobody has left a trace."""
    row = live.row_of(outcome)
    assert (row.status, row.attempts, row.failures, row.lost_count) == (Status.PENDING, 0, 0, 0)
    assert live.outcomes(outcome) == []
    return row


def test_job_that_waits_is_set_aside_and_runs_once_locks_can_be_had_again(apart: Apart) -> None:
    outcome = jobs.record_if_locked.enqueue(tag="a")
    apart.away()
    assert live.work_off() == 1
    row = untouched(outcome)
    assert lifecycle.is_aside(row)
    assert row.dispatch_id == lifecycle.NO_LOCKS
    coordinator = Coordinator()
    for _ in range(3):
        coordinator.tick()
        assert live.work_off() == 0, "no message goes round meanwhile"
    apart.back()
    until(lambda: coordinator.tick() and live.work_off(), what="it is sent again")
    assert live.row_of(outcome).status == Status.SUCCEEDED
    assert (live.row_of(outcome).attempts, live.notes("a")) == (1, [""])


def test_job_runs_by_its_row_alone_where_nothing_else_is_said(apart: Apart) -> None:
    outcome = jobs.record.enqueue(tag="a")
    apart.away()
    assert live.work_off() == 1
    assert live.row_of(outcome).status == Status.SUCCEEDED


def test_run_now_that_waits_is_left_to_a_worker(apart: Apart) -> None:
    apart.away()
    outcome = jobs.record_if_locked.run_now(tag="a")
    assert outcome.kind is Kind.CREATED
    assert outcome.job.status == Status.PENDING
    assert lifecycle.is_aside(untouched(outcome))


def test_retry_that_waits_keeps_its_failures(apart: Apart) -> None:
    outcome = jobs.record_if_locked.enqueue(tag="a")
    ProcessedJob.objects.update(status=Status.RETRYING, failures=2, attempts=2)
    apart.away()
    assert live.deliver(live.row_of(outcome)) is None
    row = live.row_of(outcome)
    assert (row.status, row.attempts, row.failures) == (Status.RETRYING, 2, 2)
    assert lifecycle.is_aside(row)
    apart.back()
    until(lambda: Sweep().do(rooms=False, most=10), what="it is let go")
    assert live.deliver(live.row_of(outcome)) is Status.SUCCEEDED


@pytest.mark.parametrize("kind", [jobs.record_if_locked, jobs.refuse_unlocked])
def test_batch_is_set_aside_as_a_whole(apart: Apart, kind: Any) -> None:
    made = kind.enqueue_many([{"tag": str(n)} for n in range(5)])
    apart.away()
    batches.run([[outcome.job.pk, 1] for outcome in made])
    assert all(lifecycle.is_aside(untouched(outcome)) for outcome in made)
    apart.back()
    coordinator = Coordinator()

    def done() -> bool:
        coordinator.tick()
        live.work_off()
        return {live.row_of(outcome).status for outcome in made} == {Status.SUCCEEDED}

    until(done, what="all run")
    assert [live.notes(str(n)) for n in range(5)] == [[""]] * 5


def test_call_is_refused_in_words_and_makes_no_row(apart: Apart) -> None:
    apart.away()
    outcome = jobs.refuse_unlocked.enqueue(tag="a")
    assert (outcome.kind, outcome.created, outcome.control) == (Kind.BLOCKED, False, None)
    assert "on_redis_error='refuse'" in outcome.reason
    assert "ConnectionError" in outcome.reason
    assert outcome.job.pk is None
    with pytest.raises(JobConflict, match="no lock can be had"):
        outcome.raise_for_conflict()
    many = jobs.refuse_unlocked.enqueue_many([{"tag": "a"}, {"tag": "b"}])
    assert [one.kind for one in many] == [Kind.BLOCKED] * 2
    assert jobs.refuse_unlocked.run_now(tag="a").kind is Kind.BLOCKED
    assert not ProcessedJob.objects.exists()
    assert jobs.record_if_locked.enqueue(tag="a").created, "another job's affair"
    apart.back()
    until(lambda: jobs.refuse_unlocked.enqueue(tag="a").created, what="it is accepted again")


def test_accepted_call_whose_delivery_meets_no_lock_waits_and_is_not_lost(apart: Apart) -> None:
    outcome = jobs.refuse_unlocked.enqueue(tag="a")
    apart.away()
    assert live.work_off() == 1
    assert lifecycle.is_aside(untouched(outcome))
    apart.back()
    coordinator = Coordinator()
    until(lambda: coordinator.tick() and live.work_off(), what="it is sent again")
    assert live.row_of(outcome).status == Status.SUCCEEDED


def test_replica_that_answers_and_can_not_write_is_as_good_as_away(apart: Apart) -> None:
    accepted = jobs.record_if_locked.enqueue(tag="a")
    apart.as_replica()
    outcome = jobs.refuse_unlocked.enqueue(tag="a")
    assert outcome.kind is Kind.BLOCKED
    assert "ReadOnlyError" in outcome.reason
    assert live.work_off() == 1
    assert lifecycle.is_aside(untouched(accepted))
    apart.as_primary()
    until(lambda: jobs.refuse_unlocked.enqueue(tag="a").created, what="it is accepted again")


def test_run_that_has_begun_goes_on_without_its_lock(apart: Apart) -> None:
    outcome = jobs.record_if_locked.enqueue(tag="a")
    row = live.row_of(outcome)
    claim = lifecycle.claim(row.pk, 1, owner="me", place=lifecycle.Place())
    assert claim is not None
    apart.away()
    assert lifecycle.complete(claim, "null", unique_for=FOREVER, note=lifecycle.NO_NOTE)


def test_story_says_why_a_row_waits_and_when_it_need_not_any_more(apart: Apart) -> None:
    outcome = jobs.record_if_locked.enqueue(tag="a")
    apart.away()
    live.work_off()
    why = telling.tell(live.row_of(outcome)).why
    assert "no lock can be had, and on_redis_error says not to run without" in why.now
    assert "ConnectionError" in why.now
    assert "costs it no attempt" in why.next
    apart.back()
    until(
        lambda: "locks can be had again" in telling.tell(live.row_of(outcome)).why.now,
        what="it says so",
    )


def test_sweep_looks_ever_more_rarely_and_as_often_as_at_first_in_the_next_outage(
    apart: Apart,
) -> None:
    sweep = Sweep()
    apart.away()
    now, looks = 100.0, []
    while now < 120:
        before = sweep._again
        assert not sweep._has_locks(now)
        if sweep._again != before:
            looks.append(now - 100)
        now += 0.5
    assert looks == [0, 1, 3, 7, 12, 17]
    assert (SOONEST, LATEST) == (1, 5)
    sweep.do(rooms=False, most=10)
    assert sweep._pause == SOONEST, "no row waits for a lock"


def test_schedule_makes_its_slots_although_calls_are_refused(apart: Apart) -> None:
    @job(key="{slot}", unique_for=FOREVER, every=60, on_redis_error="refuse", name="test.clocked")
    def clocked(*, slot: Any) -> None: ...

    try:
        schedule = Schedule()
        now = lifecycle.database_now()
        schedule.tick(now)
        apart.away()
        schedule.tick(now + timedelta(seconds=61))
        assert ProcessedJob.objects.filter(name="test.clocked").count() == 1
    finally:
        registry.forget("test.clocked")


def test_tests_of_applications_need_no_locks_unless_they_ask_for_their_loss() -> None:
    with captured_jobs():
        assert jobs.refuse_unlocked.enqueue(tag="a").created
    with inline():
        assert jobs.refuse_unlocked.enqueue(tag="b").created
        assert jobs.refuse_unlocked.run_now(tag="c").job.status == Status.SUCCEEDED
    assert live.notes("b") == [""]
    with simulate_redis_loss():
        assert jobs.refuse_unlocked.enqueue(tag="d").kind is Kind.BLOCKED
    run_pending()
    assert live.notes("a") == [""]


def test_asking_costs_no_more_than_the_budget_of_a_second(apart: Apart) -> None:
    with live.changed(DEDUPJOBS={**settings.DEDUPJOBS, "PUSH_TIMEOUT": 0.3}):
        apart.proxy.black_hole()
        assert "Timeout" in locks.why_unreachable()
        assert all("BudgetSpent" in locks.why_unreachable() for _ in range(100))


@live.with_sqlite
@pytest.mark.large
def test_worker_sets_jobs_aside_and_its_coordinator_sends_them_again(
    apart: Apart, spawn: Spawn
) -> None:
    url = settings.CACHES["locks"]["LOCATION"]
    env = {"DEDUPJOBS_TEST_LOCKS": url}
    live.start_worker(spawn, env=env, LOCK_CACHE="locks0")
    jobs.record_if_locked.enqueue(tag="first")
    until(lambda: live.notes("first"), live.PATIENCE, what="it runs")
    apart.away()
    outcome = jobs.record_if_locked.enqueue(tag="a")
    until(lambda: lifecycle.is_aside(live.row_of(outcome)), live.PATIENCE, what="it is set aside")
    apart.back()
    live.wait_for(outcome)
    assert (live.row_of(outcome).attempts, live.notes("a")) == (1, [""])
