"""How fast a worker empties a full queue, and what a job costs there."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass

import django_rq
from django.core.management import call_command

from benchmarks import jobs, stamps, usage
from benchmarks.stamps import Stamps
from benchmarks.usage import Usage

WARM_UP = 2  # jobs of the short burst
BY_QUEUE = {"plain RQ": jobs.plain, "hand-made": jobs.hand_made}


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    ran: Stamps
    used: Usage


def measure(dressing: str, count: str) -> dict[str, float]:
    """Drain ``count`` jobs; the worker class is the one in the settings."""
    # By a child, since what it imports and connects must not warm up the worker.
    filling = multiprocessing.get_context("fork").Process(
        target=_fill, args=(dressing, WARM_UP + int(count))
    )
    filling.start()
    filling.join()
    short, long = _burst(WARM_UP), _burst(None)
    for burst, wanted in ((short, WARM_UP), (long, int(count))):
        if burst.ran.count != wanted:
            raise RuntimeError(f"{burst.ran.count} of {wanted} jobs ran")
    more, used = long.ran.count - short.ran.count, long.used - short.used
    return {
        "per_second": long.ran.per_second,
        "cpu_ms": used.cpu / more * 1000,
        "redis_trips": used.trips / more,
        "redis_commands": used.commands / more,
    }


def _fill(dressing: str, count: int) -> None:
    usage.clear_servers()
    queue = django_rq.get_queue("default")
    for number in range(count):
        if dressing in BY_QUEUE:
            queue.enqueue(BY_QUEUE[dressing], number)
        else:
            jobs.deduplicated.enqueue(number)


def _burst(max_jobs: int | None) -> Burst:
    """Run what ``manage.py rqworker --burst`` runs."""
    stamps.reset()
    before = Usage.now()
    call_command("rqworker", "default", burst=True, max_jobs=max_jobs, verbosity=0)
    return Burst(ran=stamps.read(), used=Usage.now() - before)
