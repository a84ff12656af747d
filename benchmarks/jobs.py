"""One job that does nothing, dressed in three ways."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps

from django.core.cache import cache
from django.utils import timezone

from benchmarks import stamps
from dedupjobs import FOREVER, job


def once(func: Callable[[int], None]) -> Callable[[int], None]:
    """The decorator that teams write: a Redis lock around a row that says whether it is done."""

    @wraps(func)
    def run(number: int) -> None:
        from benchmarks.models import DoneByHand  # noqa: PLC0415 - jobs load before models

        key = f"{func.__name__}:{number}"
        with cache.lock(f"lock:{key}", timeout=60):
            row, _ = DoneByHand.objects.get_or_create(key=key)
            if row.done_at is None:
                func(number)
                row.done_at = timezone.now()
                row.save()

    return run


def plain(number: int) -> None:
    stamps.mark()


@once
def hand_made(number: int) -> None:
    stamps.mark()


@job(key="noop:{number}", unique_for=FOREVER)
def deduplicated(number: int) -> None:
    stamps.mark()


@job(key="free:{number}", unique_for=FOREVER, concurrency_control="optimistic")
def free(number: int) -> None:
    stamps.mark()


@job(
    key="free grouped:{number}", unique_for=FOREVER, batch="group",
    concurrency_control="optimistic",
)  # fmt: skip
def free_grouped(number: int) -> None:
    stamps.mark()


@job(key="alone:{number}", unique_for=FOREVER, batch=False)
def alone(number: int) -> None:
    stamps.mark()


@job(key="grouped:{number}", unique_for=FOREVER, batch="group")
def grouped(number: int) -> None:
    stamps.mark()


@job(key="atomic:{number}", unique_for=FOREVER, atomic=True, timeout=15)
def atomic(number: int) -> None:
    stamps.mark()


@job(key="waits:{number}", unique_for=FOREVER)
def waiting(number: int) -> None:
    """Wait as for a service that answers in 10 ms."""
    stamps.mark()
    time.sleep(0.01)


@job(key="waits alone:{number}", unique_for=FOREVER, batch=False)
def waiting_alone(number: int) -> None:
    waiting.func(number)
