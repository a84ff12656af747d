"""
When a job that runs by the clock is due: its slots, as aware datetimes in UTC.

``every`` seconds: slots are multiples of it since 1970, so all processes agree on them.
``cron``: five fields, read in a time zone. Where the clock is put forward, a slot within the hour
that is skipped comes at its end; where it is put back, a slot at a fixed hour comes once, at the
first of the two, and one of every hour comes in both (as cron(8) does it).
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import takewhile
from typing import Any

from croniter import CroniterBadDateError, croniter

FIELDS = 5
HOUR = 1  # index of the hour's field


def is_cron(text: Any) -> bool:
    """Return whether ``text`` is a cron expression of five fields."""
    if not (isinstance(text, str) and len(text.split()) == FIELDS and croniter.is_valid(text)):
        return False
    try:
        croniter(text, datetime(2000, 1, 1, tzinfo=UTC)).get_next()
    except CroniterBadDateError:  # the 30th of February
        return False
    return True


def after(
    moment: datetime, *, every: float | None, cron: str | None, zone: tzinfo
) -> Iterator[datetime]:
    """Yield the slots after ``moment``, earliest first, without end."""
    return _by_cron(cron, moment, zone) if cron else _by_interval(every or 0.0, moment)


def last(moment: datetime, *, every: float | None, cron: str | None, zone: tzinfo) -> datetime:
    """Return the newest slot at or before ``moment``."""
    if not cron:
        return _floor(moment, every or 0.0)
    # Three hours before: croniter steps back over a clock change less well than forward.
    local = (moment + timedelta(seconds=1)).astimezone(zone)
    start = croniter(cron, local).get_prev(datetime).astimezone(UTC) - timedelta(hours=3)
    return list(takewhile(lambda slot: slot <= moment, _by_cron(cron, start, zone)))[-1]


def _floor(moment: datetime, every: float) -> datetime:
    step = timedelta(seconds=every)
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    return epoch + (moment - epoch) // step * step


def _by_interval(every: float, moment: datetime) -> Iterator[datetime]:
    slot = _floor(moment, every)
    while True:
        slot += timedelta(seconds=every)
        yield slot


def _by_cron(cron: str, moment: datetime, zone: tzinfo) -> Iterator[datetime]:
    slots = croniter(cron, moment.astimezone(zone))
    fixed_hour = not cron.split()[HOUR].startswith("*")
    while True:
        slot: datetime = slots.get_next(datetime)
        if slot.fold and fixed_hour:
            continue  # the same wall time a second time
        yield slot.astimezone(UTC)
