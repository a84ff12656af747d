"""
Specimen jobs that run by the clock.

Not discovered by default, since every coordinator of the suite would run them: the fixture of
test_schedule imports this module, and forgets its jobs afterwards.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from dedupjobs import FOREVER, job
from tests.app.jobs import note


def say(slot: datetime) -> str:
    """Return the slot as the job got it, with its zone's name."""
    return f"{slot.isoformat()} {slot.tzname()}"


@job(key="latest:{slot}", unique_for=FOREVER, every=60)
def latest(*, slot: datetime) -> None:
    note("latest", say(slot))


@job(key="skip:{slot}", unique_for=FOREVER, every=60, catch_up="skip")
def skip(*, slot: datetime) -> None:
    note("skip", say(slot))


@job(key="all:{slot}", unique_for=FOREVER, every=60, catch_up="all")
def every_one(*, slot: datetime) -> None:
    note("all", say(slot))


@job(key="window:{slot}", unique_for=timedelta(hours=1), every=60, catch_up="all")
def windowed(*, slot: datetime) -> None:
    note("window", say(slot))


@job(key="second:{slot}", unique_for=FOREVER, every=1, catch_up="all")
def each_second(*, slot: datetime) -> None:
    note("second", say(slot))


@job(key="nightly:{slot}", unique_for=FOREVER, cron="30 2 * * *")
def nightly(*, slot: datetime) -> None:
    note("nightly", say(slot))
