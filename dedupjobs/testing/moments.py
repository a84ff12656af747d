"""A clock that stands still until it is moved: ``frozen_clock``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

from dedupjobs import clock, lifecycle
from dedupjobs.clock import DbNow
from dedupjobs.testing.stage import only_in_tests

_LITERALS = {
    "postgresql": "(timestamptz '{0:%Y-%m-%d %H:%M:%S.%f}+00')",
    "mysql": "CAST('{0:%Y-%m-%d %H:%M:%S.%f}' AS DATETIME(6))",
}


class FrozenClock:
    """
    What dedupjobs takes for the present, in this process: the database's clock and our own.

    Your code's clocks go on. Durations are measured as ever, plus what the clock was moved.
    """

    def __init__(self, now: datetime) -> None:
        self.now = now
        self._moved = 0.0
        self._thread = threading.get_ident()
        self._monotonic, self._sleep = clock.monotonic, clock.sleep

    def move(self, by: timedelta | float) -> datetime:
        """Move forward by a timedelta or seconds, and return the new present."""
        delta = by if isinstance(by, timedelta) else timedelta(seconds=by)
        if delta < timedelta(0):
            raise ValueError(f"move({by!r}): this clock only goes forward")
        self.now += delta
        self._moved += delta.total_seconds()
        return self.now

    def utcnow(self) -> datetime:
        return self.now

    def monotonic(self) -> float:
        return self._monotonic() + self._moved

    def sleep(self, seconds: float) -> None:
        if threading.get_ident() == self._thread:
            self.move(seconds)
        else:
            self._sleep(seconds)

    def sql(self) -> Callable[..., tuple[str, tuple[Any, ...]]]:
        """Return how DbNow is written while this clock stands."""

        def as_sql(moment: DbNow, compiler: Any, connection: Any, **_: Any) -> Any:
            value = self.now + timedelta(microseconds=moment.microseconds)
            if connection.vendor == "sqlite":  # milliseconds, as its own clock has them
                return f"'{value.replace(tzinfo=None).isoformat(' ', 'milliseconds')}'", ()
            return _LITERALS[connection.vendor].format(value), ()

        return as_sql


@contextmanager
def frozen_clock(at: datetime | None = None) -> Iterator[FrozenClock]:
    """
    Stop the clock that leases, due times and windows are judged by, at ``at`` or now.

        with frozen_clock() as now:
            now.move(timedelta(hours=1))    # a backoff, a debounce or a window is over
            run_pending()
    """
    only_in_tests("frozen_clock()")
    if at is not None and at.tzinfo is None:
        raise ValueError(f"frozen_clock({at!r}): give an aware datetime")
    start = lifecycle.database_now() if at is None else at.astimezone(UTC)
    frozen = FrozenClock(start.replace(microsecond=start.microsecond // 1000 * 1000))
    with (
        mock.patch.object(DbNow, "as_sql", frozen.sql()),
        mock.patch.multiple(
            clock, utcnow=frozen.utcnow, monotonic=frozen.monotonic, sleep=frozen.sleep
        ),
    ):
        yield frozen
