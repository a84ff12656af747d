"""The facts that the sentences of ``why`` need, read from a row, its newest attempt and its job."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.utils.translation import gettext as _

from dedupjobs import conf, controls, lifecycle, locks, operations, registry
from dedupjobs.backoff import Exponential
from dedupjobs.models import JobAttempt, ProcessedJob
from dedupjobs.story import progress
from dedupjobs.story.why import Situation, Try


def situation(row: ProcessedJob, newest: JobAttempt | None, now: datetime) -> Situation:
    """Return the facts that the sentences need."""
    options = controls.known().options_of(row.name)
    known = registry.find(row.name) is not None
    longest, jitter = _longest_delay(options.backoff, row.failures)
    return Situation(
        status=row.status,
        now=now,
        run_after=row.run_after,
        name=row.name,
        queue=row.queue,
        dispatched_at=row.dispatched_at,
        failures=row.failures,
        lost_count=row.lost_count,
        max_attempts=operations.limit_of(row),
        max_lost=options.max_lost,
        error=row.error,
        newest=_try(newest) if newest else None,
        longest_delay=longest,
        jitter=jitter,
        stall_after=options.stall_after,
        on_lost=options.on_lost,
        on_dead=options.on_dead,
        cancel_requested=row.cancel_requested,
        hold_requested=row.hold_requested,
        rerun_waits=row.rerun_args is not None,
        debounced_until=row.debounce_deadline,
        finished_at=row.ended_at,
        unique_until=row.unique_until,
        tombstone=row.is_tombstone,
        known=known,
        near="" if known else registry.near(row.name),
        tick=conf.get().TICK,
        resend_after=conf.get().RESEND_AFTER,
        aside=_aside(row),
    )


def _aside(row: ProcessedJob) -> str:
    """Return why a row waits without a message, if it does."""
    if not lifecycle.is_aside(row):
        return ""
    if row.dispatch_id == lifecycle.NO_LOCKS:
        return _without_lock()
    controls.current(at_most=0.0)
    refusal = controls.refusal_of(row)
    return (
        refusal.words
        if refusal
        else _("what it waited for is over, and the coordinator lets it go")
    )


def _without_lock() -> str:
    trouble = locks.why_unreachable()
    if not trouble:
        return _("locks can be had again, and the coordinator lets it go")
    words = _("no lock can be had, and on_redis_error says not to run without: %(trouble)s")
    return words % {"trouble": trouble}


def _try(attempt: JobAttempt) -> Try:
    said = progress.read(attempt.progress)
    return Try(
        number=attempt.number,
        outcome=attempt.outcome,
        where=where(attempt),
        claimed_at=attempt.claimed_at,
        beat_at=attempt.beat_at,
        lease_until=attempt.lease_until,
        began=attempt.began_at is not None,
        active_at=attempt.active_at,
        ended_at=attempt.ended_at,
        error_class=attempt.error_class,
        progress=said.words if said else "",
    )


def _longest_delay(backoff: Any, failures: int) -> tuple[float | None, bool]:
    """Return the longest delay that a backoff could have drawn, where that is known."""
    if not isinstance(backoff, Exponential):
        return None, False
    return backoff(failures, max), backoff.jitter


def where(attempt: JobAttempt | None) -> str:
    """Return the host and process of an attempt."""
    if attempt is None or not attempt.host:
        return "–"
    return f"{attempt.host}:{attempt.pid}" if attempt.pid else attempt.host
