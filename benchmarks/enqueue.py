"""How fast one process enqueues new keys, keys that are queued already, and keys that are done."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import django_rq
from django.core.management import call_command
from django.db import connections
from rq import Queue
from rq.exceptions import DuplicateJobError

from benchmarks import jobs, usage
from benchmarks.usage import Usage
from dedupjobs import cache

WARM_UP = 10


def measure(way: str, count: str) -> dict[str, float]:
    """
    Call ``count`` times with new keys, with the same ones again, and with one new key in ten;
    then let all these jobs run, and call again what has been asked for once since.
    """
    usage.clear_servers()
    call = WAYS[way](django_rq.get_queue("default"))
    numbers = range(WARM_UP, WARM_UP + int(count))
    for number in (*range(WARM_UP), *range(WARM_UP)):
        call(number)
    figures = _timed(call, numbers, "new")
    if way == "Queue.enqueue":  # it knows no duplicates
        return figures
    figures |= _timed(call, numbers, "duplicate")
    figures |= _timed(call, [-n if n % 10 == 0 else n for n in numbers], "mixed")
    _drain()
    for number in (*range(WARM_UP), *range(WARM_UP), *numbers):
        call(number)
    cache.expire_all()  # as another process of the same pool
    return figures | _timed(call, numbers, "done")


def _drain() -> None:
    """Run what is queued in a child, since this process must not know by itself how it ended."""
    connections.close_all()
    child = multiprocessing.get_context("fork").Process(
        target=call_command, args=("rqworker", "default"), kwargs={"burst": True, "verbosity": 0}
    )
    child.start()
    child.join()


def _timed(call: Callable[[int], object], numbers: Sequence[int], what: str) -> dict[str, float]:
    before, begun = Usage.now(), time.perf_counter()
    for number in numbers:
        call(number)
    seconds, used = time.perf_counter() - begun, Usage.now() - before
    return {
        f"{what}_per_second": len(numbers) / seconds,
        f"{what}_redis_trips": (used.trips - 1) / len(numbers),  # one is our own question
    }


def _plain(queue: Queue) -> Callable[[int], object]:
    return lambda number: queue.enqueue(jobs.plain, number)


def _unique(queue: Queue) -> Callable[[int], object]:
    def call(number: int) -> None:
        with suppress(DuplicateJobError):
            queue.enqueue(jobs.plain, number, job_id=f"noop-{number}", unique=True)

    return call


def _deduplicated(queue: Queue) -> Callable[[int], object]:
    return jobs.deduplicated.enqueue


WAYS: dict[str, Callable[[Queue], Callable[[int], object]]] = {
    "Queue.enqueue": _plain,
    "Queue.enqueue(unique=True)": _unique,
    "dedupjobs": _deduplicated,
}
