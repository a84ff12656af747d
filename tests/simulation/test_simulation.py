"""Seeds of the simulation, in a process of their own: it has other settings."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from django.db import connection

SEEDS = 150


def simulate(*arguments: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        env={**os.environ, "PYTHONPATH": os.getcwd(), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def _once() -> None:
    if connection.vendor != "sqlite":
        pytest.skip("the simulation has its own SQLite, whatever the suite's database is")


def test_all_invariants_hold_in_the_corpus_and_some_hundred_seeds() -> None:
    assert "0 failed" in simulate("--seeds", str(SEEDS))


def test_the_same_seed_is_the_same_run_in_another_process() -> None:
    first = simulate("--seeds", "20", "--digests", PYTHONHASHSEED="1")
    alone = simulate("--seeds", "10", "--from", "10", "--digests", PYTHONHASHSEED="2")
    digests = [line for line in first.splitlines() if not line.endswith("each")]
    assert digests[-10:] == [line for line in alone.splitlines() if not line.endswith("each")]
