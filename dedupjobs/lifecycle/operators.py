"""cancel, hold, retry, unhold, limit: a person's arrows, guarded by the version as seen."""

from __future__ import annotations

from django.db.models import F

from dedupjobs import registry
from dedupjobs.clock import DbNow
from dedupjobs.lifecycle.leaving import rerun_sets
from dedupjobs.lifecycle.rows import FRESH, NO_RERUN, UNSENT, jobs
from dedupjobs.models import (
    WAITING,
    Status,
)


def cancel(pk: int, version: int, reason: str = "cancelled by an operator") -> Status | None:
    """Waiting, HELD → CANCELLED; a RUNNING job is asked to stop and stays RUNNING until then."""
    seen = jobs().filter(pk=pk, version=version)
    for rerun, words in ((False, reason), (True, f"{reason}; a waiting rerun was dropped")):
        done = seen.filter(status__in=(*WAITING, Status.HELD), rerun_args__isnull=not rerun).update(
            status=Status.CANCELLED,
            version=F("version") + 1,
            **NO_RERUN,
            error=words,
            finished_at=DbNow(),
            **UNSENT,
        )
        if done:
            return Status.CANCELLED
    asked = seen.filter(status=Status.RUNNING)
    return Status.RUNNING if asked.update(cancel_requested=True, version=F("version") + 1) else None


def hold(pk: int, version: int, reason: str = "held by an operator") -> Status | None:
    """Waiting → HELD; a RUNNING job is asked to."""
    seen = jobs().filter(pk=pk, version=version)
    waiting = seen.filter(status__in=WAITING)
    if waiting.update(status=Status.HELD, version=F("version") + 1, error=reason, **UNSENT):
        return Status.HELD
    asked = seen.filter(status=Status.RUNNING)
    return Status.RUNNING if asked.update(hold_requested=True, version=F("version") + 1) else None


def retry(pk: int, version: int) -> Status | None:
    """DEAD, HELD, CANCELLED, RETRYING → PENDING now, same generation, fresh budgets."""
    return _put_back(pk, version, (Status.DEAD, Status.HELD, Status.CANCELLED, Status.RETRYING))


def unhold(pk: int, version: int) -> Status | None:
    """HELD → PENDING now, same generation, fresh budgets."""
    return _put_back(pk, version, (Status.HELD,))


def limit(pk: int, version: int, max_attempts: int) -> Status | None:
    """Let the job fail up to ``max_attempts`` times before it is dead; its status stays."""
    status = jobs().filter(pk=pk, version=version).values_list("status", flat=True).first()
    seen = jobs().filter(pk=pk, version=version, status=status)
    moved = seen.update(max_attempts=max_attempts, version=F("version") + 1)
    return Status(status) if status and moved else None


def _put_back(pk: int, version: int, from_: tuple[Status, ...]) -> Status | None:
    # A tombstone has no arguments to run with.
    seen = jobs().filter(pk=pk, version=version, status__in=from_).exclude(args="")
    if seen.filter(rerun_args=None).update(
        status=Status.PENDING,
        version=F("version") + 1,
        run_after=DbNow(),
        enqueued_at=DbNow(),
        finished_at=None,
        error="",
        **UNSENT,
        **FRESH,
    ):
        return Status.PENDING
    waiting = seen.exclude(rerun_args=None)
    name = waiting.values_list("name", flat=True).first()
    if name is None:
        return None
    taken = waiting.update(**rerun_sets(registry.options_of(name)))
    return Status.PENDING if taken else None
