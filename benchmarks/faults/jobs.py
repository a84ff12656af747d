"""One job in four dresses. It says in a file where it stands, so that it can be hit there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import django_rq
from django.core.cache import cache
from django.utils import timezone
from rq import Retry

from dedupjobs import FOREVER, job

SHORT, LONG = 0.02, 0.5  # seconds before the effect, and after it
EVERY = 5  # so many jobs are short, then one is long


def work(number: int) -> None:
    """Have one effect, with some time before and after."""
    from benchmarks.faults.models import Effect  # noqa: PLC0415 - jobs load before models

    takes = LONG if number % EVERY == 0 else SHORT
    stands(number, "before")
    time.sleep(takes)
    Effect.objects.create(number=number)
    stands(number, "after")
    time.sleep(takes)
    stands(number, "done")


def stands(number: int, where: str) -> None:
    path = Path(os.environ["BENCH_HOME"], "work", str(os.getpid()))
    path.write_text(f"{where} {number}")


def once(func: Callable[[int], None]) -> Callable[[int], None]:
    """The decorator that teams write: a Redis lock around a row that says whether it is done."""

    @wraps(func)
    def run(number: int) -> None:
        from benchmarks.faults.models import DoneByHand  # noqa: PLC0415

        key = f"{func.__name__}:{number}"
        with cache.lock(f"lock:{key}", timeout=60):
            row, _ = DoneByHand.objects.get_or_create(key=key)
            if row.done_at is None:
                func(number)
                row.done_at = timezone.now()
                row.save()

    return run


def plain(number: int) -> None:
    work(number)


@once
def hand_made(number: int) -> None:
    work(number)


# On SQLite an atomic job must end within a third of its lease.
@job(key="atomic:{number}", unique_for=FOREVER, atomic=True, timeout=1.6, backoff=0.5)
def atomic(number: int) -> None:
    work(number)


@job(key="outside:{number}", unique_for=FOREVER, timeout=30, backoff=0.5)
def outside(number: int) -> None:
    work(number)


def call(dress: str, number: int, *, retry: bool, queue: str) -> None:
    """Call the job as a project with this dress does."""
    if dress in ("plain", "hand_made"):
        options: dict[str, Any] = {"retry": Retry(max=3)} if retry else {}
        function = plain if dress == "plain" else hand_made
        django_rq.get_queue(queue).enqueue(function, number, **options)
    else:
        function = atomic if dress == "atomic" else outside
        function.using(queue_name=queue).enqueue(number)
