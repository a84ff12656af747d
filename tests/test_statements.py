"""Statements that are compiled once: they say what Django's own would say, each time anew."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction
from django.db.models import F
from django.test.utils import CaptureQueriesContext

from dedupjobs import lifecycle
from dedupjobs.clock import DbNow
from dedupjobs.lifecycle import statements
from dedupjobs.lifecycle.statements import Rows, insert
from dedupjobs.models import WAITING, JobAttempt, ProcessedJob, Status
from tests.app import jobs

pytestmark = pytest.mark.django_db

LONG_AGO = datetime(2001, 2, 3, 4, 5, 6, 789000, tzinfo=UTC)


@pytest.fixture
def row() -> ProcessedJob:
    return jobs.record.enqueue(tag="a").job


def of(**where: Any) -> Rows:
    return Rows(ProcessedJob, "default", where)


def read(row: ProcessedJob, column: str) -> Any:
    return ProcessedJob.objects.values_list(column, flat=True).get(pk=row.pk)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("error", ["", "x", "it's 100 %s; \\ \u20ac \U0001f600", "x" * 10_000]),
        ("max_attempts", [None, 0, 7, 2**31 - 1]),
        ("cancel_requested", [True, False]),
        ("status", [Status.RUNNING, "DEAD"]),
        ("run_after", [LONG_AGO, LONG_AGO.astimezone()]),
        ("version", [F("version") + 1, F("version") + 1]),
    ],
)
def test_update_writes_each_value_as_djangos_own_would(
    row: ProcessedJob, column: str, values: list[Any]
) -> None:
    for value in values:
        ProcessedJob.objects.filter(pk=row.pk).update(**{column: value})
        wanted = read(row, column)
        ProcessedJob.objects.filter(pk=row.pk).update(version=wanted if column == "version" else 5)
        before = read(row, "version")
        assert of(pk=row.pk).update(**{column: value}) == 1
        assert read(row, column) == (before + 1 if column == "version" else wanted)


@pytest.mark.parametrize(
    ("where", "fits"),
    [
        ({"status": "PENDING"}, True),
        ({"status": "DEAD"}, False),
        ({"status__in": WAITING}, True),
        ({"result": None, "rerun_args__isnull": True}, True),
        ({"rerun_args__isnull": False}, False),
        ({"cancel_requested": True}, False),
        ({"run_after__lte": DbNow()}, True),
        ({"run_after__lte": DbNow(-60)}, False),
        ({"run_after__lte": DbNow(60)}, True),
    ],
)
def test_update_changes_what_fits_and_nothing_else(
    row: ProcessedJob, where: dict[str, Any], fits: bool
) -> None:
    other = jobs.record.enqueue(tag="b").job
    assert of(pk=row.pk, **where).update(error="changed") == int(fits)
    assert (read(row, "error"), read(other, "error")) == ("changed" if fits else "", "")


@pytest.mark.parametrize("seconds", [0, 0.25, 3600, -86_400 * 400])
def test_moment_lies_as_far_from_now_as_was_said(row: ProcessedJob, seconds: float) -> None:
    of(pk=row.pk).update(run_after=DbNow(seconds))
    off = read(row, "run_after") - lifecycle.database_now() - timedelta(seconds=seconds)
    assert timedelta(seconds=-20) < off < timedelta(milliseconds=2)


def test_shape_is_compiled_once_and_holds_no_value(row: ProcessedJob) -> None:
    of(pk=row.pk, version=1).update(error="a", run_after=DbNow(1))
    known = len(statements._compiled)
    for number in range(1, 20):
        of(pk=number, version=number).update(error=f"{number}", run_after=DbNow(number + 1))
    assert len(statements._compiled) == known


def test_update_that_is_read_answers_with_the_row_after_it(row: ProcessedJob) -> None:
    found = of(pk=row.pk).update_and_read(
        ("id", "version", "key", "started_at"), version=F("version") + 1, started_at=DbNow()
    )
    assert (found.pk, found.version, found.key) == (row.pk, row.version + 1, row.key)
    assert found.started_at == read(row, "started_at")
    assert found.get_deferred_fields() >= {"args", "result"}
    assert of(pk=row.pk, status="DEAD").update_and_read(("id",), error="x") is None


def test_inserted_row_is_what_the_database_has(row: ProcessedJob) -> None:
    if not statements.can_return_inserted("default"):
        pytest.skip("this database does not say what it has inserted")
    made = insert(
        JobAttempt,
        "default",
        returning=("id", "began_at", "lease_until", "beat_at", "claimed_at"),
        job_id=row.pk,
        number=1,
        generation=1,
        owner="me",
        lease_until=DbNow(60),
        beat_at=DbNow(),
        claimed_at=DbNow(),
        began_at=None,
        queue_delay=1.5,
        host="it's",
    )
    there = JobAttempt.objects.get()
    names = [f.attname for f in JobAttempt._meta.concrete_fields]
    assert [getattr(made, name) for name in names] == [getattr(there, name) for name in names]
    made.host = "other"
    made.save()  # as one that was read
    assert JobAttempt.objects.get().host == "other"


def test_refused_statement_breaks_the_transaction_as_djangos_own_would(row: ProcessedJob) -> None:
    with transaction.atomic():
        with pytest.raises(DatabaseError):
            of(pk=row.pk).update(name=None)
        assert connection.needs_rollback
    assert ProcessedJob.objects.get(pk=row.pk).name == row.name


def test_captured_statement_is_djangos_own_but_for_brackets(row: ProcessedJob) -> None:
    with CaptureQueriesContext(connection) as captured:
        of(pk=row.pk, status="DEAD", version=3).update(error="e", max_attempts=4)
        same = ProcessedJob.objects.filter(pk=row.pk, status="DEAD", version=3)
        same.update(error="e", max_attempts=4)
    ours, theirs = (re.sub("[()]", "", query["sql"]) for query in captured.captured_queries)
    assert ours == theirs
