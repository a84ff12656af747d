"""How fast a worker empties a full queue, and what a job costs there."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass

import django_rq
from django.core.management import call_command

from benchmarks import jobs, stamps, usage
from benchmarks.stamps import Stamps
from benchmarks.usage import Usage

WARM_UP = 2  # messages of the short burst
PER_BATCH = 100  # rows of a message, as DEDUPJOBS["BATCH"] has it
BY_QUEUE = {"plain RQ": jobs.plain, "hand-made": jobs.hand_made}
SINGLE = {"dedupjobs": jobs.alone, "fetched together": jobs.deduplicated}
IN_BATCHES = {
    "each ending written": jobs.deduplicated,
    "atomic": jobs.atomic,
    "group": jobs.grouped,
    "10 ms, 16 threads": jobs.waiting,
    "10 ms, one at a time": jobs.waiting_alone,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    ran: Stamps
    used: Usage


def measure(dressing: str, count: str) -> dict[str, float]:
    """Drain ``count`` jobs, or batches; the worker class is the one in the settings."""
    rows = PER_BATCH if _shares(dressing) else 1
    # By a child, since what it imports and connects must not warm up the worker.
    filling = multiprocessing.get_context("fork").Process(
        target=_fill, args=(dressing, (WARM_UP + int(count)) * rows)
    )
    filling.start()
    filling.join()
    short, long = _burst(WARM_UP), _burst(None)
    for burst, wanted in ((short, WARM_UP * rows), (long, int(count) * rows)):
        if burst.ran.count != wanted:
            raise RuntimeError(f"{burst.ran.count} of {wanted} jobs ran")
    more, used = long.ran.count - short.ran.count, long.used - short.used
    return {
        "per_second": long.ran.per_second,
        "cpu_ms": used.cpu / more * 1000,
        "redis_trips": used.trips / more,
        "redis_commands": used.commands / more,
        "memory_mb": usage.largest_process() / 1e6,
    }


def _shares(dressing: str) -> bool:
    return dressing in IN_BATCHES and IN_BATCHES[dressing].options.batch is not False


def _fill(dressing: str, count: int) -> None:
    usage.clear_servers()
    if dressing in IN_BATCHES:
        IN_BATCHES[dressing].enqueue_many({"number": number} for number in range(count))
        return
    queue = django_rq.get_queue("default")
    for number in range(count):
        if dressing in BY_QUEUE:
            queue.enqueue(BY_QUEUE[dressing], number)
        else:
            SINGLE[dressing].enqueue(number)


def _burst(max_jobs: int | None) -> Burst:
    """Run what ``manage.py rqworker --burst`` runs."""
    stamps.reset()
    before = Usage.now()
    call_command("rqworker", "default", burst=True, max_jobs=max_jobs, verbosity=0)
    return Burst(ran=stamps.read(), used=Usage.now() - before)
