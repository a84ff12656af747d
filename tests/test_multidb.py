"""Reads that lag behind, or jobs in a database of their own: the write alias decides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.large

LIFE = {
    "enqueue": "CREATED",
    "enqueue again": "DUPLICATE",
    "enqueue many": ["DUPLICATE", "CREATED"],
    "run": "SUCCEEDED",
    "result": "",
    "run now": "t",
    "effects": 2,
    "tick": True,
    "beat": [False, False],
    "reclaim": ["RETRYING"],
    "hand over": 1,
    "hold": "HELD",
    "unhold": "PENDING",
    "cancel": "CANCELLED",
    "fold": 3,
    "operations": 3,
    "counts": 2,
    "samples": True,
    "dedupjobs_duplicates": "done",
    "dedupjobs_schedule": "done",
    "prune": [1, 2],
    "attempts left": 0,
}
PAGES = [
    "list of processedjob",
    "list of jobattempt",
    "list of duplicatecount",
    "list of duplicatesample",
    "list of operation",
    "page of a job",
]
SETUPS = {"replica": "default", "own": "jobs"}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the story told, by setup."""
    return {setup: tell(setup, tmp_path_factory.mktemp(setup)) for setup in SETUPS}


def tell(setup: str, home: Path) -> dict[str, Any]:
    env = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.multidb_settings",
        "DEDUPJOBS_TEST_DB": "sqlite",
        "MULTIDB_SETUP": setup,
        "MULTIDB_HOME": str(home),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.multidb_story"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        pytest.fail(done.stderr[-2_000:], pytrace=False)
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


@pytest.mark.parametrize("setup", SETUPS)
def test_job_lives_its_whole_life_on_the_write_alias(
    told: dict[str, dict[str, Any]], setup: str
) -> None:
    facts = told[setup]
    assert facts["alias"] == SETUPS[setup]
    assert {name: facts[name] for name in LIFE} == LIFE


@pytest.mark.parametrize("setup", SETUPS)
def test_no_statement_about_jobs_goes_to_the_database_that_does_not_decide(
    told: dict[str, dict[str, Any]], setup: str
) -> None:
    strays = {step: sql for step, sql in told[setup]["strays"].items() if step not in PAGES}
    assert strays == {}


@pytest.mark.parametrize("setup", SETUPS)
def test_admin_shows_the_database_that_decides(told: dict[str, dict[str, Any]], setup: str) -> None:
    facts = told[setup]
    assert {page: facts[page] for page in PAGES} == dict.fromkeys(PAGES, 200)
    assert facts["list shows the newest"]
    assert {step: sql for step, sql in facts["strays"].items() if step in PAGES} == {}


@pytest.mark.parametrize("setup", SETUPS)
def test_message_waits_for_the_commit_of_the_rows_own_database(
    told: dict[str, dict[str, Any]], setup: str
) -> None:
    facts = told[setup]
    assert (facts["inside its own"], facts["after its own"]) == (0, 1)
    assert facts["inside the other"] == 1  # whose commit means nothing to the row
    assert facts["rolled back"] == [0, 0]
    assert (facts["inside both"], facts["after both"]) == (0, 1)
