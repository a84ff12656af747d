"""Readers, workers and a Redis that forgets: nobody goes back in time, and all agree in the end."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings
from django.core.management import call_command

from dedupjobs import clock
from dedupjobs.models import FINAL, ProcessedJob
from tests import live
from tests.app import jobs
from tests.waiting import until

pytestmark = [pytest.mark.large, pytest.mark.django_db(transaction=True)]

KEYS = 20
SECONDS = 15
READERS, WORKERS = 4, 2
OURS = {"L1_TTL": 0.3, "PUSH_TIMEOUT": 5, "LOCK_TIMEOUT": 5, "TICK": 0.2}


@pytest.mark.timeout(600)
def test_no_reader_goes_back_in_time_and_all_agree_with_the_database_in_the_end(
    spawn: Any, process_env: dict[str, str], tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    tags, ours = [f"t{n}" for n in range(KEYS)], json.dumps(OURS)
    with live.changed(DEDUPJOBS={**OURS, "LISTEN": "never"}):
        hashes = [jobs.record_briefly.enqueue(tag=tag).job.key_hash for tag in tags]
        for _ in range(WORKERS):
            spawn("rqworker", "default", DEDUPJOBS_TEST_SETTINGS=ours)
        end = tmp_path / "end"
        readers = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.cache_reader", str(end), str(seed + n), *hashes],
                env={**process_env, "DEDUPJOBS_TEST_SETTINGS": ours},
                stdout=subprocess.PIPE,
                text=True,
                cwd=os.getcwd(),
            )
            for n in range(READERS)
        ]
        try:
            ready = [Path(f"{end}.{seed + n}") for n in range(READERS)]
            until(lambda: all(path.exists() for path in ready), 120, what="all readers read")
            disturb(random.Random(seed), tags)
            until(all_final, 120, every=0.2, what="all jobs have ended")
        finally:
            end.touch()
            reports = [json.loads(reader.communicate(timeout=120)[0]) for reader in readers]
    assert [report["older"] for report in reports] == [0] * READERS
    assert min(report["reads"] for report in reports) > KEYS
    assert min(report["heard"] for report in reports) > 0
    assert max(report["cut"] for report in reports) > 0
    rows = ProcessedJob.objects.filter(key_hash__in=hashes)
    truth = {row.key_hash: [row.pk, row.version, row.status] for row in rows}
    for report in reports:
        assert report["believed"] == {key: truth.get(key) for key in hashes}


def disturb(chance: random.Random, tags: list[str]) -> None:
    """Enqueue again and again, wipe the cache, cut listeners off, prune."""
    with redis.Redis.from_url(settings.CACHE_URL) as client:
        cut_listeners_off(client)  # at least once
        deadline = clock.monotonic() + SECONDS
        while clock.monotonic() < deadline:
            what = chance.random()
            if what < 0.05:
                client.flushdb()
            elif what < 0.1:
                cut_listeners_off(client)
            elif what < 0.12:
                call_command("dedupjobs_prune", "--purge", "--limit", "2", verbosity=0)
            else:
                jobs.record_briefly.enqueue(tag=chance.choice(tags))
            clock.sleep(chance.uniform(0, 0.05))


def cut_listeners_off(client: redis.Redis) -> None:
    """Close our listeners' connections; those of other databases belong to other tests."""
    ours = str(client.connection_pool.connection_kwargs["db"])
    for listener in client.client_list(_type="pubsub"):
        if listener["db"] == ours:
            client.client_kill_filter(_id=listener["id"])


def all_final() -> bool:
    return not ProcessedJob.objects.exclude(status__in=FINAL).exists()
