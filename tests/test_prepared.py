"""What PostgreSQL plans once per connection, and when it must not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.db import DataError, OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext

from dedupjobs import controls
from dedupjobs.lifecycle import prepared
from dedupjobs.models import ProcessedJob, Status
from tests import live
from tests.app import jobs

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _new_connection() -> Iterator[None]:
    connection.close()
    yield
    connection.close()


def names() -> list[str]:
    """Return the names of what this connection has prepared."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT name FROM pg_prepared_statements ORDER BY name")
        return [name for (name,) in cursor.fetchall()]


def live_one(tag: str) -> Status | None:
    """Enqueue and run a job, by six statements of a fixed text or so."""
    return live.deliver(live.row_of(jobs.record.enqueue(tag=tag)))


def warm_up() -> None:
    for number in range(prepared.WORTH):
        assert live_one(f"warm {number}") == Status.SUCCEEDED
    controls.current(at_most=0.0)  # what a process reads once in a while is prepared, too


def test_connection_that_is_used_again_prepares_what_it_repeats() -> None:
    assert live_one("first") == Status.SUCCEEDED
    assert not names()
    warm_up()
    found = names()
    assert found
    for number in range(5):
        live_one(f"more {number}")
    assert names() == found


def test_numbers_of_any_size_share_a_statement() -> None:
    warm_up()
    before = names()
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT setval(pg_get_serial_sequence('dedupjobs_processedjob', 'id'), 3000000000)"
        )
    assert live_one("far") == Status.SUCCEEDED
    assert ProcessedJob.objects.filter(pk__gt=3_000_000_000).exists()
    assert names() == before


def test_project_may_prepare_nothing_by_itself_as_before() -> None:
    warm_up()
    assert connection.connection.prepare_threshold is None
    ours = names()
    for _ in range(10):
        with psycopg.Cursor(connection.connection) as cursor:
            cursor.execute("SELECT %s::int", [1])
    assert names() == ours


def test_log_of_queries_shows_their_values() -> None:
    warm_up()
    with CaptureQueriesContext(connection) as captured:
        live_one("seen")
    assert any("record:seen" in query["sql"] for query in captured)


def test_wrappers_of_executions_see_what_is_prepared_and_no_question_of_ours() -> None:
    seen: list[str] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        seen.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        warm_up()
    assert len([sql for sql in seen if "dedupjobs_jobattempt" in sql]) >= 2 * prepared.WORTH
    assert names()
    assert not any(prepared.PROCESS in sql for sql in seen)


def test_jobs_go_on_after_a_migration_has_changed_a_type() -> None:
    warm_up()
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE dedupjobs_processedjob ALTER queue TYPE text")
    try:
        assert live_one("after") == Status.SUCCEEDED
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE dedupjobs_processedjob ALTER queue TYPE varchar(100)")


def drop_prepared() -> None:
    """Drop what the server has prepared, in a way that the driver does not see."""
    connection.connection.pgconn.exec_(b"DEALLOCATE ALL")


def test_jobs_go_on_after_somebody_has_dropped_what_was_prepared() -> None:
    warm_up()
    drop_prepared()
    assert live_one("after") == Status.SUCCEEDED
    assert not names()


def test_in_a_transaction_that_is_an_error_as_of_a_connection() -> None:
    warm_up()
    drop_prepared()
    with pytest.raises(OperationalError, match="fits no more"), transaction.atomic():
        jobs.record.enqueue(tag="inside")
    with transaction.atomic():
        jobs.record.enqueue(tag="again")
    assert ProcessedJob.objects.filter(key__endswith="again").exists()


def test_nothing_is_prepared_where_the_number_of_the_process_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As a pooler does it, which answers a connect with a number of its own.
    monkeypatch.setattr(prepared, "PROCESS", "SELECT pg_backend_pid() + 1")
    warm_up()
    assert live_one("more") == Status.SUCCEEDED
    assert not names()


def test_broken_transaction_is_asked_nothing() -> None:
    for _ in range(prepared.WORTH):
        prepared.cursor(connection).close()
    with transaction.atomic(), connection.cursor() as cursor:
        with pytest.raises(DataError):
            cursor.execute("SELECT 1/0")
        prepared.cursor(connection).close()
        transaction.set_rollback(True)
    assert prepared._history_of(connection.connection).is_direct is None
