"""A job's row as the framework's result."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from django.conf import settings
from django.utils import timezone

from dedupjobs import exceptions, keys, lifecycle, seal
from dedupjobs.backends import arguments
from dedupjobs.backends.framework import TaskError, TaskResultStatus
from dedupjobs.backends.tasks import DedupTaskResult
from dedupjobs.client import Outcome
from dedupjobs.models import FINAL, AttemptOutcome, JobAttempt, ProcessedJob, Status

PURPOSE = "task result"  # of an id's signature
LOST = f"{exceptions.LeaseLost.__module__}.{exceptions.LeaseLost.__qualname__}"

_STATUS = {
    Status.PENDING: TaskResultStatus.READY,
    Status.RETRYING: TaskResultStatus.READY,
    Status.HELD: TaskResultStatus.READY,
    Status.RUNNING: TaskResultStatus.RUNNING,
    Status.SUCCEEDED: TaskResultStatus.SUCCESSFUL,
    Status.DEAD: TaskResultStatus.FAILED,
    Status.CANCELLED: TaskResultStatus.FAILED,
}


def result_of(task: Any, row: ProcessedJob, outcome: Outcome | None = None) -> DedupTaskResult:
    """Return what is known of the newest run of a key; ``outcome``: of the call that asks."""
    if row.get_deferred_fields():  # answered by the status cache
        row = lifecycle.jobs().get(pk=row.pk)
    if task.queue_name != row.queue:
        task = replace(task, queue_name=row.queue)
    attempts = _attempts(row)
    args, kwargs = arguments.passed(task, row.args)
    result = DedupTaskResult(
        task=task,
        id=id_of(row),
        status=_STATUS[Status(row.status)],
        enqueued_at=_shown(row.enqueued_at),
        started_at=_shown(attempts[0].claimed_at) if attempts else None,
        finished_at=_shown(row.ended_at) if row.status in FINAL else None,
        last_attempted_at=_shown(attempts[-1].claimed_at) if attempts else None,
        args=args,
        kwargs=kwargs,
        backend=task.backend,
        errors=[_error(a) for a in attempts if a.error_class or a.outcome == AttemptOutcome.LOST],
        worker_ids=[attempt.owner for attempt in attempts],
        kind=outcome.kind if outcome else None,
        reason=outcome.reason if outcome else "",
    )
    if row.status == Status.SUCCEEDED:
        object.__setattr__(result, "_return_value", _returned(row))
    return result


def _returned(row: ProcessedJob) -> Any:
    if row.result is None and row.is_tombstone:
        return keys.NotKept("result was pruned")
    return keys.decode(row.result or "null")


def id_of(row: ProcessedJob) -> str:
    """Return an id that nobody can guess, since some show it to their users."""
    plain = f"{row.pk}-{row.generation}"
    return f"{plain}-{seal.sign(PURPOSE, plain)}"


def row_of(result_id: str) -> ProcessedJob | None:
    """Return the row of an id that we have given, unless it was pruned or has run again."""
    plain, _, signature = str(result_id).rpartition("-")
    if not seal.is_genuine(PURPOSE, plain, signature):
        return None
    pk, generation = map(int, plain.split("-"))
    return lifecycle.jobs().filter(pk=pk, generation=generation).exclude(args="").first()


def _attempts(row: ProcessedJob) -> list[JobAttempt]:
    if not row.attempts:
        return []
    found = lifecycle.attempts().filter(job_id=row.pk, generation=row.generation)
    return list(found.order_by("number"))


def _error(attempt: JobAttempt) -> TaskError:
    return TaskError(
        exception_class_path=attempt.error_class or LOST,
        traceback=attempt.traceback or attempt.error_message or attempt.reason,
    )


def _shown(moment: datetime | None) -> datetime | None:
    """Return a moment as the framework has it under USE_TZ."""
    if moment is None or settings.USE_TZ:
        return moment
    return timezone.make_naive(moment, timezone.get_default_timezone())
