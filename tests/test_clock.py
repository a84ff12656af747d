"""The database's clock, in UTC whatever a project has set; tokens and chance."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import F
from hypothesis import given, settings
from hypothesis import strategies as st

from dedupjobs import clock, lifecycle
from dedupjobs.clock import DbNow, UtcDateTimeField
from dedupjobs.models import ProcessedJob
from tests.app import jobs
from tests.rows import alter, job_row
from tests.waiting import until

pytestmark = pytest.mark.django_db

fixed = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))


@pytest.fixture
def row() -> ProcessedJob:
    return jobs.record.enqueue(tag="a").job


# ---- the database's moment


def test_database_now_is_this_moment_in_utc() -> None:
    now = clock.read_db_now(connection)
    assert now.tzinfo is UTC
    assert abs(now - clock.utcnow()) < timedelta(seconds=5)


@pytest.mark.parametrize(
    "after", [0, 1.5, -1.5, 86_400.25, timedelta(days=400), -timedelta(seconds=1), 1e-3], ids=str
)
def test_moment_plus_seconds_is_that_much_later(row: ProcessedJob, after: Any) -> None:
    alter(row, run_after=DbNow(after))
    delta = after if isinstance(after, timedelta) else timedelta(seconds=after)
    off = job_row(row).run_after - lifecycle.database_now() - delta
    assert timedelta(seconds=-5) < off <= timedelta(milliseconds=1)


def test_moment_moves_on_within_a_transaction(row: ProcessedJob) -> None:
    with transaction.atomic():
        first = lifecycle.database_now()
        until(lambda: lifecycle.database_now() > first + timedelta(milliseconds=20))


@pytest.mark.parametrize("steady", [False, True])
def test_moment_compares_with_stored_ones_to_the_millisecond(
    row: ProcessedJob, steady: bool
) -> None:
    due = ProcessedJob.objects.filter(run_after__lte=DbNow(steady=steady))
    alter(row, run_after=DbNow(60))
    assert not due.exists()
    assert 50 < lifecycle.seconds_until_due(row.pk) <= 60
    alter(row, run_after=DbNow(0.3))
    moment = job_row(row).run_after

    def seen() -> bool:
        before = lifecycle.database_now()
        found = due.exists()
        assert (lifecycle.database_now() >= moment) if found else (before < moment)
        return found

    until(seen, every=0.01)


def test_moment_read_back_next_to_a_column_is_of_the_same_kind(row: ProcessedJob) -> None:
    found = ProcessedJob.objects.annotate(db_now=DbNow()).get(pk=row.pk)
    assert found.db_now.tzinfo is UTC
    assert timedelta(0) <= found.db_now - found.created_at < timedelta(seconds=5)


# ---- the field


@given(st.datetimes(datetime(1971, 1, 1), datetime(2200, 1, 1), timezones=fixed))
@settings(deadline=None)
def test_moment_is_prepared_as_utc_from_every_zone(moment: datetime) -> None:
    prepared = UtcDateTimeField().get_prep_value(moment)
    assert prepared == moment
    assert prepared.utcoffset() == timedelta(0)


@pytest.mark.parametrize("microseconds", [0, 1_000, 999_000])
def test_moment_comes_back_equal_and_in_utc(row: ProcessedJob, microseconds: int) -> None:
    there = timezone(timedelta(hours=-3, minutes=-30))
    moment = datetime(2026, 3, 29, 23, 59, 59, microseconds, tzinfo=there)
    alter(row, run_after=moment)
    found = job_row(row).run_after
    assert found == moment
    assert found.tzinfo is UTC
    assert ProcessedJob.objects.filter(run_after=moment.astimezone(UTC)).exists()
    assert ProcessedJob.objects.filter(run_after=F("run_after")).exists()


def test_moment_is_found_again_by_the_value_that_was_read(row: ProcessedJob) -> None:
    # Reclaim compares beat_at with what a sweep has read.
    for _ in range(20):
        alter(row, run_after=DbNow())
        assert ProcessedJob.objects.filter(run_after=job_row(row).run_after).exists()


def test_moments_sort_as_text_as_they_do_as_time(row: ProcessedJob) -> None:
    moment = datetime(2026, 1, 1, 12, tzinfo=UTC)
    alter(row, run_after=moment)
    for step in (1, 10, 999):
        later = moment + timedelta(milliseconds=step)
        assert ProcessedJob.objects.filter(run_after__lt=later).exists()
        assert not ProcessedJob.objects.filter(run_after__gt=later).exists()


def test_moment_without_a_zone_is_refused(row: ProcessedJob) -> None:
    with pytest.raises(ValueError, match=r"run_after: .*has no time zone"):
        alter(row, run_after=datetime(2026, 1, 1))
    with pytest.raises(ValueError, match="has no time zone"):
        ProcessedJob.objects.filter(run_after__lt=datetime(2026, 1, 1)).exists()


def test_null_stays_null(row: ProcessedJob) -> None:
    alter(row, finished_at=None)
    assert job_row(row).finished_at is None


# ---- other settings, in a process of their own

SCRIPT = """
import json, os, sys
import tests.settings as s
for name, value in json.loads(sys.argv[1]).items():
    if name == "DATABASE_ZONE":
        s.DATABASES["default"]["TIME_ZONE"] = value
    else:
        setattr(s, name, value)
import django; django.setup()
from datetime import timedelta
from dedupjobs import clock, lifecycle, registry
from dedupjobs.clock import DbNow
from dedupjobs.coordinator import Coordinator
from dedupjobs.models import JobAttempt, ProcessedJob
from dedupjobs.testing import run_pending
from tests.app import jobs
from tests.waiting import until

out = {}
row = jobs.fail_once.enqueue(tag="zone").job
now = clock.utcnow()
out["now"] = abs((lifecycle.database_now() - now).total_seconds())
out["created"] = abs((ProcessedJob.objects.get(pk=row.pk).created_at - now).total_seconds())
out["ran"] = run_pending()                       # due at once
retrying = ProcessedJob.objects.get(pk=row.pk)
out["status"] = retrying.status
until(run_pending)                               # due after its backoff of 2 s, not hours
out["waited"] = (lifecycle.database_now() - retrying.run_after).total_seconds()
claim = lifecycle.claim(jobs.record.enqueue(tag="zone").job.pk, 1, owner="zone",
                        place=lifecycle.Place())
attempt = JobAttempt.objects.get(pk=claim.fence)
out["lease"] = (attempt.lease_until - lifecycle.database_now()).total_seconds()
kept = lifecycle.reclaim(claim.fence, beat_at=attempt.beat_at, ahead_of=60.5, reason="")
out["kept"] = kept is None                       # a live lease is neither over nor too far ahead
JobAttempt.objects.filter(pk=claim.fence).update(lease_until=DbNow(-1), beat_at=DbNow(-1.1))
taken, coordinator = [], Coordinator()
until(lambda: taken.extend(coordinator.reclaim()) or taken)
out["reclaimed"] = [lost.fence for lost in taken] == [claim.fence]
hourly = jobs.record_hourly.enqueue(tag="zone").job
run_pending(name="testapp.record_hourly")
held = ProcessedJob.objects.get(pk=hourly.pk)
out["held"] = (held.unique_until - lifecycle.database_now()).total_seconds()
out["replayed"] = jobs.record_hourly.enqueue(tag="zone").kind
print(json.dumps(out))
"""


@pytest.mark.large
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "changed",
    [
        {"USE_TZ": False, "TIME_ZONE": "Asia/Tokyo"},
        {"USE_TZ": False, "TIME_ZONE": "America/St_Johns"},
        {"USE_TZ": True, "TIME_ZONE": "Asia/Tokyo"},
        {"USE_TZ": True, "TIME_ZONE": "UTC", "DATABASE_ZONE": "America/New_York"},
    ],
    ids=str,
)
def test_leases_and_due_times_hold_in_every_zone_and_without_time_zones(
    process_env: dict[str, str], changed: dict[str, Any]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(changed)],
        env=process_env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout.splitlines()[-1])
    assert out["now"] < 5
    assert out["created"] < 5
    assert (out["ran"], out["status"]) == (1, "RETRYING")
    assert 0 <= out["waited"] < 10
    assert 50 < out["lease"] <= 60
    assert out["kept"] is True
    assert out["reclaimed"] is True
    assert 3590 < out["held"] <= 3600
    assert out["replayed"] == "REPLAYED"


@pytest.mark.django_db(transaction=True)
def test_rows_written_without_time_zones_are_read_the_same_with_them(
    process_env: dict[str, str],
) -> None:
    script = (
        "import sys, tests.settings as s\n"
        "s.USE_TZ, s.TIME_ZONE = False, 'Asia/Tokyo'\n"
        "import django; django.setup()\n"
        "from tests.app import jobs\n"
        "print(jobs.record.enqueue(tag='zone').job.pk)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=process_env, capture_output=True, text=True, check=True
    )
    row = ProcessedJob.objects.get(pk=int(done.stdout.split()[-1]))
    assert abs(lifecycle.database_now() - row.created_at) < timedelta(seconds=30)
    assert row.run_after <= lifecycle.database_now()


SESSION_ZONE = {"postgresql": "SET TIME ZONE '{}'", "mysql": "SET SESSION time_zone = '{}'"}


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no session time zone")
def test_session_time_zone_changes_nothing(row: ProcessedJob) -> None:
    before = job_row(row).created_at
    with session_zone("+09:00"):
        assert job_row(row).created_at == before
        assert abs(clock.read_db_now(connection) - clock.utcnow()) < timedelta(seconds=5)
        alter(row, run_after=DbNow(60))
        assert 50 < lifecycle.seconds_until_due(row.pk) <= 60


@contextmanager
def session_zone(zone: str) -> Iterator[None]:
    with connection.cursor() as cursor:
        cursor.execute(SESSION_ZONE[connection.vendor].format(zone))
        try:
            yield
        finally:
            cursor.execute(SESSION_ZONE[connection.vendor].format("+00:00"))


# ---- tokens


def test_tokens_are_hexadecimal_and_never_drawn_twice() -> None:
    tokens = {clock.token() for _ in range(1_000)}
    assert len(tokens) == 1_000
    assert {len(t) for t in tokens} == {24}
    assert all(int(t, 16) >= 0 for t in tokens)


def test_chance_stays_within_its_bounds() -> None:
    assert all(2 <= clock.uniform(2, 3) <= 3 for _ in range(100))
