"""Fixtures of the whole suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import redis
from django.conf import settings
from django.db import connection
from django.utils import translation

from dedupjobs import cache, controls, counters, invalidation, load, registry, runner, stats, wire
from dedupjobs.lifecycle import together
from tests import sessions
from tests.processes import Spawned
from tests.waiting import until

# What asks no database, brings its own, or asks for nothing that one has and another has not,
# runs once, with the first of them.
ONCE = (
    "admin_input", "admin_permissions", "admin_truth", "admin_unfold", "admin_why", "alert_rules",
    "backoff", "census", "commands", "conf", "contrib", "deployment", "docs", "endings",
    "event_hooks", "event_settings", "keys", "logs", "moving", "peers", "policy_checks",
    "pressure", "quorum", "readme", "registry", "security", "sentinel", "slots", "tasks",
    "testing", "tracing", "translations", "tutorial", "vitals", "votes",
)  # fmt: skip
DATABASE = os.environ.get("DEDUPJOBS_TEST_DB", "sqlite")
collect_ignore = [f"test_{name}.py" for name in ONCE] if DATABASE != "sqlite" else []
if DATABASE != "postgresql":
    collect_ignore += ["test_prepared.py", "test_together.py"]  # others go step by step

# Tests that want a listener have one of their own; another would hear their messages, too.
invalidation.never_listen()

SPAWNED = pytest.StashKey[list[Spawned]]()


@pytest.fixture(autouse=True)
def _empty_redis() -> None:
    """Let each test find this worker's two databases empty."""
    for url in (settings.RQ_URL, settings.CACHE_URL):
        with redis.Redis.from_url(url) as client:
            client.flushdb()
    cache.forget_clients()
    for budget in (wire.budget, counters._budget, stats._budget):
        budget.reset()  # a breaker that an earlier test has opened stays so for a second
    for source in counters.sources:
        source()  # what an earlier test has counted and not paid
    counters.forget_owed()
    stats._forget_owed()
    controls.forget()
    load.forget()


class Guest(runner.Host):
    """A process that never settles in: its thread would pay, idle, what a later test counts."""


@pytest.fixture(autouse=True)
def _guest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "host", Guest())


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """Drop no database that a thread still has a connection to: those that idle give them up."""
    yield
    if connection.vendor != "sqlite":
        with django_db_blocker.unblock():
            until(lambda: not sessions.others(), 30, every=0.2, what="nobody uses the database")
            sessions.let_nobody_in()


@pytest.fixture(autouse=True)
def _no_language() -> None:
    """Let each test speak the project's language: a request leaves its own behind."""
    translation.deactivate()


@pytest.fixture
def step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PostgreSQL, too, claim and end in steps, for a test that stands between two of them."""
    monkeypatch.setattr(together, "allowed", False)


@pytest.fixture
def redis_client(_empty_redis: None) -> Iterator[redis.Redis]:
    """A client of the database that RQ's queues are in."""
    with redis.Redis.from_url(settings.RQ_URL) as client:
        yield client


@pytest.fixture
def process_env(transactional_db: None) -> dict[str, str]:
    """The environment in which a subprocess reaches this test's databases."""
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DEDUPJOBS_TEST_DB_NAME": str(connection.settings_dict["NAME"]),
        "DEDUPJOBS_TEST_LOG": "INFO",
        "PYTHONPATH": os.getcwd(),
        "PYTHONUNBUFFERED": "1",
    }


@pytest.fixture
def spawn(
    request: pytest.FixtureRequest, process_env: dict[str, str]
) -> Iterator[Callable[..., Spawned]]:
    """Start Django commands: `spawn("rqworker", "default", DEDUPJOBS_TEST_WORKER="rq.Worker")`.

    Keywords are variables of the environment. All processes are gone when the test ends, before
    its database is emptied; a failed test shows what they printed.
    """
    spawned = request.node.stash[SPAWNED] = []

    def start(*command: str, **env: str) -> Spawned:
        process = Spawned((sys.executable, "-m", "django", *command), {**process_env, **env})
        spawned.append(process)
        return process

    yield start
    for process in spawned:
        process.stop()


def pytest_collection_finish() -> None:
    """Let no check name the jobs of these modules, which belong to no app."""
    registry._outside.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach what spawned processes have printed to the report of a failed test."""
    report = yield
    if report.when == "call" and report.failed:
        for process in item.stash.get(SPAWNED, []):
            report.sections.append((f"{process.title} ({process.pid})", process.output))
    return report
