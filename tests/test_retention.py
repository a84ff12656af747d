"""What prune removes, what stays of a key that is held, and what it never touches."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction
from django.test import override_settings

from dedupjobs import coordinator, lifecycle, operations, registry, stats
from dedupjobs import job as register
from dedupjobs.clock import DbNow
from dedupjobs.coordinator import Coordinator
from dedupjobs.exceptions import NoResult, PayloadMismatch
from dedupjobs.lifecycle import Place, Pruned
from dedupjobs.models import DuplicateSample, JobAttempt, Kind, Operation, ProcessedJob, Status
from dedupjobs.testing import run_pending
from tests.app import jobs
from tests.rows import Held, Side, together, until_blocked
from tests.sessions import needs_row_locks

pytestmark = pytest.mark.django_db
committing = pytest.mark.django_db(transaction=True)

MONTH = 30 * 86_400.0
ENDED = ("SUCCEEDED", "DEAD", "CANCELLED")


def fresh(row: ProcessedJob) -> ProcessedJob:
    return ProcessedJob.objects.get(pk=row.pk)


def aged(row: ProcessedJob, days: float = 31, **columns: Any) -> ProcessedJob:
    """Let the row have ended that long ago."""
    ended = lifecycle.database_now() - timedelta(days=days)
    ProcessedJob.objects.filter(pk=row.pk).update(finished_at=ended, **columns)
    return fresh(row)


def done(job: Any = jobs.record, days: float = 31, **call: Any) -> ProcessedJob:
    """Return the row of a run that ended that many days ago."""
    row = job.enqueue(**{"tag": "a", **call}).job
    run_pending()
    return aged(row, days)


def prune(row: ProcessedJob, *, older_than: float = MONTH, limit: int = 100) -> Pruned:
    return lifecycle.prune(row.name, older_than=older_than, limit=limit)


def everything() -> list[Any]:
    tables = (ProcessedJob, JobAttempt, Operation, DuplicateSample)
    return [row for table in tables for row in table.objects.order_by("pk").values()]


# ---- what goes, what stays


def test_row_whose_key_is_free_goes_with_its_attempts_and_notes() -> None:
    row = done(jobs.record_again)
    stats.count_duplicate(row.pk, row.name, "producer", "again")
    stats.fold()
    Operation.objects.create(
        job=row, action="hold", by="ada", before="PENDING", after="HELD", at=DbNow()
    )
    assert prune(row) == Pruned(deleted=1, tombstones=0)
    assert everything() == []
    assert jobs.record_again.enqueue(tag="a").kind is Kind.CREATED


def test_row_whose_key_is_held_for_ever_leaves_a_tombstone_that_answers() -> None:
    row = done(text="secret")
    before = fresh(row)
    assert prune(row) == Pruned(deleted=0, tombstones=1)
    now = fresh(row)
    assert (now.args, now.result, now.error, now.rerun_args) == ("", None, "", None)
    assert now.is_tombstone
    assert not JobAttempt.objects.exists()
    kept = ("key_hash", "key", "status", "generation", "fingerprint", "unique_until", "attempts")
    assert [getattr(now, name) for name in kept] == [getattr(before, name) for name in kept]
    again = jobs.record.enqueue(tag="a", text="secret")
    assert (again.kind, again.job) == (Kind.REPLAYED, row)
    with pytest.raises(NoResult, match="its result was pruned"):
        again.result()
    assert run_pending() == 0


def test_tombstone_still_refuses_the_same_key_with_other_arguments() -> None:
    row = done(text="one")
    prune(row)
    with pytest.raises(PayloadMismatch) as caught:
        jobs.record.enqueue(tag="a", text="two")
    assert caught.value.stored == row.fingerprint


@pytest.mark.parametrize("job", [jobs.record_warning, jobs.record_lenient], ids=["warn", "ignore"])
def test_tombstone_answers_other_arguments_by_the_jobs_policy(job: Any) -> None:
    row = done(job, text="one")
    prune(row)
    assert job.enqueue(tag="a", text="two").kind is Kind.REPLAYED


def test_dead_row_that_keeps_a_rerun_for_a_person_stays_until_he_takes_it_up() -> None:
    row = jobs.keep_last_blocking.enqueue(tag="a", text="one").job
    waiting = {"rerun_args": row.args.replace("one", "two"), "rerun_fingerprint": "two"}
    row = aged(row, status=Status.DEAD, **waiting)
    assert prune(row) == Pruned()
    assert fresh(row).rerun_args == waiting["rerun_args"]
    operations.retry(row, by="ada")
    assert (fresh(row).args, fresh(row).rerun_args) == (waiting["rerun_args"], None)


def test_tombstone_of_a_window_goes_once_the_window_is_over() -> None:
    row = done(jobs.record_hourly)
    ProcessedJob.objects.update(unique_until=DbNow(600))
    assert prune(row) == Pruned(tombstones=1)
    assert prune(row) == Pruned()
    assert jobs.record_hourly.enqueue(tag="a").kind is Kind.REPLAYED
    ProcessedJob.objects.update(unique_until=DbNow(-1))
    assert prune(row) == Pruned(deleted=1)
    assert not ProcessedJob.objects.exists()


def test_tombstone_whose_window_is_over_is_opened_again_by_a_call() -> None:
    row = done(jobs.record_hourly)
    ProcessedJob.objects.update(unique_until=DbNow(600))
    prune(row)
    ProcessedJob.objects.update(unique_until=DbNow(-1))
    again = jobs.record_hourly.enqueue(tag="a")
    assert (again.kind, again.job.pk, again.job.generation) == (Kind.CREATED, row.pk, 2)
    assert run_pending() == 1
    assert fresh(row).status == Status.SUCCEEDED


def test_dead_row_that_blocks_its_key_leaves_a_tombstone_that_blocks() -> None:
    row = done(jobs.fail_and_block)
    assert prune(row) == Pruned(tombstones=1)
    assert fresh(row).is_tombstone
    again = jobs.fail_and_block.enqueue(tag="a")
    assert (again.kind, again.job) == (Kind.BLOCKED, row)


@pytest.mark.parametrize("status", ["DEAD", "CANCELLED"])
def test_failed_row_whose_key_may_be_used_again_goes(status: str) -> None:
    row = aged(done(), status=status)
    assert prune(row) == Pruned(deleted=1)
    assert not ProcessedJob.objects.exists()


@pytest.mark.parametrize("status", [s for s in Status if s.value not in ENDED])
def test_row_that_has_not_ended_is_never_touched(status: Status) -> None:
    # Not even where it bears an old end, as a row that was opened again by a faulty hand may.
    row = jobs.record_again.enqueue(tag="a").job
    assert lifecycle.claim(row.pk, 1, owner="a worker", place=Place())
    aged(row, days=4_000, status=status)
    before = everything()
    assert prune(row, older_than=-1) == Pruned()
    call_command("dedupjobs_prune", "--purge", stdout=StringIO())
    assert everything() == before


def test_row_within_its_retention_stays_to_the_second() -> None:
    row = aged(done(jobs.record_again), days=30 - 1 / 1_440)
    assert prune(row) == Pruned()
    aged(row, days=30 + 1 / 1_440)
    assert prune(row) == Pruned(deleted=1)


def test_job_is_pruned_apart_from_others() -> None:
    done(jobs.record_again)
    other = done(jobs.record_always)
    lifecycle.prune(jobs.record_again.name, older_than=MONTH, limit=100)
    assert list(ProcessedJob.objects.values_list("pk", flat=True)) == [other.pk]


def test_limit_takes_the_oldest() -> None:
    rows = [done(jobs.record_again, tag=f"{i}", days=31 + i) for i in range(5)]
    assert prune(rows[0], limit=2) == Pruned(deleted=2)
    assert list(ProcessedJob.objects.order_by("pk")) == rows[:3]


def test_held_rows_before_the_limit_hide_no_free_ones_behind_them() -> None:
    for i in range(3):
        done(tag=f"{i}", days=60)
    assert lifecycle.prune(jobs.record.name, older_than=MONTH, limit=2) == Pruned(tombstones=2)
    aged(jobs.record.enqueue(tag="free").job, status=Status.DEAD)
    assert lifecycle.prune(jobs.record.name, older_than=MONTH, limit=2) == Pruned(
        deleted=1, tombstones=1
    )


# ---- others at work


@needs_row_locks
@committing
def test_row_that_somebody_has_locked_is_left_for_the_next_round() -> None:
    busy, free = (done(jobs.record_again, tag=tag) for tag in ("busy", "free"))
    with Held(busy):
        assert Side(lambda: prune(busy)).result(5) == Pruned(deleted=1)
        assert list(ProcessedJob.objects.all()) == [busy]
    assert not ProcessedJob.objects.filter(pk=free.pk).exists()
    assert prune(busy) == Pruned(deleted=1)


@needs_row_locks
@committing
@pytest.mark.parametrize("job", [jobs.record_again, jobs.record_hourly], ids=["gone", "window"])
def test_call_that_comes_while_its_row_is_pruned_gets_a_run(job: Any) -> None:
    row = done(job)
    ProcessedJob.objects.update(unique_until=DbNow(-1))
    with transaction.atomic():
        assert prune(row) == Pruned(deleted=1)
        caller = Side(lambda: job.enqueue(tag="a"))
        until_blocked(caller)
    outcome = caller.result()
    assert outcome.kind is Kind.CREATED
    assert ProcessedJob.objects.get().pk == outcome.job.pk
    assert run_pending() == 1


@needs_row_locks
@committing
def test_row_that_is_opened_again_meanwhile_is_not_pruned() -> None:
    row = done(jobs.record_again)
    with transaction.atomic():
        assert jobs.record_again.enqueue(tag="a").created
        assert Side(lambda: prune(row)).result(5) == Pruned()
    assert fresh(row).status == Status.PENDING
    assert prune(row, older_than=-1) == Pruned()
    assert run_pending() == 1


@committing
def test_calls_and_prunes_at_once_lose_no_call() -> None:
    tags = [f"{i}" for i in range(15)]
    for tag in tags:
        done(jobs.record_again, tag=tag)

    def call() -> list[bool]:
        return [jobs.record_again.enqueue(tag=tag).created for tag in tags]

    def sweep() -> int:
        name = jobs.record_again.name
        return sum(lifecycle.prune(name, older_than=MONTH, limit=2).deleted for _ in range(10))

    created, pruned, more = together(call, sweep, sweep)
    assert created == [True] * 15
    assert pruned + more <= 15
    assert ProcessedJob.objects.filter(status=Status.PENDING).count() == 15
    assert run_pending() == 15


@committing
def test_two_prunes_at_once_count_each_row_once() -> None:
    for i in range(10):
        done(jobs.record_again, tag=f"{i}")
    name = jobs.record_again.name

    def sweep() -> int:
        return sum(lifecycle.prune(name, older_than=MONTH, limit=3).deleted for _ in range(8))

    assert sum(together(sweep, sweep)) == 10
    assert not ProcessedJob.objects.exists()


# ---- the coordinator


def short_lived(*, tag: str) -> None:
    """Kept for an hour."""


def test_coordinator_prunes_each_job_by_its_own_retention() -> None:
    short = register(key=None, name="retention.short", retain_for=3_600)(short_lived)
    try:
        gone = done(short, days=0.1)
        stays = done(jobs.record_always, days=0.1)
        assert Coordinator().tick().pruned == Pruned(deleted=1)
    finally:
        registry.forget("retention.short")
    assert list(ProcessedJob.objects.all()) == [stays]
    assert gone.pk != stays.pk


def test_coordinator_prunes_rows_of_a_job_that_no_code_knows_by_the_default() -> None:
    row = aged(done(jobs.record_always), days=29, name="gone.job")
    assert Coordinator().tick().pruned == Pruned()
    aged(row, days=31)
    assert Coordinator().prune() in (Pruned(deleted=1), Pruned(tombstones=1))


@override_settings(DEDUPJOBS={"PRUNE_EVERY": 3_600})
def test_coordinator_prunes_at_its_first_tick_and_then_every_prune_every() -> None:
    coordinator = Coordinator()
    done(jobs.record_always)
    assert coordinator.tick().pruned == Pruned(deleted=1)
    done(jobs.record_always)
    assert coordinator.tick().pruned == Pruned()
    with override_settings(DEDUPJOBS={"PRUNE_EVERY": 0.001}):
        restarted = Coordinator(owner=coordinator.owner)
        assert restarted.tick().pruned == Pruned(deleted=1)
        done(jobs.record_always)
        assert restarted.tick().pruned == Pruned(deleted=1)


@pytest.fixture
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "PRUNE_PAGE", 2)
    monkeypatch.setattr(coordinator, "PRUNE_SECONDS", 60.0)


@pytest.mark.usefixtures("_small_pages")
def test_coordinator_takes_several_pages_and_stops_at_none() -> None:
    for i in range(5):
        done(jobs.record_again, tag=f"{i}")
        done(tag=f"{i}")
    assert Coordinator().prune() == Pruned(deleted=5, tombstones=5)
    assert Coordinator().prune() == Pruned()


@pytest.mark.usefixtures("_small_pages")
def test_coordinator_that_ran_out_of_time_goes_on_with_the_next_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for i in range(5):
        done(jobs.record_again, tag=f"{i}")
        done(tag=f"{i}")
    monkeypatch.setattr(coordinator, "PRUNE_SECONDS", 0.0)  # so a page a tick
    hurried = Coordinator()
    pruned = [hurried.tick().pruned for _ in range(7)]
    assert [p.deleted + p.tombstones for p in pruned] == [2, 2, 1, 2, 2, 1, 0]


def test_sweeps_for_tombstones_pass_over_none_that_stays() -> None:
    """Growth: a million keys that are held for ever cost a sweep nothing."""
    row = done()
    ended = row.finished_at
    assert prune(row) == Pruned(tombstones=1)
    hollow = fresh(row)
    assert (hollow.finished_at, hollow.ended_at) == (None, ended)
    assert [rows.count() for rows in lifecycle.free_tombstones(row.name)] == [0, 0]
    assert not lifecycle.prunable(row.name, older_than=-1_000).exists()


# ---- the command


def printed(*args: str) -> str:
    out = StringIO()
    call_command("dedupjobs_prune", *args, stdout=out)
    return out.getvalue()


def three_kinds() -> None:
    """One row to go, one to become a tombstone, one within its retention."""
    done(jobs.record_again, tag="old")
    done(jobs.record, tag="old")
    done(jobs.record_again, tag="new", days=1)


def test_command_prunes_what_is_out_of_retention_and_says_how_much() -> None:
    three_kinds()
    assert printed().splitlines() == [
        "testapp.record: 0 gone, 1 tombstones.",
        "testapp.record_again: 1 gone, 0 tombstones.",
    ]
    assert set(ProcessedJob.objects.values_list("key", flat=True)) == {"record:old", "again:new"}


def test_command_counts_and_changes_nothing_on_a_dry_run() -> None:
    three_kinds()
    before = everything()
    assert printed("--dry-run").splitlines() == [
        "testapp.record: 0 would go, 1 would become tombstones.",
        "testapp.record_again: 1 would go, 0 would become tombstones.",
    ]
    assert everything() == before


def test_command_prunes_one_job_by_name() -> None:
    three_kinds()
    assert printed("--name", "testapp.record_again") == (
        "testapp.record_again: 1 gone, 0 tombstones.\n"
    )
    assert not fresh(ProcessedJob.objects.get(key="record:old")).is_tombstone


def test_command_purges_regardless_of_retention_and_keeps_held_keys() -> None:
    three_kinds()
    printed("--purge")
    assert list(ProcessedJob.objects.values_list("key", "args")) == [("record:old", "")]
    assert jobs.record.enqueue(tag="old").kind is Kind.REPLAYED


@pytest.mark.parametrize(("limit", "left"), [(1, 6), (2, 5), (3, 4), (7, 0), (50, 0)])
@pytest.mark.usefixtures("_small_pages")
def test_command_prunes_at_most_the_limit(limit: int, left: int) -> None:
    for i in range(7):
        done(jobs.record_again, tag=f"{i}")
    assert printed("--limit", str(limit)) == (
        f"testapp.record_again: {7 - left} gone, 0 tombstones.\n"
    )
    assert ProcessedJob.objects.count() == left


@pytest.mark.usefixtures("_small_pages")
def test_command_prunes_at_most_the_limit_where_rows_have_notes() -> None:
    for i in range(6):
        row = jobs.record_again.enqueue(tag=f"{i}").job
        operations.retry(aged(row, status=Status.DEAD), by="ada")
        run_pending()
        aged(row)
    assert printed("--limit", "3") == "testapp.record_again: 3 gone, 0 tombstones.\n"
    assert ProcessedJob.objects.count() == Operation.objects.count() == 3


def test_command_refuses_a_limit_below_one() -> None:
    with pytest.raises(CommandError, match="--limit 0: give a whole number of at least 1"):
        printed("--limit", "0")


def test_held_row_is_kept_for_its_person() -> None:
    row = jobs.record.enqueue(tag="a").job
    operations.hold(row, by="ada")
    printed("--purge")
    assert fresh(row).status == Status.HELD
    assert fresh(row).args == row.args
