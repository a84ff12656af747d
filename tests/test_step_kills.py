"""Processes that are killed at each point of a job with steps: no effect is lost or repeated."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from django.db import connections

from dedupjobs import FOREVER, Done, NotDone, current_attempt, job, lifecycle, probes, runner
from dedupjobs.clock import DbNow
from dedupjobs.models import JobAttempt, JobStep, ProcessedJob, Status, StepState
from tests.app.jobs import note
from tests.app.models import Ledger

pytestmark = [pytest.mark.large, pytest.mark.django_db(transaction=True)]

POINTS = {"step.before", "step.after_started", "step.after_code", "step.uncommitted",
          "step.after_recorded"}  # fmt: skip


def write(world: str, what: str) -> str:
    """Have an effect outside of the database, at once and for good."""
    with Path(world).open("a") as file:
        file.write(f"{what}\n")
    return what


def seen(world: str) -> Counter[str]:
    path = Path(world)
    return Counter(path.read_text().split() if path.exists() else [])


def look_up(world: str, key: str) -> Done | NotDone:
    return Done(f"charge:{key}") if seen(world)[f"charge:{key}"] else NotDone()


@job(key="careful:{tag}", unique_for=FOREVER, max_lost=9)
def look_before_repeating(*, tag: str, world: str) -> str:
    """Charge what can be looked up, book in our own database, write what may come twice."""
    attempt = current_attempt()
    key = attempt.idempotency_key("charge")
    charged = attempt.step(
        "charge", write, world, f"charge:{key}", check=lambda key: look_up(world, key)
    )
    attempt.step("book", note, tag, text=charged, atomic=True)
    attempt.step("mail", write, world, "mail", repeat=True)
    return charged


@job(key="blind:{tag}", unique_for=FOREVER, max_lost=9)
def never_repeat(*, tag: str, world: str) -> None:
    """Charge what nobody can look up."""
    attempt = current_attempt()
    attempt.step("charge", write, world, "charge")
    attempt.step("book", note, tag, atomic=True)


def points_of(row: ProcessedJob) -> Counter[str]:
    """Return how often a run comes by each probe."""
    reached: Counter[str] = Counter()
    probes.hook = lambda point: reached.update([point])
    try:
        runner.run([[row.pk, row.generation]])
    finally:
        probes.hook = None
    return reached


def kill_at(point: str, time: int, row: ProcessedJob) -> None:
    """Run the row in a child of ours that dies as it comes by the point for that time."""
    connections.close_all()
    pid = os.fork()
    if pid == 0:
        passed: Counter[str] = Counter()

        def strike(reached: str) -> None:
            passed.update([reached])
            if reached == point and passed[point] == time:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            probes.hook = strike
            runner.run([[row.pk, row.generation]])
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"it came by {point}"


def recover(row: ProcessedJob) -> None:
    """Take a dead attempt as a coordinator does after its lease, and run what waits."""
    left = JobAttempt.objects.filter(outcome=None)
    left.update(lease_until=DbNow(-60), beat_at=DbNow(-120))
    for attempt in list(left):
        assert lifecycle.reclaim(
            attempt.pk, beat_at=attempt.beat_at, ahead_of=None, reason="silent"
        )
    runner.run([[row.pk, row.generation]])


def test_process_killed_anywhere_has_each_effect_once_and_repeats_what_it_may(
    tmp_path: Path,
) -> None:
    reached = points_of(look_before_repeating.enqueue(tag="dry", world=str(tmp_path / "dry")).job)
    assert reached.keys() >= POINTS
    for point, times in sorted(reached.items()):
        for time in range(1, times + 1):
            where = f"{point} {time}"
            world = str(tmp_path / where)
            row = look_before_repeating.enqueue(tag=where, world=world).job
            kill_at(point, time, row)
            mailed_unrecorded = JobStep.objects.filter(
                job=row, name="mail", state=StepState.STARTED
            ).exists()
            recover(row)
            row = ProcessedJob.objects.get(pk=row.pk)
            assert row.status == Status.SUCCEEDED, (where, row.error)
            effects = seen(world)
            charges = [n for what, n in effects.items() if what.startswith("charge:")]
            assert charges == [1], where
            assert Ledger.objects.filter(tag=where).count() == 1, where
            assert effects["mail"] == 1 or (effects["mail"] == 2 and mailed_unrecorded), where
            states = JobStep.objects.filter(job=row).values_list("state", flat=True)
            assert list(states) == [StepState.SUCCEEDED] * 3, where


def test_step_that_nobody_can_look_up_is_never_repeated_and_in_doubt_holds_the_job(
    tmp_path: Path,
) -> None:
    reached = points_of(never_repeat.enqueue(tag="dry", world=str(tmp_path / "dry")).job)
    held = 0
    for point, times in sorted(reached.items()):
        for time in range(1, times + 1):
            where = f"{point} {time}"
            world = str(tmp_path / where)
            row = never_repeat.enqueue(tag=where, world=world).job
            kill_at(point, time, row)
            in_doubt = JobStep.objects.filter(job=row, state=StepState.STARTED).exists()
            recover(row)
            row = ProcessedJob.objects.get(pk=row.pk)
            assert row.status == (Status.HELD if in_doubt else Status.SUCCEEDED), where
            assert seen(world)["charge"] == 1 or in_doubt, where
            assert seen(world)["charge"] <= 1, where
            assert Ledger.objects.filter(tag=where).count() == (0 if in_doubt else 1), where
            held += in_doubt
    assert held == 2, "begun, and done but not recorded"
