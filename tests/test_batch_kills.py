"""Processes that are killed in the middle of a batch: nothing is lost, and little is repeated."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from django.db import connection, connections

from dedupjobs import batches, lifecycle, probes
from dedupjobs.batches import desk, shared
from dedupjobs.clock import DbNow
from dedupjobs.models import JobAttempt, ProcessedJob, Status
from tests import live, sessions
from tests.app import jobs
from tests.app.models import Ledger
from tests.live import DEDUP, SIMPLE, STOCK, Spawn, with_server
from tests.test_batches import INTERRUPTED, KINDS, LOST, RETURNED, SUCCEEDED, every_kind, outcomes
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

SIZE = 6
ALWAYS = {"lock.after", "claim.committed", "user_code.before", "user_code.after", "release.before"}


# ---- at each probe


@pytest.mark.large
@every_kind
def test_process_killed_at_any_probe_of_a_batch_loses_nothing_and_repeats_what_had_not_ended(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for gathers in (desk, shared):
        monkeypatch.setattr(gathers, "GATHERED", 60.0)  # or a slow run comes by more often
    reached = points_of(kind)
    assert reached.keys() >= ALWAYS
    for point, times in sorted(reached.items()):
        ProcessedJob.objects.all().delete()
        Ledger.objects.all().delete()
        rows = made(kind, point)
        kill_at(point, (times + 1) // 2, rows)
        recover(rows)
        check(kind, rows, point)


def points_of(kind: str) -> Counter[str]:
    """Return how often a batch comes by each probe."""
    reached: Counter[str] = Counter()
    rows = made(kind, "dry")
    # Beats come by the clock.
    probes.hook = lambda point: None if point.startswith("beat.") else reached.update([point])
    try:
        batches.run([[row.pk, row.generation] for row in rows])
    finally:
        probes.hook = None
    return reached


def made(kind: str, prefix: str) -> list[ProcessedJob]:
    calls = [{"tag": f"{prefix} {n}"} for n in range(SIZE)]
    return [outcome.job for outcome in KINDS[kind].enqueue_many(calls)]


def kill_at(point: str, time: int, rows: list[ProcessedJob]) -> None:
    """Run the batch in a child of ours that dies as it comes by the point for that time."""
    connections.close_all()
    pid = os.fork()
    if pid == 0:
        seen: Counter[str] = Counter()

        def strike(reached: str) -> None:
            seen.update([reached])
            if reached == point and seen[point] == time:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            probes.hook = strike
            batches.run([[row.pk, row.generation] for row in rows])
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"it came by {point}"


def recover(rows: list[ProcessedJob]) -> None:
    """Take the dead attempts as a coordinator does after their lease, and run what waits."""
    if connection.vendor != "sqlite":
        until(lambda: not sessions.others(), live.PATIENCE, what="the dead one's locks are gone")
    left = JobAttempt.objects.filter(outcome=None)
    left.update(lease_until=DbNow(-60), beat_at=DbNow(-120))
    for attempt in list(left):
        assert lifecycle.reclaim(
            attempt.pk, beat_at=attempt.beat_at, ahead_of=None, reason="silent"
        )
    waiting = ProcessedJob.objects.filter(status__in=(Status.PENDING, Status.RETRYING))
    batches.run([[row.pk, row.generation] for row in waiting])


def check(kind: str, rows: list[ProcessedJob], point: str) -> None:
    found = list(ProcessedJob.objects.filter(pk__in=[row.pk for row in rows]))
    assert [row.status for row in found] == [Status.SUCCEEDED] * SIZE, point
    effects = Counter(Ledger.objects.values_list("tag", flat=True))
    assert len(effects) == SIZE, point
    lost = JobAttempt.objects.filter(outcome=LOST).count()
    if kind == "atomic":
        assert set(effects.values()) == {1}, point
    if kind == "each":
        assert sum(effects.values()) <= SIZE + 1, point
        assert lost <= 1, point
    ended = JobAttempt.objects.filter(outcome=SUCCEEDED)
    assert ended.count() == SIZE, point
    assert not JobAttempt.objects.filter(outcome=None).exists(), point


# ---- real workers


def sent(job: object, count: int, tmp_path: Path, **kwargs: str) -> list[ProcessedJob]:
    """Enqueue jobs that wait for a file each; all but the second one's are there."""
    calls = []
    for n in range(count):
        release = tmp_path / f"release {n}"
        if n != 1:
            release.touch()
        calls.append({"tag": f"{n}", "release": str(release)})
    return [outcome.job for outcome in job.enqueue_many(calls)]  # type: ignore[attr-defined]


def all_done(rows: list[ProcessedJob]) -> bool:
    done = ProcessedJob.objects.filter(pk__in=[row.pk for row in rows], status=Status.SUCCEEDED)
    return done.count() == len(rows)


def effects() -> Counter[str]:
    begun = Ledger.objects.filter(note__startswith="begin").values_list("tag", flat=True)
    return Counter(begun)


@pytest.mark.parametrize("worker", [DEDUP, STOCK, SIMPLE])
def test_batch_runs_on_every_worker_class(spawn: Spawn, worker: str) -> None:
    with live.changed(RQ={"WORKER_CLASS": worker}):
        live.start_worker(spawn, worker=worker)
        for kind in KINDS:
            rows = made(kind, kind)
            until(lambda rows=rows: all_done(rows), live.PATIENCE, what=f"{kind} is done")
            assert outcomes(rows) == [[SUCCEEDED]] * SIZE


def test_horse_killed_in_a_batch_repeats_the_running_job_alone_and_frees_the_rest(
    spawn: Spawn, tmp_path: Path
) -> None:
    worker = live.start_worker(spawn)
    rows = sent(jobs.wait_with_long_lease, 5, tmp_path)
    live.kill(live.begun("1"))
    (tmp_path / "release 1").touch()
    until(lambda: all_done(rows), live.PATIENCE, what="all are done")
    before = [row for row, found in zip(rows, outcomes(rows), strict=True) if found == [SUCCEEDED]]
    others = [found for found in outcomes(rows) if found != [SUCCEEDED]]
    assert [LOST, SUCCEEDED] in others
    others.remove([LOST, SUCCEEDED])
    assert others == [[RETURNED, SUCCEEDED]] * (4 - len(before))
    assert effects()["1"] == 2
    assert sum(effects().values()) == 6
    counted = ProcessedJob.objects.filter(pk__in=[r.pk for r in rows], lost_count__gt=0)
    assert counted.count() == 1
    worker.signal(signal.SIGTERM)
    worker.wait(live.PATIENCE)


def test_horse_killed_in_a_group_interrupts_the_innocent_uncounted(
    spawn: Spawn, tmp_path: Path
) -> None:
    live.start_worker(spawn)
    rows = sent(jobs.wait_in_group, 5, tmp_path)
    live.kill(live.begun("1"))
    (tmp_path / "release 1").touch()
    until(lambda: all_done(rows), live.PATIENCE, what="all are done")
    found = Counter(tuple(one) for one in outcomes(rows))
    assert found[(LOST, SUCCEEDED)] == 1
    unmarked = found[(INTERRUPTED, SUCCEEDED)] + found[(SUCCEEDED,)]
    assert unmarked == 4, found


@with_server
def test_horse_killed_in_an_atomic_batch_has_each_effect_once(spawn: Spawn, tmp_path: Path) -> None:
    live.start_worker(spawn)
    rows = sent(jobs.wait_atomically, 5, tmp_path)
    until((tmp_path / "release 1.begun").exists, live.PATIENCE, what="the second one runs")
    pid = JobAttempt.objects.get(job_id=rows[1].pk).pid
    assert pid is not None
    live.kill(pid)
    (tmp_path / "release 1").touch()
    until(lambda: all_done(rows), live.PATIENCE, what="all are done")
    assert effects() == Counter({f"{n}": 1 for n in range(5)})
    assert outcomes(rows)[1] == [LOST, SUCCEEDED]
    innocent = [tuple(one) for n, one in enumerate(outcomes(rows)) if n != 1]
    unmarked = {(SUCCEEDED,), (INTERRUPTED, SUCCEEDED), (RETURNED, SUCCEEDED)}
    assert set(innocent) <= unmarked, innocent


@pytest.mark.large
def test_horse_of_a_stock_worker_killed_in_a_batch_is_recovered_by_the_coordinator(
    spawn: Spawn, tmp_path: Path
) -> None:
    with live.changed(RQ={"WORKER_CLASS": STOCK}):
        live.start_worker(spawn, worker=STOCK)
        live.start_coordinator(spawn)
        rows = sent(jobs.wait, 5, tmp_path)
        live.kill(live.begun("1"))
        (tmp_path / "release 1").touch()
        until(lambda: all_done(rows), live.PATIENCE, what="all are done")
    assert outcomes(rows)[1] == [LOST, SUCCEEDED]
    assert sum(effects().values()) == 6


@pytest.mark.large
def test_worker_told_to_end_in_a_batch_gives_back_what_has_not_started(
    spawn: Spawn, tmp_path: Path
) -> None:
    worker = live.start_worker(spawn)
    rows = sent(jobs.wait_with_long_lease, 5, tmp_path)
    live.begun("1")
    worker.signal(signal.SIGTERM)
    worker.wait(live.PATIENCE)
    found = Counter(tuple(one) for one in outcomes(rows))
    assert found[(INTERRUPTED,)] == 1
    assert found[(INTERRUPTED,)] + found[(RETURNED,)] + found[(SUCCEEDED,)] == 5
    (tmp_path / "release 1").touch()
    live.start_worker(spawn)
    until(lambda: all_done(rows), live.PATIENCE, what="all are done")


def test_single_messages_of_short_jobs_are_taken_together(spawn: Spawn) -> None:
    rows = [jobs.do_nothing.enqueue(tag=f"{n}").job for n in range(60)]
    live.start_worker(spawn)
    until(lambda: all_done(rows), live.PATIENCE, what="all are done")
    assert outcomes(rows) == [[SUCCEEDED]] * 60
    owners = {a.owner.partition(".")[0] for a in JobAttempt.objects.all()}
    assert len(owners) < 30
    until(lambda: not live.eternal_keys(), live.PATIENCE, what="RQ's books are closed")
