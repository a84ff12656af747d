"""One action on all rows that match: in pages, resumable, stoppable, and a job of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import DatabaseError, connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from dedupjobs import bulk, clock, dispatch, lifecycle, locks, operations, runner
from dedupjobs.models import BulkOperation, BulkRefusal, Operation, ProcessedJob, Status
from dedupjobs.testing import run_pending
from tests.admin_rows import address, everything, fresh, make
from tests.rows import Held, at
from tests.sessions import needs_row_locks

pytestmark = pytest.mark.django_db
committing = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _patient(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    settings.DEDUPJOBS = {"PUSH_TIMEOUT": 30, "LOCK_TIMEOUT": 30}
    monkeypatch.setattr(bulk, "PAGE", 10)
    dispatch.forget_clients()
    locks.forget_clients()
    yield
    dispatch.forget_clients()
    locks.forget_clients()


@pytest.fixture
def boss() -> User:
    return User.objects.create_superuser("boss")


def start(boss: User, action: str = "retry", **given: str) -> BulkOperation:
    return bulk.start(action, given or {"state": "DEAD"}, user=boss, reason="because")


def again(started: BulkOperation) -> BulkOperation:
    return BulkOperation.objects.get(pk=started.pk)


def counts(status: Status) -> int:
    return ProcessedJob.objects.filter(status=status, name="testapp.record").count()


def test_all_rows_that_match_are_changed_and_no_other(boss: User) -> None:
    dead = [make(Status.DEAD) for _ in range(25)]
    others = [make(status) for status in Status if status != Status.DEAD]
    before = [fresh(row).version for row in others]
    started = start(boss)
    run_pending(name="dedupjobs.bulk")
    now = again(started)
    assert (now.total, now.changed, now.refused, now.note) == (25, 25, 0, "done")
    assert now.ended_at is not None
    assert {fresh(row).status for row in dead} == {"PENDING"}
    assert [fresh(row).version for row in others] == before
    records = Operation.objects.filter(bulk=started)
    assert {(r.action, r.by, r.reason, r.after) for r in records} == {
        ("retry", "boss", "because", "PENDING")
    }
    lines = LogEntry.objects.values_list("change_message", "user__username")
    assert set(lines) == {(f"retry: DEAD → PENDING; because (bulk {started.pk})", "boss")}
    assert LogEntry.objects.count() == len(records) == 25


def test_rows_that_die_later_are_left_alone(boss: User) -> None:
    make(Status.DEAD)
    started = start(boss)
    later = make(Status.DEAD)
    run_pending(name="dedupjobs.bulk")
    assert again(started).changed == 1
    assert fresh(later).status == "DEAD"


def test_stop_between_two_pages_leaves_the_rest_as_it_was(boss: User) -> None:
    for _ in range(25):
        make(Status.DEAD)
    started = start(boss)
    assert bulk.page(started.pk) == ""
    assert bulk.stop(started, by="ada")
    assert bulk.page(started.pk) == "stopped by ada"
    run_pending(name="dedupjobs.bulk")
    now = again(started)
    assert (now.changed, now.note, now.stopped_by) == (10, "stopped by ada", "ada")
    assert (counts(Status.PENDING), counts(Status.DEAD)) == (10, 15)
    assert not bulk.stop(started, by="bob")
    assert again(started).stopped_by == "ada"


def test_stop_before_the_first_page_changes_nothing(boss: User) -> None:
    make(Status.DEAD)
    started = start(boss)
    bulk.stop(started, by="ada")
    run_pending(name="dedupjobs.bulk")
    assert counts(Status.DEAD) == 1


class KilledError(BaseException):
    """Ends a run as a kill does."""


def die() -> None:
    raise KilledError


@committing
def test_run_that_dies_in_a_page_is_taken_up_and_nothing_is_done_twice(boss: User) -> None:
    rows = [make(Status.DEAD) for _ in range(25)]
    started = start(boss)
    assert bulk.page(started.pk) == ""

    real = lifecycle.retry
    calls = []

    def retry(pk: int, version: int) -> Any:
        calls.append(pk)
        if len(calls) == 5:
            die()
        return real(pk, version)

    operations.lifecycle.retry = retry
    try:
        with pytest.raises(KilledError):
            bulk.page(started.pk)
    finally:
        operations.lifecycle.retry = real
    assert (again(started).changed, counts(Status.PENDING)) == (10, 10)
    with at("bulk.page", die), pytest.raises(KilledError):
        bulk.page(started.pk)
    run_pending(name="dedupjobs.bulk")
    now = again(started)
    assert (now.changed, now.refused, now.note) == (25, 0, "done")
    assert {fresh(row).version for row in rows} == {1}
    assert Operation.objects.count() == LogEntry.objects.count() == 25


def test_two_runs_of_one_page_do_it_once(boss: User) -> None:
    rows = [make(Status.DEAD) for _ in range(5)]
    as_read = again(start(boss, name="testapp.record"))
    for _ in range(2):
        bulk._do(as_read, [row.pk for row in rows], one_by_one=False)
    now = again(as_read)
    assert (now.changed, now.refused) == (5, 0)
    assert Operation.objects.count() == 5
    assert {fresh(row).version for row in rows} == {1}


def test_row_that_the_database_refuses_stops_none_of_the_others(
    boss: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [make(Status.DEAD) for _ in range(25)]
    bad = {rows[3].pk, rows[14].pk}
    real = operations.move

    def move(action: str, row: ProcessedJob, **facts: Any) -> Any:
        if row.pk in bad:
            raise DatabaseError("this row is cursed")
        return real(action, row, **facts)

    monkeypatch.setattr(operations, "move", move)
    started = start(boss)
    run_pending(name="dedupjobs.bulk")
    now = again(started)
    assert (now.changed, now.refused, now.note) == (23, 2, "done")
    assert {(r.job_pk, r.words) for r in BulkRefusal.objects.all()} == {
        (pk, "DatabaseError: this row is cursed") for pk in bad
    }
    assert {row.pk for row in rows if fresh(row).status == "DEAD"} == bad


def test_rows_that_an_action_does_not_fit_are_refused_with_the_reason(boss: User) -> None:
    fits, final = make(Status.RETRYING), make(Status.SUCCEEDED)
    asked = make(Status.RUNNING, cancel_requested=True)
    hollow = make(Status.DEAD, args="")
    started = start(boss, "cancel", name="testapp.record")
    run_pending(name="dedupjobs.bulk")
    assert fresh(fits).status == "CANCELLED"
    words = dict(BulkRefusal.objects.values_list("job_pk", "words"))
    assert words.keys() == {final.pk, asked.pk, hollow.pk}
    assert "SUCCEEDED, which cancel does not apply to" in words[final.pk]
    assert (again(started).changed, again(started).refused) == (1, 3)


@committing
@needs_row_locks
def test_row_in_somebodys_transaction_is_passed_over(boss: User) -> None:
    free, busy = make(Status.DEAD), make(Status.DEAD)
    started = start(boss)
    with Held(busy):
        assert bulk.page(started.pk) == ""
    assert (fresh(free).status, fresh(busy).status) == ("PENDING", "DEAD")
    assert BulkRefusal.objects.get().words == str(bulk.IN_USE)


@pytest.mark.parametrize(
    ("action", "status", "after"),
    [
        ("retry", Status.DEAD, "PENDING"),
        ("cancel", Status.RETRYING, "CANCELLED"),
        ("hold", Status.RETRYING, "HELD"),
        ("unhold", Status.HELD, "PENDING"),
        ("limit", Status.DEAD, "DEAD"),
        ("purge", Status.DEAD, None),
        ("free lock", Status.DEAD, "DEAD"),
    ],
)
def test_every_action_runs_in_bulk(boss: User, action: str, status: Status, after: Any) -> None:
    rows = [make(status) for _ in range(3)]
    for row in rows:
        locks.acquire(row.pk, "ghost", ttl=60)
    given = {"state": str(status)}
    started = bulk.start(action, given, user=boss, reason="because", limit=9)
    run_pending(name="dedupjobs.bulk")
    assert (again(started).changed, again(started).note) == (3, "done")
    found = ProcessedJob.objects.filter(pk__in=[row.pk for row in rows])
    assert [row.status for row in found] == ([] if after is None else [after] * 3)
    if action == "limit":
        assert {row.max_attempts for row in found} == {9}
    if action == "free lock":
        assert locks.seen([row.pk for row in rows]) == {}
    assert LogEntry.objects.count() == 3


def test_bulk_is_one_of_our_own_jobs_and_leaves_itself_alone(boss: User) -> None:
    started = start(boss, "cancel", queue="default")
    own = ProcessedJob.objects.get(key_hash=bulk.identity_of(started))
    assert (own.name, own.key, own.status) == ("dedupjobs.bulk", f"bulk:{started.pk}", "PENDING")
    assert not bulk.do_in_bulk.enqueue(bulk=started.pk).created
    run_pending()
    assert (fresh(own).status, json.loads(str(fresh(own).result))) == ("SUCCEEDED", "done")


def test_long_bulk_gives_others_their_turn(boss: User, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(25):
        make(Status.DEAD)
    started = start(boss)
    monkeypatch.setattr(bulk, "SLICE", 0.0)
    own = ProcessedJob.objects.get(key_hash=bulk.identity_of(started))
    assert runner.deliver(own.pk, 1, owner=clock.token(), lock=False) == "RETRYING"
    assert (fresh(own).failures, again(started).ended_at) == (0, None)
    monkeypatch.setattr(bulk, "SLICE", 60.0)
    run_pending(name="dedupjobs.bulk")
    assert (again(started).changed, fresh(own).status) == (25, "SUCCEEDED")


def test_search_for_an_argument_keeps_its_bound(
    boss: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dedupjobs.criteria.SEARCHED", 5)
    rows = [make(Status.DEAD, args='{"order_id":7}') for _ in range(12)]
    started = start(boss, state="DEAD", q="order_id=7")
    run_pending(name="dedupjobs.bulk")
    changed = [row.pk for row in rows if fresh(row).status == "PENDING"]
    assert changed == [row.pk for row in rows[-5:]]
    assert again(started).total == 5


# ---- the pages


def test_preview_counts_and_samples_and_changes_nothing(admin_client: Client) -> None:
    for status in (Status.DEAD, Status.DEAD, Status.SUCCEEDED):
        make(status, scope="acme")
    make(Status.DEAD, scope="other")
    before = everything()
    chosen = {"action": "retry", "select_across": "1", "_selected_action": ["1"]}
    answer = admin_client.post(f"{address('changelist')}?scope=acme", chosen)
    page = answer.content.decode()
    assert "3 jobs match" in page
    assert dict(answer.context["counts"]) == {"DEAD": 2, "SUCCEEDED": 1}
    assert len(answer.context["sample"]) == 3
    assert 'name="scope" value="acme"' in page
    assert everything() == before


def test_preview_of_many_counts_to_a_bound(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dedupjobs.admin.jobs.COUNTED", 5)
    for _ in range(7):
        make(Status.DEAD)
    chosen = {"action": "retry", "select_across": "1", "_selected_action": ["1"]}
    page = admin_client.post(address("changelist"), chosen).content.decode()
    assert "More than 5 jobs match" in page
    assert "No filter: these are all jobs." in page


def test_bulk_starts_stops_and_shows_its_progress(admin_client: Client) -> None:
    for _ in range(25):
        make(Status.DEAD)
    make(Status.SUCCEEDED)
    form = {"action": "retry", "confirmed": "1", "reason": "because", "name": "testapp.record"}
    page = admin_client.post(address("bulk_start"), form, follow=True)
    started = BulkOperation.objects.get()
    assert page.redirect_chain[0][0] == address("bulk", started.pk)
    assert "waiting for a worker" in page.content.decode()
    bulk.page(started.pk)
    progress = admin_client.get(address("progress", started.pk)).json()
    assert (progress["state"], progress["done"], progress["total"]) == ("running", 10, 26)
    page = admin_client.post(address("bulk_stop", started.pk), follow=True).content.decode()
    assert "stopped by admin" in page
    assert "10 of 26 rows: 10 changed, 0 left as they were" in page
    assert admin_client.get(address("progress", started.pk)).json()["state"] == "ended"


@pytest.mark.parametrize(
    "form",
    [
        {"action": "retry", "reason": ""},
        {"action": "limit", "reason": "x", "limit": "0"},
    ],
)
def test_bulk_without_what_it_needs_asks_again(admin_client: Client, form: dict[str, str]) -> None:
    make(Status.DEAD)
    answer = admin_client.post(address("bulk_start"), {**form, "confirmed": "1", "state": "DEAD"})
    assert answer.status_code == 200
    assert 'class="errorlist"' in answer.content.decode()
    assert not BulkOperation.objects.exists()


def test_unknown_bulk_is_not_found(admin_client: Client) -> None:
    for page in ("bulk", "progress"):
        assert admin_client.get(address(page, 99)).status_code == 404
    assert admin_client.post(address("bulk_stop", 99)).status_code == 404


def test_ended_bulks_do_not_stay_for_ever(boss: User) -> None:
    old, young = start(boss), start(boss)
    now = lifecycle.database_now()
    BulkOperation.objects.filter(pk=old.pk).update(ended_at=now - bulk.KEPT * 2)
    BulkOperation.objects.filter(pk=young.pk).update(ended_at=now)
    start(boss)
    assert not BulkOperation.objects.filter(pk=old.pk).exists()
    assert BulkOperation.objects.filter(pk=young.pk).exists()


def test_page_costs_one_statement_for_each_row_and_few_more(boss: User) -> None:
    costs = []
    for number in (1, 4, 9):  # the first one fills Django's own caches
        ProcessedJob.objects.all().delete()
        for _ in range(number):
            make(Status.DEAD)
        started = start(boss)
        with CaptureQueriesContext(connection) as captured:
            bulk.page(started.pk)
        assert again(started).changed == number
        costs.append(len(captured))
    assert costs[2] - costs[1] == 5
    assert costs[1] < 25
