"""The judge sees each kind of violation, and none where there is none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import redis
from django.conf import settings
from django.db.models import F

from dedupjobs import runner
from dedupjobs.models import JobAttempt, JobStep, ProcessedJob, Status
from tests.faults import enqueuer, judge, ledger, points, recovery
from tests.faults.app import jobs
from tests.faults.app.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

KINDS = ("plain", "atomic", "completing", "fenced", "latest", "newest", "stepping")


@pytest.fixture(autouse=True)
def _good_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job of each kind has run; its call was committed and written down."""
    monkeypatch.setenv("FAULTS_HOME", str(tmp_path))
    ledger._file.cache_clear()
    for kind in KINDS:
        pk = enqueuer.call(kind, f"{kind}.x", 1)
        assert pk is not None
        runner.deliver(pk, 1, owner=f"owner of {kind}")
    with redis.Redis.from_url(settings.RQ_URL) as client:
        client.flushdb()
    yield
    os.close(ledger._file())
    ledger._file.cache_clear()


def row(kind: str) -> ProcessedJob:
    return ProcessedJob.objects.get(key=f"{kind}.x")


def attempt_of(kind: str) -> JobAttempt:
    return JobAttempt.objects.get(job__key=f"{kind}.x")


def another_attempt(kind: str, **changes: object) -> JobAttempt:
    """Add an attempt after the one that has succeeded."""
    attempt = attempt_of(kind)
    ProcessedJob.objects.filter(pk=attempt.job_id).update(attempts=F("attempts") + 1)
    late = timedelta(seconds=1)
    times = {"claimed_at": attempt.claimed_at + late, "ended_at": attempt.ended_at + late}
    fields = {"pk": None, "number": 2, "owner": "another", **times, **changes}
    for name, value in fields.items():
        setattr(attempt, name, value)
    attempt.save(force_insert=True)
    return attempt


def effect_line(kind: str, **changes: object) -> None:
    lines = [entry for entry in ledger.read() if entry["what"] == "effect"]
    line = next(entry for entry in lines if entry["tag"] == f"{kind}.x")
    facts = {name: value for name, value in line.items() if name not in ("what", "at", "pid")}
    ledger.write("effect", **{**facts, **changes})


def update(kind: str, **columns: object) -> None:
    ProcessedJob.objects.filter(key=f"{kind}.x").update(**columns)


def copy_effect(kind: str, **columns: object) -> None:
    effect = Effect.objects.get(tag=f"{kind}.x")
    for name, value in {"pk": None, **columns}.items():
        setattr(effect, name, value)
    effect.save(force_insert=True)


def charge_again(attempt: int) -> None:
    (line,) = [entry for entry in ledger.read() if entry["what"] == "charge"]
    if attempt > 1:
        another_attempt("stepping", outcome="LOST")
    moment = attempt_of_number("stepping", attempt).ended_at.timestamp()
    facts = {name: value for name, value in line.items() if name not in ("what", "pid")}
    ledger.write("charge", **{**facts, "at": moment - 0.001, "attempt": attempt})


def attempt_of_number(kind: str, number: int) -> JobAttempt:
    return JobAttempt.objects.get(job__key=f"{kind}.x", number=number)


def keep_for_ever() -> None:
    with redis.Redis.from_url(settings.CACHE_URL) as client:
        client.set(":1:dedupjobs:lock:{1}", "1:nobody")


def roll_back() -> None:
    jobs.plain.enqueue(tag="plain.undone")
    ProcessedJob.objects.filter(key="plain.undone").delete()
    update("plain", key="plain.undone")
    ledger.write("rolled back", kind="plain", tag="plain.undone", number=0)


BREACHES: dict[str, tuple[str, Callable[[], object]]] = {
    "row lost": ("I2", lambda: row("plain").delete()),
    "rolled back and there": ("I2", roll_back),
    "still waiting": ("I5", lambda: update("plain", status=Status.RETRYING)),
    "dead": ("I5", lambda: update("plain", status=Status.DEAD)),
    "effect doubled": ("I1", lambda: copy_effect("atomic")),
    "effect of no run": ("I1", lambda: Effect.objects.filter(tag="atomic.x").update(generation=7)),
    "effect missing": ("I1", lambda: Effect.objects.filter(tag="completing.x").delete()),
    "nothing done": ("I1", lambda: Effect.objects.filter(tag="fenced.x").delete()),
    "step's transaction doubled": ("I1", lambda: copy_effect("stepping")),
    "step charged again": ("I1", lambda: charge_again(attempt=1)),
    "step done after its record": ("I1", lambda: charge_again(attempt=2)),
    "step forgotten": ("I1", lambda: JobStep.objects.filter(name="charge").delete()),
    "attempt ran twice": ("I1", lambda: effect_line("plain")),
    "went on after success": ("I1", lambda: another_attempt("plain", outcome="LOST")),
    "stale write": ("I4", lambda: copy_effect("fenced", fence=0)),
    "fence fell": ("I4", lambda: another_attempt("plain", pk=-1)),
    "two at once": (
        "I3",
        lambda: another_attempt("plain", claimed_at=attempt_of("plain").claimed_at),
    ),
    "open": ("I6", lambda: JobAttempt.objects.update(outcome=None)),
    "number missing": ("I6", lambda: JobAttempt.objects.update(number=3)),
    "loss uncounted": ("I6", lambda: JobAttempt.objects.update(outcome="LOST")),
    "loss counted that was none": ("I6", lambda: update("plain", lost_count=1)),
    "newest not run": (
        "I11",
        lambda: ledger.write(
            "committed", tag="latest.x", number=2, job=row("latest").pk, answer="RERUN"
        ),
    ),
    "older after newer": ("I11", lambda: effect_line("latest", number=0, fence=10**6)),
    "two keys": ("I12", lambda: effect_line("plain", key="another", fence=10**6)),
    "key without end": ("I8", keep_for_ever),
}


def test_good_world_has_no_violation() -> None:
    assert judge.violations(ledger.read()) == []


@pytest.mark.parametrize("breach", BREACHES)
def test_violation_is_seen(breach: str) -> None:
    invariant, break_it = BREACHES[breach]
    break_it()
    found = judge.violations(ledger.read())
    assert any(sentence.startswith(f"{invariant}:") for sentence in found), found


def test_call_of_replace_that_found_a_running_job_is_no_accepted_payload() -> None:
    ledger.write("committed", tag="newest.x", number=9, job=row("newest").pk, answer="DUPLICATE")
    assert judge.violations(ledger.read()) == []


def test_recovery_counts_from_the_strike_to_the_next_claim_of_its_job() -> None:
    first = attempt_of("plain")
    again = another_attempt("plain", outcome="LOST")
    pk, at = first.job_id, first.claimed_at.timestamp() + 0.4
    line = {"what": "strike", "at": at, "job": pk, "role": "horse", "action": "kill"}
    found = recovery.times([], [line])
    assert found["horse: kill"] == [pytest.approx(again.claimed_at.timestamp() - at)]


def test_every_probe_of_the_package_can_be_struck_in_some_role() -> None:
    reachable = {point for _, point in points.by_role("dedupjobs.worker.DedupWorker", "sqlite")}
    assert reachable == points.all_points()
