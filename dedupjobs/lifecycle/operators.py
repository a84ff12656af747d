"""
cancel, hold, retry, unhold, limit: a person's arrows, guarded by the version as seen.

Each moves one row. Its ``…_alike`` moves many in one statement, by the same guards: rows that were
seen with the same version, and in which no rerun waits. It returns how many it moved; where that
are fewer than were meant, the caller rolls back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db.models import F, QuerySet

from dedupjobs import registry
from dedupjobs.clock import DbNow
from dedupjobs.lifecycle.leaving import rerun_sets
from dedupjobs.lifecycle.rows import FRESH, NO_RERUN, UNSENT, jobs
from dedupjobs.models import WAITING, ProcessedJob, Status

Seen = QuerySet[ProcessedJob]

RETRIED = (Status.DEAD, Status.HELD, Status.CANCELLED, Status.RETRYING)
CANCELLED = "cancelled by an operator"
HELD = "held by an operator"


def cancel(pk: int, version: int, reason: str = CANCELLED) -> Status | None:
    """Waiting, HELD → CANCELLED; a RUNNING job is asked to stop and stays RUNNING until then."""
    seen = _seen([pk], version)
    for rerun, words in ((False, reason), (True, f"{reason}; a waiting rerun was dropped")):
        if _cancel(seen.filter(rerun_args__isnull=not rerun), words):
            return Status.CANCELLED
    return Status.RUNNING if _ask(seen, cancel_requested=True) else None


def cancel_alike(pks: Sequence[int], version: int, reason: str = CANCELLED) -> int:
    """As cancel, for rows without a rerun."""
    seen = _seen(pks, version)
    return _cancel(seen.filter(rerun_args=None), reason) + _ask(seen, cancel_requested=True)


def hold(pk: int, version: int, reason: str = HELD) -> Status | None:
    """Waiting → HELD; a RUNNING job is asked to."""
    seen = _seen([pk], version)
    if _hold(seen, reason):
        return Status.HELD
    return Status.RUNNING if _ask(seen, hold_requested=True) else None


def hold_alike(pks: Sequence[int], version: int, reason: str = HELD) -> int:
    """As hold."""
    seen = _seen(pks, version)
    return _hold(seen, reason) + _ask(seen, hold_requested=True)


def retry(pk: int, version: int) -> Status | None:
    """DEAD, HELD, CANCELLED, RETRYING → PENDING now, same generation, fresh budgets."""
    return _put_back(_seen([pk], version).filter(status__in=RETRIED))


def retry_alike(pks: Sequence[int], version: int) -> int:
    """As retry, for rows without a rerun."""
    return _renew(_seen(pks, version).filter(status__in=RETRIED))


def unhold(pk: int, version: int) -> Status | None:
    """HELD → PENDING now, same generation, fresh budgets."""
    return _put_back(_seen([pk], version).filter(status=Status.HELD))


def unhold_alike(pks: Sequence[int], version: int) -> int:
    """As unhold, for rows without a rerun."""
    return _renew(_seen(pks, version).filter(status=Status.HELD))


def limit(pk: int, version: int, max_attempts: int) -> Status | None:
    """Let the job fail up to ``max_attempts`` times before it is dead; its status stays."""
    status = jobs().filter(pk=pk, version=version).values_list("status", flat=True).first()
    moved = limit_alike([pk], version, max_attempts, status or "")
    return Status(status) if status and moved else None


def limit_alike(pks: Sequence[int], version: int, max_attempts: int, status: str) -> int:
    """As limit, for rows of one status."""
    seen = _seen(pks, version).filter(status=status)
    return _move(seen, max_attempts=max_attempts)


def _seen(pks: Sequence[int], version: int) -> Seen:
    return jobs().filter(pk__in=pks, version=version)


def _cancel(seen: Seen, words: str) -> int:
    sets = {**NO_RERUN, "error": words, "finished_at": DbNow(), **UNSENT}
    return _move(seen.filter(status__in=(*WAITING, Status.HELD)), status=Status.CANCELLED, **sets)


def _hold(seen: Seen, reason: str) -> int:
    return _move(seen.filter(status__in=WAITING), status=Status.HELD, error=reason, **UNSENT)


def _ask(seen: Seen, **request: bool) -> int:
    return _move(seen.filter(status=Status.RUNNING), **request)


def _put_back(seen: Seen) -> Status | None:
    if _renew(seen):
        return Status.PENDING
    waiting = seen.exclude(args="").exclude(rerun_args=None)
    name = waiting.values_list("name", flat=True).first()
    if name is None:
        return None
    taken = waiting.update(**rerun_sets(registry.options_of(name)))
    return Status.PENDING if taken else None


def _renew(seen: Seen) -> int:
    # A tombstone has no arguments to run with.
    return _move(
        seen.exclude(args="").filter(rerun_args=None),
        status=Status.PENDING,
        run_after=DbNow(),
        enqueued_at=DbNow(),
        finished_at=None,
        error="",
        **UNSENT,
        **FRESH,
    )


def _move(seen: Seen, **sets: Any) -> int:
    return seen.update(version=F("version") + 1, **sets)
