"""How fast one process enqueues many new keys at once, and many that are queued already."""

from __future__ import annotations

import time
from collections.abc import Callable

import django_rq
from rq import Queue

from benchmarks import jobs, usage
from benchmarks.usage import Usage

WARM_UP = 10


def measure(way: str, count: str) -> dict[str, float]:
    """Enqueue ``count`` new keys in one call, then the same ones again."""
    usage.clear_servers()
    call = WAYS[way]
    call(range(WARM_UP))
    call(range(WARM_UP))
    numbers = range(WARM_UP, WARM_UP + int(count))
    figures = _timed(call, numbers, "new")
    if way != "Queue.enqueue_many":  # it knows no duplicates
        figures |= _timed(call, numbers, "duplicate")
    return figures


def _timed(call: Callable[[range], object], numbers: range, what: str) -> dict[str, float]:
    before, begun = Usage.now(), time.perf_counter()
    call(numbers)
    seconds, used = time.perf_counter() - begun, Usage.now() - before
    return {
        f"{what}_per_second": len(numbers) / seconds,
        f"{what}_cpu_us": used.cpu / len(numbers) * 1_000_000,
    }


def _plain(numbers: range) -> None:
    queue = django_rq.get_queue("default")
    queue.enqueue_many([Queue.prepare_data(jobs.plain, args=(number,)) for number in numbers])


def _in_bulk(numbers: range) -> None:
    jobs.deduplicated.enqueue_many({"number": number} for number in numbers)


def _one_by_one(numbers: range) -> None:
    for number in numbers:
        jobs.deduplicated.enqueue(number)


WAYS: dict[str, Callable[[range], object]] = {
    "Queue.enqueue_many": _plain,
    "dedupjobs one by one": _one_by_one,
    "dedupjobs in bulk": _in_bulk,
}
