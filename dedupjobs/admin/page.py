"""What a job's page shows, read at a fixed number of queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dedupjobs import controls, lifecycle, operations
from dedupjobs.admin import timeline, truth
from dedupjobs.admin.truth import Known
from dedupjobs.controls import Rule
from dedupjobs.models import DuplicateSample, JobAttempt, Operation, ProcessedJob
from dedupjobs.story import events, parts, progress, why
from dedupjobs.story.progress import Progress
from dedupjobs.story.situation import situation, where

SHOWN_ATTEMPTS = 50
SHOWN_DUPLICATES = 50
SHOWN_OPERATIONS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """An attempt in the table; ``same_as``: the number of an earlier one with that very error."""

    attempt: JobAttempt
    where: str
    same_as: int | None
    progress: Progress | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All of it, as of ``now`` by the database's clock."""

    now: datetime
    why: why.Why
    truth: truth.Truth
    drawing: timeline.Drawing | None
    attempts: tuple[Line, ...]
    steps: tuple[parts.Seen, ...]
    operations: tuple[Operation, ...]
    duplicates: tuple[DuplicateSample, ...]
    newest: JobAttempt | None
    max_attempts: int
    controls: tuple[Rule, ...]


def read(row: ProcessedJob) -> Page:
    """Read what the page shows of a row."""
    now = lifecycle.database_now()
    attempts = list(lifecycle.attempts().filter(job_id=row.pk).order_by("-number")[:SHOWN_ATTEMPTS])
    newest = attempts[0] if attempts else None
    duplicates = _newest_of(DuplicateSample, row, SHOWN_DUPLICATES)
    steps = parts.steps_of(row, newest)
    happened = events.events_of(row, attempts[::-1], duplicates, steps, now)
    return Page(
        now=now,
        why=why.explain(situation(row, newest, now)),
        truth=truth.look(Known(row=row, newest=newest, now=now)),
        drawing=timeline.draw(happened),
        attempts=tuple(_lines(attempts)),
        steps=tuple(steps),
        operations=tuple(_newest_of(Operation, row, SHOWN_OPERATIONS)),
        duplicates=tuple(duplicates),
        newest=newest,
        max_attempts=operations.limit_of(row),
        controls=tuple(controls.current(at_most=0.0).about(row)),
    )


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
        said = progress.read(attempt.progress)
        line = Line(attempt=attempt, where=where(attempt), same_as=same_as, progress=said)
        lines.append(line)
    return lines[::-1]
