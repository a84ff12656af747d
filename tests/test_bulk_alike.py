"""Rows of a bulk operation that are alike move in one statement, and as the single arrows would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import DatabaseError, connection
from django.test.utils import CaptureQueriesContext

from dedupjobs import bulk, dispatch, lifecycle, locks, operations, signals
from dedupjobs.models import BulkOperation, BulkRefusal, Operation, ProcessedJob, Status
from tests.admin_rows import fresh, make

pytestmark = pytest.mark.django_db

MANY = 15
FREE = {"id", "key", "key_hash", "run_after", "created_at", "enqueued_at", "finished_at"}


@pytest.fixture(autouse=True)
def _patient(settings: Any) -> Iterator[None]:
    settings.DEDUPJOBS = {"PUSH_TIMEOUT": 30, "LOCK_TIMEOUT": 30}
    dispatch.forget_clients()
    locks.forget_clients()
    yield
    dispatch.forget_clients()
    locks.forget_clients()


@pytest.fixture
def boss() -> User:
    return User.objects.create_superuser("boss")


def done(boss: User, action: str, limit: int | None = 9, **given: str) -> BulkOperation:
    """Do it to all that match, and return what came of it."""
    given = given or {"name": "testapp.record"}
    started = bulk.start(action, given, user=boss, reason="because", limit=limit)
    while not bulk.page(started.pk):
        pass
    return BulkOperation.objects.get(pk=started.pk)


def left(row: ProcessedJob) -> dict[str, Any]:
    """Return what does not depend on which row it is, or when; moments as set or not."""
    now = ProcessedJob.objects.filter(pk=row.pk).values().get()
    return {name: bool(value) if name in FREE else value for name, value in now.items()}


@pytest.mark.parametrize(
    ("action", "status"),
    [
        ("retry", Status.DEAD),
        ("retry", Status.CANCELLED),
        ("retry", Status.RETRYING),
        ("retry", Status.HELD),
        ("cancel", Status.PENDING),
        ("cancel", Status.HELD),
        ("cancel", Status.RUNNING),
        ("hold", Status.RETRYING),
        ("hold", Status.RUNNING),
        ("unhold", Status.HELD),
        ("limit", Status.DEAD),
        ("limit", Status.RUNNING),
    ],
)
def test_together_they_become_what_each_would_alone(
    boss: User, monkeypatch: pytest.MonkeyPatch, action: str, status: Status
) -> None:
    columns = {"failures": 3, "lost_count": 1, "error": "it", "version": 7, "dispatch_id": "x"}
    found, costs = [], []
    for few in (MANY, MANY - 1):
        ProcessedJob.objects.all().delete()
        rows = [make(status, **columns) for _ in range(MANY)]
        monkeypatch.setattr(bulk, "FEW", few)
        with CaptureQueriesContext(connection) as asked:
            ended = done(boss, action)
        assert (ended.changed, ended.refused) == (MANY, 0)
        records = Operation.objects.filter(bulk=ended).order_by("job_id")
        told = [(r.job_id, r.action, r.before, r.after, r.by, r.reason) for r in records]
        assert [one[0] for one in told] == [row.pk for row in rows]
        found.append(([left(row) for row in rows], [one[1:] for one in told]))
        costs.append(len(asked))
    assert found[0] == found[1]
    assert costs[1] <= costs[0] - MANY + 2  # at the most two statements for all of them


def test_rows_that_differ_are_each_done_as_they_must_be(boss: User) -> None:
    """Versions, reruns, tombstones and what does not apply, in one page."""
    old = [make(Status.DEAD, version=3) for _ in range(MANY)]
    new = [make(Status.DEAD, version=4) for _ in range(MANY)]
    rerun = make(Status.DEAD, version=4, rerun_args='{"tag":"b","text":""}', rerun_fingerprint="e")
    hollow = make(Status.DEAD, version=4, args="")
    over = make(Status.SUCCEEDED, version=4)
    ended = done(boss, "retry")
    assert (ended.changed, ended.refused) == (2 * MANY + 1, 2)
    assert {fresh(row).version for row in old} == {4}
    assert {fresh(row).version for row in new} == {5}
    assert {fresh(row).status for row in (*old, *new, rerun)} == {"PENDING"}
    taken = fresh(rerun)
    assert (taken.generation, taken.args, taken.rerun_args) == (2, rerun.rerun_args, None)
    assert set(BulkRefusal.objects.values_list("job_pk", flat=True)) == {hollow.pk, over.pk}
    assert LogEntry.objects.count() == 2 * MANY + 1


def test_limit_that_is_none_for_some_leaves_those(boss: User) -> None:
    rows = [make(Status.DEAD) for _ in range(MANY)]
    more = make(Status.DEAD, max_attempts=50)
    ended = done(boss, "limit")
    assert (ended.changed, ended.refused) == (MANY, 1)
    assert {fresh(row).max_attempts for row in rows} == {9}
    assert fresh(more).max_attempts == 50
    assert "may fail 50 times already" in BulkRefusal.objects.get().words


def test_page_in_which_a_row_has_moved_on_is_rolled_back_and_done_row_by_row(
    boss: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [make(Status.DEAD) for _ in range(MANY)]
    rerun = make(Status.DEAD, rerun_args='{"tag":"b","text":""}', rerun_fingerprint="e")
    real, asked = operations.alike, []

    def alike(action: str, found: Any, limit: int | None = None) -> Any:
        asked.append(len(found))
        return {(str(Status.DEAD), 0): list(found)}  # as if the rerun had come just now

    monkeypatch.setattr(operations, "alike", alike)
    ended = done(boss, "retry")
    assert (asked, ended.changed, ended.refused) == ([MANY + 1], MANY + 1, 0)
    assert {fresh(row).version for row in rows} == {1}
    assert fresh(rerun).generation == 2
    assert Operation.objects.count() == MANY + 1
    assert real("retry", [rerun]) == {}


def test_page_that_the_database_refuses_is_done_row_by_row(
    boss: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [make(Status.DEAD) for _ in range(MANY)]

    def refuse(pks: Any, version: int) -> int:
        raise DatabaseError("too much at once")

    monkeypatch.setattr(lifecycle, "retry_alike", refuse)
    ended = done(boss, "retry")
    assert (ended.changed, ended.refused) == (MANY, 0)
    assert {fresh(row).status for row in rows} == {"PENDING"}


def test_version_that_was_not_seen_is_not_moved() -> None:
    rows = [make(Status.DEAD, version=2) for _ in range(3)]
    pks = [row.pk for row in rows]
    assert lifecycle.retry_alike(pks, 1) == lifecycle.limit_alike(pks, 1, 9, "DEAD") == 0
    assert lifecycle.limit_alike(pks, 2, 9, "HELD") == lifecycle.cancel_alike(pks, 2) == 0
    assert lifecycle.hold_alike(pks, 2) == lifecycle.unhold_alike(pks, 2) == 0
    assert {fresh(row).version for row in rows} == {2}
    assert lifecycle.retry_alike(pks, 2) == 3


@pytest.mark.django_db(transaction=True)
def test_changes_of_a_page_are_told_in_one_go(boss: User) -> None:
    told: list[Any] = []

    def hear(sender: str, changes: Any, **_: Any) -> None:
        told.append((sender, [(c.job_pk, c.version, c.event) for c in changes]))

    mine = [make(Status.DEAD) for _ in range(MANY)]
    others = [make(Status.DEAD, name="testapp.other") for _ in range(2)]
    signals.job_changed.connect(hear)
    try:
        done(boss, "retry", state="DEAD")
    finally:
        signals.job_changed.disconnect(hear)
    assert sorted(told) == [
        ("testapp.other", [(row.pk, 1, "PENDING") for row in others]),
        ("testapp.record", [(row.pk, 1, "PENDING") for row in mine]),
    ]
