"""When a job that runs by the clock is due: intervals, cron, and the two days a year with a gap."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedupjobs import job, registry, slots
from dedupjobs.exceptions import JobDefinitionError
from dedupjobs.registry import FOREVER

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BERLIN, SYDNEY, LORD_HOWE = "Europe/Berlin", "Australia/Sydney", "Australia/Lord_Howe"


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def by_cron(cron: str, zone: str, after: str, number: int) -> list[str]:
    """Return the next slots as UTC texts."""
    found = slots.after(utc(after), every=None, cron=cron, zone=ZoneInfo(zone))
    return [f"{slot:%Y-%m-%d %H:%M}" for slot in islice(found, number)]


def last_by_cron(cron: str, zone: str, moment: str) -> str:
    found = slots.last(utc(moment), every=None, cron=cron, zone=ZoneInfo(zone))
    return f"{found:%Y-%m-%d %H:%M}"


# ---- every


@pytest.mark.parametrize("every", [0.5, 1, 7, 60, 3600, 86_400, 100_000])
@given(moment=st.datetimes(datetime(1980, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)))
@settings(max_examples=20, deadline=None)
def test_interval_slots_are_multiples_since_1970_whoever_asks(
    every: float, moment: datetime
) -> None:
    step = timedelta(seconds=every)
    newest = slots.last(moment, every=every, cron=None, zone=UTC)
    following = list(islice(slots.after(moment, every=every, cron=None, zone=UTC), 3))
    assert newest <= moment < newest + step
    assert (newest - EPOCH) % step == timedelta(0)
    assert following == [newest + step, newest + 2 * step, newest + 3 * step]
    assert newest.tzinfo is UTC


def test_slot_at_the_moment_itself_is_the_newest_and_not_the_next() -> None:
    moment = utc("2026-05-01 12:00")
    assert slots.last(moment, every=60, cron=None, zone=UTC) == moment
    assert next(slots.after(moment, every=60, cron=None, zone=UTC)) == utc("2026-05-01 12:01")
    assert last_by_cron("0 12 * * *", "UTC", "2026-05-01 12:00") == "2026-05-01 12:00"
    assert by_cron("0 12 * * *", "UTC", "2026-05-01 12:00", 1) == ["2026-05-02 12:00"]


def test_slots_after_a_moment_have_no_end() -> None:
    for rule in ({"every": 1.0, "cron": None}, {"every": None, "cron": "* * * * *"}):
        found = list(islice(slots.after(EPOCH, zone=UTC, **rule), 3_000))
        step = found[0] - EPOCH
        assert found[-1] == EPOCH + 3_000 * step


# ---- cron, in a zone

TABLE = [
    # a fixed hour that the clock skips comes at the end of the gap
    ("30 2 * * *", BERLIN, "2026-03-28 12:00", ["2026-03-29 01:00", "2026-03-30 00:30"]),
    ("30 2 * * *", SYDNEY, "2026-10-03 12:00", ["2026-10-03 16:00", "2026-10-04 15:30"]),
    ("15 2 * * *", LORD_HOWE, "2026-10-03 12:00", ["2026-10-03 15:30", "2026-10-04 15:15"]),
    # several slots in the gap are one
    ("*/15 2 * * *", BERLIN, "2026-03-28 12:00", ["2026-03-29 01:00", "2026-03-30 00:00"]),
    ("0 2,3 * * *", BERLIN, "2026-03-28 12:00", ["2026-03-29 01:00", "2026-03-30 00:00"]),
    # a fixed hour that comes twice is taken once, at the first
    ("30 2 * * *", BERLIN, "2026-10-24 12:00", ["2026-10-25 00:30", "2026-10-26 01:30"]),
    ("30 2 * * *", SYDNEY, "2026-04-04 12:00", ["2026-04-04 15:30", "2026-04-05 16:30"]),
    ("45 1 * * *", LORD_HOWE, "2026-04-04 12:00", ["2026-04-04 14:45", "2026-04-05 15:15"]),
    # also for one who asks between the two
    ("30 2 * * *", BERLIN, "2026-10-25 00:45", ["2026-10-26 01:30"]),
    ("30 2 * * *", BERLIN, "2026-10-25 01:15", ["2026-10-26 01:30"]),
    # every hour: none in the gap, both of the doubled one
    (
        "30 * * * *",
        BERLIN,
        "2026-03-29 00:00",
        ["2026-03-29 00:30", "2026-03-29 01:30", "2026-03-29 02:30"],
    ),
    (
        "30 * * * *",
        BERLIN,
        "2026-10-24 23:45",
        ["2026-10-25 00:30", "2026-10-25 01:30", "2026-10-25 02:30"],
    ),
    (
        "30 * * * *",
        SYDNEY,
        "2026-04-04 15:00",
        ["2026-04-04 15:30", "2026-04-04 16:30", "2026-04-04 17:30"],
    ),
    (
        "30 * * * *",
        SYDNEY,
        "2026-10-03 15:00",
        ["2026-10-03 15:30", "2026-10-03 16:30", "2026-10-03 17:30"],
    ),
    # UTC knows neither
    ("30 2 * * *", "UTC", "2026-03-28 12:00", ["2026-03-29 02:30", "2026-03-30 02:30"]),
    ("30 2 * * *", "UTC", "2026-10-24 12:00", ["2026-10-25 02:30", "2026-10-26 02:30"]),
    # weeks, leap days
    ("0 9 * * 1-5", BERLIN, "2026-06-05 12:00", ["2026-06-08 07:00", "2026-06-09 07:00"]),
    ("0 0 29 2 *", "UTC", "2026-06-05 12:00", ["2028-02-29 00:00", "2032-02-29 00:00"]),
]


@pytest.mark.parametrize(("cron", "zone", "after", "expected"), TABLE)
def test_cron_slots_follow_the_wall_clock_of_the_zone(
    cron: str, zone: str, after: str, expected: list[str]
) -> None:
    assert by_cron(cron, zone, after, len(expected)) == expected


@pytest.mark.parametrize(("cron", "zone", "after", "expected"), TABLE)
def test_newest_slot_is_the_same_whether_asked_at_it_or_just_before_the_next(
    cron: str, zone: str, after: str, expected: list[str]
) -> None:
    for slot, following in pairwise(expected):
        just_before = f"{utc(following) - timedelta(seconds=1):%Y-%m-%d %H:%M:%S}"
        assert last_by_cron(cron, zone, slot) == slot
        assert last_by_cron(cron, zone, just_before) == slot


@pytest.mark.parametrize(
    ("cron", "moment", "expected"),
    [
        # Long pauses between many slots: a search that gives up half-way names an older one.
        ("* 9-17 * * 1-5", "2026-06-07 12:00", "2026-06-05 17:59"),
        ("* 9-17 * * 1-5", "2026-06-08 08:59", "2026-06-05 17:59"),
        ("* * 29 2 *", "2027-06-07 12:00", "2024-02-29 23:59"),
        ("* * 1 1 *", "2024-12-31 23:59", "2024-01-01 23:59"),
        ("0 0 29 2 *", "2027-06-07 12:00", "2024-02-29 00:00"),
    ],
)
def test_newest_slot_is_found_behind_a_long_pause(cron: str, moment: str, expected: str) -> None:
    assert last_by_cron(cron, "UTC", moment) == expected


@given(
    moment=st.datetimes(datetime(2026, 1, 1), datetime(2027, 1, 1), timezones=st.just(UTC)),
    cron=st.sampled_from(["*/7 * * * *", "5 */3 * * *", "30 2 * * *", "0 9 * * 1-5", "0 0 1 * *"]),
    zone=st.sampled_from([BERLIN, SYDNEY, LORD_HOWE, "UTC"]),
)
@settings(max_examples=80, deadline=None)
def test_no_slot_lies_between_the_newest_and_the_next(
    moment: datetime, cron: str, zone: str
) -> None:
    rule = {"every": None, "cron": cron, "zone": ZoneInfo(zone)}
    newest = slots.last(moment, **rule)
    following = next(slots.after(moment, **rule))
    assert newest <= moment < following
    assert next(slots.after(newest, **rule)) == following
    assert (following.second, following.microsecond, following.utcoffset()) == (0, 0, timedelta(0))


# ---- what is no cron expression


@pytest.mark.parametrize(
    "text",
    [
        "0 0 30 2 *",
        "0 0 31 4,6 *",
        "* * * * * *",
        "* * * *",
        "60 * * * *",
        "0 24 * * *",
        "@daily",
        "every day",
        "",
        None,
        5,
    ],
)
def test_impossible_cron_is_refused(text: object) -> None:
    assert not slots.is_cron(text)
    if text is not None:
        with pytest.raises(JobDefinitionError, match="no cron expression of five fields"):
            job(key="r:{slot}", unique_for=FOREVER, name="slots.refused", cron=text)(at_slot)
    assert registry.find("slots.refused") is None


@pytest.mark.parametrize("text", ["* * * * *", "0 0 29 2 *", "*/5 9-17 * * 1-5", "0 0 31 * *"])
def test_possible_cron_is_taken(text: str) -> None:
    assert slots.is_cron(text)


def at_slot(*, slot: datetime) -> None:
    """Stand for a job's function."""
