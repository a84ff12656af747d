"""What a worker does once before it forks, and that nobody else does it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from django.db import connection

from tests import live
from tests.app import warm
from tests.live import PATIENCE, STOCK, Spawn

pytestmark = [pytest.mark.large, pytest.mark.django_db(transaction=True)]

SETTINGS = {"AUTODISCOVER": ["jobs", "warm"]}
FIND_OUT = """
import gc, json, os, sys
import django
django.setup()
from django.db import connection, connections
from dedupjobs import locks, prefork
from dedupjobs.lifecycle import statements
{before}
pid = os.fork()
if not pid:
    os._exit(0)
os.waitpid(pid, 0)
print(json.dumps({{
    "ready": prefork._is_ready,
    "compiled": len(statements._compiled),
    "frozen": gc.get_freeze_count(),
    "open": connection.connection is not None,
    "sockets": len(locks._client().connection_pool._available_connections),
}}))
"""


def found_out(env: dict[str, str], before: str = "") -> dict[str, Any]:
    """Return how a process is that has forked once."""
    program = [sys.executable, "-c", FIND_OUT.format(before=before)]
    done = subprocess.run(program, env=env, stdout=subprocess.PIPE, timeout=PATIENCE, check=True)
    return dict(json.loads(done.stdout))


def test_process_that_is_no_worker_forks_as_it_always_did(process_env: dict[str, str]) -> None:
    found = found_out(process_env)
    assert (found["ready"], found["compiled"], found["frozen"]) == (False, 0, 0)


def test_worker_gets_ready_before_its_first_fork_and_asks_no_server(
    process_env: dict[str, str],
) -> None:
    found = found_out(process_env, "import rq.cli")
    assert found["ready"]
    assert found["frozen"] > 0
    assert (found["compiled"] > 0) == (connection.vendor != "mysql")
    assert not found["open"]
    assert found["sockets"] == 0


def test_wrong_settings_keep_no_worker_from_forking(process_env: dict[str, str]) -> None:
    wrong = {"DEDUPJOBS_TEST_SETTINGS": json.dumps({"LOCK_CACHE": "there is none"})}
    own = "locks._client = lambda: __import__('redis').Redis()\nimport rq.cli"
    found = found_out({**process_env, **wrong}, own)
    assert found["ready"]


def test_horse_of_a_stock_worker_finds_all_it_needs(spawn: Spawn) -> None:
    with live.changed(RQ={"WORKER_CLASS": STOCK}):
        live.start_worker(spawn, worker=STOCK, **SETTINGS)
        outcomes = [warm.readiness.enqueue(tag=tag) for tag in "ab"]
        first, second = [outcome.result(timeout=PATIENCE) for outcome in outcomes]
    assert first["ready"]
    assert first["frozen"] > 0
    assert first["pid"] != second["pid"]
    # The first run has compiled nothing that its parent had not.
    assert first["compiled"] == second["compiled"]
    if connection.vendor != "mysql":
        assert first["compiled"] > 0
