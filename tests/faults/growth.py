"""
Does anything grow with the number of jobs? Memory, threads, files, connections, keys in Redis.

    python -m tests.faults.growth rq.SimpleWorker --jobs 20000

One worker with its coordinator, and nothing that goes wrong. What a process needs once is there
after a fifth of the jobs; from then on nothing may grow.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil

from tests.faults.house import USUAL, House
from tests.processes import Spawned
from tests.waiting import until

SHORT_LIVED = 120  # seconds
SETTLED = 8.0  # seconds after which a coordinator has done each of its duties once
PAGE = 100  # jobs that are enqueued at once
SAMPLES = 20
MAY_GROW = 3_000_000  # bytes of memory from the first fifth to the end: an allocator's noise


@dataclass(frozen=True, slots=True)
class Sample:
    """What the worker's long-lived processes have, and the servers of them."""

    jobs: int
    memory: int  # bytes that are its own, of worker and coordinator
    threads: int
    files: int
    connections: int  # of the database, all but ours
    keys: int


def main() -> int:
    options = _options()
    samples = run(options.worker, options.jobs, options.database)
    grown = complaints(samples)
    print("\n".join(grown) or "nothing grows")
    return 1 if grown else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.growth")
    parser.add_argument("worker")
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--database", default="postgresql")
    return parser.parse_args()


def run(worker: str, jobs: int, database: str) -> list[Sample]:
    """Let one worker run the jobs, and look at it SAMPLES times."""
    with (
        tempfile.TemporaryDirectory(prefix="dedupjobs-faults-") as folder,
        House(database, Path(folder)) as house,
    ):
        settings = {**USUAL, "PUSH_TIMEOUT": 10}  # a page is no web request
        env = house.env(direct=True, settings=settings, worker=worker)
        os.environ.update(env)
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", run_syncdb=True, verbosity=0)
        commands = [["rqworker", "default"]]
        if "dedupjobs" not in worker:
            commands.append(["dedupjobs_coordinator"])
        actors = [
            Spawned([sys.executable, "-m", "django", *command], {**os.environ, **env})
            for command in commands
        ]
        try:
            return _samples(actors, jobs)
        finally:
            for actor in actors:
                actor.stop()


def _samples(actors: list[Spawned], jobs: int) -> list[Sample]:
    from dedupjobs import locks
    from tests.faults.app import jobs as specimens

    samples: list[Sample] = []
    every = max(jobs // SAMPLES, 1)
    specimens.silent.enqueue_many([{"tag": f"first.{n}"} for n in range(PAGE)])
    until(lambda: _all_done() and locks.leader(), 300, every=0.2, what="a coordinator leads")
    led = time.monotonic()
    until(
        lambda: min(time.monotonic() - led, _youngest(actors)) > SETTLED,
        300,
        every=0.2,
        what="all is up",
    )
    for start in range(0, jobs, PAGE):
        calls = [{"tag": f"growth.{start + n}"} for n in range(PAGE)]
        specimens.silent.enqueue_many(calls)
        until(_all_done, 300, every=0.05, what="the page is done")
        if (start + PAGE) // every > start // every:
            samples.append(_sample(actors, start + PAGE))
            print(json.dumps(asdict(samples[-1])), flush=True)
    return samples


def _youngest(actors: list[Spawned]) -> float:
    """Return the age, in seconds, of the newest process that has not just been forked for a job."""
    found = [psutil.Process(actor.pid) for actor in actors]
    found += [child for one in found for child in one.children()]
    return time.time() - max(one.create_time() for one in found)


def _all_done() -> bool:
    from dedupjobs.models import ACTIVE, ProcessedJob

    return not ProcessedJob.objects.filter(status__in=ACTIVE).exists()


def _sample(actors: list[Spawned], jobs: int) -> Sample:
    # A horse may just be leaving; its parent and the coordinator stay.
    found = [psutil.Process(actor.pid) for actor in actors]
    children = [child for one in found for child in one.children()]
    found += [child for child in children if time.time() - child.create_time() > 1]
    return Sample(
        jobs=jobs,
        memory=sum(one.memory_full_info().uss for one in found),
        threads=sum(one.num_threads() for one in found),
        files=sum(one.num_fds() for one in found),
        connections=_connections(),
        keys=_keys(),
    )


def _connections() -> int:
    from django.db import connection

    if connection.vendor != "postgresql":
        return 0
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        return int(cursor.fetchone()[0]) - 1


def _keys() -> int:
    """
    Return how many keys are there to stay: RQ keeps what it knows of a finished job a minute.

    A row is done a moment before RQ is done with its message, which could stay for a week.
    """
    import redis
    from django.conf import settings

    with redis.Redis.from_url(settings.RQ_URL) as client:
        until(lambda: not client.zcard("rq:wip:default"), 30, what="RQ is done with all messages")
    count = 0
    for url in (settings.RQ_URL, settings.CACHE_URL):
        with redis.Redis.from_url(url) as client, client.pipeline(transaction=False) as pipe:
            for key in list(client.scan_iter(count=1000)):
                pipe.pttl(key)
            # -1: for ever; -2: it has gone since we saw it
            count += sum(left == -1 or left > 1000 * SHORT_LIVED for left in pipe.execute())
    return count


def complaints(samples: list[Sample]) -> list[str]:
    """Return what has grown since a fifth of the jobs were done."""
    settled = [s for s in samples if s.jobs > samples[-1].jobs / 5]
    third = max(len(settled) // 3, 1)
    before, after = settled[:third], settled[-third:]
    found = []
    for what in ("memory", "threads", "files", "connections", "keys"):
        old, new = (median(getattr(s, what) for s in part) for part in (before, after))
        may = MAY_GROW if what == "memory" else 2
        if new > old + may:
            found.append(f"{what} grew from {old:.0f} to {new:.0f}")
    return found


if __name__ == "__main__":
    sys.exit(main())
