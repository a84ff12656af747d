"""enqueue, join, reopen: what a call does to the row of its key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db import connections, transaction
from django.db.models import F

from dedupjobs import probes
from dedupjobs.clock import DbNow
from dedupjobs.exceptions import DedupJobsError
from dedupjobs.lifecycle.rows import FRESH, alias, jobs
from dedupjobs.lifecycle.sending import new_dispatch_id
from dedupjobs.models import (
    ACTIVE,
    Kind,
    ProcessedJob,
    Status,
)
from dedupjobs.registry import Call, Options

LOOPS = 10  # read → insert or reopen; each loop means that somebody else moved the row


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an enqueue found or made. ``mismatch``: the key is held by other arguments."""

    kind: Kind
    row: ProcessedJob
    mismatch: bool = False


def enqueue(name: str, call: Call, *, options: Options, holds: bool) -> Answer:
    """
    Return the key's row, PENDING because of this call or held by an earlier one.

    ``holds``: a success keeps the key (``unique_for`` is not None). Starts with a plain read, so
    a duplicate costs one SELECT and no lock; only a miss inserts.
    """
    for _ in range(LOOPS):
        row = _row_of(call.key_hash)
        if row is None:
            row = _insert(name, call, options)
            if row is not None:
                return Answer(kind=Kind.CREATED, row=row)
            continue
        kind = _held_as(row, options, holds)
        if kind is not None:
            return Answer(kind=kind, row=row, mismatch=row.fingerprint != call.fingerprint)
        if _reopen(row, name, call, options):
            return Answer(kind=Kind.CREATED, row=_row_of(call.key_hash) or row)
    raise DedupJobsError(f"{name} {call.key!r}: moved by others {LOOPS} times in a row; try again")


def _row_of(key_hash: str) -> ProcessedJob | None:
    return jobs().filter(key_hash=key_hash).annotate(db_now=DbNow()).first()


def _held_as(row: Any, options: Options, holds: bool) -> Kind | None:
    """Return how the row turns a call away, or None if it may be reopened."""
    if row.status in ACTIVE:
        return Kind.DUPLICATE
    if row.status == Status.HELD or (row.status == Status.DEAD and options.on_dead == "block"):
        return Kind.BLOCKED
    over = row.unique_until is not None and row.unique_until <= row.db_now
    if row.status == Status.SUCCEEDED and holds and not over:
        return Kind.REPLAYED
    return None


def _insert(name: str, call: Call, options: Options) -> ProcessedJob | None:
    """
    Insert the row, or return None if another call has the key.

    A conflict must not abort the caller's transaction, so the insert ignores it; whose row it
    is shows by the dispatch id, which is drawn before. A loser waits for an open winner, and
    wins if that one rolls back.
    """
    sent_as = new_dispatch_id()
    now = DbNow()
    row = ProcessedJob(
        key_hash=call.key_hash,
        key=call.key,
        scope=call.scope,
        name=name,
        queue=options.queue,
        args=call.args,
        fingerprint=call.fingerprint,
        run_after=now,
        dispatch_id=sent_as,
        dispatched_at=now,
        created_at=now,
        enqueued_at=now,
    )
    # One transaction, so that no coordinator can send the row again before we have looked.
    with transaction.atomic(using=alias()):
        if connections[alias()].vendor == "mysql":
            # Losers that wait at the insert get deadlocks when the winner rolls back; a locking
            # read of the key first makes them queue up.
            jobs().select_for_update().filter(key_hash=call.key_hash).first()
        jobs().bulk_create([row], ignore_conflicts=True)
        probes.reach("enqueue.inserted")
        return jobs().filter(key_hash=call.key_hash, dispatch_id=sent_as).first()


def _reopen(row: ProcessedJob, name: str, call: Call, options: Options) -> bool:
    """
    Put a final row back to PENDING for this call; guarded by the version that was read.

    A success starts a new generation, and so does a failed key with other arguments: its
    effects belong to another intention. The same call on a failed key goes on in the same one,
    since its effects may have happened under that idempotency key.
    """
    other = row.fingerprint != call.fingerprint
    grows = row.status == Status.SUCCEEDED or (other and row.attempts > 0)
    return bool(
        jobs()
        .filter(pk=row.pk, status=row.status, version=row.version)
        .update(
            status=Status.PENDING,
            version=F("version") + 1,
            generation=F("generation") + int(grows),
            name=name,
            queue=options.queue,
            args=call.args,
            fingerprint=call.fingerprint,
            rerun_args=None,
            rerun_fingerprint=None,
            run_after=DbNow(),
            debounce_deadline=None,
            dispatch_id=new_dispatch_id(),
            dispatched_at=DbNow(),
            enqueued_at=DbNow(),
            finished_at=None,
            unique_until=None,
            result=None,
            error="",
            **FRESH,
        )
    )
