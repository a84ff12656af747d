"""Threads with connections of their own, and what a test wants to know of their locks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.db.models import F

from dedupjobs.models import ProcessedJob
from tests.waiting import until

PATIENCE = 20.0  # seconds; what takes longer hangs

needs_row_locks = pytest.mark.skipif(
    connection.vendor == "sqlite", reason="SQLite locks the whole file: one writer, no row locks"
)


class Aside(threading.Thread):
    """Run a function in a thread, and hand out its value or its error."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error
        finally:
            connections.close_all()

    def result(self, seconds: float = PATIENCE) -> Any:
        self.join(seconds)
        assert not self.is_alive(), f"still busy after {seconds} s"
        if self._error is not None:
            raise self._error
        return self._value


def together(*functions: Callable[[], Any], seconds: float = 60) -> list[Any]:
    """Let all functions go at the same moment, each in a thread; return their values in order."""
    barrier = threading.Barrier(len(functions))

    def behind_barrier(function: Callable[[], Any]) -> Callable[[], Any]:
        def go() -> Any:
            connection.ensure_connection()
            barrier.wait(PATIENCE)
            return function()

        return go

    sides = [Aside(behind_barrier(function)) for function in functions]
    return [side.result(seconds) for side in sides]


@contextmanager
def locked(row: ProcessedJob) -> Iterator[None]:
    """Keep the row in an open transaction of another connection, as a business transaction may."""
    has, end = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic():
            # Not only updated: PostgreSQL lets foreign keys to an updated row pass.
            ProcessedJob.objects.select_for_update().get(pk=row.pk)
            ProcessedJob.objects.filter(pk=row.pk).update(attempts=F("attempts"))
            has.set()
            assert end.wait(PATIENCE)

    side = Aside(hold)
    assert has.wait(PATIENCE)
    try:
        yield
    finally:
        end.set()
        side.result()


def until_a_session_waits() -> None:
    """Return once a session of this test's server waits for a row's lock."""
    # InnoDB answers from a cache that it renews once nobody has asked for 100 ms.
    until(_waiting_sessions, every=0.15, what="a session waits for a lock")


def _waiting_sessions() -> int:
    if connection.vendor == "postgresql":
        sql = (
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
    else:
        sql = (
            "SELECT count(*) FROM information_schema.innodb_trx t "
            "JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id "
            "WHERE t.trx_state = 'LOCK WAIT' AND p.db = DATABASE()"
        )
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":  # which shows a transaction what it saw at first
            cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute(sql)
        return int(cursor.fetchone()[0])


@contextmanager
def before_sql(*words: str, action: Callable[[], Any]) -> Iterator[None]:
    """Do ``action``, once, before this thread's connection sends a statement with all the words."""
    done: list[str] = []

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if not done and all(word in sql for word in words):
            done.append(sql)
            action()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield
    assert done, f"no statement with {words}"
