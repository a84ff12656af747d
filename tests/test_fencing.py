"""``attempt.fenced()`` and ``attempt.complete()``: a stale worker writes nothing."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction

from dedupjobs import clock, lifecycle
from dedupjobs.clock import DbNow
from dedupjobs.context import Attempt
from dedupjobs.exceptions import LeaseLost
from dedupjobs.heartbeat import Heart
from dedupjobs.lifecycle import Claim, Lost, Place
from dedupjobs.models import JobAttempt, ProcessedJob, Status
from tests import faults, sessions
from tests.app import fenced
from tests.app.jobs import note
from tests.app.models import Ledger
from tests.faults import PATIENCE, Spawn, deliver
from tests.rows import Pause, Side, at, has_row_locks, together
from tests.sessions import needs_server
from tests.waiting import until

pytestmark = [pytest.mark.large, pytest.mark.django_db(transaction=True)]

LEASE = 60.0


@pytest.fixture
def row() -> ProcessedJob:
    return fenced.write_fenced.enqueue(tag="a", release="").job


def claimed(row: ProcessedJob) -> Attempt:
    """Return a new attempt of the row, as its running function would see it."""
    claim = lifecycle.claim(row.pk, row.generation, owner=clock.token(), place=Place())
    assert claim is not None
    return attempt_of(claim)


def attempt_of(claim: Claim) -> Attempt:
    heart = Heart(
        job_pk=claim.job_pk, fence=claim.fence, owner=claim.owner, name=claim.name, lease=LEASE
    )
    return Attempt(claim, heart)


def expire(attempt: Attempt) -> None:
    """Let the attempt's lease have ended a minute ago."""
    JobAttempt.objects.filter(pk=attempt.fence).update(
        beat_at=DbNow(-2 * LEASE), lease_until=DbNow(-LEASE)
    )


def reclaim(attempt: Attempt) -> Lost | None:
    """Reclaim the attempt as a coordinator that has seen its present beat stand still."""
    beat_at = JobAttempt.objects.get(pk=attempt.fence).beat_at
    return lifecycle.reclaim(attempt.fence, beat_at=beat_at, ahead_of=None, reason="lost")


def write(attempt: Attempt) -> str:
    """Write by the fence; return what came of it."""
    try:
        with attempt.fenced():
            note("a", f"write {attempt.number}")
    except LeaseLost:
        return "lost"
    return "written"


def writes(tag: str = "a") -> list[str]:
    found = Ledger.objects.filter(tag=tag, note__startswith="write").order_by("pk")
    return list(found.values_list("note", flat=True))


def effects() -> list[str]:
    return list(Ledger.objects.order_by("pk").values_list("note", flat=True))


# ---- fenced()


def test_worker_that_owns_its_attempt_writes_and_its_lease_is_renewed(row: ProcessedJob) -> None:
    attempt = claimed(row)
    expire(attempt)
    assert write(attempt) == "written"
    assert reclaim(attempt) is None
    after = JobAttempt.objects.annotate(db_now=DbNow()).get()
    assert 0 < (after.lease_until - after.db_now).total_seconds() <= LEASE
    assert after.outcome is None


def test_stale_worker_writes_nothing_before_a_new_owner_is_there(row: ProcessedJob) -> None:
    stale = claimed(row)
    expire(stale)
    assert reclaim(stale)
    assert write(stale) == "lost"
    assert writes() == []


def test_stale_worker_writes_nothing_although_the_new_owner_has_not_written_yet(
    row: ProcessedJob,
) -> None:
    stale = claimed(row)
    expire(stale)
    assert reclaim(stale)
    owner = claimed(row)
    assert owner.fence > stale.fence
    assert write(stale) == "lost"
    assert write(owner) == "written"
    assert write(stale) == "lost"
    assert writes() == ["write 2"]


def test_worker_whose_attempt_has_ended_writes_nothing(row: ProcessedJob) -> None:
    attempt = claimed(row)
    assert lifecycle.complete(attempt._claim, "null", unique_for=None)
    assert write(attempt) == "lost"
    assert writes() == []


def test_block_that_raises_leaves_neither_its_writes_nor_a_longer_lease(row: ProcessedJob) -> None:
    attempt = claimed(row)
    expire(attempt)
    before = JobAttempt.objects.values().get()

    def fail() -> None:
        with attempt.fenced():
            note("a", "write 1")
            raise ValueError("in the block")

    with pytest.raises(ValueError, match="in the block"):
        fail()
    assert writes() == []
    assert JobAttempt.objects.values().get() == before


def test_stale_worker_inside_its_own_transaction_is_told_and_can_roll_it_back(
    row: ProcessedJob,
) -> None:
    stale = claimed(row)
    expire(stale)
    assert reclaim(stale)

    def fail() -> None:
        with transaction.atomic():
            note("a", "write outside the block")
            with stale.fenced():
                note("a", "write 1")

    with pytest.raises(LeaseLost, match="given up for lost"):
        fail()
    assert writes() == []


def test_reclaim_that_meets_a_fenced_block_takes_nothing(
    row: ProcessedJob,
) -> None:
    """The row is locked: the reclaim skips it, or waits (SQLite) and finds the lease renewed."""
    attempt = claimed(row)
    expire(attempt)
    with Pause("fenced.locked") as pause:
        writing = Side(write, attempt)
        pause.wait()
        taking = Side(reclaim, attempt)
        if has_row_locks:
            assert taking.result(PATIENCE) is None
        pause.go_on()
        assert writing.result(PATIENCE) == "written"
        assert taking.result(PATIENCE) is None
    assert lifecycle.claim(row.pk, 1, owner=clock.token(), place=Place()) is None
    assert writes() == ["write 1"]


@pytest.mark.parametrize("point", ["reclaim.between", "reclaim.uncommitted"])
def test_fenced_block_that_meets_a_reclaim_waits_for_it_and_writes_nothing(
    row: ProcessedJob, point: str
) -> None:
    stale = claimed(row)
    expire(stale)
    with Pause(point) as pause:
        taking = Side(reclaim, stale)
        pause.wait()
        writing = Side(write, stale)
        pause.go_on()
        assert taking.result(PATIENCE).status == Status.RETRYING
        assert writing.result(PATIENCE) == "lost"
    assert write(claimed(row)) == "written"
    assert writes() == ["write 2"]


def test_fenced_blocks_and_reclaims_at_once_leave_one_writer_each_time(
    row: ProcessedJob,
) -> None:
    for number in range(1, 9):
        attempt = claimed(row)
        expire(attempt)
        wrote, lost = together(partial(write, attempt), partial(reclaim, attempt))
        assert (wrote == "written") == (lost is None)
        if lost is None:
            expire(attempt)
            assert reclaim(attempt)
        assert (f"write {number}" in writes()) == (wrote == "written")
        ProcessedJob.objects.update(lost_count=0)


# ---- complete()


def test_effect_and_success_are_committed_together() -> None:
    row = fenced.complete_itself.enqueue(tag="a").job

    def seen_by_others() -> tuple[list[str], str]:
        return effects(), ProcessedJob.objects.get().status

    with Pause("settle.uncommitted") as pause:
        running = Side(deliver, row)
        pause.wait()
        assert seen_by_others() == ([], Status.RUNNING)
        pause.go_on()
        assert running.result(PATIENCE) == Status.SUCCEEDED
    assert seen_by_others() == (["effect 1"], Status.SUCCEEDED)
    assert ProcessedJob.objects.get().result == json.dumps({"by": 1}, separators=(",", ":"))


@pytest.mark.parametrize(
    ("trouble", "status", "ending", "failures"),
    [
        ("rolled back", Status.PENDING, "INTERRUPTED", 0),
        ("raises inside", Status.RETRYING, "FAILED", 1),
    ],
)
def test_completion_that_is_rolled_back_leaves_no_effect_and_the_job_runs_again(
    trouble: str, status: Status, ending: str, failures: int
) -> None:
    row = fenced.complete_itself.enqueue(tag="a", first=trouble).job
    assert deliver(row) == status
    assert effects() == []
    assert ProcessedJob.objects.get().failures == failures
    until(lambda: deliver(row) == Status.SUCCEEDED)
    assert effects() == ["effect 2"]
    assert faults.outcomes_of(row.pk) == [ending, "SUCCEEDED"]


def test_error_after_the_completion_changes_nothing() -> None:
    outcome = fenced.complete_itself.enqueue(tag="a", first="raises afterwards")
    assert deliver(outcome.job) == Status.SUCCEEDED
    assert outcome.result() == {"by": 1}
    assert deliver(outcome.job) is None
    assert effects() == ["effect 1"]


def test_completion_after_the_lease_was_lost_leaves_no_effect() -> None:
    row = fenced.complete_itself.enqueue(tag="a").job

    def lose() -> None:
        attempt = attempt_of(lifecycle.claimed_by(JobAttempt.objects.get().owner)[0])
        expire(attempt)
        assert reclaim(attempt)

    with at("user_code.before", lose):
        assert deliver(row) is None
    assert effects() == []
    assert faults.outcomes_of(row.pk) == ["LOST"]
    assert deliver(row) == Status.SUCCEEDED
    assert effects() == ["effect 2"]


@pytest.mark.parametrize(
    ("specimen", "words"),
    [
        (fenced.complete_outside_atomic, "belongs inside transaction.atomic()"),
        (fenced.complete_in_atomic_job, "is atomic and completes by returning"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_completion_in_the_wrong_place_is_refused_and_says_why(specimen: Any, words: str) -> None:
    row = specimen.enqueue(tag="a").job
    assert deliver(row) == Status.DEAD
    attempt = JobAttempt.objects.get()
    assert attempt.error_class == "builtins.RuntimeError"
    assert words in attempt.error_message


@needs_server
def test_completion_whose_commit_has_no_reply_is_a_success_once() -> None:
    row = fenced.complete_itself.enqueue(tag="a").job
    with faults.through_proxy() as proxy:
        with at("settle.uncommitted", lambda: proxy.swallow_reply_to(b"COMMIT")):
            assert deliver(row) == Status.SUCCEEDED
        assert proxy.swallowed.is_set()
    assert effects() == ["effect 1"]
    assert faults.outcomes_of(row.pk) == ["SUCCEEDED"]


@contextmanager
def terminated_before_the_commit() -> Iterator[None]:
    own = sessions.own()
    with at("settle.uncommitted", lambda: sessions.terminate(own)):
        yield


@contextmanager
def lost_on_the_commits_way() -> Iterator[None]:
    with (
        faults.through_proxy() as proxy,
        at("settle.uncommitted", lambda: proxy.lose_request(b"COMMIT")),
    ):
        yield


@needs_server
@pytest.mark.parametrize("connection_", [terminated_before_the_commit, lost_on_the_commits_way])
def test_completion_whose_commit_never_arrived_is_interrupted_and_the_job_runs_again(
    connection_: Callable[[], AbstractContextManager[None]],
) -> None:
    row = fenced.complete_itself.enqueue(tag="a").job
    with connection_():
        assert deliver(row) == Status.PENDING
    assert effects() == []
    assert ProcessedJob.objects.get().failures == 0
    assert deliver(row) == Status.SUCCEEDED
    assert effects() == ["effect 2"]
    assert faults.outcomes_of(row.pk) == ["INTERRUPTED", "SUCCEEDED"]


# ---- real processes


def stop(*pids: int) -> None:
    """Stop processes at a moment at which none of them holds a lock that others need."""

    def stopped_without_a_lock() -> bool:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        if _is_free():
            return True
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        return False

    until(stopped_without_a_lock, PATIENCE, what="the processes are stopped outside of a beat")


def _is_free() -> bool:
    if has_row_locks:
        with transaction.atomic():
            return bool(JobAttempt.objects.select_for_update(skip_locked=True))
    with closing(sqlite3.connect(connection.settings_dict["NAME"], timeout=0.2)) as other:
        try:
            other.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        return True


@pytest.mark.parametrize(
    "specimen", [fenced.write_fenced, fenced.write_unfenced], ids=["fenced", "unfenced"]
)
@pytest.mark.parametrize("order", ["before the new owner writes", "after the new owner wrote"])
def test_horse_and_parent_stopped_past_the_lease_and_woken_write_only_without_a_fence(
    spawn: Spawn, tmp_path: Path, specimen: Any, order: str
) -> None:
    release = tmp_path / "release"
    sleeper = faults.start_worker(spawn, AUTODISCOVER=["jobs", "fenced"])
    row = specimen.enqueue(tag="a", release=str(release)).job
    horse = faults.begun("a", 1)
    other = faults.start_worker(spawn, AUTODISCOVER=["jobs", "fenced"])
    stop(sleeper.pid, horse)
    faults.begun("a", 2)
    if order.startswith("after"):
        Path(f"{release}.2").touch()
        until(lambda: "write 2" in writes(), PATIENCE)
    Path(f"{release}.1").touch()
    os.kill(horse, signal.SIGCONT)  # its parent would kill it, so that sleeps on
    until(Path(f"{release}.1.stale").exists, PATIENCE, what="the stale horse has tried to write")
    Path(f"{release}.2").touch()
    until(lambda: ProcessedJob.objects.get().status == Status.SUCCEEDED, PATIENCE)
    os.kill(sleeper.pid, signal.SIGCONT)
    for worker in (sleeper, other):
        worker.signal(signal.SIGTERM)
    for worker in (sleeper, other):
        worker.wait(PATIENCE)
    stale = [] if specimen is fenced.write_fenced else ["write 1"]
    assert sorted(writes()) == [*stale, "write 2"]
    assert faults.outcomes_of(row.pk) == ["LOST", "SUCCEEDED"]
