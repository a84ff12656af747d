"""Projects that are set up otherwise: two of them on one Redis, and with other user models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings

from tests.processes import Spawned
from tests.waiting import until

QUICK = {"RESEND_AFTER": 1, "TICK": 0.2, "RECLAIM_EVERY": 0.5, "LEADER_TTL": 2}
ENQUEUE = """
import django, json
django.setup()
from tests.app import jobs
outcomes = [jobs.record.enqueue(tag=tag, text="{project}") for tag in ("a", "a", "b")]
print(json.dumps([str(outcome.kind) for outcome in outcomes]))
"""
TELL = """
import django, json
django.setup()
from dedupjobs import dispatch
from dedupjobs.models import ProcessedJob
from tests.app import jobs
from tests.app.models import Ledger
print(json.dumps({
    "effects": sorted(Ledger.objects.values_list("tag", "note")),
    "rows": sorted(ProcessedJob.objects.values_list("key", "status")),
    "status": [str(jobs.record.status(tag="a")), str(jobs.record.status(tag="none"))],
    "again": str(jobs.record.enqueue(tag="a", text="{project}").kind),
}))
"""


class Shop:
    """A project with a database of its own, on the Redis of all."""

    def __init__(self, home: Path, name: str) -> None:
        self.name = name
        self.env = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "DEDUPJOBS_TEST_DB": "sqlite",
            "DEDUPJOBS_TEST_DB_NAME": str(home / f"{name}.sqlite3"),
            "DEDUPJOBS_TEST_SETTINGS": json.dumps({"PREFIX": name, **QUICK}),
        }
        self.tell(
            "import django; django.setup(); from django.core.management import call_command; "
            "call_command('migrate', run_syncdb=True, verbosity=0); print('0')"
        )

    def tell(self, code: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", code.replace("{project}", self.name)],
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr[-2_000:]
        return json.loads(done.stdout.splitlines()[-1])

    def worker(self) -> Spawned:
        return Spawned((sys.executable, "-m", "django", "rqworker", "default"), self.env)

    def is_done(self) -> bool:
        told = self.tell(TELL)
        return {status for _, status in told["rows"]} == {"SUCCEEDED"}


@pytest.fixture
def shops(tmp_path: Path) -> list[Shop]:
    return [Shop(tmp_path, name) for name in ("north", "south")]


@pytest.mark.large
def test_two_projects_on_one_redis_lose_nothing_and_answer_for_themselves(
    shops: list[Shop],
) -> None:
    for shop in shops:
        assert shop.tell(ENQUEUE) == ["CREATED", "DUPLICATE", "CREATED"]
    # Their rows have the same numbers, and their messages stand in one queue.
    workers = [shop.worker() for shop in shops]
    try:
        for shop in shops:
            until(shop.is_done, 60, every=0.5, what=f"{shop.name} has run its jobs")
    finally:
        for worker in workers:
            worker.stop()
    for shop in shops:
        told = shop.tell(TELL)
        assert told["effects"] == [["a", shop.name], ["b", shop.name]]
        assert told["status"] == ["SUCCEEDED", "None"]
        assert told["again"] == "REPLAYED"


@pytest.mark.large
def test_two_projects_share_no_key_of_ours_in_redis(shops: list[Shop]) -> None:
    for shop in shops:
        shop.tell(ENQUEUE)
    with redis.Redis.from_url(settings.CACHE_URL) as client:
        ours = {key.decode() for key in client.keys("*")}
    assert ours
    owners = {next((s.name for s in shops if s.name in key), key) for key in ours}
    assert owners <= {"north", "south"}


@pytest.mark.large
def test_person_of_another_user_model_operates_jobs_in_the_admin(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.people.story"],
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.people.settings",
            "DEDUPJOBS_TEST_DB": "sqlite",
            "DEDUPJOBS_TEST_DB_NAME": str(tmp_path / "people.sqlite3"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1:] == ["told: 4 operations"], done.stderr[-2_000:]
