"""Scenarios of crash, lock expiry and time-out that have no home beside one module's tests.

docs/verification.md lists all scenarios of these areas with the tests that pin them.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError

from dedupjobs import FOREVER, lifecycle, locks, probes, registry
from dedupjobs.clock import DbNow
from dedupjobs.coordinator import Coordinator
from dedupjobs.lifecycle import Place
from dedupjobs.models import JobAttempt, Kind, ProcessedJob, Status
from tests import faults
from tests.app import fenced, jobs, stubborn
from tests.faults import PATIENCE, Spawn, deliver, with_sqlite
from tests.rows import Side
from tests.waiting import until

pytestmark = [pytest.mark.large, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def release(tmp_path: Path) -> Iterator[str]:
    """Where jobs look for their release, which comes at the latest when the test is over."""
    path = str(tmp_path / "release")
    yield path
    for number in (1, 2, 3):
        Path(f"{path}.{number}").touch()


@pytest.fixture
def beats_fail() -> Iterator[threading.Event]:
    """While the event is set, every beat finds its connection broken."""
    failing = threading.Event()

    def hook(point: str) -> None:
        if point == "beat.before" and failing.is_set():
            raise OperationalError("the heartbeat's connection is blocked")

    probes.hook = hook
    yield failing
    probes.hook = None


def test_page_that_lists_the_scenarios_names_tests_that_exist() -> None:
    here = Path(__file__).parent
    page = (here.parent / "docs" / "verification.md").read_text()
    listed = [
        (module, name)
        for module, names in re.findall(r"`(test_\w+)`: ((?:`test_\w+`(?:, )?)+)", page)
        for name in re.findall(r"`(test_\w+)`", names)
    ]
    there = {path.stem: path.read_text() for path in here.glob("test_*.py")}
    assert len(listed) > 30
    missing = [f"{m}: {n}" for m, n in listed if m in there and f"def {n}(" not in there[m]]
    assert missing == []


# ---- lock expiry


def test_job_whose_beats_fail_is_taken_once_and_its_late_end_harms_no_successor(
    beats_fail: threading.Event, release: str
) -> None:
    """S-014: the job goes on, but its heartbeat can not be written for longer than the lease."""
    row = fenced.write_unfenced.enqueue(tag="a", release=release).job
    first = Side(deliver, row)
    until(lambda: faults.notes("a") == ["begin 1"], PATIENCE)
    beats_fail.set()
    coordinator = Coordinator()
    until(coordinator.reclaim, PATIENCE, every=0.05, what="the silent attempt is taken")
    beats_fail.clear()
    second = Side(deliver, row)
    until(lambda: faults.notes("a") == ["begin 1", "begin 2"], PATIENCE)
    owner = JobAttempt.objects.get(number=2).owner
    Path(f"{release}.1").touch()
    assert first.result(PATIENCE) is None
    assert coordinator.reclaim() == []
    assert locks.holder(row.pk) == owner
    assert ProcessedJob.objects.get().status == Status.RUNNING
    Path(f"{release}.2").touch()
    assert second.result(PATIENCE) == Status.SUCCEEDED
    assert faults.outcomes_of(row.pk) == ["LOST", "SUCCEEDED"]
    assert JobAttempt.objects.get(number=1).late_ending == "SUCCEEDED"


def test_lease_with_nothing_left_is_over_and_not_taken_for_none() -> None:
    """S-069: a remaining lease of exactly 0 is a lease that has ended."""
    row = jobs.record.enqueue(tag="a").job
    claim = lifecycle.claim(row.pk, 1, owner="me", place=Place())
    assert claim is not None
    JobAttempt.objects.update(lease_until=DbNow(), beat_at=DbNow())
    beat_at = JobAttempt.objects.get().beat_at

    def take() -> Any:
        return lifecycle.reclaim(claim.fence, beat_at=beat_at, ahead_of=60.0, reason="lost")

    assert until(take, seconds=5).status == Status.RETRYING


# ---- time-out


@with_sqlite
def test_job_killed_past_its_time_out_runs_again_and_frees_its_lock(spawn: Spawn) -> None:
    """S-064, S-069: nothing of the killed attempt blocks the retry."""
    faults.start_worker(spawn, AUTODISCOVER=["jobs", "stubborn"])
    outcome = stubborn.hang_at_first.enqueue(tag="stuck")
    row = faults.wait_for(outcome, Status.SUCCEEDED)
    assert faults.outcomes_of(row.pk) == ["TIMED_OUT", "SUCCEEDED"]
    assert (row.failures, row.lost_count) == (1, 0)
    until(lambda: locks.holder(row.pk) is None)


@with_sqlite
def test_job_killed_past_its_time_out_that_it_gives_up_on_is_dead_and_its_key_free(
    spawn: Spawn,
) -> None:
    """S-069: no automatic retry where the job says so."""
    faults.start_worker(spawn, AUTODISCOVER=["jobs", "stubborn"])
    outcome = stubborn.hang_and_give_up.enqueue(tag="once")
    row = faults.wait_for(outcome, Status.DEAD)
    assert faults.outcomes_of(row.pk) == ["TIMED_OUT"]
    assert stubborn.hang_and_give_up.enqueue(tag="once").kind is Kind.CREATED


# ---- crash


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"on_lost": "retry"}, Status.RETRYING),
        ({"on_lost": "retry", "max_lost": 1}, Status.DEAD),
        ({"on_lost": "hold"}, Status.HELD),
    ],
    ids=["retried", "given up", "held for a person"],
)
def test_job_whose_worker_died_goes_where_it_says(options: Any, status: Status) -> None:
    """S-069: retry, fail or hold after a lost attempt is each job's choice."""
    make = registry.job(name="scenario", key="{tag}", unique_for=FOREVER, **options)
    try:
        row = make(_specimen).enqueue(tag="a").job
        claim = lifecycle.claim(row.pk, 1, owner="dead", place=Place())
        assert claim is not None
        lost = lifecycle.bury(claim.fence, "its process died")
    finally:
        registry.forget("scenario")
    assert lost is not None
    assert (lost.outcome, lost.status) == ("LOST", status)


def _specimen(*, tag: str) -> None:
    """Never run."""


class Fatal(BaseException):
    """Neither an Exception nor one of Python's own exits."""


@dataclass
class Poisoned:
    """A type that can be stored but no longer loaded."""

    text: str

    def __post_init__(self) -> None:
        if self.text == "poison":
            raise Fatal(self.text)


def test_argument_whose_loading_raises_a_base_exception_does_not_block_its_key_for_good() -> None:
    """S-050: also while arguments are loaded."""
    row = jobs.record.enqueue(tag="a").job
    value = {"$": "dataclass", "t": f"{__name__}:Poisoned", "v": {"text": "poison"}}
    ProcessedJob.objects.update(args=json.dumps({"tag": value}))
    with pytest.raises(Fatal):
        deliver(row)
    JobAttempt.objects.update(lease_until=DbNow(-60), beat_at=DbNow(-120))
    attempt = JobAttempt.objects.get()
    assert lifecycle.reclaim(attempt.pk, beat_at=attempt.beat_at, ahead_of=None, reason="lost")
    ProcessedJob.objects.update(args=json.dumps({"tag": "a"}))
    assert deliver(row) == Status.SUCCEEDED
    assert faults.outcomes_of(row.pk) == ["LOST", "SUCCEEDED"]
