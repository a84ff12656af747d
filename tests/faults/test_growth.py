"""Long-lived processes do not grow with the jobs that they have run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults import growth
from tests.faults.growth import Sample


@pytest.mark.timeout(600)
@pytest.mark.parametrize("worker", ["rq.SimpleWorker", "dedupjobs.worker.DedupWorker"])
def test_worker_and_coordinator_do_not_grow_over_a_thousand_jobs(worker: str) -> None:
    command = [sys.executable, "-m", "tests.faults.growth", worker, "--jobs", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def samples(**grown: int) -> list[Sample]:
    level = {"memory": 10**8, "threads": 3, "files": 17, "connections": 2, "keys": 5}
    return [
        Sample(
            jobs=n * 100,
            **{what: value + n * grown.get(what, 0) for what, value in level.items()},
        )
        for n in range(1, 21)
    ]


@pytest.mark.parametrize("what", ["memory", "threads", "files", "connections", "keys"])
def test_growth_is_seen(what: str) -> None:
    per_sample = 1_000_000 if what == "memory" else 1
    assert growth.complaints(samples()) == []
    assert len(growth.complaints(samples(**{what: per_sample}))) == 1
