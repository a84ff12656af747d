"""Beats keep an attempt alive, and tell it when it is not its own any more."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dedupjobs import lifecycle, locks, signals
from dedupjobs.context import Attempt
from dedupjobs.exceptions import Cancel, Hold, LeaseLost
from dedupjobs.heartbeat import Heart, beating
from dedupjobs.lifecycle import Claim, Pulse
from dedupjobs.models import AttemptOutcome, JobAttempt, ProcessedJob, Status
from tests import live, sessions
from tests.app import jobs
from tests.live import PATIENCE, Spawn
from tests.sessions import needs_row_locks, needs_server
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

LEASE = 2  # seconds; a beat each third of a second


@pytest.fixture(autouse=True)
def _patient() -> Iterator[None]:
    """A busy machine must not look like a fault."""
    with live.brisk(LOCK_TIMEOUT=10, PUSH_TIMEOUT=10):
        yield


@pytest.fixture
def outcome() -> Any:
    return jobs.record.enqueue(tag="beating")


@pytest.fixture
def claim(outcome: Any) -> Claim:
    """A claim that nobody works at, with its lock."""
    made = live.claimed(outcome, lease=LEASE, overdue=-LEASE)
    locks.acquire(made.job_pk, made.owner, ttl=LEASE)
    return made


@pytest.fixture
def heart(claim: Claim) -> Heart:
    return heart_of(claim)


@pytest.fixture
def losses() -> Iterator[list[int]]:
    """The fences that lease_lost is told of."""
    told: list[int] = []

    def note(fence: int, **_: Any) -> None:
        told.append(fence)

    signals.lease_lost.connect(note)
    yield told
    signals.lease_lost.disconnect(note)


def heart_of(claim: Claim, lease: float = LEASE) -> Heart:
    return Heart(
        job_pk=claim.job_pk, fence=claim.fence, owner=claim.owner, name=claim.name, lease=lease
    )


def row(claim: Claim) -> JobAttempt:
    return JobAttempt.objects.get(pk=claim.fence)


def beats_for(claim: Claim, seconds: float) -> None:
    """Wait until beats have come for so long, by the database's clock."""
    begun = row(claim).beat_at
    until(lambda: (row(claim).beat_at - begun).total_seconds() > seconds, PATIENCE)


# ---- alive


@pytest.mark.large
def test_beats_extend_the_lease_and_the_lock_for_longer_than_their_first_length(
    claim: Claim, heart: Heart
) -> None:
    with beating(heart):
        beats_for(claim, 2 * LEASE)
        seen = row(claim)
        assert seen.lease_until > seen.beat_at
        assert (seen.lease_until - seen.beat_at).total_seconds() == pytest.approx(LEASE, abs=0.1)
        until(lambda: locks.holder(claim.job_pk) == claim.owner, PATIENCE)
        assert not heart.lost.is_set()
    until(lambda: locks.holder(claim.job_pk) is None, PATIENCE, what="without beats it ends")
    assert row(claim).outcome is None


def test_beats_end_with_the_block_and_leave_no_thread(claim: Claim, heart: Heart) -> None:
    with beating(heart):
        beats_for(claim, 0.1)
        assert f"dedupjobs-heart-{claim.fence}" in {t.name for t in threading.enumerate()}
    assert f"dedupjobs-heart-{claim.fence}" not in {t.name for t in threading.enumerate()}


def test_beat_renews_an_expired_lease_that_nobody_has_reclaimed(claim: Claim, heart: Heart) -> None:
    live.set_lease(claim.fence, beat_at=-100, lease_until=-50)
    assert heart.tick() == Pulse()
    assert row(claim).lease_until > lifecycle.database_now()


def test_beat_touches_nothing_but_the_attempt(outcome: Any, claim: Claim, heart: Heart) -> None:
    before = ProcessedJob.objects.filter(pk=outcome.job.pk).values().get()
    heart.tick()
    assert ProcessedJob.objects.filter(pk=outcome.job.pk).values().get() == before


def test_beat_writes_progress_and_activity_that_the_job_has_noted(
    claim: Claim, heart: Heart
) -> None:
    attempt = Attempt(claim, heart)
    attempt.progress(3, 7, "half\x00way")
    assert row(claim).progress == "", "kept in memory until the beat"
    heart.tick()
    done, total, text = json.loads(row(claim).progress)
    assert (done, total) == (3, 7)
    assert text.startswith("half")
    active = row(claim).active_at
    assert active is not None
    assert active <= lifecycle.database_now()


@pytest.mark.large
def test_progress_of_a_running_job_is_seen_from_outside(spawn: Spawn, tmp_path: Path) -> None:
    release = tmp_path / "release"
    live.start_worker(spawn)
    outcome = jobs.report_progress.enqueue(tag="progress", release=str(release))
    live.begun("progress")
    until(lambda: live.attempt(outcome).progress == '[3, 7, "halfway"]', PATIENCE)
    release.touch()
    live.wait_for(outcome)


# ---- lost


def test_heart_of_an_attempt_that_another_has_ended_tells_it_and_stops(
    claim: Claim, heart: Heart, losses: list[int]
) -> None:
    with beating(heart):
        beats_for(claim, 0.1)
        assert lifecycle.bury(claim.fence, "taken by a test")
        assert heart.lost.wait(PATIENCE)
        until(
            lambda: f"dedupjobs-heart-{claim.fence}" not in {t.name for t in threading.enumerate()},
            PATIENCE,
            what="its thread ends",
        )
    ended = row(claim)
    assert heart.tick() == Pulse(lost=True, over=True)
    assert losses == [claim.fence], "told once"
    assert row(claim).beat_at == ended.beat_at, "nothing is written any more"
    with pytest.raises(LeaseLost, match=f"fence {claim.fence}"):
        Attempt(claim, heart).check()


def test_heart_of_an_attempt_that_its_own_runner_has_ended_is_over_but_not_lost(
    claim: Claim, heart: Heart, losses: list[int]
) -> None:
    assert lifecycle.complete(claim, "null", unique_for=None) == Status.SUCCEEDED
    assert heart.tick() == Pulse(over=True)
    assert not heart.lost.is_set()
    assert losses == []


def test_heart_of_an_attempt_that_is_not_visible_yet_proves_nothing(claim: Claim) -> None:
    stranger = Heart(job_pk=claim.job_pk, fence=10**9, owner="x", name=claim.name, lease=LEASE)
    assert stranger.tick() == Pulse()
    assert not stranger.lost.is_set()


def test_lock_of_a_lost_attempt_is_not_extended_for_the_next_owner(
    claim: Claim, heart: Heart
) -> None:
    lifecycle.bury(claim.fence, "taken by a test")
    locks.replace(claim.job_pk, "next", ttl=60)
    heart.tick()
    assert locks.holder(claim.job_pk) == "next"


# ---- requests of operators


@pytest.mark.parametrize(
    ("ask", "wish"), [(lifecycle.cancel, Cancel), (lifecycle.hold, Hold)], ids=["cancel", "hold"]
)
def test_check_raises_what_an_operator_has_asked_for_since_the_last_beat(
    outcome: Any, claim: Claim, heart: Heart, ask: Any, wish: type[Exception]
) -> None:
    attempt = Attempt(claim, heart)
    heart.tick()
    attempt.check()
    assert ask(outcome.job.pk, live.row_of(outcome).version) == Status.RUNNING
    heart.tick()
    with pytest.raises(wish, match="request"):
        attempt.check()


def test_check_looks_by_itself_where_no_beat_comes(outcome: Any, claim: Claim) -> None:
    attempt = Attempt(claim, heart_of(claim, lease=1_000))
    lifecycle.cancel(outcome.job.pk, live.row_of(outcome).version)

    def raises() -> bool:
        try:
            attempt.check()
        except Cancel:
            return True
        return False

    until(raises, PATIENCE)


@pytest.mark.parametrize(
    ("ask", "status", "ending"),
    [
        (lifecycle.cancel, Status.CANCELLED, AttemptOutcome.CANCELLED),
        (lifecycle.hold, Status.HELD, AttemptOutcome.HELD),
    ],
    ids=["cancel", "hold"],
)
@pytest.mark.large
def test_running_job_that_checks_obeys_an_operator(
    spawn: Spawn, tmp_path: Path, ask: Any, status: Status, ending: AttemptOutcome
) -> None:
    live.start_worker(spawn)
    never = str(tmp_path / "never")
    outcome = jobs.wait.enqueue(tag="asked", release=never, checks=True)
    live.begun("asked")
    assert ask(outcome.job.pk, live.row_of(outcome).version) == Status.RUNNING
    row = live.wait_for(outcome, status)
    assert live.outcomes(outcome) == [ending]
    assert (row.cancel_requested, row.hold_requested) == (False, False)
    assert row.failures == 0


# ---- trouble in the database


@needs_server
def test_beat_whose_connection_is_killed_is_tried_again_on_a_fresh_one(
    claim: Claim, heart: Heart
) -> None:
    with beating(heart):
        beats_for(claim, 0.1)
        killed = until(sessions.others, PATIENCE)
        sessions.terminate(*killed)
        beats_for(claim, 2 * LEASE)
        assert not heart.lost.is_set()
        assert not set(killed) & set(sessions.others())
    until(lambda: not sessions.others(), PATIENCE, what="the heart has closed its connection")


@needs_row_locks
def test_beat_of_a_locked_attempt_is_skipped_without_waiting_and_is_not_lost(
    claim: Claim, heart: Heart
) -> None:
    heart.tick()
    beat_at = row(claim).beat_at
    with live.rows_locked(JobAttempt.objects.filter(pk=claim.fence)):
        assert heart.tick() == Pulse(), "it would hang here"
        assert row(claim).beat_at == beat_at
    assert not heart.lost.is_set()
    heart.tick()
    assert row(claim).beat_at > beat_at


@pytest.mark.large
@needs_row_locks
def test_business_transaction_on_the_jobs_row_starves_no_beat_and_delays_only_the_settle(
    spawn: Spawn, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    workers = [live.start_worker(spawn) for _ in range(2)]
    outcome = jobs.wait.enqueue(tag="busy row", release=str(release))
    live.begun("busy row")
    first = live.attempt(outcome)
    with live.rows_locked(ProcessedJob.objects.filter(pk=outcome.job.pk)):
        until(
            lambda: (live.attempt(outcome).beat_at - first.lease_until).total_seconds() > 0.5,
            PATIENCE,
            what="it beats on after its first lease",
        )
        release.touch()
        until(lambda: "end 1" in live.notes("busy row"), PATIENCE)
        settling = live.attempt(outcome).lease_until
        until(
            lambda: (lifecycle.database_now() - settling).total_seconds() > 1.2,
            PATIENCE,
            what="the lease is over while it settles",
        )
        assert live.row_of(outcome).status == Status.RUNNING
    live.wait_for(outcome)
    assert live.outcomes(outcome) == [AttemptOutcome.SUCCEEDED]
    assert live.notes("busy row") == ["begin 1", "end 1"]
    assert all(worker.is_alive() for worker in workers)
