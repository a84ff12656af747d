"""What calls and jobs cost: counts that depend on no machine, so they are held here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import redis
from django.conf import settings
from django.db import connection
from django.test.utils import CaptureQueriesContext
from redis.connection import AbstractConnection

from dedupjobs import FOREVER, batches, cache, clock, controls, job, runner, stats
from dedupjobs.models import Kind, ProcessedJob, Status
from dedupjobs.testing import run_pending
from tests import live
from tests.app import jobs
from tests.servers import Valkey

pytestmark = pytest.mark.django_db(transaction=True)

PATIENT = {"PUSH_TIMEOUT": 10, "LOCK_TIMEOUT": 10, "LISTEN": "never"}


@job(key="noted:{tag}", unique_for=FOREVER, on_mismatch="ignore")
def noted(*, tag: str, more: int) -> None:
    """Do nothing."""


@pytest.fixture
def server() -> Iterator[redis.Redis]:
    """A server of our own, since others' commands would be counted; its client."""
    with (
        Valkey() as valkey,
        live.changed(**live.redis_at(valkey.url), DEDUPJOBS=PATIENT),
        valkey.client() as client,
    ):
        yield client


class Costs:
    """Counts a block's SQL statements on our tables, transactions, and round trips to Redis."""

    def __init__(self) -> None:
        self.trips = 0

    def __enter__(self) -> Costs:
        controls.current(at_most=0.0)  # a process reads them once a second, whatever it does
        send = AbstractConnection.send_packed_command

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.trips += 1
            return send(*args, **kwargs)

        self._patch = patch.object(AbstractConnection, "send_packed_command", counted)
        self._captured = CaptureQueriesContext(connection)
        self._patch.start()
        self._captured.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._captured.__exit__(*raised)
        self._patch.stop()
        texts = [query["sql"] for query in self._captured]
        self.transactions = sum(text.startswith("COMMIT") for text in texts)
        self.statements = [text.split(maxsplit=1)[0] for text in texts if "dedupjobs_" in text]


def waiting() -> ProcessedJob:
    return jobs.record.enqueue(tag=clock.token()).job


def run(row: ProcessedJob) -> Status | None:
    return runner.deliver(row.pk, 1, owner=clock.token())


def test_counting_counts_round_trips(server: redis.Redis) -> None:
    server.ping()  # connects
    with Costs() as nothing:
        pass
    with Costs() as three:
        for _ in range(3):
            server.ping()
    assert (nothing.trips, three.trips) == (0, 3)


def cheapest(act: Callable[[], object]) -> Costs:
    """Return what ``act`` costs once connections are there."""
    found = []
    for _ in range(4):
        with Costs() as costs:
            act()
        found.append(costs)
    return min(found, key=lambda costs: (costs.trips, len(costs.statements)))


STATEMENTS = {
    "postgresql": 2,  # each a transaction of its own
    "sqlite": 4,
    "mysql": 5,  # its UPDATE returns no row
}


def test_job_costs_four_statements_at_most_in_two_transactions_and_two_round_trips(
    server: redis.Redis,
) -> None:
    rows = iter([waiting() for _ in range(4)])
    costs = cheapest(lambda: run(next(rows)))
    assert len(costs.statements) == STATEMENTS[connection.vendor]
    assert costs.transactions == (0 if connection.vendor == "postgresql" else 2)
    assert costs.trips == 2
    assert set(ProcessedJob.objects.values_list("status", flat=True)) == {Status.SUCCEEDED}


@pytest.mark.parametrize("size", [2, 10, 100])
def test_group_batch_of_any_size_costs_six_statements_and_three_round_trips_at_most(
    server: redis.Redis, size: int
) -> None:
    def make() -> list[ProcessedJob]:
        calls = [{"tag": clock.token()} for _ in range(size)]
        return [outcome.job for outcome in jobs.do_nothing_in_group.enqueue_many(calls)]

    made = iter([make() for _ in range(4)])

    def run_all() -> None:
        batches.run([[row.pk, row.generation] for row in next(made)])

    costs = cheapest(run_all)
    if connection.vendor == "postgresql":
        assert len(costs.statements) <= 6
        assert costs.transactions <= 2
    assert costs.trips <= 3
    assert set(ProcessedJob.objects.values_list("status", flat=True)) == {Status.SUCCEEDED}


def test_batch_that_writes_each_ending_costs_a_statement_for_each(server: redis.Redis) -> None:
    def make() -> list[ProcessedJob]:
        calls = [{"tag": clock.token()} for _ in range(20)]
        return [outcome.job for outcome in jobs.do_nothing.enqueue_many(calls)]

    made = iter([make() for _ in range(4)])

    def run_all() -> None:
        batches.run([[row.pk, row.generation] for row in next(made)])

    costs = cheapest(run_all)
    if connection.vendor == "postgresql":
        assert len(costs.statements) <= 2 + 20
    assert costs.trips <= 3 + 20


def test_call_of_a_new_key_costs_a_read_with_an_insert_and_a_push(server: redis.Redis) -> None:
    costs = cheapest(waiting)
    if connection.vendor != "mysql":
        at_once = connection.vendor == "postgresql"
        assert costs.statements == (["WITH"] if at_once else ["SELECT", "INSERT"])
    assert costs.trips == 2  # the status cache is asked, the message is pushed


def test_duplicate_that_the_cache_knows_costs_one_round_trip_and_no_statement(
    server: redis.Redis,
) -> None:
    jobs.record.enqueue(tag="a")
    run_pending()
    jobs.record.enqueue(tag="a")
    jobs.record.enqueue(tag="a")
    stats.flush()

    def call() -> None:
        cache._forget_l1()  # as another process that has its connections
        assert jobs.record.enqueue(tag="a").kind is Kind.REPLAYED

    costs = cheapest(call)
    assert (costs.statements, costs.trips) == ([], 1)


def test_first_duplicate_of_a_success_brings_it_to_the_cache_in_two_more_round_trips(
    server: redis.Redis,
) -> None:
    tags = [clock.token() for _ in range(20)]
    for tag in tags:
        jobs.record.enqueue(tag=tag)
    run_pending()
    left = iter(tags)
    costs = cheapest(lambda: jobs.record.enqueue(tag=next(left)))
    assert costs.statements == ["WITH" if connection.vendor == "postgresql" else "SELECT", "SELECT"]
    assert costs.trips == 3  # the cache is asked, a lease is taken, the row is filled in


def test_duplicate_that_only_the_database_can_answer_is_not_read_again(
    server: redis.Redis,
) -> None:
    for more in (1, 1, 2):
        noted.enqueue(tag="a", more=more)
        run_pending()
    known = cheapest(lambda: noted.enqueue(tag="a", more=2))
    assert (len(known.statements), known.trips) == (1, 0)

    def call() -> None:
        cache._forget_l1()
        noted.enqueue(tag="a", more=2)

    unknown = cheapest(call)
    assert (len(unknown.statements), unknown.trips) == (1, 1)


def test_duplicate_that_this_process_knows_costs_nothing(
    server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "GATHER", 3600)  # the count waits
    jobs.record.enqueue(tag="a")
    run_pending()
    for _ in range(3):
        jobs.record.enqueue(tag="a")
    stats.flush()
    with Costs() as costs:
        assert jobs.record.enqueue(tag="a").kind is Kind.REPLAYED
    assert (costs.statements, costs.trips) == ([], 0)


def test_counting_for_metrics_costs_a_run_no_round_trip_of_its_own(server: redis.Redis) -> None:
    def cost_of_a_run() -> int:
        rows = iter([waiting() for _ in range(4)])
        return cheapest(lambda: run(next(rows))).trips

    with_counts = cost_of_a_run()
    with live.changed(DEDUPJOBS={**settings.DEDUPJOBS, "METRICS": False}):
        without = cost_of_a_run()
    assert (with_counts, without) == (2, 2)
