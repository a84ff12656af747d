"""What ended is summed up by minute and hour: from the tables, again and again, never twice."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from dedupjobs import lifecycle, summaries
from dedupjobs.clock import DbNow
from dedupjobs.coordinator import Coordinator
from dedupjobs.lifecycle import statements
from dedupjobs.models import (
    AttemptOutcome,
    DuplicateCount,
    JobAttempt,
    ProcessedJob,
    Status,
    Summary,
)
from dedupjobs.summaries import HOUR, MINUTE
from dedupjobs.testing.moments import FrozenClock
from tests.admin_rows import make, try_of
from tests.app import jobs

pytestmark = pytest.mark.django_db


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> datetime:
    """Half past some hour, which the tests let pass as they like."""
    found = summaries.floor(lifecycle.database_now(), HOUR) + timedelta(minutes=30, seconds=30)
    pass_to(monkeypatch, found)
    monkeypatch.setattr(summaries, "BUDGET", 60.0)
    return found


def pass_to(monkeypatch: pytest.MonkeyPatch, moment: datetime) -> None:
    """Let the database's clock stand at ``moment``, as ``frozen_clock`` does."""
    monkeypatch.setattr(DbNow, "PRESENT", FrozenClock(moment).present())
    monkeypatch.setattr(statements, "_compiled", {})


def end(at: datetime, outcome: str = "SUCCEEDED", **columns: Any) -> JobAttempt:
    """Let an attempt have ended at a moment."""
    row = make(Status.SUCCEEDED, **{k: columns.pop(k) for k in ("name", "queue") if k in columns})
    return try_of(row, outcome=outcome, ended_at=at, **{"run_time": 0.03, **columns})


def of(span: int, begin: datetime, queue: str = "", name: str = "") -> Summary:
    return Summary.objects.get(span=span, begin=begin, queue=queue, name=name)


def numbers(row: Summary) -> dict[str, int]:
    return {c: n for c in summaries.NUMBERS if (n := getattr(row, c))}


def everything() -> list[dict[str, Any]]:
    return list(Summary.objects.order_by("span", "begin", "queue", "name").values())


def test_minute_counts_each_ending_by_outcome_queue_and_job(now: datetime) -> None:
    minute = summaries.floor(now, MINUTE)
    for outcome in AttemptOutcome.values:
        end(now, outcome)
    end(now, "SUCCEEDED", name="testapp.other", queue="high", run_time=7.0)
    end(minute - timedelta(seconds=1))
    try_of(make(Status.RUNNING))  # open
    summaries.keep()
    assert numbers(of(MINUTE, minute)) == {
        "succeeded": 2, "failed": 1, "timed_out": 1, "lost": 1, "other": 5
    }  # fmt: skip
    assert numbers(of(MINUTE, minute, "high")) == {"succeeded": 1}
    assert numbers(of(MINUTE, minute, "high", "testapp.other")) == {"succeeded": 1}
    assert numbers(of(MINUTE, minute, "default", "testapp.record"))["succeeded"] == 1
    assert numbers(of(MINUTE, minute - timedelta(minutes=1))) == {"succeeded": 1}
    assert numbers(of(HOUR, summaries.floor(now, HOUR)))["succeeded"] == 3


def test_doing_it_twice_counts_nothing_twice(now: datetime) -> None:
    for _ in range(3):
        end(now)
    summaries.keep()
    before = everything()
    for coordinator in (1, 2, 3):
        summaries.keep()
        assert everything() == before, coordinator


def test_coordinator_that_was_away_makes_what_it_has_missed(
    now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(now)
    summaries.keep()
    later = now + timedelta(hours=5)
    for missed in (timedelta(seconds=10), timedelta(hours=2), timedelta(hours=2, minutes=7)):
        end(now + missed)
    pass_to(monkeypatch, later)
    made = summaries.keep()
    assert numbers(of(MINUTE, summaries.floor(now, MINUTE))) == {"succeeded": 2}
    assert made < 20  # not the 300 minutes in which nothing ended
    hours = Summary.objects.filter(span=HOUR, queue="", name="")
    assert sum(row.succeeded for row in hours) == 4 == JobAttempt.objects.count()


def test_round_that_runs_out_of_time_goes_on_in_the_next_one(
    now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summaries, "BUDGET", 0.0)
    for minutes in range(8):
        end(now - timedelta(minutes=20 * minutes))
    total = Summary.objects.filter(span=HOUR, queue="", name="")
    for _ in range(12):
        summaries.keep()
    assert sum(row.succeeded for row in total) == 8


def test_ending_that_is_committed_late_is_counted_after_all(
    now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(now)
    for minutes in range(4):
        pass_to(monkeypatch, now + timedelta(minutes=minutes))
        summaries.keep()
    end(now)  # as the commit of a long transaction shows it
    for minutes in range(4, summaries.LATE + 2):
        pass_to(monkeypatch, now + timedelta(minutes=minutes))
        summaries.keep()
    assert numbers(of(MINUTE, summaries.floor(now, MINUTE))) == {"succeeded": 2}
    assert numbers(of(HOUR, summaries.floor(now, HOUR))) == {"succeeded": 2}


def test_attempts_that_are_gone_are_not_counted_any_more(now: datetime) -> None:
    end(now, name="testapp.other")
    end(now)
    summaries.keep()
    JobAttempt.objects.filter(job__name="testapp.other").delete()
    summaries.keep()
    minute = summaries.floor(now, MINUTE)
    assert numbers(of(MINUTE, minute)) == {"succeeded": 1}
    assert numbers(of(MINUTE, minute, "default", "testapp.other")) == {}


def test_old_summaries_go(now: datetime, monkeypatch: pytest.MonkeyPatch) -> None:
    end(now)
    summaries.keep()
    pass_to(monkeypatch, now + summaries.KEPT[MINUTE] + timedelta(minutes=2))
    summaries.keep()
    kept = Summary.objects.filter(queue="", name="")
    assert not kept.filter(span=MINUTE, begin=summaries.floor(now, MINUTE)).exists()
    assert kept.filter(span=HOUR, begin=summaries.floor(now, HOUR)).exists()
    pass_to(monkeypatch, now + summaries.KEPT[HOUR] + timedelta(hours=2))
    summaries.keep()
    assert not kept.filter(begin__lt=now + timedelta(days=1)).exists()


def test_gauges_say_what_waits_in_each_queue(
    now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    for status in (*Status, Status.PENDING, Status.DEAD):
        make(status)
    make(Status.PENDING, queue="high")
    DuplicateCount.objects.create(
        name="testapp.record", cause="replay", count=7, first_at=now, last_at=now
    )
    summaries.keep()
    total, high = summaries.points(MINUTE, now - timedelta(hours=1))[-3:][::2]
    assert total.gauges == {
        "PENDING": 3, "RUNNING": 1, "RETRYING": 1, "HELD": 1, "DEAD": 2,
        "duplicates": {"replay": 7}, "cut": [], "pressure": 0.0,
    }  # fmt: skip
    assert (high.queue, high.gauges["PENDING"]) == ("high", 1)
    summaries.keep()
    assert summaries.points(MINUTE, now - timedelta(hours=1))[-3].gauges == total.gauges
    monkeypatch.setattr(summaries, "COUNTED", 1)
    pass_to(monkeypatch, now + timedelta(minutes=1))
    summaries.keep()
    gauges = summaries.points(MINUTE, now + timedelta(seconds=1))[0].gauges
    assert (gauges["DEAD"], gauges["PENDING"]) == (1, 2)
    assert gauges["cut"] == ["DEAD", "HELD", "PENDING", "RETRYING", "RUNNING"]


@pytest.mark.parametrize("many", [10, 100])
def test_round_asks_the_same_number_of_questions_whatever_has_ended(
    now: datetime, many: int
) -> None:
    """S-018: no view counts big tables, and what is kept for them costs the same, too."""
    for _ in range(many):
        end(now)
    summaries.keep()
    with CaptureQueriesContext(connection) as asked:
        summaries.keep()
    assert len(asked) <= 12


def test_percentiles_are_right_to_within_a_bucket(now: datetime) -> None:
    for run in (0.0004, 0.011, 0.012, 0.3, 0.4, 0.45, 0.46, 0.47, 0.48, 900.0):
        end(now, run_time=run, queue_delay=1e9)
    end(now, run_time=None)
    summaries.keep()
    runs = summaries.points(MINUTE, now - timedelta(minutes=1))[0].totals.runs
    assert sum(runs.values()) == 10
    assert 0.2 <= (summaries.percentile(runs, 0.5) or 0) <= 0.5
    assert 500 <= (summaries.percentile(runs, 0.99) or 0) <= 1000
    assert (summaries.percentile(runs, 0.1) or 0) <= 0.001
    delays = summaries.points(MINUTE, now - timedelta(minutes=1))[0].totals.delays
    assert delays == Counter({len(summaries.EDGES): 10})
    assert summaries.percentile(delays, 0.5) is not None
    assert summaries.percentile(Counter(), 0.5) is None


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.0011, 1.0, 49_999.0, 50_000.0, 50_001.0, 1e12])
def test_database_and_python_mean_the_same_bucket(now: datetime, seconds: float) -> None:
    end(now, run_time=seconds)
    summaries.keep()
    runs = summaries.points(MINUTE, now - timedelta(minutes=1))[0].totals.runs
    assert runs == Counter({summaries.bucket_of(seconds): 1})


def test_jobs_with_failures_come_first(now: datetime) -> None:
    for name, outcome in (
        ("testapp.a", "SUCCEEDED"),
        ("testapp.b", "LOST"),
        ("testapp.c", "FAILED"),
    ):
        end(now, outcome, name=name)
    end(now, "TIMED_OUT", name="testapp.c")
    summaries.keep()
    found = summaries.by_name(MINUTE, now - timedelta(hours=1), most=2)
    assert [(row["name"], row["failures"]) for row in found] == [("testapp.c", 2), ("testapp.b", 1)]


def test_coordinator_keeps_them_and_all_numbers_come_from_the_table(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-112: after settling, summaries and a plain count of the tables say the same."""
    settings.DEDUPJOBS = {"PUSH_TIMEOUT": 30, "LOCK_TIMEOUT": 30}
    monkeypatch.setattr(summaries, "BUDGET", 60.0)
    from dedupjobs.testing import run_pending

    for tag in ("a", "b", "c"):
        jobs.record.enqueue(tag=tag)
    run_pending()
    Coordinator().tick()
    hours = Summary.objects.filter(span=HOUR, queue="", name="")
    assert sum(row.succeeded for row in hours) == 3
    assert ProcessedJob.objects.filter(status=Status.SUCCEEDED).count() == 3
    by_job = Summary.objects.filter(span=HOUR).exclude(name="")
    assert {(row.queue, row.name) for row in by_job} == {("default", "testapp.record")}
    assert sum(row.succeeded for row in by_job) == 3  # an hour may have ended between them
