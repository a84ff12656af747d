"""
What the status cache saves, and how fast a change is heard: python -m benchmarks.caching [--help].

Every figure is taken in one process and, where it is a ratio, of both sides in turn.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

LISTENERS = 4
UNHEARD = 50  # changes that nobody tells
ROUNDS = 5


def measure(reads: str, changes: str) -> dict[str, float]:
    """Return the figures; ``reads`` and ``changes`` say how many of each."""
    from django.core.management import call_command  # noqa: PLC0415 - after the set-up

    call_command("migrate", verbosity=0)
    return {
        **_reads(int(reads)),
        **_enqueues(int(reads) // 10),
        **_news(int(changes)),
        **_unheard(),
    }


# ---- reading


def _reads(count: int) -> dict[str, float]:
    from django.db import connection  # noqa: PLC0415
    from django.test.utils import CaptureQueriesContext  # noqa: PLC0415

    from benchmarks.jobs import deduplicated  # noqa: PLC0415
    from dedupjobs import cache, lifecycle  # noqa: PLC0415
    from dedupjobs.testing import run_pending  # noqa: PLC0415

    row = deduplicated.enqueue(0).job
    run_pending()
    key = row.key_hash
    cache.read(key, holds=True)
    client = cache.client().redis
    entry = cache.entry_key(key)

    def from_redis() -> None:
        cache._from_redis(key)

    def from_database() -> None:
        lifecycle.jobs().filter(key_hash=key).first()

    def uncached() -> None:
        cache.expire(key)
        client.delete(entry)
        cache.read(key, holds=True)

    # Who asks nobody else is measured by the time of his own processor.
    l1, status = (
        _rate(lambda: cache.read(key, holds=True), count, time.process_time),
        _rate(lambda: deduplicated.status(0), count // 10, time.process_time),
    )
    bare, l2 = _in_turn(lambda: client.get(entry), from_redis, count // 50)
    with CaptureQueriesContext(connection) as asked:
        uncached()
    return {
        "l1_reads_per_second": l1,
        "status_calls_per_second": status,
        "redis_gets_per_second": bare,
        "l2_reads_per_second": l2,
        "l2_read_over_bare_get": bare / l2,
        "database_reads_per_second": _rate(from_database, count // 100),
        "queries_of_a_miss": len(asked),
    }


def _rate(
    call: Callable[[], Any], count: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return calls per second, the best of some rounds."""
    rates = []
    for _ in range(ROUNDS):
        begun = clock()
        for _ in range(count):
            call()
        rates.append(count / (clock() - begun))
    return max(rates)


def _in_turn(one: Callable[[], Any], another: Callable[[], Any], count: int) -> tuple[float, float]:
    """Return both rates, measured in small turns so that a busy machine burdens both alike."""
    rates: list[tuple[float, float]] = []
    for _ in range(ROUNDS * 4):
        rates.append((_once(one, count // 4), _once(another, count // 4)))
    ratio = median(a / b for a, b in rates)
    best = max(a for a, _ in rates)
    return best, best / ratio


def _once(call: Callable[[], Any], count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return count / (time.perf_counter() - begun)


# ---- enqueueing what is mostly done


def _enqueues(count: int) -> dict[str, float]:
    """Enqueue 10 % new keys and 90 % that have succeeded, with the cache and without."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(ROUNDS):
        for cached in (True, False):
            rates[cached].append(_mixed(f"{turn}{cached}", count // 10, cached=cached))
    return {
        "cached_enqueues_per_second": max(rates[True]),
        "uncached_enqueues_per_second": max(rates[False]),
        "cached_over_uncached_enqueues": median(
            a / b for a, b in zip(rates[True], rates[False], strict=True)
        ),
    }


def _mixed(tag: str, count: int, *, cached: bool) -> float:
    from django.test import override_settings  # noqa: PLC0415

    from benchmarks.jobs import deduplicated  # noqa: PLC0415
    from dedupjobs import cache  # noqa: PLC0415
    from dedupjobs.testing import run_pending  # noqa: PLC0415

    base = abs(hash(tag)) % 10**9
    done = [base + n for n in range(20)]
    deduplicated.enqueue_many([{"number": n} for n in done])
    run_pending()
    chance = random.Random(1)
    calls = [
        base + 1_000 + n if chance.random() < 0.1 else chance.choice(done) for n in range(count)
    ]
    ours = {"PUSH_TIMEOUT": 10, **({} if cached else {"STATUS_CACHE": None})}
    with override_settings(DEDUPJOBS=ours):
        cache.forget_clients()
        for number in done:  # as a process that has been up for a while
            deduplicated.enqueue(number)
        begun = time.perf_counter()
        for number in calls:
            deduplicated.enqueue(number)
        return count / (time.perf_counter() - begun)


# ---- being told


def _listener(heard: Any, ready: Any) -> None:
    """Note when each message is heard; runs in a process of its own."""
    import django  # noqa: PLC0415

    django.setup()
    from dedupjobs import invalidation  # noqa: PLC0415

    for raw in invalidation.messages(lambda: False, poll=0.2):
        now = time.monotonic()
        if raw is None:
            ready.release()
        elif (message := invalidation.handle(raw)) is not None:
            heard.put((message.version, now))


def _news(count: int) -> dict[str, float]:
    """Announce changes, one each 5 ms, to LISTENERS other processes."""
    from benchmarks.jobs import deduplicated  # noqa: PLC0415
    from dedupjobs import invalidation  # noqa: PLC0415
    from dedupjobs.lifecycle import Change  # noqa: PLC0415

    spawning = multiprocessing.get_context("spawn")
    heard, ready = spawning.Queue(), spawning.Semaphore(0)
    listeners = [
        spawning.Process(target=_listener, args=(heard, ready), daemon=True)
        for _ in range(LISTENERS)
    ]
    for listener in listeners:
        listener.start()
    try:
        for _ in listeners:
            ready.acquire(timeout=60)
        row = deduplicated.enqueue(0).job
        sent, delays = {}, []
        for version in range(count):
            sent[version] = time.monotonic()
            invalidation.announce([Change.of(row, row.status, version=version)])
            time.sleep(0.005)
        for _ in range(count * LISTENERS):
            version, at = heard.get(timeout=60)
            delays.append(at - sent[version])
    finally:
        for listener in listeners:
            listener.terminate()
            listener.join(10)
    cuts = quantiles(delays, n=100)
    return {"heard_after_p50_ms": 1000 * cuts[49], "heard_after_p99_ms": 1000 * cuts[98]}


# ---- not being told


def _unheard() -> dict[str, float]:
    """Change keys that this process knows, tell nobody, and see how long it believes the old."""
    from django.test import override_settings  # noqa: PLC0415

    from benchmarks.jobs import deduplicated  # noqa: PLC0415
    from dedupjobs import FOREVER, cache, clock, lifecycle  # noqa: PLC0415
    from dedupjobs.lifecycle import Place  # noqa: PLC0415
    from dedupjobs.models import Status  # noqa: PLC0415

    with override_settings(DEDUPJOBS={"LISTEN": "never", "PUSH_TIMEOUT": 10}):
        cache.forget_clients()
        numbers = range(5_000_000, 5_000_000 + UNHEARD)
        deduplicated.enqueue_many([{"number": n} for n in numbers])
        changed = {}
        for number in numbers:
            job = deduplicated.enqueue(number).job
            deduplicated.status(number)
            claim = lifecycle.claim(job.pk, 1, owner=clock.token(), place=Place())
            lifecycle.complete(claim, "null", unique_for=FOREVER)  # type: ignore[arg-type]
            changed[number] = time.monotonic()
        delays = []
        while changed:
            for number, at in list(changed.items()):
                if deduplicated.status(number) is Status.SUCCEEDED:
                    delays.append(time.monotonic() - at)
                    del changed[number]
            time.sleep(0.01)
    return {"unheard_believed_max_s": max(delays)}


# ---- the command


def main() -> None:
    from benchmarks import servers  # noqa: PLC0415

    parser = argparse.ArgumentParser(prog="python -m benchmarks.caching", description=__doc__)
    parser.add_argument("--reads", type=int, default=200_000, help="reads per figure (200,000)")
    parser.add_argument("--changes", type=int, default=1_000, help="changes told (1,000)")
    parser.add_argument("--database", choices=servers.DATABASES, action="append")
    options = parser.parse_args()
    for name in options.database or servers.installed_databases():
        with ExitStack() as stack:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            redis_url = stack.enter_context(servers.redis_server(home))
            database = stack.enter_context(servers.database(name, home))
            environment = {
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
                "BENCH_REDIS": redis_url,
                "BENCH_DATABASE": json.dumps(database),
                "BENCH_WORKER": "dedupjobs.worker.DedupWorker",
            }
            arguments = ["caching", str(options.reads), str(options.changes)]
            command = [sys.executable, "-m", "benchmarks.measure", *arguments]
            printed = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            ).stdout
        print(f"\n{name}")
        for what, figure in json.loads(printed.splitlines()[-1]).items():
            print(f"  {what.replace('_', ' '):32} {figure:>14,.2f}")


if __name__ == "__main__":
    main()
