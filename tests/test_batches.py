"""Messages of many rows: claimed together, each settled as if it had come alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction

from dedupjobs import (
    batches,
    clock,
    dispatch,
    interrupts,
    levers,
    lifecycle,
    locks,
    operations,
    probes,
)
from dedupjobs.batches import course, desk, shared
from dedupjobs.clock import DbNow
from dedupjobs.exceptions import ArgumentError, Cancel, JobDefinitionError, Snooze
from dedupjobs.levers import Wish
from dedupjobs.models import AttemptOutcome, JobAttempt, ProcessedJob, Status
from dedupjobs.registry import job
from tests import live
from tests.app import jobs
from tests.app.models import Ledger
from tests.rows import Side, has_row_locks, job_row
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

KINDS = {
    "each": jobs.act_in_turn,
    "group": jobs.act_in_group,
    "atomic": jobs.act_atomically,
}
every_kind = pytest.mark.parametrize("kind", KINDS)
SUCCEEDED, FAILED = AttemptOutcome.SUCCEEDED, AttemptOutcome.FAILED
LOST, RETURNED = AttemptOutcome.LOST, AttemptOutcome.RETURNED
INTERRUPTED, TIMED_OUT = AttemptOutcome.INTERRUPTED, AttemptOutcome.TIMED_OUT


@pytest.fixture
def acts() -> Iterator[dict[str, Callable[[], Any]]]:
    """What jobs do, by tag."""
    jobs.acts.clear()
    yield jobs.acts
    jobs.acts.clear()


def enqueued(kind: str, count: int) -> list[ProcessedJob]:
    calls = [{"tag": f"{n}"} for n in range(count)]
    return [outcome.job for outcome in KINDS[kind].enqueue_many(calls)]


def run(rows: list[ProcessedJob]) -> None:
    batches.run([[row.pk, row.generation] for row in rows])


def statuses(rows: list[ProcessedJob]) -> list[str]:
    return [job_row(row).status for row in rows]


def outcomes(rows: list[ProcessedJob]) -> list[list[str | None]]:
    return [live.outcomes_of(row.pk) for row in rows]


def tags() -> list[str]:
    return list(Ledger.objects.order_by("pk").values_list("tag", flat=True))


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def lose(row: ProcessedJob) -> None:
    """Let another one end the row's attempt, as a coordinator does that sees no beat."""

    def take() -> None:
        attempt = JobAttempt.objects.get(job_id=row.pk, outcome=None)
        JobAttempt.objects.filter(pk=attempt.pk).update(lease_until=DbNow(-60), beat_at=DbNow(-120))
        attempt.refresh_from_db()
        assert lifecycle.reclaim(
            attempt.pk, beat_at=attempt.beat_at, ahead_of=None, reason="silent"
        )

    Side(take).result()


# ---- every row as if alone


@every_kind
def test_batch_runs_each_row_once_under_an_owner_and_a_fence_of_its_own(kind: str) -> None:
    rows = enqueued(kind, 5)
    run(rows)
    run(rows)
    assert statuses(rows) == [Status.SUCCEEDED] * 5
    assert outcomes(rows) == [[SUCCEEDED]] * 5
    assert tags() == [f"{n}" for n in range(5)]
    found = list(JobAttempt.objects.order_by("job_id"))
    first = found[0].owner.partition(".")[0]
    assert sorted(a.owner for a in found) == [f"{first}.{n}" for n in range(5)]
    assert all(a.began_at and a.ended_at and a.run_time is not None for a in found)
    assert [job_row(row).result for row in rows] == [f'"{n}"' for n in range(5)]
    assert live.locks_left() == []


@every_kind
def test_row_that_a_message_names_twice_runs_once(kind: str) -> None:
    rows = enqueued(kind, 2)
    run([rows[0], rows[1], rows[0]])
    assert tags() == ["0", "1"]
    assert outcomes(rows) == [[SUCCEEDED]] * 2


def test_rows_of_several_jobs_run_each_in_its_own_way() -> None:
    rows = [row for kind in KINDS for row in enqueued(kind, 2)]
    rows.append(jobs.record_alone.enqueue(tag="alone").job)
    run(rows)
    assert statuses(rows) == [Status.SUCCEEDED] * 7
    assert tags()[-1] == "alone", "by itself, after the others"


@every_kind
def test_failed_job_waits_for_its_retry_and_the_others_succeed(kind: str, acts: Any) -> None:
    acts["1"] = raising(ValueError("no luck"))
    rows = enqueued(kind, 3)
    run(rows)
    assert statuses(rows) == [Status.SUCCEEDED, Status.RETRYING, Status.SUCCEEDED]
    assert (job_row(rows[1]).failures, outcomes(rows)[1]) == (1, [FAILED])
    assert tags() == (["0", "2"] if kind == "atomic" else ["0", "1", "2"])
    del acts["1"]
    ProcessedJob.objects.filter(pk=rows[1].pk).update(run_after=DbNow(-1))
    run([rows[1]])
    assert outcomes(rows) == [[SUCCEEDED], [FAILED, SUCCEEDED], [SUCCEEDED]]


@every_kind
def test_snoozed_and_cancelled_jobs_end_as_they_ask(kind: str, acts: Any) -> None:
    acts |= {"0": raising(Snooze(60, "later")), "1": raising(Cancel("no need"))}
    rows = enqueued(kind, 3)
    run(rows)
    assert statuses(rows) == [Status.RETRYING, Status.CANCELLED, Status.SUCCEEDED]
    assert job_row(rows[0]).failures == 0


@every_kind
def test_rerun_that_comes_while_its_job_runs_is_taken_up(kind: str, acts: Any) -> None:
    if kind == "atomic" and connection.vendor == "sqlite":
        pytest.skip("its one writer keeps the call out until the job has ended")
    acts["1"] = lambda: Side(KINDS[kind].enqueue, tag="1", text="newest").result()
    rows = enqueued(kind, 3)
    run(rows)
    again = job_row(rows[1])
    assert statuses(rows) == [Status.SUCCEEDED, Status.PENDING, Status.SUCCEEDED]
    assert (again.generation, "newest" in again.args) == (2, True)
    assert outcomes(rows) == [[SUCCEEDED]] * 3


@every_kind
def test_stale_job_writes_nothing_and_the_others_succeed(kind: str, acts: Any) -> None:
    if kind == "atomic" and connection.vendor == "sqlite":
        pytest.skip("its one writer keeps others from taking the row meanwhile")
    rows = enqueued(kind, 3)
    acts["1"] = lambda: lose(rows[1])
    run(rows)
    assert statuses(rows) == [Status.SUCCEEDED, Status.RETRYING, Status.SUCCEEDED]
    assert outcomes(rows)[1] == [LOST]
    assert JobAttempt.objects.get(job_id=rows[1].pk).late_ending == SUCCEEDED
    assert ("1" in tags()) == (kind != "atomic"), "an atomic effect goes with its ending"


@pytest.fixture
def _shared_for_long(monkeypatch: Any) -> None:
    """Let a slow machine not end a shared transaction between two jobs."""
    monkeypatch.setattr(shared, "GATHERED", 60.0)


@pytest.mark.usefixtures("_shared_for_long")
@every_kind
def test_job_that_times_out_ends_alone(kind: str, acts: Any) -> None:
    acts["1"] = lambda: time.sleep(30)
    cut = Wish(kind="timeout", aim="job", target=KINDS[kind].name, value=1)
    levers.add(cut, by="me", reason="test")
    *rows, one, other = enqueued(kind, 5)
    fresh = [job_row(one), job_row(other)]
    run(rows)
    assert outcomes(rows)[1] == [TIMED_OUT]
    assert job_row(rows[1]).failures == 1
    innocent = job_row(rows[0])
    if kind == "atomic" and connection.vendor != "sqlite":
        # It shared the transaction, which is gone: it runs again, by itself and uncounted.
        assert (innocent.status, outcomes(rows)[0]) == (Status.PENDING, [INTERRUPTED])
        assert (innocent.failures, innocent.lost_count) == (0, 0)
        assert dispatch.in_batches([innocent, *fresh]) == [[innocent], fresh]
        assert "0" not in tags()
    else:
        assert innocent.status == Status.SUCCEEDED
    assert statuses(rows)[2] == Status.SUCCEEDED


@pytest.mark.usefixtures("_shared_for_long")
@pytest.mark.skipif(not has_row_locks, reason="on SQLite each has a transaction of its own")
def test_deadlock_ends_the_shared_transaction_and_the_innocent_run_again(acts: Any) -> None:
    acts["1"] = raising(OperationalError("deadlock detected"))
    rows = enqueued("atomic", 3)
    run(rows)
    assert outcomes(rows) == [[INTERRUPTED], [FAILED], [SUCCEEDED]]
    assert tags() == ["2"]
    run([rows[0]])
    assert outcomes(rows)[0] == [INTERRUPTED, SUCCEEDED]


def test_job_whose_cancellation_is_asked_for_before_its_turn_does_not_start(acts: Any) -> None:
    rows = enqueued("each", 3)

    def ask() -> None:
        ProcessedJob.objects.filter(pk=rows[1].pk).update(cancel_requested=True)
        wait_for_beats(rows[1], 2)

    acts["0"] = ask
    run(rows)
    assert statuses(rows) == [Status.SUCCEEDED, Status.CANCELLED, Status.SUCCEEDED]
    assert (outcomes(rows)[1], tags()) == ([RETURNED], ["0", "2"])


# ---- what they share


def wait_for_beats(row: ProcessedJob, count: int) -> None:
    """Wait until the lease of the row's attempt was renewed so often."""

    def beat_at() -> Any:
        return JobAttempt.objects.get(job_id=row.pk, outcome=None).beat_at

    for _ in range(count):
        before = beat_at()
        until(lambda before=before: beat_at() > before, what="a beat")


@pytest.mark.parametrize("kind", ["each", "group"])
def test_slow_job_does_not_let_the_others_leases_expire(kind: str, acts: Any) -> None:
    rows = enqueued(kind, 3)
    acts["0"] = lambda: wait_for_beats(rows[2], 2)
    run(rows)
    assert outcomes(rows) == [[SUCCEEDED]] * 3


@pytest.mark.large
def test_lease_of_which_half_is_over_is_renewed_before_the_next_start(acts: Any) -> None:
    """The beat's thread hangs meanwhile, as behind code that keeps the GIL."""
    rows = enqueued("each", 2)
    held = threading.Event()
    ages: list[float] = []

    def hang(point: str) -> None:
        if point == "beat.before" and threading.current_thread() is not threading.main_thread():
            held.wait(20)

    def look() -> None:
        attempt = JobAttempt.objects.get(job_id=rows[1].pk)
        ages.append((lifecycle.database_now() - attempt.beat_at).total_seconds())

    acts |= {"0": lambda: time.sleep(1.8), "1": look}
    probes.hook = hang
    try:
        run(rows)
    finally:
        probes.hook = None
        held.set()
    assert ages[0] < 1.5
    assert outcomes(rows) == [[SUCCEEDED]] * 2


@pytest.mark.parametrize("kind", ["each", "group"])
def test_success_that_comes_while_others_are_taken_to_be_written_is_not_lost(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    desks: list[desk.Desk] = []

    class Seen(desk.Desk):
        def __init__(self, chorus: Any) -> None:
            super().__init__(chorus)
            desks.append(self)

    def flush_first() -> float:
        if threading.current_thread() is threading.main_thread():
            desks[-1]._flush()
        return clock.monotonic()

    monkeypatch.setattr(course, "Desk", Seen)
    monkeypatch.setattr(desk, "clock", SimpleNamespace(monotonic=flush_first, start=clock.start))
    rows = enqueued(kind, 3)
    run(rows)
    assert statuses(rows) == [Status.SUCCEEDED] * 3
    assert live.locks_left() == []


def test_success_of_a_group_waits_a_moment_only_while_a_slow_job_runs(acts: Any) -> None:
    rows = enqueued("group", 3)
    acts["1"] = lambda: until(lambda: job_row(rows[0]).status == Status.SUCCEEDED, 2)
    run(rows)
    assert outcomes(rows) == [[SUCCEEDED]] * 3


def test_each_ending_is_written_before_the_next_job_starts(acts: Any) -> None:
    rows = enqueued("each", 3)
    seen: list[list[str]] = []
    acts |= {tag: lambda: seen.append(statuses(rows)) for tag in "012"}
    run(rows)
    done, runs = Status.SUCCEEDED, Status.RUNNING
    assert seen == [[runs] * 3, [done, runs, runs], [done, done, runs]]


def test_next_job_begins_with_the_ending_before_it_and_no_sooner(acts: Any) -> None:
    rows = enqueued("each", 3)
    seen: list[list[bool]] = []

    def look() -> None:
        began = dict(JobAttempt.objects.values_list("job_id", "began_at"))
        seen.append([began[row.pk] is not None for row in rows])

    acts |= dict.fromkeys("012", look)
    run(rows)
    assert seen == [[True, False, False], [True, True, False], [True, True, True]]


@pytest.mark.skipif(not has_row_locks, reason="SQLite has one writer")
@every_kind
def test_row_that_a_transaction_holds_does_not_hold_the_others_up(kind: str, acts: Any) -> None:
    rows = enqueued(kind, 3)
    done = threading.Event()
    acts["2"] = done.set
    with live.rows_locked(ProcessedJob.objects.filter(pk=rows[1].pk)):
        side = Side(run, rows)
        assert done.wait(20), "the others run meanwhile"
    side.result()
    assert outcomes(rows) == [[SUCCEEDED]] * 3
    assert tags()[-1] == "1"


@every_kind
def test_busy_lock_of_a_waiting_row_is_taken_over(kind: str) -> None:
    rows = enqueued(kind, 2)
    locks.take(rows[1].pk, "a dead one", ttl=60)
    run(rows)
    assert outcomes(rows) == [[SUCCEEDED]] * 2
    assert live.locks_left() == []


@every_kind
def test_batch_runs_without_redis(kind: str) -> None:
    rows = enqueued(kind, 3)
    nowhere = live.redis_at("redis://127.0.0.1:1")
    with live.changed(**nowhere):
        run(rows)
    assert outcomes(rows) == [[SUCCEEDED]] * 3


# ---- when it must end


def end_soon() -> None:
    interrupts.shutting_down.set()


@pytest.fixture
def _running_on() -> Iterator[None]:
    yield
    interrupts.shutting_down.clear()


@pytest.mark.usefixtures("_running_on")
@every_kind
def test_what_has_not_started_at_a_shutdown_goes_back_without_a_mark(kind: str, acts: Any) -> None:
    rows = enqueued(kind, 4)
    acts["1"] = end_soon
    run(rows)
    assert statuses(rows) == [Status.SUCCEEDED] * 2 + [Status.PENDING] * 2
    counted = ProcessedJob.objects.values_list("failures", "lost_count").distinct()
    assert list(counted) == [(0, 0)]
    went = INTERRUPTED if kind == "group" else RETURNED  # claimed counts as begun
    alone = kind == "atomic" and connection.vendor == "sqlite"
    assert outcomes(rows)[2:] == [[RETURNED if alone else went]] * 2
    assert [job_row(row).dispatched_at for row in rows[2:]] == [None] * 2
    assert live.locks_left() == []
    assert tags() == ["0", "1"]


@every_kind
def test_interrupted_job_is_told_to_whoever_runs_the_batch_and_the_rest_goes_back(
    kind: str, acts: Any
) -> None:
    rows = enqueued(kind, 3)
    acts["1"] = raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(rows)
    assert statuses(rows)[1:] == [Status.PENDING] * 2
    assert outcomes(rows)[1] == [INTERRUPTED]


def test_rows_behind_slow_ones_are_sent_again_each_by_itself(acts: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(course, "PATIENT", 0.0)
    rows = enqueued("each", 3)
    acts["0"] = lambda: time.sleep(0.01)
    run(rows)
    assert statuses(rows) == [Status.SUCCEEDED, Status.PENDING, Status.PENDING]
    assert outcomes(rows)[1:] == [[RETURNED]] * 2
    ids = {job_row(row).dispatch_id for row in rows[1:]}
    assert len(ids) == 2
    assert ids < set(live.queued())


# ---- when the database is away


@pytest.mark.parametrize("point", ["settle.before", "settle.committed"])
@every_kind
def test_success_whose_commit_has_no_reply_is_written_once(
    kind: str, point: str, acts: Any
) -> None:
    rows = enqueued(kind, 3)
    struck: list[str] = []

    def strike(reached: str) -> None:
        if reached == point and "1" in tags_seen and not struck:
            struck.append(point)
            raise OperationalError("the connection is gone")

    tags_seen: list[str] = []
    acts["1"] = lambda: tags_seen.append("1")
    probes.hook = strike
    try:
        run(rows)
    finally:
        probes.hook = None
    assert struck
    for row in rows:
        if job_row(row).status == Status.PENDING:  # its transaction is gone
            run([row])
    assert statuses(rows) == [Status.SUCCEEDED] * 3
    assert sorted(tags()) == ["0", "1", "2"]
    assert all(found[-1] == SUCCEEDED and LOST not in found for found in outcomes(rows))


def test_claim_whose_commit_has_no_reply_is_found_by_its_owner() -> None:
    rows = enqueued("each", 3)
    struck: list[str] = []

    def strike(reached: str) -> None:
        if reached == "claim.committed" and not struck:
            struck.append(reached)
            raise OperationalError("the connection is gone")

    probes.hook = strike
    try:
        run(rows)
    finally:
        probes.hook = None
    assert struck
    assert outcomes(rows) == [[SUCCEEDED]] * 3


# ---- which rows travel together


def test_calls_at_once_share_messages_of_batch_rows() -> None:
    with live.changed(DEDUPJOBS={"BATCH": 4, "PUSH_TIMEOUT": 5.0}):
        rows = enqueued("each", 10)
    sizes = [len([r for r in rows if r.dispatch_id == i]) for i in live.queued()]
    assert sorted(sizes) == [2, 4, 4]
    assert live.work_off() == 3
    assert outcomes(rows) == [[SUCCEEDED]] * 10


def test_job_that_forbids_it_shares_no_message_and_no_claim() -> None:
    rows = [o.job for o in jobs.record_alone.enqueue_many([{"tag": f"{n}"} for n in range(3)])]
    assert len(live.queued()) == 3
    run(rows)
    assert outcomes(rows) == [[SUCCEEDED]] * 3


@pytest.mark.parametrize("option", [{"atomic": True}, {"on_lost": "hold"}])
def test_group_is_refused_for_jobs_that_must_not_be_repeated(option: dict[str, Any]) -> None:
    with pytest.raises(JobDefinitionError, match="may be repeated"):
        job(key=None, name="nobody", batch="group", **option)(note_nothing)


def note_nothing() -> None: ...


def test_unknown_way_to_share_is_refused() -> None:
    with pytest.raises(JobDefinitionError, match="True, False or 'group'"):
        job(key=None, name="nobody", batch="all")(note_nothing)


@pytest.mark.parametrize("forged", ["os.system", [[1]], [["1", 1]], None, [[1, 99]] * 1_001])
def test_message_that_names_no_rows_is_refused(forged: Any) -> None:
    with pytest.raises(ArgumentError, match="is no list of"):
        batches.run(forged)


def test_batch_inside_a_transaction_runs_row_by_row() -> None:

    rows = enqueued("each", 2)
    with transaction.atomic():
        run(rows)
    assert outcomes(rows) == [[SUCCEEDED]] * 2


@every_kind
@pytest.mark.parametrize("count", [1, 3])
def test_success_forgets_the_failure_before_it_however_it_is_written(
    acts: dict[str, Callable[[], Any]], kind: str, count: int
) -> None:
    rows = enqueued(kind, count)
    ProcessedJob.objects.update(error_class="shop.Declined", error="no", failures=1)
    run(rows)
    found = ProcessedJob.objects.values_list("status", "error_class", "error", "failures")
    assert list(found) == [(Status.SUCCEEDED, "", "", 1)] * count


def test_cancelled_row_leaves_the_message_that_others_wait_for() -> None:
    rows = enqueued("each", 3)
    cancelled, again, last = (job_row(row) for row in rows)
    operations.cancel(cancelled, by="me")
    assert live.queued() == [cancelled.dispatch_id]
    operations.send_again(again, by="me")
    assert live.queued()[0] == last.dispatch_id
    operations.cancel(last, by="me")
    assert last.dispatch_id not in live.queued(), "nobody waits for it any more"
    live.work_off()
    assert statuses(rows) == [Status.CANCELLED, Status.SUCCEEDED, Status.CANCELLED]


@every_kind
@pytest.mark.parametrize(
    "change",
    [
        {"generation": 2},
        {"run_after": DbNow(60)},
        {"cancel_requested": True},
        {"hold_requested": True},
        {"status": Status.HELD},
        {"status": Status.RUNNING, "attempts": 1},
        {"status": Status.SUCCEEDED},
    ],
    ids=["another generation", "later", "cancel", "hold", "held", "running", "succeeded"],
)
def test_row_that_a_single_claim_would_leave_is_left(kind: str, change: dict[str, Any]) -> None:
    rows = enqueued(kind, 3)
    ProcessedJob.objects.filter(pk=rows[1].pk).update(**change)
    before = ProcessedJob.objects.filter(pk=rows[1].pk).values().get()
    run(rows)
    assert ProcessedJob.objects.filter(pk=rows[1].pk).values().get() == before
    assert outcomes(rows) == [[SUCCEEDED], [], [SUCCEEDED]]
