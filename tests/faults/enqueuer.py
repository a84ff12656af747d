"""Calls jobs in a loop and writes down which calls were committed; rate.txt says how fast."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

from django.db import DatabaseError, InterfaceError, connections, transaction

from dedupjobs.exceptions import DedupJobsError
from tests.faults import ledger

SHARES = {
    "plain": 24,
    "free": 5,
    "patient": 5,
    "slow": 4,
    "atomic": 20,
    "completing": 14,
    "fenced": 9,
    "flaky": 5,
    "stepping": 12,
    "latest": 10,
    "newest": 8,
    "forking": 1,
}
AGAIN = 0.25  # of all calls are made twice or more
ROLLED_BACK = 0.05
IN_TRANSACTION = 0.5
WHILE_IT_RUNS = 0.15  # seconds after a call


class _UndoError(Exception):
    """Roll the caller's transaction back."""


def main(name: str) -> None:
    """Call until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    rng = random.Random(f"{os.environ['FAULTS_SEED']} {name}")
    for number in count(1):
        if stop.wait(_pause()):
            return
        kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
        tag = f"{kind}.{name}.{number if kind not in ('latest', 'newest') else number % 3}"
        times = 1 + (rng.random() < AGAIN) + (rng.random() < AGAIN**2)
        for repeat in range(3 if kind == "latest" else times):
            if repeat and kind == "latest":
                stop.wait(WHILE_IT_RUNS)
            rolls_back = rng.random() < ROLLED_BACK and repeat == 0
            call(kind, tag, number * 10 + repeat, rng=rng, rolls_back=rolls_back)
            ask(kind, tag)


def call(
    kind: str, tag: str, number: int, *, rng: random.Random | None = None, rolls_back: bool = False
) -> int | None:
    """Make one call and write down what came of it; return the row's primary key."""
    enqueue = _call_of(kind, tag, number)
    in_transaction = rolls_back or (rng is not None and rng.random() < IN_TRANSACTION)
    ledger.write("calling", kind=kind, tag=tag, number=number)
    try:
        if in_transaction:
            with transaction.atomic():
                outcome = enqueue()
                if rolls_back:
                    raise _UndoError
        else:
            outcome = enqueue()
    except _UndoError:
        ledger.write("rolled back", kind=kind, tag=tag, number=number)
    except (DatabaseError, InterfaceError) as error:
        ledger.write("doubtful", kind=kind, tag=tag, number=number, error=repr(error)[:200])
        connections.close_all()
    except DedupJobsError as error:
        ledger.write("refused", kind=kind, tag=tag, number=number, error=repr(error)[:200])
    else:
        pk = outcome.job.pk if outcome.job else None
        ledger.write(
            "committed", kind=kind, tag=tag, number=number, job=pk, answer=str(outcome.kind)
        )
        return pk
    return None


def ask(kind: str, tag: str) -> None:
    """Ask how the job stands, as a page that shows it would."""
    from tests.faults.app import jobs

    job = jobs.plain if kind == "slow" else getattr(jobs, kind)
    try:
        job.status(tag=tag)
    except (DatabaseError, InterfaceError):
        connections.close_all()


def _call_of(kind: str, tag: str, number: int) -> Callable[[], Any]:
    from tests.faults.app import jobs

    if kind == "slow":
        work = 1 + number // 10 % 4 / 2.5  # equal for all calls with this tag
        return lambda: jobs.plain.enqueue(tag=tag, work=work)
    if kind in ("latest", "newest"):
        return lambda: getattr(jobs, kind).enqueue(tag=tag, number=number)
    return lambda: getattr(jobs, kind).enqueue(tag=tag)


def _pause() -> float:
    try:
        return float((ledger.home() / "rate.txt").read_text())
    except (FileNotFoundError, ValueError):
        return 0.2
