"""What an application calls: enqueue a job, and learn what became of the call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from django.db import DatabaseError, transaction

from dedupjobs import clock, conf, dispatch, keys, lifecycle, signals
from dedupjobs.dispatch import Delivery
from dedupjobs.exceptions import JobConflict, NotMigrated, PayloadMismatch, PayloadTooLarge
from dedupjobs.lifecycle import Answer
from dedupjobs.models import Kind, ProcessedJob, Status
from dedupjobs.registry import Call, Job

MISSING_TABLE = {"42P01", "1146"}  # as PostgreSQL and MySQL number it


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """
    What an enqueue did: always an object, always true.

    ``job`` is the row that holds the key: the new one, or the one in the way. ``reason`` is a
    sentence for people.
    """

    kind: Kind
    job: ProcessedJob
    reason: str

    @property
    def created(self) -> bool:
        """Whether a run follows because of this call."""
        return self.kind is Kind.CREATED

    def __bool__(self) -> bool:
        return True

    def raise_for_conflict(self) -> Outcome:
        """Return self, or raise JobConflict if the call was turned away."""
        if self.kind in (Kind.DUPLICATE, Kind.BLOCKED):
            raise JobConflict(self)
        return self


def enqueue(job: Job[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
    """
    Make sure that this call runs once, and say what is.

    Writes one row inside the caller's transaction, if there is one; nothing reaches Redis
    before its outermost commit, and a rollback leaves nothing.
    """
    call = _call(job, args, kwargs)
    dispatch.check_queue(job.options.queue)
    try:
        answer = lifecycle.enqueue(
            job.name, call, options=job.options, holds=job.unique_for is not None
        )
    except DatabaseError as error:
        if _is_missing_table(error):
            raise NotMigrated("The dedupjobs tables are missing. Run: manage.py migrate") from error
        raise
    outcome = Outcome(kind=answer.kind, job=answer.row, reason=_reason(answer))
    if outcome.created:
        _hand_over(answer.row)
        return outcome
    signals.tell(
        signals.duplicate_detected,
        job.name,
        job_pk=answer.row.pk,
        cause="replay" if answer.kind is Kind.REPLAYED else "producer",
        detail=outcome.reason,
    )
    if answer.mismatch and job.key_maker is not None:
        outcome = _mismatched(job, call, outcome)
    if job.options.on_conflict == "raise" and answer.kind is Kind.DUPLICATE:
        raise JobConflict(outcome)
    return outcome


def _call(job: Job[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    call = job.call_of(job.bind(args, kwargs), unkeyed=clock.token())
    size, limit = len(call.args.encode()), conf.get().MAX_PAYLOAD
    if size > limit:
        raise PayloadTooLarge(
            f"{job.name}: the arguments take {size:,} bytes, MAX_PAYLOAD allows {limit:,}. Store "
            "them in a table or file and pass the pk."
        )
    return call


def _hand_over(row: ProcessedJob) -> None:
    delivery = Delivery(
        queue=row.queue,
        dispatch_id=row.dispatch_id or "",
        name=row.name,
        rows=((row.pk, row.generation),),
    )
    dispatch.push_on_commit(delivery)

    def tell_enqueued() -> None:
        signals.tell(signals.job_enqueued, row.name, job=row, kind=Kind.CREATED)

    transaction.on_commit(tell_enqueued, using=lifecycle.alias(), robust=True)


def _mismatched(job: Job[..., Any], call: Call, outcome: Outcome) -> Outcome:
    """Raise, warn or stay silent that the key is held by other arguments."""
    row = outcome.job
    differing = keys.differing(row.args, call.args)
    error = PayloadMismatch(
        outcome, differing=differing, stored=row.fingerprint, given=call.fingerprint
    )
    policy = job.options.on_mismatch
    signals.tell(signals.mismatch_detected, job.name, job=row, differing=differing, policy=policy)
    if policy == "raise":
        raise error
    if policy == "warn":
        return replace(outcome, reason=f"{outcome.reason}; {error}")
    return outcome


def _reason(answer: Answer) -> str:
    row = answer.row
    if answer.kind is Kind.CREATED:
        return "a run follows"
    if answer.kind is Kind.DUPLICATE:
        return f"an active job (row {row.pk}, {row.status}) has this key"
    if answer.kind is Kind.REPLAYED:
        held = f"until {row.unique_until:%Y-%m-%d %H:%M:%S} UTC" if row.unique_until else "for ever"
        return f"row {row.pk} has succeeded and holds this key {held}"
    if row.status == Status.HELD:
        return f"row {row.pk} is held for a person: {row.error or 'no reason given'}"
    return f"row {row.pk} is {row.status} and on_dead='block' keeps its key: {row.error}"


def _is_missing_table(error: DatabaseError) -> bool:
    cause = error.__cause__
    codes = (getattr(cause, "sqlstate", None), *getattr(cause, "args", ())[:1])
    return "no such table" in str(error) or bool(MISSING_TABLE & {str(c) for c in codes})
