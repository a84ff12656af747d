"""Ending what a job runs on its database, once its time is up: each driver in its own way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from django.db import connections
from django.db.backends.signals import connection_created

from dedupjobs import clock, interrupts, signals

CANCEL_SECONDS = 1
AFTER_ALARM = 0.1  # seconds; a driver that lets the alarm in needs no other help


def drop_connections() -> None:
    """Cancel what runs on the server, and close: a signal may have hit in mid-query."""
    for connection in connections.all(initialized_only=True):
        if connection.connection is None:
            continue
        try:
            _cancel(connection)
        except Exception as error:
            signals.tell(signals.settle_troubled, "", claim=None, error=error)
        connection.close()


def _cancel(connection: Any) -> None:
    if cancel := getattr(connection.connection, "cancel_safe", None):  # psycopg
        cancel(timeout=CANCEL_SECONDS)
    elif interrupt := getattr(connection.connection, "interrupt", None):  # SQLite
        interrupt()
    elif connection.vendor == "mysql":  # where a query does not notice that its client is gone
        _kill(connection, "CONNECTION", connection.connection.thread_id())


def _kill(connection: Any, what: str, session: int) -> None:
    """End a session of MySQL, or just its QUERY, from another one: nobody else can."""
    other = connection.copy()
    seconds = {"connect_timeout": CANCEL_SECONDS, "read_timeout": CANCEL_SECONDS}
    other.settings_dict["OPTIONS"] = {**other.settings_dict["OPTIONS"], **seconds}
    with closing(other), other.cursor() as cursor:
        cursor.execute(f"KILL {what} {session:d}")


@contextmanager
def ended_with(cutter: interrupts.Cutter) -> Iterator[None]:
    """
    End what runs on MySQL's server once the time is up, so that the alarm gets through.

    mysqlclient lets no signal in while it waits for the server's answer. The time may change
    meanwhile.
    """
    ours = [connection for connection in connections.all() if connection.vendor == "mysql"]
    if cutter.timeout is None or not ours:
        yield
        return
    left, leaving = threading.Event(), threading.Lock()
    with _sessions_of(ours) as sessions:

        def watch() -> None:
            seconds = cutter.left
            while not clock.wait(left, _until_next_look(seconds)):
                seconds = cutter.left
                if seconds is None or seconds > -AFTER_ALARM:
                    continue
                with leaving:
                    if not left.is_set():
                        _end_queries(ours, sessions)
                seconds = interrupts.REPEAT

        join = clock.start(watch, name="dedupjobs-time-out")
        try:
            yield
        finally:
            with leaving:  # or the settle's queries would be ended
                left.set()
            join(CANCEL_SECONDS)


def _until_next_look(left: float | None) -> float:
    longest = interrupts.REPEAT
    return longest if left is None else min(max(left, 0.0) + AFTER_ALARM, longest)


@contextmanager
def _sessions_of(ours: list[Any]) -> Iterator[dict[str, int]]:
    """Keep the connections' sessions by alias; another thread must not ask mysqlclient itself."""
    sessions = {c.alias: c.connection.thread_id() for c in ours if c.connection is not None}

    def note(connection: Any, **_: Any) -> None:
        if connection in ours:
            sessions[connection.alias] = connection.connection.thread_id()

    connection_created.connect(note)
    try:
        yield sessions
    finally:
        connection_created.disconnect(note)


def _end_queries(ours: list[Any], sessions: dict[str, int]) -> None:
    for connection in ours:
        try:
            if connection.alias in sessions:
                _kill(connection, "QUERY", sessions[connection.alias])
        except Exception as error:
            signals.tell(signals.settle_troubled, "", claim=None, error=error)
