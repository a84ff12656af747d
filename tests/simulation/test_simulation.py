"""Seeds of the simulation, in a process of their own: it has other settings."""

from __future__ import annotations

import os
import subprocess
import sys

SEEDS = 60


def simulate(*arguments: str, **env: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        env={**os.environ, "PYTHONPATH": os.getcwd(), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_all_invariants_hold_in_the_corpus_and_some_seeds() -> None:
    *_, summary = simulate("--seeds", str(SEEDS))
    assert ", 0 failed;" in summary


def test_the_same_seed_is_the_same_run_in_another_process() -> None:
    after_others = digests("--seeds", "20", PYTHONHASHSEED="1")
    at_once = digests("--seeds", "10", "--from", "10", PYTHONHASHSEED="2")
    assert after_others[10:] == at_once
    assert len(set(at_once)) == len(at_once) == 10


def digests(*arguments: str, **env: str) -> list[str]:
    *lines, _, _ = simulate("--stop", "--digests", *arguments, **env)
    return lines
