"""concurrency_control="optimistic": the claim decides alone, and Redis hears of no lock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings
from django.db import connections
from django_redis import get_redis_connection

from dedupjobs import batches, clock, conf, counters, dispatch, locks, runner
from dedupjobs.coordinator import Coordinator
from dedupjobs.exceptions import JobDefinitionError
from dedupjobs.locks import Grip
from dedupjobs.models import AttemptOutcome, Kind, ProcessedJob, Status
from dedupjobs.registry import job
from tests import live
from tests.app import jobs
from tests.live import Spawn
from tests.servers import Valkey
from tests.test_costs import PATIENT, Costs, cheapest
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

SUCCEEDED = AttemptOutcome.SUCCEEDED


@pytest.fixture
def server() -> Iterator[redis.Redis]:
    """A server of our own, since others' commands would be counted; its client."""
    with (
        Valkey() as valkey,
        live.changed(**live.redis_at(valkey.url), DEDUPJOBS=PATIENT),
        valkey.client() as client,
    ):
        yield client


@contextmanager
def heard(client: redis.Redis) -> Iterator[list[str]]:
    """Yield what is asked in our database of a server about row locks, once the block is over."""
    asked: list[str] = []
    lines: list[str] = []
    source: Any = get_redis_connection(conf.get().lock_home)
    mine = source.connection_pool.connection_kwargs["db"]
    with client.monitor() as monitor:
        yield asked
        client.echo("the end")
        while "the end" not in (line := (seen := monitor.next_command())["command"]):
            if seen["db"] == mine:  # a server is shared, its databases are not
                lines.append(line)
    asked += [line for line in lines if "dedupjobs:lock:" in line]


def test_run_asks_nothing_about_a_lock(server: redis.Redis) -> None:
    with heard(server) as asked:
        outcome = jobs.record_freely.enqueue(tag="a")
        assert live.work_off() == 1
    assert live.outcomes(outcome) == [SUCCEEDED]
    assert asked == []


def test_run_with_a_lock_is_heard_so_the_test_before_can_fail(server: redis.Redis) -> None:
    with heard(server) as asked:
        jobs.record.enqueue(tag="a")
        assert live.work_off() == 1
    assert asked


def test_run_here_and_now_asks_nothing_about_a_lock(server: redis.Redis) -> None:
    with heard(server) as asked:
        assert jobs.record_freely.run_now(tag="a").job.status == Status.SUCCEEDED
    assert asked == []


@pytest.mark.parametrize("kind", [jobs.record_freely, jobs.record_freely_in_group])
def test_batch_asks_nothing_about_locks(server: redis.Redis, kind: Any) -> None:
    with heard(server) as asked:
        made = kind.enqueue_many([{"tag": str(n)} for n in range(5)])
        assert live.work_off() == 1
    assert {live.row_of(outcome).status for outcome in made} == {Status.SUCCEEDED}
    assert asked == []


@live.with_sqlite
@pytest.mark.large
def test_worker_and_its_parent_ask_nothing_about_the_lock_of_a_long_run(
    spawn: Spawn, tmp_path: Path
) -> None:
    with live.cache_client() as client, heard(client) as asked:
        live.start_worker(spawn)
        release = tmp_path / "go"
        outcome = jobs.wait_freely.enqueue(tag="a", release=str(release))
        live.begun("a")
        claimed_at = live.attempt(outcome).beat_at
        until(lambda: live.attempt(outcome).beat_at > claimed_at, what="its lease is renewed")
        release.touch()
        live.wait_for(outcome)
    assert asked == []


def test_run_costs_one_round_trip_which_takes_the_counts_along(server: redis.Redis) -> None:
    rows = iter([jobs.record_freely.enqueue(tag=clock.token()).job for _ in range(4)])

    def run() -> None:
        row = next(rows)
        runner.deliver(row.pk, 1, owner=clock.token(), lock=False)

    assert cheapest(run).trips == 1
    counted = counters.read().counters["attempts_total"]
    assert sum(counted.values()) == 4
    assert not counters._owed.counts


def test_batch_costs_two_round_trips_less_than_one_with_locks(server: redis.Redis) -> None:
    def cost(kind: Any) -> Costs:
        def make() -> list[ProcessedJob]:
            return [o.job for o in kind.enqueue_many([{"tag": clock.token()} for _ in range(10)])]

        made = iter([make() for _ in range(4)])

        def run_all() -> None:
            batches.run([[row.pk, row.generation] for row in next(made)])

        return cheapest(run_all)

    with_locks = cost(jobs.do_nothing_in_group)
    runner.host.description = dispatch.described(
        jobs.record_freely_in_group.name
    )  # as a message would say
    without = cost(jobs.record_freely_in_group)
    assert with_locks.trips >= 2
    assert without.trips <= 1


def test_message_that_describes_itself_otherwise_runs_once_and_leaves_no_lock() -> None:
    runner.host.description = dispatch.described(jobs.record.name)
    outcome = jobs.record_freely.enqueue(tag="a")
    row = live.row_of(outcome)
    runner.run([[row.pk, row.generation]])
    assert live.outcomes(outcome) == [SUCCEEDED]
    made = [o.job for o in jobs.record_freely.enqueue_many([{"tag": "b"}, {"tag": "c"}])]
    batches.run([[row.pk, row.generation] for row in made])
    assert set(ProcessedJob.objects.values_list("status", flat=True)) == {Status.SUCCEEDED}
    assert live.locks_left() == []


def test_message_that_claims_to_be_optimistic_only_spares_the_row_its_filter() -> None:
    runner.host.description = dispatch.described(jobs.record_freely.name)
    outcome = jobs.record.enqueue(tag="a")
    row = live.row_of(outcome)
    for _ in range(2):
        runner.run([[row.pk, row.generation]])
    assert live.outcomes(outcome) == [SUCCEEDED]
    assert live.notes("a") == [""]


def test_row_that_many_deliver_at_once_runs_once() -> None:
    outcomes = [jobs.record_freely.enqueue(tag=f"t{n}") for n in range(5)]
    rows = [live.row_of(outcome) for outcome in outcomes]
    barrier = threading.Barrier(4)

    def deliver(_: int) -> list[Status | None]:
        try:
            barrier.wait()
            return [
                runner.deliver(row.pk, row.generation, owner=clock.token(), lock=False)
                for row in rows
            ]
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        found = [status for statuses in pool.map(deliver, range(4)) for status in statuses]
    assert found.count(Status.SUCCEEDED) == len(rows)
    assert [live.outcomes(outcome) for outcome in outcomes] == [[SUCCEEDED]] * len(rows)
    assert [live.notes(f"t{n}") for n in range(5)] == [[""]] * 5


def test_attempt_that_died_is_taken_back_without_a_word_about_its_lock(
    server: redis.Redis,
) -> None:
    outcome = jobs.record_freely.enqueue(tag="a")
    live.claimed(outcome)
    coordinator = Coordinator()
    with heard(server) as asked:
        until(coordinator.reclaim, what="it is reclaimed")
    assert live.outcomes(outcome) == [AttemptOutcome.LOST]
    assert asked == []


def test_job_of_the_name_in_a_message_is_known_by_its_description() -> None:
    assert dispatch.name_in("shop.charge (1 row)") == "shop.charge"
    assert dispatch.name_in("shop.charge (1 row, again)") == "shop.charge"
    assert dispatch.name_in("shop.charge (20 rows)") == "shop.charge"
    for strange in ("", "(", "whatever", " (x) (", "\x00"):
        assert runner.registry.options_of(dispatch.name_in(strange)).takes_lock


@pytest.mark.parametrize("trouble", ["wait", "refuse", "database"])
def test_optimistic_job_that_says_what_to_do_without_a_lock_is_refused(trouble: str) -> None:
    with pytest.raises(JobDefinitionError, match=f"on_redis_error='{trouble}'.*remove one"):
        job(key=None, concurrency_control="optimistic", on_redis_error=trouble)(_specimen)


def test_optimistic_job_runs_whatever_the_projects_default_says_about_locks() -> None:
    defaults = {**settings.DEDUPJOBS, "DEFAULTS": {"on_redis_error": "refuse"}}
    with live.changed(DEDUPJOBS=defaults):
        made: Any = job(key=None, concurrency_control="optimistic", name="test.free")(_specimen)
    assert not made.options.needs_lock
    assert made.enqueue().kind is Kind.CREATED


def _specimen() -> None: ...


def test_lock_of_an_optimistic_row_that_another_version_has_left_keeps_nobody_out() -> None:
    outcome = jobs.record_freely.enqueue(tag="a")
    assert locks.acquire(outcome.job.pk, "dead", ttl=60) is Grip.HELD
    assert live.deliver(live.row_of(outcome)) is Status.SUCCEEDED
    assert locks.holder(outcome.job.pk) == "dead", "it is another's, and ends by itself"
