"""
The one source of time, tokens, chance and threads, so that a simulation can stand in for all.

Two clocks, never mixed: leases and due times are judged by the *database* (``DbNow``), so
that no worker's clock matters; durations within one process by ``monotonic``.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import models
from django.db.models.expressions import Expression
from django.utils.dateparse import parse_datetime

monotonic = time.monotonic
sleep = time.sleep
uniform = random.SystemRandom().uniform


def wait(event: threading.Event, seconds: float) -> bool:
    """Wait for the event, at most ``seconds``; return whether it is set."""
    return event.wait(seconds)


def start(target: Callable[[], None], *, name: str) -> Callable[[float], None]:
    """Run ``target`` in a thread of its own, and return a function that waits for its end."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread.join


def utcnow() -> datetime:
    """Return this machine's wall clock, aware, in UTC; for display and Redis stamps only."""
    return datetime.now(UTC)


def reseed() -> None:
    """Let ``random`` differ from that of the process that has forked this one."""
    random.seed()


def token() -> str:
    """Return 24 hex digits that no other process will ever draw."""
    return secrets.token_hex(12)


def uuid() -> str:
    """Return a UUID that no other process will ever draw, and that later ones stand behind."""
    stamp = time.time_ns() // 1_000_000
    value = stamp << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76  # version 7 (RFC 9562)
    value = value & ~(0x3 << 62) | 0x2 << 62
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class UtcDateTimeField(models.DateTimeField):  # type: ignore[type-arg]
    """
    A point in time that is UTC in the database and an aware UTC datetime in Python.

    Django's own field follows USE_TZ, TIME_ZONE and the connection's zone; ``DbNow`` follows
    none of them, and a lease that is read in another zone than it was written in is hours off.
    """

    def get_prep_value(self, value: Any) -> Any:
        if isinstance(value, datetime):
            if value.tzinfo is None:
                raise ValueError(f"{self.name}: {value!r} has no time zone; give an aware datetime")
            return value.astimezone(UTC)
        return value if value is None or hasattr(value, "resolve_expression") else str(value)

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        value = value if prepared else self.get_prep_value(value)
        if not isinstance(value, datetime) or connection.vendor == "postgresql":
            return value
        # Milliseconds on SQLite, as strftime('%f') writes them: the text must compare right.
        digits = "milliseconds" if connection.vendor == "sqlite" else "microseconds"
        return value.replace(tzinfo=None).isoformat(" ", digits)

    def select_format(self, compiler: Any, sql: str, params: Any) -> Any:
        if compiler.connection.vendor == "postgresql":
            return f"({sql}) AT TIME ZONE 'UTC'", params
        return sql, params

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> datetime | None:
        if isinstance(value, str):
            value = parse_datetime(value)
        return None if value is None else value.replace(tzinfo=UTC)


_FORMAT = "'%%Y-%%m-%%d %%H:%%M:%%f'"  # SQLite's text for a moment
_MOMENT = UtcDateTimeField()  # one for all: making a field costs more than the rest of DbNow


class DbNow(Expression):
    """
    The database's present moment in UTC, plus ``after`` (seconds or a timedelta).

    PostgreSQL's clock_timestamp() moves on within a transaction, unlike now(), which would
    grant leases from the transaction's start. ``steady`` reads it once per statement, so that
    an index can bound a sweep by it.
    """

    PRESENT = {
        "postgresql": "clock_timestamp()",
        "mysql": "UTC_TIMESTAMP(6)",
        "sqlite": "'now'",
    }

    def __init__(self, after: float | timedelta = 0, *, steady: bool = False) -> None:
        super().__init__(output_field=_MOMENT)
        seconds = after.total_seconds() if isinstance(after, timedelta) else after
        self.microseconds = round(seconds * 1_000_000)
        self.steady = steady

    def as_sql(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, tuple[Any, ...]]:
        return getattr(self, f"_{connection.vendor}")(), ()

    def _postgresql(self) -> str:
        present = self.PRESENT["postgresql"]
        now = f"(SELECT {present})" if self.steady else present
        return f"({now} + interval '{self.microseconds} microseconds')"

    def _mysql(self) -> str:
        return f"({self.PRESENT['mysql']} + INTERVAL {self.microseconds} MICROSECOND)"

    def _sqlite(self) -> str:
        return f"strftime({_FORMAT}, {self.PRESENT['sqlite']}, '{self.shift('sqlite')}')"

    @classmethod
    def shifted(cls, vendor: str) -> str:
        """Return the same as SQL that takes ``shift`` as its parameter."""
        present = cls.PRESENT[vendor]
        return {
            "postgresql": f"({present} + %s * interval '1 microsecond')",
            "mysql": f"({present} + INTERVAL %s MICROSECOND)",
            "sqlite": f"strftime({_FORMAT}, {present}, %s)",
        }[vendor]

    def shift(self, vendor: str) -> int | str:
        """Return how far the moment lies ahead, as the vendor's SQL takes it."""
        if vendor == "sqlite":
            return f"{self.microseconds / 1_000_000:+.6f} seconds"
        return self.microseconds


def read_db_now(connection: Any) -> datetime:
    """Return the present moment of ``connection``'s database, in one round trip."""
    sql, _ = DbNow().as_sql(None, connection)
    if connection.vendor == "postgresql":
        sql = f"{sql} AT TIME ZONE 'UTC'"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {sql}", [])
        value = cursor.fetchone()[0]
    found = datetime.fromisoformat(value) if isinstance(value, str) else value
    return found.replace(tzinfo=UTC)
