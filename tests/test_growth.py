"""What keeps jobs and sweeps at their cost while the tables grow: plans, and room for beats."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from dedupjobs import coordinator, lifecycle
from dedupjobs.models import JobAttempt, ProcessedJob
from tests import live
from tests.app import jobs

pytestmark = pytest.mark.django_db

SWEPT = {"dedupjobs_due", "dedupjobs_final"}
OTHERS = sorted({index.name for index in ProcessedJob._meta.indexes} - SWEPT)
BEATEN = {"lease_until", "beat_at", "active_at", "progress"}


def plan(sql: str) -> list[str]:
    """Return how a query would be done, were the tables large."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            # It judges by the rows that are there, which are none: so it gets no choice.
            for name in OTHERS:
                cursor.execute(f"DROP INDEX IF EXISTS {name}")
            for way in ("seqscan", "bitmapscan", "sort"):
                cursor.execute(f"SET LOCAL enable_{way} = off")
        explain = "EXPLAIN QUERY PLAN" if connection.vendor == "sqlite" else "EXPLAIN"
        cursor.execute(f"{explain} {sql}")
        return [str(row[0] if len(row) == 1 else row) for row in cursor.fetchall()]


def sorts(sql: str) -> list[str]:
    """Return what of a query's plan sorts all that it finds, though an index could have done it."""
    # MySQL judges by the rows, too, and its other indexes stay.
    sign = {"sqlite": r".*'USE TEMP B-TREE FOR ORDER BY'", "postgresql": r"\s*(->)?\s*Sort  \("}
    wanted = sign.get(connection.vendor, "never")
    return [line for line in plan(sql) if re.match(wanted, line)]


def asked(act: Any) -> list[str]:
    with CaptureQueriesContext(connection) as captured, transaction.atomic():
        act()
    return [q["sql"] for q in captured.captured_queries if "ORDER BY" in q["sql"]]


@pytest.mark.parametrize(
    ("sweep", "pages"),
    [
        (lambda: coordinator.Coordinator().hand_over(["default"]), 2),
        (lambda: list(coordinator._pages(_sent(), "dispatched_at")), 2),
        (lambda: lifecycle.prune(jobs.record.name, older_than=1, limit=9), 5),
    ],
    ids=["hand-over", "re-send", "prune"],
)
def test_page_of_a_sweep_is_sorted_by_an_index(sweep: Any, pages: int) -> None:
    jobs.record.enqueue(tag="a")
    queries = asked(sweep)
    assert len(queries) == pages
    with transaction.atomic():
        found = {sql: plan for sql in queries if (plan := sorts(sql))}
        transaction.set_rollback(True)
    assert found == {}


def test_sweep_for_the_lost_reads_open_attempts_only() -> None:
    """An index has them; by the primary key all that have ended would come first."""
    live.claimed(jobs.record.enqueue(tag="a"))
    (query,) = asked(lambda: list(coordinator._open_attempts()))
    with transaction.atomic():
        found = plan(query)
        transaction.set_rollback(True)
    assert "dedupjobs_outcome" in "".join(found)


def _sent() -> Any:
    return coordinator._sent_before("default", lifecycle.database_now())


def test_beat_touches_no_column_of_an_index_and_finds_room_beside_its_row() -> None:
    indexed = {name for index in JobAttempt._meta.indexes for name in index.fields}
    for constraint in JobAttempt._meta.constraints:
        indexed |= set(getattr(constraint, "fields", ()))
    assert not indexed & BEATEN
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT reloptions FROM pg_class WHERE relname = %s", [JobAttempt._meta.db_table]
            )
            assert cursor.fetchone() == (["fillfactor=85"],)
