"""
What goes wrong on purpose: a worker and a work horse die by kill -9 in mid-charge, so does
the ledger at whatever it does, and Redis forgets everything.

The kills are timed by the payment service's own record: it has written a charge down and
not yet answered, so the money has moved and nobody on our side knows.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import connection
from django.utils import timezone

from dedupjobs.models import WAITING, JobAttempt, ProcessedJob
from project.demo import plan
from project.demo.family import parent_of
from project.demo.replay import exchange
from project.demo.stack import Stack

POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    what: str
    job_id: int
    at: datetime


class Faults:
    """Strikes by the plan; ``tell`` gets one sentence for each strike."""

    def __init__(self, stack: Stack, tell: Callable[[str], None], stop: threading.Event) -> None:
        self.stack = stack
        self.tell = tell
        self.stop = stop
        self.kills: list[Kill] = []
        self.waiting_at_wipe = 0

    def strike(self) -> None:
        started = time.monotonic()
        plans = [
            (plan.KILL_WORKER_AT, lambda: self._kill_in_mid_charge(whole_worker=True)),
            (plan.KILL_LEDGER_AT, self._kill_ledger),
            (plan.KILL_HORSE_AT, lambda: self._kill_in_mid_charge(whole_worker=False)),
            (plan.WIPE_REDIS_AT, self._wipe_redis),
        ]
        try:
            for at, fault in plans:
                if self.stop.wait(max(0.0, started + at - time.monotonic())):
                    return
                fault()
        finally:
            connection.close()

    def _kill_in_mid_charge(self, *, whole_worker: bool) -> None:
        """Try until a kill fell between the service's record and its answer."""
        for _ in self._polls("no charge was found waiting for its answer"):
            for charge in unanswered_charges():
                attempt = _open_attempt(charge["order"])
                if attempt and self._kill(attempt, charge, whole_worker=whole_worker):
                    return

    def _kill(self, attempt: JobAttempt, charge: dict[str, Any], *, whole_worker: bool) -> bool:
        """Kill the attempt's horse; return whether its charge was not answered by then."""
        horse = attempt.pid
        worker = self.stack.worker(parent_of(horse)) if horse else None
        if horse is None or worker is None:
            return False  # it has ended in the meantime
        if whole_worker:
            # The parent first, or it would bury its horse before it dies.
            worker.expected_to_end = True
            worker.popen.kill()
        try:
            os.kill(horse, signal.SIGKILL)
        except ProcessLookupError:
            if not whole_worker:
                return False
        in_mid_charge = _is_unanswered(charge)
        what = f"{worker.name} and its horse" if whole_worker else f"a horse of {worker.name}"
        kill = Kill(what=what, job_id=attempt.job_id, at=timezone.now())
        self.kills.append(kill)
        moment = "in the middle of" if in_mid_charge else "just after"
        self.tell(f"kill -9 {what}, {moment} charging {charge['order']}")
        if whole_worker:
            worker.popen.wait()
            self.tell(f"started {self.stack.start_worker().name} in its place")
        return in_mid_charge

    def _kill_ledger(self) -> None:
        self.stack.ledger_process().popen.kill()
        self.tell("kill -9 the ledger, which takes events in")

    def _wipe_redis(self) -> None:
        waiting = ProcessedJob.objects.filter(status__in=WAITING)
        for _ in self._polls("the workers were never behind"):
            if waiting.count() >= plan.WAITING_AT_WIPE:
                break
        self.waiting_at_wipe = waiting.count()
        self.stack.wipe_redis()
        command = self.stack.wipe_command
        self.tell(f"wiped Redis ({command}) with {self.waiting_at_wipe} jobs waiting in it")

    def _polls(self, otherwise: str) -> Iterator[None]:
        deadline = time.monotonic() + plan.FAULT_WITHIN_SECONDS
        while not self.stop.wait(POLL_SECONDS):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{otherwise} within {plan.FAULT_WITHIN_SECONDS:.0f} s")
            yield


def charges() -> list[dict[str, Any]]:
    """Return the payment service's record, in order."""
    status, _, content = exchange(settings.PAYMENT_SERVICE_URL, "GET", "/charges")
    if status == 0:
        raise ConnectionError("the payment service does not answer")
    found: list[dict[str, Any]] = json.loads(content)["charges"]
    return found


def unanswered_charges() -> list[dict[str, Any]]:
    """Return what is recorded and not answered, the newest first: it will wait the longest."""
    try:
        found = charges()
    except ConnectionError:
        return []
    return [charge for charge in reversed(found) if charge["answered_at"] is None]


def _is_unanswered(charge: dict[str, Any]) -> bool:
    return charge["id"] in {waiting["id"] for waiting in unanswered_charges()}


def _open_attempt(payment_id: str) -> JobAttempt | None:
    return (
        JobAttempt.objects.filter(
            job__name="shop.charge", job__key=f"payment:{payment_id}", outcome=None
        )
        .select_related("job")
        .first()
    )
