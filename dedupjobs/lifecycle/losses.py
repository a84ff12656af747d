"""bury, reclaim: attempts whose worker is gone."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import F

from dedupjobs import probes, registry
from dedupjobs.clock import DbNow
from dedupjobs.lifecycle.claims import claim_of
from dedupjobs.lifecycle.leaving import cancelled, die, leave
from dedupjobs.lifecycle.rows import (
    UNASKED,
    UNSENT,
    Change,
    Claim,
    alias,
    attempts,
    jobs,
    skip_locked,
)
from dedupjobs.lifecycle.statements import Rows, Select, Slot
from dedupjobs.models import AttemptOutcome, JobAttempt, ProcessedJob, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """
    An attempt that was taken from its owner, and where its job went. ``silent_for``: seconds
    since its last beat, by the database's clock.
    """

    job_pk: int
    key: str
    name: str
    fence: int
    outcome: AttemptOutcome
    status: Status | None
    change: Change | None
    silent_for: float


def bury(fence: int, reason: str) -> Lost | None:
    """RUNNING → as reclaim, at once: only by the parent that has reaped its own horse."""
    return _lose(fence, {}, reason)


def reclaim(fence: int, *, beat_at: datetime, ahead_of: float | None, reason: str) -> Lost | None:
    """
    RUNNING → RETRYING, HELD or DEAD: the lease has expired, in the UPDATE itself.

    ``beat_at`` is the beat that the caller has seen stand still by its own clock. ``ahead_of``
    (seconds): also take a lease that ends later than that from now, which no beat of a right
    clock has written. Locked rows are skipped: somebody is at work on them.
    """
    expired: dict[str, Any] = {"beat_at": beat_at, "lease_until__lt": DbNow()}
    lost = _lose(fence, expired, reason)
    if lost is None and ahead_of is not None:
        ahead = {"beat_at": beat_at, "lease_until__gt": DbNow(ahead_of)}
        lost = _lose(fence, ahead, reason)
    return lost


_OPEN = Select(
    JobAttempt,
    "open, locked",
    lambda: skip_locked(
        attempts().filter(pk=Slot("pk", JobAttempt._meta.pk), outcome=None).annotate(db_now=DbNow())
    ),
)
_JOB = Select(
    ProcessedJob,
    "locked",
    lambda: skip_locked(jobs().filter(pk=Slot("pk", ProcessedJob._meta.pk))),
)


def _lose(fence: int, expired: dict[str, Any], reason: str) -> Lost | None:
    probes.reach("reclaim.before")
    with transaction.atomic(using=alias()):
        attempt = _OPEN.first(alias(), pk=fence)
        if attempt is None:
            return None
        job = _JOB.first(alias(), pk=attempt.job_id)
        if job is None:
            return None
        begun = attempt.began_at is not None
        outcome = AttemptOutcome.LOST if begun else AttemptOutcome.RETURNED
        ended = Rows(JobAttempt, alias(), {"pk": fence, "outcome": None, **expired})
        if not ended.update(outcome=outcome, ended_at=DbNow(), reason=reason):
            return None
        probes.reach("reclaim.between")
        taken = claim_of(attempt, job)
        status = _after_loss(taken, job, begun, reason)
        probes.reach("reclaim.uncommitted")
    probes.reach("reclaim.committed")
    return Lost(
        job_pk=job.pk,
        key=job.key,
        name=job.name,
        fence=fence,
        outcome=outcome,
        status=status,
        change=taken.change(status) if status else None,
        silent_for=max((attempt.db_now - attempt.beat_at).total_seconds(), 0.0),
    )


def _after_loss(claim: Claim, job: ProcessedJob, begun: bool, reason: str) -> Status | None:
    """Move the locked job on; a loss before user code began costs nothing."""
    options = registry.options_of(job.name)
    counted: dict[str, Any] = {"error": reason}
    if begun:
        counted["lost_count"] = F("lost_count") + 1
    if begun and options.on_lost == "hold":
        return leave(claim, Status.HELD, sets={**counted, **UNSENT})
    if job.cancel_requested:
        return cancelled(claim, counted)
    if begun and job.lost_count + 1 >= options.max_lost:
        return die(claim, options.on_dead, {**counted, **UNASKED})
    if job.hold_requested:
        return leave(claim, Status.HELD, sets={**counted, **UNSENT, **UNASKED})
    return leave(claim, Status.RETRYING, sets={**counted, "run_after": DbNow(), **UNSENT})
