"""Jobs of a batch that wait for something else, several at a time in one process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection

from dedupjobs import current_attempt, interrupts, levers, slate
from dedupjobs.batches import crew
from dedupjobs.exceptions import Snooze
from dedupjobs.levers import Wish
from dedupjobs.models import JobAttempt, ProcessedJob, Status
from tests import live
from tests.app import jobs
from tests.rows import job_row
from tests.test_batches import (
    FAILED,
    INTERRUPTED,
    KINDS,
    RETURNED,
    SUCCEEDED,
    TIMED_OUT,
    enqueued,
    lose,
    outcomes,
    raising,
    run,
    statuses,
    tags,
)
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

THREADS = 4
every_kind = pytest.mark.parametrize("kind", ["each", "group"])


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with live.changed(DEDUPJOBS={"THREADS": THREADS, "LOCK_TIMEOUT": 10, "PUSH_TIMEOUT": 10}):
        yield
    interrupts.shutting_down.clear()


@pytest.fixture
def acts() -> Iterator[dict[str, Callable[[], Any]]]:
    """What jobs do, by tag."""
    jobs.acts.clear()
    yield jobs.acts
    jobs.acts.clear()


@every_kind
def test_threads_run_as_many_jobs_at_a_time_each_on_its_own_connection(
    kind: str, acts: Any
) -> None:
    rows = enqueued(kind, 2 * THREADS)
    meeting = threading.Barrier(THREADS, timeout=10)
    used: dict[int, set[int]] = {}

    def meet() -> None:
        meeting.wait()
        used.setdefault(threading.get_ident(), set()).add(id(connection.connection))

    acts |= {f"{n}": meet for n in range(2 * THREADS)}
    run(rows)
    assert outcomes(rows) == [[SUCCEEDED]] * 2 * THREADS
    assert len(used) == THREADS
    assert len(set.union(*used.values())) == THREADS
    assert threading.get_ident() not in used
    assert live.locks_left() == []


def test_atomic_jobs_run_one_after_the_other() -> None:
    rows = [*enqueued("atomic", 3), *enqueued("each", 3)]
    run(rows)
    assert outcomes(rows) == [[SUCCEEDED]] * 6


@every_kind
def test_failure_snooze_and_lost_lease_end_their_own_job_alone(kind: str, acts: Any) -> None:
    rows = enqueued(kind, 5)
    acts |= {
        "0": raising(ValueError("no luck")),
        "1": raising(Snooze(60, "later")),
        "2": lambda: lose(rows[2]),
    }
    run(rows)
    assert statuses(rows) == [Status.RETRYING] * 3 + [Status.SUCCEEDED] * 2
    assert outcomes(rows)[0] == [FAILED]
    assert JobAttempt.objects.get(job_id=rows[2].pk).late_ending == SUCCEEDED


@every_kind
def test_rerun_that_comes_meanwhile_is_taken_up(kind: str, acts: Any) -> None:
    acts["1"] = lambda: KINDS[kind].enqueue(tag="1", text="newest")
    rows = enqueued(kind, 3)
    run(rows)
    assert statuses(rows) == [Status.SUCCEEDED, Status.PENDING, Status.SUCCEEDED]


def sleep_on() -> None:
    for _ in range(3_000):
        time.sleep(0.01)


@pytest.mark.large
@every_kind
def test_job_that_times_out_in_a_thread_is_cut_off_and_the_others_go_on(
    kind: str, acts: Any
) -> None:
    acts["1"] = sleep_on
    cut = Wish(kind="timeout", aim="job", target=KINDS[kind].name, value=3)
    levers.add(cut, by="me", reason="test")
    rows = enqueued(kind, 6)
    begun = time.monotonic()
    run(rows)
    assert time.monotonic() - begun < 20
    assert outcomes(rows) == [[SUCCEEDED], [TIMED_OUT], *[[SUCCEEDED]] * 4]
    assert "time-out of 3 s" in JobAttempt.objects.get(job_id=rows[1].pk).error_message


def test_cancellation_that_is_asked_for_is_seen_by_a_check_in_a_thread(acts: Any) -> None:
    rows = enqueued("each", 2)

    def ask_and_check() -> None:
        ProcessedJob.objects.filter(pk=rows[1].pk).update(cancel_requested=True)
        until(lambda: current_attempt().check(), 2.5, what="the check raises")

    acts["1"] = ask_and_check
    run(rows)
    assert statuses(rows) == [Status.SUCCEEDED, Status.CANCELLED]


def test_slow_jobs_leases_are_renewed_in_threads(acts: Any) -> None:
    rows = enqueued("each", 2)
    seen: list[str] = []

    def work() -> None:
        current_attempt().progress(1, 2, "half")

        def written() -> str:
            return JobAttempt.objects.get(job_id=rows[0].pk).progress

        seen.append(until(written, 2.5, what="a beat"))

    acts["0"] = work
    run(rows)
    assert "half" in seen[0]
    assert outcomes(rows) == [[SUCCEEDED]] * 2


def test_sigterm_interrupts_what_runs_in_threads_and_the_rest_goes_back(acts: Any) -> None:
    rows = enqueued("each", 3 * THREADS)
    meeting = threading.Barrier(THREADS, timeout=10)

    def wait_for_the_end() -> None:
        if meeting.wait() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        sleep_on()

    acts |= {f"{n}": wait_for_the_end for n in range(3 * THREADS)}
    previous = signal.signal(signal.SIGTERM, interrupts.note_shutdown)
    try:
        run(rows)
    finally:
        signal.signal(signal.SIGTERM, previous)
    found = [one for (one,) in outcomes(rows)]
    assert found.count(INTERRUPTED) == THREADS
    assert found.count(RETURNED) == 2 * THREADS
    assert set(statuses(rows)) == {Status.PENDING}
    assert {job_row(row).failures for row in rows} == {0}
    assert len(tags()) == THREADS


def test_threads_of_the_crew_do_not_make_a_horse_leave() -> None:
    many = slate.MOST_DAEMONS + 4
    before = slate.Slate.now().wipe()  # another test's executor may be there
    with live.changed(DEDUPJOBS={"THREADS": many}):
        run(enqueued("each", many))
    names = [t.name for t in threading.enumerate() if t.name.startswith(crew.NAME)]
    assert len(names) >= many
    assert slate.Slate.now().wipe() == before
