"""What a job's page shows, read at a fixed number of queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dedupjobs import conf, lifecycle, operations, registry
from dedupjobs.admin import timeline, truth, why
from dedupjobs.admin.listing import where
from dedupjobs.admin.truth import Known
from dedupjobs.admin.why import Situation, Try
from dedupjobs.backoff import Exponential
from dedupjobs.models import DuplicateSample, JobAttempt, Operation, ProcessedJob

SHOWN_ATTEMPTS = 50
SHOWN_DUPLICATES = 50
SHOWN_OPERATIONS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """An attempt in the table; ``same_as``: the number of an earlier one with that very error."""

    attempt: JobAttempt
    where: str
    same_as: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All of it, as of ``now`` by the database's clock."""

    now: datetime
    why: why.Why
    truth: truth.Truth
    drawing: timeline.Drawing | None
    attempts: tuple[Line, ...]
    operations: tuple[Operation, ...]
    duplicates: tuple[DuplicateSample, ...]
    newest: JobAttempt | None
    max_attempts: int


def read(row: ProcessedJob) -> Page:
    """Read what the page shows of a row."""
    now = lifecycle.database_now()
    attempts = list(lifecycle.attempts().filter(job_id=row.pk).order_by("-number")[:SHOWN_ATTEMPTS])
    newest = attempts[0] if attempts else None
    duplicates = _newest_of(DuplicateSample, row, SHOWN_DUPLICATES)
    events = timeline.events_of(row, attempts[::-1], duplicates, now)
    return Page(
        now=now,
        why=why.explain(situation(row, newest, now)),
        truth=truth.look(Known(row=row, newest=newest, now=now)),
        drawing=timeline.draw(events),
        attempts=tuple(_lines(attempts)),
        operations=tuple(_newest_of(Operation, row, SHOWN_OPERATIONS)),
        duplicates=tuple(duplicates),
        newest=newest,
        max_attempts=operations.limit_of(row),
    )


def situation(row: ProcessedJob, newest: JobAttempt | None, now: datetime) -> Situation:
    """Return the facts that the sentences need."""
    options = registry.options_of(row.name)
    longest, jitter = _longest_delay(options.backoff, row.failures)
    return Situation(
        status=row.status,
        now=now,
        run_after=row.run_after,
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
        finished_at=row.finished_at,
        unique_until=row.unique_until,
        tombstone=row.is_tombstone,
        known=registry.find(row.name) is not None,
        tick=conf.get().TICK,
        resend_after=conf.get().RESEND_AFTER,
    )


def _try(attempt: JobAttempt) -> Try:
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
    )


def _longest_delay(backoff: Any, failures: int) -> tuple[float | None, bool]:
    """Return the longest delay that a backoff could have drawn, where that is known."""
    if not isinstance(backoff, Exponential):
        return None, False
    return backoff(failures, max), backoff.jitter


def _newest_of(model: Any, row: ProcessedJob, most: int) -> list[Any]:
    found = model._base_manager.using(lifecycle.alias()).filter(job_id=row.pk)
    return list(found.order_by("-pk")[:most])


def _lines(newest_first: Sequence[JobAttempt]) -> list[Line]:
    """Return the attempts newest first; an error is told in full where it came up first."""
    first: dict[tuple[str, str], int] = {}
    lines = []
    for attempt in reversed(newest_first):
        error = (attempt.error_class, attempt.error_message)
        known = first.setdefault(error, attempt.number)
        same_as = known if attempt.error_class and known != attempt.number else None
        lines.append(Line(attempt=attempt, where=where(attempt), same_as=same_as))
    return lines[::-1]
