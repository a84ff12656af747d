"""A clock that stands still until it is moved: ``frozen_clock``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from unittest import mock

from dedupjobs import clock, lifecycle
from dedupjobs.clock import DbNow
from dedupjobs.lifecycle import statements
from dedupjobs.testing.stage import only_in_tests


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
        self._tell()
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

    def present(self) -> dict[str, str]:
        """Return what stands for the database's present in SQL, by vendor."""
        text = f"{self.now:%Y-%m-%d %H:%M:%S.%f}"
        return {
            "postgresql": f"timestamptz '{text}+00'",
            "mysql": f"CAST('{text}' AS DATETIME(6))",
            "sqlite": f"'{text[:-3]}'",
        }

    def _tell(self) -> None:
        DbNow.PRESENT = self.present()
        statements._compiled.clear()


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
        mock.patch.object(DbNow, "PRESENT", frozen.present()),
        mock.patch.object(statements, "_compiled", {}),  # with the present of the moment in it
        mock.patch.multiple(
            clock, utcnow=frozen.utcnow, monotonic=frozen.monotonic, sleep=frozen.sleep
        ),
    ):
        yield frozen
