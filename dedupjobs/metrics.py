"""Counts what signals tell; a receiver of signals that nobody imports but ``apps``."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.core.signals import request_finished

from dedupjobs import cache, counters, runner, signals
from dedupjobs.endings import Ending, Failed, Interrupted, Snoozed
from dedupjobs.exceptions import Retry
from dedupjobs.lifecycle import Change, Claim, Lost
from dedupjobs.models import AttemptOutcome, Status
from dedupjobs.signals import LockEvent

ASKED = f"{Retry.__module__}.{Retry.__qualname__}"


def connect() -> None:
    """Count from now on."""
    for signal, receiver in (
        (signals.insert_lost, _insert_lost),
        (signals.lock_moved, _lock_moved),
        (signals.attempt_started, _started),
        (signals.attempt_ended, _ended),
        (signals.attempt_lost, _lost),
        (signals.job_dead, _dead),
        (signals.messages_resent, _resent),
        (signals.operated, _operated),
        (signals.job_changed, _changed),
        (signals.job_invalidated, _invalidated),
    ):
        signals.hear(signal, receiver)
    request_finished.connect(_request_finished, dispatch_uid="dedupjobs.metrics")
    if _cache_reads not in counters.sources:
        counters.sources.append(_cache_reads)


def _insert_lost(sender: str, **_: Any) -> None:
    counters.add("idempotency_conflict_total", sender)


def _lock_moved(sender: str, event: LockEvent, **_: Any) -> None:
    match event:
        case LockEvent.ACQUIRED | LockEvent.TAKEN_OVER:
            counters.add("lock_acquire_success_total")
        case LockEvent.BUSY:
            counters.add("lock_acquire_failed_total", "busy")
        case LockEvent.UNREACHABLE:
            counters.add("lock_acquire_failed_total", "unreachable")
        case LockEvent.EXPIRED:
            counters.add("lock_expired_before_completion_total", sender)


def _started(sender: str, claim: Claim, **_: Any) -> None:
    if claim.queue_delay is not None:
        counters.observe("queue_delay_seconds", claim.queue, seconds=claim.queue_delay)
    if claim.lock_wait is not None:
        counters.observe("lock_wait_seconds", sender, seconds=claim.lock_wait)


def _ended(
    sender: str, ending: Ending, status: Status | None, run_time: float | None, **_: Any
) -> None:
    if status is None:
        return  # whoever took the attempt has counted it
    if run_time is not None:
        counters.observe("job_processing_duration_seconds", sender, seconds=run_time)
    counters.add("attempts_total", runner.outcome_of(ending) or "", sender)
    if reason := _retried(ending, status):
        counters.add("job_retry_total", reason, sender)


def _retried(ending: Ending, status: Status) -> str:
    """Return why another attempt follows this one, or an empty text."""
    match ending:
        case Failed() if status == Status.RETRYING:
            if ending.timed_out:
                return "timeout"
            return "asked" if ending.error.type == ASKED else "error"
        case Snoozed() if status == Status.RETRYING:
            return "snoozed"
        case Interrupted() if status == Status.PENDING:
            return "interrupted"
    return ""


def _lost(sender: str, lost: Lost, cause: str, **_: Any) -> None:
    counters.add("attempts_total", lost.outcome, sender)
    counters.add("recovered_total", cause)
    counters.observe("recovery_seconds", cause, seconds=lost.silent_for)
    if cause == "lease":
        counters.add("stale_processing_records_total", sender)
    if lost.status == Status.RETRYING:
        reason = "returned" if lost.outcome == AttemptOutcome.RETURNED else "lost"
        counters.add("job_retry_total", reason, sender)


def _dead(sender: str, **_: Any) -> None:
    counters.add("jobs_dead_total", sender)


def _resent(queue: str, count: int, cause: str, waited: float, **_: Any) -> None:
    counters.add("requeued_stuck_total", cause, queue, number=count)
    counters.observe("recovery_seconds", cause, seconds=waited, number=count)


def _operated(sender: str, action: str, **_: Any) -> None:
    if action == "retry":
        counters.add("job_retry_total", "operator", sender)


def _changed(changes: Sequence[Change], **_: Any) -> None:
    if cache.is_on():
        counters.add("invalidations_sent_total", number=len(changes))


def _invalidated(**_: Any) -> None:
    counters.add("invalidations_received_total")


def _request_finished(**_: Any) -> None:
    counters.pay_if_due()


@dataclass(slots=True)
class _Told:
    """The reads of the status cache that were counted already."""

    reads: Counter[str] = field(default_factory=Counter)
    guard: threading.Lock = field(default_factory=threading.Lock)


_told = _Told()


def _forget_told() -> None:
    global _told  # noqa: PLW0603 - a forked child counts its own reads from 0
    _told = _Told()


os.register_at_fork(after_in_child=_forget_told)

_READS = {
    "process": "cache_hits_total|process",
    "redis": "cache_hits_total|redis",
    "missed": "cache_misses_total",
}


def _cache_reads() -> Mapping[str, int]:
    """Return the reads of the status cache that were not counted yet."""
    with _told.guard:
        now = Counter(cache.counts)
        fresh = now - _told.reads
        _told.reads = now
    return {_READS[level]: number for level, number in fresh.items()}
