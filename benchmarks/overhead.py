"""
What counting and logging add to a no-op job: drains with and without, in turn, in one process.

With: METRICS, and a log file at INFO. Without: neither. ``ratio`` is the middle of the rounds'
own ratios, each of two drains that follow each other, so that a busy machine disturbs both.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from django.core.management import call_command
from django.test import override_settings

from benchmarks import jobs, usage
from dedupjobs import counters

ROUNDS = 11
_numbers = count()


def measure(number: str) -> dict[str, Any]:
    """Return seconds and CPU per job; ``number``: jobs per drain."""
    usage.clear_servers()
    with tempfile.NamedTemporaryFile("w", suffix=".log") as file:
        _drain(int(number), observed=True, file=file.name)  # imports and connects
        rounds = []
        for i in range(ROUNDS):
            order = (True, False) if i % 2 else (False, True)
            rounds.append({o: _drain(int(number), observed=o, file=file.name) for o in order})
    wall, cpu = ([one[True][i] / one[False][i] for one in rounds] for i in (0, 1))
    return {
        "jobs_per_drain": int(number),
        "rounds": ROUNDS,
        "without_ms": _middle([one[False][0] for one in rounds], int(number)),
        "with_ms": _middle([one[True][0] for one in rounds], int(number)),
        "ratio": round(statistics.median(wall), 3),
        "ratio_of_cpu": round(statistics.median(cpu), 3),
    }


def _middle(seconds: list[float], number: int) -> float:
    return round(statistics.median(seconds) / number * 1000, 3)


def _drain(number: int, *, observed: bool, file: str) -> tuple[float, float]:
    """Fill the queue and empty it; return the seconds and CPU seconds of emptying."""
    for _ in range(number):
        jobs.deduplicated.enqueue(next(_numbers))
    with (
        _logging(file if observed else None),
        override_settings(DEDUPJOBS={"PUSH_TIMEOUT": 10, "METRICS": observed}),
    ):
        begun, used = time.perf_counter(), time.process_time()
        call_command("rqworker", "default", burst=True, verbosity=0)
        done = time.perf_counter() - begun, time.process_time() - used
        counters.pay()
    return done


@contextmanager
def _logging(file: str | None) -> Iterator[None]:
    logger = logging.getLogger("dedupjobs")
    handler = logging.FileHandler(file) if file else logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if file else logging.CRITICAL)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
