"""What gets jobs going again: hand-over, reclaim, re-sending, and the commands that do it."""

from __future__ import annotations

import io
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

from dedupjobs import lifecycle
from dedupjobs.clock import DbNow
from dedupjobs.coordinator import Coordinator
from dedupjobs.heartbeat import Heart, beating
from dedupjobs.models import AttemptOutcome, JobAttempt, ProcessedJob, Status
from tests import live, sessions
from tests.app import jobs
from tests.app.models import Ledger
from tests.live import PATIENCE, SIMPLE, STOCK, Spawn, with_sqlite
from tests.processes import Spawned
from tests.rows import together
from tests.servers import HOST, NOBODY, MariaDB, PostgreSQL, Server, Valkey
from tests.sessions import needs_row_locks, needs_server
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

FAILED, LOST, SUCCEEDED = AttemptOutcome.FAILED, AttemptOutcome.LOST, AttemptOutcome.SUCCEEDED
FAR = 1_000  # seconds; longer than any test
PATIENT = {"PUSH_TIMEOUT": 10, "LOCK_TIMEOUT": 10}  # so that a busy machine looks like no fault


@pytest.fixture(autouse=True)
def _brisk() -> Iterator[None]:
    with live.brisk(**PATIENT, RECLAIM_EVERY=0.001, RESEND_AFTER=FAR):
        yield


@pytest.fixture
def coordinator() -> Coordinator:
    """One whose server has its epoch key already, as in daily life."""
    made = Coordinator()
    made.tick()
    return made


def message_ids(*outcomes: object) -> list[str | None]:
    return [live.row_of(outcome).dispatch_id for outcome in outcomes]


# ---- hand-over


def test_coordinator_hands_over_due_rows_oldest_first_and_no_row_before_its_time() -> None:
    due = [jobs.record_alone.enqueue(tag=f"due {n}") for n in range(3)]
    later = jobs.record.enqueue(tag="later")
    with live.rq_client() as client:
        client.flushdb()
    for outcome, ago in zip(due, (2, 30, 10), strict=True):
        live.unsent(outcome, run_after=-ago)
    live.unsent(later, run_after=FAR)
    assert Coordinator().hand_over(["default"]) == 3
    assert live.queued() == message_ids(due[1], due[2], due[0])
    assert live.row_of(later).dispatched_at is None
    assert Coordinator().hand_over(["default"]) == 0, "each is handed over once"


def test_coordinators_handing_over_at_once_send_one_message_per_row() -> None:
    outcomes = [jobs.record_alone.enqueue(tag=f"race {n}") for n in range(20)]
    with live.rq_client() as client:
        client.flushdb()
    for outcome in outcomes:
        live.unsent(outcome, run_after=-1)
    sent = together(*[lambda: Coordinator().hand_over(["default"]) for _ in range(3)])
    assert sum(sent) == 20
    assert sorted(live.queued()) == sorted(message_ids(*outcomes))


def test_coordinators_handing_over_at_once_name_each_row_in_one_message() -> None:
    outcomes = [jobs.record.enqueue(tag=f"race {n}") for n in range(20)]
    with live.rq_client() as client:
        client.flushdb()
    for outcome in outcomes:
        live.unsent(outcome, run_after=-1)
    sent = together(*[lambda: Coordinator().hand_over(["default"]) for _ in range(3)])
    assert sum(sent) == 20
    assert set(live.queued()) == set(message_ids(*outcomes))
    assert live.work_off() <= 3
    assert {live.row_of(outcome).status for outcome in outcomes} == {Status.SUCCEEDED}
    assert {live.row_of(outcome).attempts for outcome in outcomes} == {1}


def test_row_that_was_tried_before_is_sent_by_itself() -> None:
    outcomes = [jobs.record.enqueue(tag=f"tried {n}") for n in range(3)]
    with live.rq_client() as client:
        client.flushdb()
    for outcome in outcomes:
        live.unsent(outcome, run_after=-1)
    live.unsent(outcomes[1], run_after=-1, attempts=1)
    assert Coordinator().hand_over(["default"]) == 3
    alone, first, second = message_ids(outcomes[1], outcomes[0], outcomes[2])
    assert set(live.queued()) == {alone, first}
    assert first == second != alone


def test_rows_of_an_unknown_queue_more_than_a_page_block_none_behind_them() -> None:
    with live.brisk(**PATIENT, BATCH=3):
        for n in range(7):
            live.unsent(jobs.record.enqueue(tag=f"gone {n}"), run_after=-50, queue="removed")
        outcome = jobs.record.enqueue(tag="here")
        live.unsent(outcome, run_after=-1)
        Coordinator().tick()
    assert message_ids(outcome)[0] in live.queued()


def test_rows_of_an_unreachable_queue_wait_for_it_and_block_no_others() -> None:
    with Valkey() as server:
        queues = live.redis_at(server.url)["RQ_QUEUES"]
        there = {"low": queues["low"]}
        server.kill()
        with live.changed(RQ_QUEUES={**live.settings.RQ_QUEUES, **there}):
            away, here = jobs.record_low.enqueue(tag="away"), jobs.record.enqueue(tag="here")
            live.unsent(away, run_after=-50)
            live.unsent(here, run_after=-1)
            coordinator = Coordinator()
            until(
                lambda: coordinator.tick() and message_ids(here)[0] in live.queued(),
                PATIENCE,
                what="the other one is handed over",
            )
            assert live.row_of(away).dispatched_at is None
            server.restart()
            until(
                lambda: coordinator.tick() and message_ids(away)[0] in live.queued("low"),
                PATIENCE,
                what="the row is handed over once its queue is back",
            )


@needs_row_locks
def test_waiting_row_locked_by_a_business_transaction_blocks_no_other_hand_over() -> None:
    locked, free = (jobs.record.enqueue(tag=tag) for tag in ("locked", "free"))
    live.unsent(locked, run_after=-50)
    live.unsent(free, run_after=-1)
    with live.rows_locked(ProcessedJob.objects.filter(pk=locked.job.pk)):
        sessions.limit_lock_waits(3)  # or a coordinator that waits would hang the test
        try:
            Coordinator().hand_over(["default"])
        finally:
            connection.close()
        assert message_ids(free)[0] in live.queued()
    Coordinator().hand_over(["default"])
    assert message_ids(locked)[0] in live.queued()


@pytest.mark.large
def test_retry_of_a_killed_workers_job_needs_no_scheduler_of_rq(spawn: Spawn) -> None:
    worker = live.start_worker(spawn)
    outcome = jobs.fail_once.enqueue(tag="retry")
    live.wait_for(outcome, Status.RETRYING)
    live.kill(worker.pid)
    worker.wait()
    live.start_worker(spawn)
    row = live.wait_for(outcome)
    assert live.outcomes(outcome) == [FAILED, SUCCEEDED]
    assert row.failures == 1
    assert live.attempt(outcome, 2).claimed_at >= row.run_after
    with live.rq_client() as client:
        assert list(client.scan_iter("rq:scheduled:*")) == []


# ---- reclaim


def test_expired_attempt_is_taken_only_after_standing_still_for_a_third_of_its_lease() -> None:
    outcome = jobs.record.enqueue(tag="dead")
    claim = live.claimed(outcome, lease=1.2, overdue=FAR)
    coordinator = Coordinator()
    begun = time.monotonic()
    assert coordinator.reclaim() == [], "the first look proves nothing"
    lost = until(coordinator.reclaim, PATIENCE)
    assert time.monotonic() - begun >= 0.4
    assert [(one.fence, one.outcome, one.status) for one in lost] == [
        (claim.fence, LOST, Status.RETRYING)
    ]
    row = live.row_of(outcome)
    assert (row.lost_count, row.failures, row.dispatch_id) == (1, 0, None)


def test_expired_attempt_whose_beats_are_seen_coming_is_not_taken() -> None:
    claim = live.claimed(jobs.record.enqueue(tag="jump"), lease=0.3, overdue=FAR)
    coordinator = Coordinator()
    beats, begun = itertools.count(), time.monotonic()

    def beats_on() -> bool:
        assert coordinator.reclaim() == []
        beat = next(beats)
        live.set_lease(claim.fence, beat_at=-FAR - beat, lease_until=-FAR - beat + 0.3)
        return time.monotonic() - begun > 0.5

    until(beats_on, PATIENCE, what="five thirds of a lease have passed")
    assert live.outcomes_of(claim.job_pk) == [None]
    until(coordinator.reclaim, PATIENCE, what="taken once the beats have stopped")


@pytest.mark.large
def test_live_job_is_never_taken_by_a_coordinator_that_looks_all_the_time() -> None:
    outcome = jobs.record.enqueue(tag="alive")
    claim = live.claimed(outcome, lease=2, overdue=-2)
    heart = Heart(
        job_pk=claim.job_pk, fence=claim.fence, owner=claim.owner, name=claim.name, lease=2
    )
    coordinator = Coordinator()
    begun = live.attempt(outcome).beat_at
    with beating(heart):

        def lives_on() -> bool:
            assert coordinator.reclaim() == []
            return (live.attempt(outcome).beat_at - begun).total_seconds() > 6

        until(lives_on, PATIENCE, what="it has lived for three leases")
    assert not heart.lost.is_set()
    assert live.outcomes(outcome) == [None]
    until(coordinator.reclaim, PATIENCE, what="it is taken once its heart stands still")


def test_lease_far_ahead_of_the_databases_clock_is_taken_after_a_full_lease_of_standstill() -> None:
    outcome = jobs.record.enqueue(tag="ahead")
    claim = live.claimed(outcome)
    live.set_lease(claim.fence, beat_at=3600, lease_until=3600.5)
    coordinator = Coordinator()
    looks = []

    def doomed() -> bool:
        (suspect,) = coordinator.suspects()
        looks.append(suspect)
        return suspect.ahead

    until(doomed, PATIENCE)
    assert all(s.still < s.lease and not s.expired for s in looks[:-1])
    assert looks[-1].still >= looks[-1].lease
    assert [one.fence for one in coordinator.reclaim()] == [claim.fence]


def test_lease_of_a_right_clock_is_not_taken_however_long_it_is() -> None:
    claim = live.claimed(jobs.record.enqueue(tag="long"))
    live.set_lease(claim.fence, beat_at=0, lease_until=0.3 + FAR)
    coordinator = Coordinator()
    other = live.claimed(jobs.record.enqueue(tag="other"), lease=1)
    taken = until(coordinator.reclaim, PATIENCE)
    assert [one.fence for one in taken] == [other.fence]


@needs_row_locks
def test_locked_attempts_more_than_a_page_block_none_behind_them() -> None:
    with live.brisk(**PATIENT, BATCH=3):
        locked = [live.claimed(jobs.record.enqueue(tag=f"locked {n}")) for n in range(7)]
        free = live.claimed(jobs.record.enqueue(tag="free"))
        coordinator = Coordinator()
        with live.rows_locked(JobAttempt.objects.filter(pk__in=[c.fence for c in locked])):
            taken = until(coordinator.reclaim, PATIENCE)
            assert [one.fence for one in taken] == [free.fence]
            assert coordinator.reclaim() == []
        assert len(coordinator.reclaim()) == len(locked)


def test_sweep_that_has_no_time_left_looks_at_all_and_leaves_them_to_the_next() -> None:
    claims = [live.claimed(jobs.record.enqueue(tag=f"many {n}")) for n in range(3)]
    coordinator = Coordinator()
    for _ in range(2):
        assert coordinator.reclaim(within=0) == []
    until(lambda: all(s.expired for s in coordinator.suspects()), PATIENCE)
    assert coordinator.reclaim(within=0) == []
    assert [one.fence for one in coordinator.reclaim()] == [claim.fence for claim in claims]


@needs_row_locks
def test_attempt_whose_jobs_row_is_locked_is_skipped_and_taken_later() -> None:
    claim = live.claimed(jobs.record.enqueue(tag="in use"))
    coordinator = Coordinator()
    until(lambda: [s for s in coordinator.suspects() if s.expired], PATIENCE)
    with live.rows_locked(ProcessedJob.objects.filter(pk=claim.job_pk)):
        assert coordinator.reclaim() == []
        assert live.outcomes_of(claim.job_pk) == [None], "nothing is written by halves"
    assert len(coordinator.reclaim()) == 1


def test_three_reclaimers_with_one_stale_list_take_each_attempt_once() -> None:
    claims = [live.claimed(jobs.record.enqueue(tag=f"stale {n}")) for n in range(5)]
    stale = list(Coordinator().suspects())

    def take() -> int:
        taken = [
            lifecycle.reclaim(s.fence, beat_at=s.beat_at, ahead_of=None, reason="stale")
            for s in stale
        ]
        return sum(one is not None for one in taken)

    taken = together(take, take, take)
    # SKIP LOCKED lets each skip what another is just at; the next sweep has nothing left over.
    assert sum(taken) == len(claims)
    assert set(ProcessedJob.objects.values_list("lost_count", "status")) == {(1, Status.RETRYING)}
    assert not Ledger.objects.exists(), "a reclaimer runs no job"


def test_attempt_that_has_beaten_since_it_was_seen_is_not_taken() -> None:
    outcome = jobs.record.enqueue(tag="late beat")
    claim = live.claimed(outcome)
    (suspect,) = Coordinator().suspects()
    lifecycle.beat(claim.fence, lease=60)
    assert lifecycle.reclaim(claim.fence, beat_at=suspect.beat_at, ahead_of=None, reason="") is None
    assert live.outcomes(outcome) == [None]


@pytest.mark.large
def test_jobs_left_by_a_dead_leader_are_recovered_by_the_next_one() -> None:
    with live.brisk(**PATIENT, LEADER_TTL=0.5, BATCH=30):
        dead, heir = Coordinator(), Coordinator()
        assert dead.tick().leads
        outcomes = [jobs.record_always.enqueue(tag="stale") for _ in range(100)]
        for outcome in outcomes:
            live.claimed(outcome, overdue=FAR)
        taken = 0

        def takes() -> bool:
            nonlocal taken
            taken += len(heir.tick().lost)
            return taken == 100

        until(takes, PATIENCE, what="all hundred are taken")
    assert {live.row_of(outcome).status for outcome in outcomes} == {Status.RETRYING}


# ---- the leader


def test_second_coordinator_rests_while_the_first_one_leads_and_takes_over_after_its_ttl() -> None:
    with live.brisk(**PATIENT, LEADER_TTL=60):
        first, second = Coordinator(), Coordinator()
        assert first.tick().leads
        for _ in range(3):
            assert first.tick().leads, "it renews its lease"
            assert not second.tick().leads
        with live.brisk(**PATIENT, LEADER_TTL=0.5):
            assert first.tick().leads, "for half a second more"
        until(lambda: second.tick().leads, PATIENCE, what="the lease runs out")
        assert not first.tick().leads


@with_sqlite
@pytest.mark.large
def test_leading_process_killed_is_followed_by_another(spawn: Spawn) -> None:
    with live.changed(RQ={"WORKER_CLASS": STOCK}), live.cache_client() as client:
        leader = live.start_coordinator(spawn)
        until(lambda: client.keys(":1:dedupjobs:leader:*"), PATIENCE, what="it leads")
        live.start_coordinator(spawn)
        live.kill(leader.pid)
        leader.wait()
        outcome = jobs.record.enqueue(tag="due")
        live.unsent(outcome, run_after=-1)
        until(lambda: live.row_of(outcome).dispatch_id, PATIENCE, what="it is handed over")


def test_coordinators_without_redis_all_lead_and_reclaim() -> None:
    claim = live.claimed(jobs.record.enqueue(tag="dark"), overdue=FAR)
    with live.changed(**live.redis_at(NOBODY)):
        first, second = Coordinator(), Coordinator()
        assert first.tick().leads
        assert second.tick().leads
        until(lambda: first.tick().lost or second.tick().lost, PATIENCE)
    assert live.outcomes_of(claim.job_pk) == [LOST]


# ---- lost messages


def test_message_popped_and_lost_is_sent_again_although_rqs_hash_says_queued(
    coordinator: Coordinator,
) -> None:
    outcome = jobs.record.enqueue(tag="popped")
    lost_id = message_ids(outcome)[0]
    with live.rq_client() as client:
        client.lpop("rq:queue:default")  # as a worker on two queues does before it dies
        assert client.hget(f"rq:job:{lost_id}", "status") == "queued"
    assert coordinator.tick().resent == 0, "not before RESEND_AFTER"
    live.sent_ago(outcome, FAR + 1)
    assert coordinator.tick().resent == 1
    assert live.queued() == message_ids(outcome)
    assert live.queued() != [lost_id], "no two hand-overs share an id"
    assert coordinator.tick().resent == Coordinator().resend_lost("default") == 0


def test_message_stuck_in_the_intermediate_list_is_sent_again_after_it_was_watched(
    coordinator: Coordinator,
) -> None:
    outcome = jobs.record.enqueue(tag="stuck")
    with live.rq_client() as client:
        client.lmove("rq:queue:default", "rq:queue:default:intermediate", "LEFT", "RIGHT")
    live.sent_ago(outcome, FAR + 1)
    assert coordinator.tick().resent == 0, "a worker may just have popped it"
    with live.brisk(**PATIENT, RESEND_AFTER=0.5):
        until(lambda: coordinator.tick().resent == 1, PATIENCE, what="it is sent again")
    assert live.queued() == message_ids(outcome)


def test_message_in_a_live_execution_is_not_sent_again_but_one_in_a_dead_execution_is(
    coordinator: Coordinator,
) -> None:
    outcome = jobs.record.enqueue(tag="started")
    live.sent_ago(outcome, FAR + 1)
    with live.rq_client() as client:
        popped = client.lpop("rq:queue:default")
        now = client.time()[0]
        client.zadd("rq:wip:default", {f"{popped}:execution": now + 60})
        assert coordinator.tick().resent == 0
        client.zadd("rq:wip:default", {f"{popped}:execution": now - 1})
    assert coordinator.tick().resent == 1


def test_message_whose_worker_died_before_its_claim_is_sent_again_while_rq_still_believes_in_it(
    coordinator: Coordinator,
) -> None:
    outcome = jobs.record.enqueue(tag="registered")
    with live.rq_client() as client:
        popped = client.lpop("rq:queue:default")
        client.zadd("rq:wip:default", {f"{popped}:execution": client.time()[0] + 90})
    live.sent_ago(outcome, FAR + 1)
    assert coordinator.tick().resent == 0, "a worker may just have started it"
    with live.brisk(**PATIENT, RESEND_AFTER=0.5):
        until(lambda: coordinator.tick().resent == 1, PATIENCE, what="it is sent again")
    assert live.queued() == message_ids(outcome)


def test_ids_in_redis_that_are_no_text_stop_no_coordinator(coordinator: Coordinator) -> None:
    outcome = jobs.record.enqueue(tag="beside rubbish")
    live.sent_ago(outcome, FAR + 1)
    with live.rq_client() as client:
        client.lpop("rq:queue:default")
        client.rpush("rq:queue:default", b"\xff\xfe")
        client.rpush("rq:queue:default:intermediate", b"\xff\xfe")
        client.zadd("rq:wip:default", {b"\xff\xfe": client.time()[0] + 90})
    assert coordinator.tick().resent == 1


def test_coordinator_without_its_database_tries_again_every_few_seconds() -> None:
    pauses: list[float] = []

    def fail(*_: Any) -> None:
        raise OperationalError("the database is away")

    def rest(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) > 12

    with connection.execute_wrapper(fail):
        Coordinator().run(rest)
    assert pauses[0] < pauses[1] < pauses[2], "more slowly"
    assert max(pauses) == 5, "but it is noticed soon that the database is back"


def test_wiped_redis_has_all_waiting_rows_sent_again_at_once(coordinator: Coordinator) -> None:
    with live.brisk(**PATIENT, RESEND_AFTER=FAR, BATCH=10):
        outcomes = [jobs.record.enqueue(tag=f"wiped {n}") for n in range(25)]
        outcomes.append(jobs.record_high.enqueue(tag="wiped"))
        with live.rq_client() as client:
            client.flushdb()
        assert coordinator.tick().resent == 26
        sent = live.queued() + live.queued("high")
        assert len(sent) == 4, "ten rows share a message"
        assert set(sent) == set(message_ids(*outcomes))
        assert coordinator.tick().resent == 0


def test_wiped_redis_that_takes_more_than_a_tick_to_fill_is_filled_by_the_next_ones(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live.brisk(**PATIENT, RESEND_AFTER=FAR, BATCH=2):
        outcomes = [jobs.record.enqueue(tag=f"wiped {n}") for n in range(5)]
        with live.rq_client() as client:
            client.flushdb()
        monkeypatch.setattr("dedupjobs.coordinator.DUTY_SECONDS", 0.0)  # a page a tick
        assert [coordinator.resend_wiped("default") for _ in range(4)] == [2, 2, 1, 0]
        assert set(live.queued()) == set(message_ids(*outcomes))
        monkeypatch.undo()
        assert coordinator._wiped, "nobody may believe yet that all was sent"
        assert coordinator.resend_wiped("default") == 0
        assert not coordinator._wiped
        assert Coordinator().resend_wiped("default") == 0


@pytest.mark.large
def test_long_honest_backlog_is_not_copied_and_costs_few_queries(coordinator: Coordinator) -> None:
    count = 4_000
    template = jobs.record.enqueue(tag="first").job
    with live.rq_client() as client:
        client.delete("rq:queue:default")
        rows = [
            ProcessedJob(
                key_hash=f"{n:064}",
                name=template.name,
                queue="default",
                args='{"tag": "backlog", "text": ""}',
                fingerprint=template.fingerprint,
                run_after=DbNow(-5_000 + n),
                dispatch_id=f"backlog_{n}",
                dispatched_at=DbNow(-5_000 - count + n),
                created_at=template.created_at,
                enqueued_at=template.enqueued_at,
            )
            for n in range(count)
        ]
        ProcessedJob.objects.filter(pk=template.pk).delete()
        ProcessedJob.objects.bulk_create(rows, batch_size=50)
        client.rpush("rq:queue:default", *[row.dispatch_id for row in rows])
        with CaptureQueriesContext(connection) as queries:
            assert coordinator.resend_lost("default") == 0
        assert len(queries) <= 5
        assert len(live.queued()) == count

        # Workers have taken the first 3,000, of which one died with row 1,500 in its hands.
        ProcessedJob.objects.filter(
            pk__in=[r.pk for r in rows[:3000] if r is not rows[1500]]
        ).delete()
        client.lpop("rq:queue:default", 3000)
        assert coordinator.resend_lost("default") == 1
        assert live.queued()[-1] == ProcessedJob.objects.get(pk=rows[1500].pk).dispatch_id
        assert len(live.queued()) == count - 3000 + 1


def test_foreign_jobs_crowding_the_head_of_a_queue_make_no_copies_and_hide_no_loss(
    coordinator: Coordinator,
) -> None:
    with live.rq_client() as client:
        client.rpush("rq:queue:default", *[f"foreign_{n}" for n in range(500)])
        there, lost = (jobs.record.enqueue(tag=tag) for tag in ("there", "lost"))
        client.lrem("rq:queue:default", 1, message_ids(lost)[0])
        for outcome in (there, lost):
            live.sent_ago(outcome, FAR + 1)
        assert coordinator.resend_lost("default") == 1
        assert live.queued()[500:] == message_ids(there, lost)
        assert coordinator.resend_lost("default") == 0


def test_lost_row_is_sent_once_per_interval_by_however_many_coordinators() -> None:
    outcomes = [jobs.record_alone.enqueue(tag=f"lost {n}") for n in range(20)]
    with live.rq_client() as client:
        client.delete("rq:queue:default")
    for outcome in outcomes:
        live.sent_ago(outcome, FAR + 1)
    many = [Coordinator() for _ in range(3)]
    sent = together(*[lambda c=c: c.resend_lost("default") for c in many])
    assert sum(sent) == 20
    assert [c.resend_lost("default") for c in many] == [0, 0, 0]
    assert sorted(live.queued()) == sorted(message_ids(*outcomes))


@with_sqlite
def test_messages_lost_by_a_worker_on_two_queues_run_once(spawn: Spawn) -> None:
    lost = [jobs.record.enqueue(tag="a"), jobs.record_high.enqueue(tag="b")]
    with live.rq_client() as client:
        client.lpop("rq:queue:default")
        client.lpop("rq:queue:high")
    live.start_worker(spawn, "default", "high", RESEND_AFTER=0.5)
    for outcome in lost:
        live.wait_for(outcome)
        assert live.outcomes(outcome) == [SUCCEEDED]


@pytest.mark.large
@with_sqlite
def test_redis_wiped_and_restarted_in_the_middle_of_28_jobs_has_each_succeed_once(
    spawn: Spawn, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    with Valkey() as server, live.changed(**live.redis_at(server.url)):
        env = {"DEDUPJOBS_TEST_REDIS": server.url}
        workers = [live.start_worker(spawn, env=env) for _ in range(3)]
        retrying = [jobs.fail_once.enqueue(tag=f"retrying {n}") for n in range(5)]
        for outcome in retrying:
            until(lambda o=outcome: live.row_of(o).failures == 1, PATIENCE)
        running = [jobs.wait.enqueue(tag=f"run {n}", release=str(release)) for n in range(3)]
        ProcessedJob.objects.filter(pk__in=[o.job.pk for o in retrying]).filter(
            status=Status.RETRYING
        ).update(run_after=DbNow(4))
        for n in range(3):
            live.begun(f"run {n}")
        queued = [jobs.record.enqueue(tag=f"queued {n}") for n in range(20)]
        with server.client() as client:
            client.flushall()
            client.script_flush()
        server.kill()
        server.restart()
        release.touch()
        for outcome in (*queued, *running, *retrying):
            live.wait_for(outcome, seconds=60)
        for outcome in (*queued, *running):
            assert live.outcomes(outcome) == [SUCCEEDED]
        for outcome in retrying:
            assert live.outcomes(outcome) == [FAILED, SUCCEEDED]
        assert all(live.notes(f"queued {n}") == [""] for n in range(20))
        assert all(live.notes(f"run {n}") == ["begin 1", "end 1"] for n in range(3))
        for worker in workers:
            assert worker.is_alive()
            worker.stop()


# ---- an absent database


@pytest.mark.large
@needs_server
def test_coordinator_whose_database_goes_away_goes_on_when_it_is_back(
    process_env: dict[str, str], spawn: Spawn
) -> None:
    made, variable = DATABASES[connection.vendor]
    with made() as server:
        with elsewhere(server, made.first_database) as cursor:
            cursor.execute("CREATE DATABASE elsewhere")
        env = {
            **live.env_of(SIMPLE),
            variable: f"{HOST}:{server.port}",
            "DEDUPJOBS_TEST_DB_NAME": "elsewhere",
        }
        in_django({**process_env, **env}, "migrate", "--run-syncdb", "--verbosity=0")
        enqueue = "from tests.app import jobs; print(jobs.record.enqueue(tag={!r}).job.pk)"
        coordinator = spawn("dedupjobs_coordinator", **env)
        worker = spawn("rqworker", "default", "--worker-class", SIMPLE, **env)
        for process in (coordinator, worker):
            process.wait_for_output("started", PATIENCE)
        server.kill()
        coordinator.wait_for_output("coordinator: OperationalError", PATIENCE)
        server.restart()
        pk = in_django(
            {**process_env, **env}, "shell", "-v0", "-c", enqueue.format("after")
        ).split()[-1]
        with elsewhere(server, "elsewhere") as cursor:
            cursor.execute(
                "UPDATE dedupjobs_processedjob SET dispatch_id = NULL, dispatched_at = NULL "
                "WHERE id = %s AND status = 'PENDING'",
                [pk],
            )
            until(lambda: status(cursor, pk) == "SUCCEEDED", PATIENCE, what="sent and run")
        assert coordinator.is_alive()


DATABASES = {
    "postgresql": (PostgreSQL, "DEDUPJOBS_TEST_POSTGRESQL"),
    "mysql": (MariaDB, "DEDUPJOBS_TEST_MARIADB"),
}


@contextmanager
def elsewhere(server: Server, name: str) -> Iterator[Any]:
    """Open a cursor on another server than the suite's."""
    other = connection.copy()
    other.settings_dict |= {"HOST": HOST, "PORT": server.port, "NAME": name}
    with closing(other), other.cursor() as cursor:
        yield cursor


def in_django(env: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "django", *command],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def status(cursor: Any, pk: str) -> str:
    cursor.execute("SELECT status FROM dedupjobs_processedjob WHERE id = %s", [pk])
    return cursor.fetchone()[0]


# ---- commands


def reclaim(*options: str, **more: object) -> str:
    out = io.StringIO()
    call_command("dedupjobs_reclaim", *options, stdout=out, **more)
    return out.getvalue()


def test_reclaim_command_alone_watches_an_expired_attempt_before_it_takes_it() -> None:
    outcome = jobs.record.enqueue(tag="dead")
    live.claimed(outcome, lease=0.6, overdue=FAR)
    said = reclaim()
    assert "1 attempt(s) with an expired lease; watching them for 0.2 s." in said
    assert f"took row {outcome.job.pk}" in said
    assert "1 attempt(s) taken." in said
    assert live.outcomes(outcome) == [LOST]
    assert "0 attempt(s) taken." in reclaim()


def test_reclaim_command_leaves_an_expired_attempt_that_beats_while_it_watches() -> None:
    outcome = jobs.record.enqueue(tag="beats")
    claim = live.claimed(outcome, lease=3, overdue=FAR)
    heart = Heart(
        job_pk=claim.job_pk, fence=claim.fence, owner=claim.owner, name=claim.name, lease=0.6
    )
    with beating(heart):
        assert "0 attempt(s) taken." in reclaim()
    assert live.outcomes(outcome) == [None]


def test_dry_run_of_the_reclaim_command_names_what_it_would_take_and_changes_nothing() -> None:
    outcome = jobs.record.enqueue(tag="dead")
    claim = live.claimed(outcome, overdue=FAR)
    before = list(ProcessedJob.objects.values()), list(JobAttempt.objects.values())
    said = reclaim("--dry-run")
    assert f"would take row {outcome.job.pk} (testapp.record record:dead), fence" in said
    assert str(claim.fence) in said
    assert "1 attempt(s) would be taken." in said
    assert (list(ProcessedJob.objects.values()), list(JobAttempt.objects.values())) == before


def test_reclaim_command_explains_each_open_attempt() -> None:
    live.claimed(jobs.record.enqueue(tag="dead"), overdue=FAR)
    live.claimed(jobs.record.enqueue(tag="alive"), lease=FAR, overdue=-FAR)
    said = reclaim("--explain", "--dry-run")
    dead = next(line for line in said.splitlines() if "record:dead" in line)
    alive = next(line for line in said.splitlines() if "record:alive" in line)
    assert "to be taken" in dead
    assert "its lease lives for another" in alive


def test_reclaim_command_with_a_limit_takes_so_many() -> None:
    outcomes = [jobs.record.enqueue(tag=f"dead {n}") for n in range(3)]
    for outcome in outcomes:
        live.claimed(outcome, overdue=FAR)
    assert "2 attempt(s) would be taken." in reclaim("--dry-run", "--limit", "2")
    assert "2 attempt(s) taken." in reclaim("--limit", "2")
    assert JobAttempt.objects.filter(outcome=LOST).count() == 2
    with pytest.raises(CommandError, match="at least 1"):
        reclaim("--limit", "0")


@with_sqlite
@pytest.mark.large
def test_reclaim_command_in_a_loop_takes_what_dies_later_until_it_is_interrupted(
    spawn: Spawn,
) -> None:
    process = spawn("dedupjobs_reclaim", "--loop", **live.env_of())
    process.wait_for_output("0 attempt(s) taken.", PATIENCE)
    outcome = jobs.record.enqueue(tag="later")
    live.claimed(outcome, overdue=FAR)
    live.wait_for_outcome(outcome, LOST)
    process.signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 0
    assert "Stopped." in process.output


@with_sqlite
def test_coordinator_command_told_to_end_ends_well(spawn: Spawn) -> None:
    process: Spawned = live.start_coordinator(spawn)
    process.signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    assert "Coordinator stopped." in process.output


@with_sqlite
def test_coordinator_whose_redis_goes_away_goes_on_by_the_rows(spawn: Spawn) -> None:
    with Valkey() as server, live.changed(**live.redis_at(server.url)):
        process = live.start_coordinator(spawn, env={"DEDUPJOBS_TEST_REDIS": server.url})
        server.kill()
        outcome = jobs.record.enqueue(tag="dark")
        live.claimed(outcome, overdue=FAR)
        live.wait_for_outcome(outcome, LOST)
        server.restart()
        until(live.queued, PATIENCE, what="it hands over once Redis is back")
        assert live.queued() == message_ids(outcome)
        assert process.is_alive()
