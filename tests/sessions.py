"""The sessions of a database server: who waits, who works, and ending one from outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any

import pytest
from django.db import OperationalError, connection

from tests.settings import WORKER_NUMBER
from tests.waiting import until

on_sqlite = connection.vendor == "sqlite"
needs_server = pytest.mark.skipif(
    on_sqlite, reason="SQLite is a file: it has no sessions and no network to lose"
)
needs_row_locks = pytest.mark.skipif(
    on_sqlite, reason="SQLite locks the whole file: one writer, no row locks"
)

# To this database, but for the one that asks. `{}`: conditions on the columns state and query.
_OTHERS = {
    "postgresql": "SELECT pid, query FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND backend_type = 'client backend'",  # not the vacuum
    "mysql": "SELECT id, info FROM information_schema.processlist "
    "WHERE db = DATABASE() AND id <> CONNECTION_ID()",
}
_WORKING = {"postgresql": " AND state = 'active'", "mysql": " AND command = 'Query'"}
_WAITING = {
    "postgresql": "SELECT pid FROM pg_stat_activity "
    "WHERE datname = current_database() AND wait_event_type = 'Lock'",
    "mysql": "SELECT p.id FROM information_schema.innodb_trx t "
    "JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id "
    "WHERE t.trx_state = 'LOCK WAIT' AND p.db = DATABASE()",
}
_OWN = {"postgresql": "SELECT pg_backend_pid()", "mysql": "SELECT CONNECTION_ID()"}
_LIMIT = {
    "postgresql": "SET lock_timeout = %s",
    "mysql": "SET SESSION innodb_lock_wait_timeout = %s",
}
_UNITS = {"postgresql": 1_000, "mysql": 1}  # per second
_TERMINATE = {"postgresql": "SELECT pg_terminate_backend(%s)", "mysql": "KILL CONNECTION %s"}


def own() -> int:
    """Return the id of this connection's session."""
    return int(_rows(_OWN)[0][0])


def others() -> list[int]:
    """Return the ids of all other sessions of this database."""
    return [int(row[0]) for row in _rows(_OTHERS)]


def running(word: str) -> list[int]:
    """Return the ids of other sessions that run a query with this word right now."""
    working = {vendor: sql + _WORKING[vendor] for vendor, sql in _OTHERS.items()}
    return [int(pid) for pid, query in _rows(working) if word in (query or "")]


def waiting() -> list[int]:
    """Return the ids of sessions of this database that wait for a lock."""
    return [int(row[0]) for row in _rows(_WAITING)]


def terminate(*sessions: int) -> None:
    """End sessions from outside, from a connection that is none of them, and see them gone."""
    with closing(connection.copy()) as outside, outside.cursor() as cursor:
        for session in sessions:
            with suppress(OperationalError):  # it has ended by itself
                cursor.execute(_TERMINATE[connection.vendor], [session])

        def gone() -> bool:
            cursor.execute(_OTHERS[connection.vendor])
            return not {int(row[0]) for row in cursor.fetchall()} & set(sessions)

        until(gone, what=f"sessions {sessions} are gone")


def limit_lock_waits(seconds: int) -> None:
    """Let this connection wait no longer than that for a lock, until it is closed."""
    with connection.cursor() as cursor:
        cursor.execute(_LIMIT[connection.vendor], [seconds * _UNITS[connection.vendor]])


def _rows(sql: dict[str, str]) -> Sequence[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":  # which shows a transaction what it saw at first
            cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute(sql[connection.vendor])
        return cursor.fetchall()


def until_one_waits(unless: Callable[[], bool] = lambda: False) -> None:
    """Return once a session of this database waits for a lock, or ``unless`` is true."""
    # InnoDB answers from a cache that it renews once nobody has asked for 100 ms, and another
    # process of the suite may be asking, too: at another pace.
    pace = 0.15 + 0.2 * WORKER_NUMBER
    until(lambda: unless() or waiting(), 30, every=pace, what="a session waits for a lock")


def let_nobody_in() -> None:
    """Keep a thread of an earlier test from connecting once more to what is about to be dropped."""
    if connection.vendor != "postgresql":
        return  # the others drop what is in use
    name = connection.settings_dict["NAME"]
    connection.close()
    with connection._nodb_cursor() as cursor:
        cursor.execute(f"ALTER DATABASE {connection.ops.quote_name(name)} ALLOW_CONNECTIONS false")

        def gone() -> bool:
            asked = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
            cursor.execute(asked, [name])
            return not cursor.fetchall()

        until(gone, 10, what="nobody is connected")
