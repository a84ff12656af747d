"""
Every change of a job's status, in the order a job meets them. Nothing else writes them.

    enqueue ──► PENDING ──claim──► RUNNING ──complete──► SUCCEEDED ──┐
                 ▲ ▲ ▲               │├──fail, snooze, reclaim──► RETRYING ──claim──► RUNNING
                 │ │ └─interrupt─────┤├──give_up, reclaim──► DEAD ───┤
                 │ │   unclaim       │├──stop──► CANCELLED ──────────┤
                 │ └─retry, unhold───│└──park, reclaim──► HELD       │
                 └───────────────────┴──────────reopen───────────────┘

Each arrow is a guarded UPDATE whose row count says who won. Endings lock the *attempt* first,
then the *job*, in one transaction: ``outcome IS NULL`` on the attempt is the one door that every
ending passes. 0 rows: somebody else decided; then nothing is written, and None is returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connections, router, transaction
from django.db.models import F, Q, QuerySet

from dedupjobs import clock, probes, registry
from dedupjobs.clock import DbNow
from dedupjobs.endings import Error
from dedupjobs.exceptions import DedupJobsError
from dedupjobs.models import (
    ACTIVE,
    WAITING,
    AttemptOutcome,
    JobAttempt,
    Kind,
    ProcessedJob,
    Status,
)
from dedupjobs.registry import FOREVER, Call, Options

LOOPS = 10  # read → insert or reopen; each loop means that somebody else moved the row

UNASKED: dict[str, Any] = {"cancel_requested": False, "hold_requested": False}
UNSENT: dict[str, Any] = {"dispatch_id": None, "dispatched_at": None}
FRESH: dict[str, Any] = {**UNASKED, "failures": 0, "lost_count": 0}


def alias() -> str:
    """Return the database that every read which decides, and every write, goes to."""
    return router.db_for_write(ProcessedJob)


def jobs() -> QuerySet[ProcessedJob]:
    """Return all jobs, from the database that decides."""
    return ProcessedJob._base_manager.using(alias())


def attempts() -> QuerySet[JobAttempt]:
    """Return all attempts, from the database that decides."""
    return JobAttempt._base_manager.using(alias())


# ---- enqueue, join, reopen


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


def new_dispatch_id() -> str:
    """Return a fresh RQ id; no two hand-overs share one, since RQ forgets by id."""
    return f"dedupjobs_{clock.token()}"


# ---- claim, begin, beat


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """
    The right to run one attempt. ``fence`` (the attempt's primary key) grows per key;
    ``failures`` as of the claim, when it can not change until this attempt ends.
    """

    job_pk: int
    fence: int
    number: int
    generation: int
    owner: str
    name: str
    key: str
    key_hash: str
    queue: str
    args: str
    failures: int
    max_attempts: int | None
    began: bool
    queue_delay: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an attempt runs, for people who look for it."""

    host: str = ""
    pid: int | None = None
    rq_id: str = ""


def claim(
    pk: int, generation: int, *, owner: str, place: Place, begins: bool = True
) -> Claim | None:
    """
    Take a waiting, due job for a new attempt, or return None if there is nothing to take.

    Never from RUNNING: a dead owner's job comes back through reclaim. The arguments are read
    after the UPDATE, which holds the row, so they are those of this generation. ``begins``: user
    code starts at once, so ``began_at`` is written here and spares a statement.
    """
    probes.reach("claim.before")
    with transaction.atomic(using=alias()):
        won = (
            jobs()
            .filter(
                pk=pk,
                status__in=WAITING,
                generation=generation,
                run_after__lte=DbNow(),
                **UNASKED,
            )
            .update(
                status=Status.RUNNING,
                attempts=F("attempts") + 1,
                version=F("version") + 1,
                started_at=DbNow(),
            )
        )
        if not won:
            return None
        row = jobs().defer("result", "error", "rerun_args").get(pk=pk)
        delay = _seconds_between(max(row.run_after, row.enqueued_at), row.started_at)
        attempt = JobAttempt(
            job_id=pk,
            number=row.attempts,
            generation=generation,
            owner=owner,
            lease_until=DbNow(registry.options_of(row.name).lease),
            beat_at=DbNow(),
            began_at=DbNow() if begins else None,
            claimed_at=DbNow(),
            queue_delay=delay,
            host=place.host[:200],
            pid=place.pid,
            rq_id=place.rq_id[:200],
        )
        attempt.save(using=alias(), force_insert=True)
        probes.reach("claim.uncommitted")
    probes.reach("claim.committed")
    return _claim_of(attempt, row)


def claimed_by(owner: str) -> list[Claim]:
    """
    Return the open attempts of one delivery: after a claim's COMMIT without a reply, or when
    its process is gone. ``owner`` stands before an optional ``.number`` of the row in a batch.
    """
    mine = Q(owner=owner) | Q(owner__startswith=f"{owner}.")
    open_ones = attempts().filter(mine, outcome=None).select_related("job").order_by("pk")
    return [_claim_of(attempt, attempt.job) for attempt in open_ones]


def _claim_of(attempt: JobAttempt, row: ProcessedJob) -> Claim:
    return Claim(
        job_pk=row.pk,
        fence=attempt.pk,
        number=attempt.number,
        generation=attempt.generation,
        owner=attempt.owner,
        name=row.name,
        key=row.key,
        key_hash=row.key_hash,
        queue=row.queue,
        args=row.args,
        failures=row.failures,
        max_attempts=row.max_attempts,
        began=attempt.began_at is not None,
        queue_delay=attempt.queue_delay,
    )


def _seconds_between(earlier: datetime, later: datetime | None) -> float | None:
    return None if later is None else max((later - earlier).total_seconds(), 0.0)


def begin(claim: Claim) -> bool:
    """Write that user code starts; False: the attempt has ended, so it must not start."""
    unbegun = attempts().filter(pk=claim.fence, outcome=None, began_at=None)
    return bool(unbegun.update(began_at=DbNow()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What a beat found. ``lost``: another one ended this attempt. ``over``: it has ended."""

    lost: bool = False
    over: bool = False
    cancel: bool = False
    hold: bool = False


def beat(fence: int, *, lease: float, progress: str | None = None, active: float = 0) -> Pulse:
    """
    Renew an open attempt's lease, also an expired one that nobody has reclaimed.

    ``active``: seconds since the job last showed activity. A row that is locked is skipped, not
    waited for: it is our own settle or batch, and the beat's connection must stay free.
    """
    probes.reach("beat.before")
    changes: dict[str, Any] = {"lease_until": DbNow(lease), "beat_at": DbNow()}
    changes["active_at"] = DbNow(-active)
    if progress is not None:
        changes["progress"] = progress
    with transaction.atomic(using=alias()):
        free = _skip_locked(attempts().filter(pk=fence, outcome=None)).values_list("pk", flat=True)
        if free:
            attempts().filter(pk=fence, outcome=None).update(**changes)
    return look(fence)


def look(fence: int) -> Pulse:
    """Read an attempt's state and what is asked of its job; changes nothing."""
    found = attempts().filter(pk=fence)
    row = found.values_list("outcome", "job__cancel_requested", "job__hold_requested").first()
    if row is None:  # not visible yet to this connection: no proof of anything
        return Pulse()
    outcome, cancel, hold = row
    lost = outcome in (AttemptOutcome.LOST, AttemptOutcome.RETURNED)
    return Pulse(lost=lost, over=outcome is not None, cancel=cancel, hold=hold)


# ---- the endings of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What is written on the attempt besides its outcome."""

    error: Error | None = None
    reason: str = ""
    run_time: float | None = None


NO_NOTE = Note()


def complete(
    claim: Claim, result: str, *, unique_for: timedelta | None, note: Note = NO_NOTE
) -> Status | None:
    """RUNNING → SUCCEEDED, or PENDING if a rerun waits. The success holds the key from now."""
    until = DbNow(unique_for or 0) if unique_for is not FOREVER else None

    def move() -> Status | None:
        return _leave(
            claim,
            Status.SUCCEEDED,
            rerun_args=None,
            sets={
                "result": result,
                "error": "",
                "finished_at": DbNow(),
                "unique_until": until,
                **UNASKED,
            },
        ) or _take_up(claim)

    return _settle(claim, AttemptOutcome.SUCCEEDED, note, move)


def fail(claim: Claim, *, after: float, note: Note, timed_out: bool = False) -> Status | None:
    """RUNNING → RETRYING in ``after`` seconds; a waiting request is obeyed instead."""
    outcome = AttemptOutcome.TIMED_OUT if timed_out else AttemptOutcome.FAILED
    counted = {"failures": F("failures") + 1, "error": _headline(note)}

    def move() -> Status | None:
        sets = {"run_after": DbNow(after), **UNSENT, **counted}
        return _leave(claim, Status.RETRYING, **UNASKED, sets=sets) or _obey(claim, counted)

    return _settle(claim, outcome, note, move)


def give_up(claim: Claim, *, on_dead: str, note: Note, timed_out: bool = False) -> Status | None:
    """RUNNING → DEAD: the budget is used or the error is final. A waiting rerun is taken up."""
    outcome = AttemptOutcome.TIMED_OUT if timed_out else AttemptOutcome.FAILED
    sets = {"failures": F("failures") + 1, "error": _headline(note), **UNASKED}
    return _settle(claim, outcome, note, lambda: _die(claim, on_dead, sets))


def snooze(claim: Claim, *, after: float, note: Note = NO_NOTE) -> Status | None:
    """RUNNING → RETRYING in ``after`` seconds; no failure is counted."""

    def move() -> Status | None:
        sets = {"run_after": DbNow(after), **UNSENT}
        return _leave(claim, Status.RETRYING, **UNASKED, sets=sets) or _obey(claim)

    return _settle(claim, AttemptOutcome.SNOOZED, note, move)


def interrupt(claim: Claim, *, on_lost: str, note: Note = NO_NOTE) -> Status | None:
    """RUNNING → PENDING, or HELD by ``on_lost`` once user code has begun. Not counted."""

    def move() -> Status | None:
        if on_lost == "hold" and claim.began:
            return _leave(claim, Status.HELD, sets={"error": note.reason, **UNSENT})
        sets = {"run_after": DbNow(), **UNSENT}
        return _leave(claim, Status.PENDING, **UNASKED, sets=sets) or _obey(claim)

    return _settle(claim, AttemptOutcome.INTERRUPTED, note, move)


def unclaim(claim: Claim, note: Note = NO_NOTE) -> Status | None:
    """RUNNING → PENDING: claimed, but user code never began. Nothing is counted."""

    def move() -> Status | None:
        sets = {"run_after": DbNow(), **UNSENT}
        return _leave(claim, Status.PENDING, **UNASKED, sets=sets) or _obey(claim)

    return _settle(claim, AttemptOutcome.RETURNED, note, move, began_at=None)


def stop(claim: Claim, *, requested: bool, note: Note = NO_NOTE) -> Status | None:
    """
    RUNNING → CANCELLED. By the job's own ``Cancel`` a waiting rerun is taken up; by an
    operator's request it is dropped, and the row's error says so.
    """

    def move() -> Status | None:
        if requested:
            return _cancelled(claim, {})
        sets = {"error": note.reason, "finished_at": DbNow(), **UNASKED}
        return _leave(claim, Status.CANCELLED, rerun_args=None, sets=sets) or _take_up(claim)

    return _settle(claim, AttemptOutcome.CANCELLED, note, move)


def park(claim: Claim, reason: str, note: Note = NO_NOTE) -> Status | None:
    """RUNNING → HELD: a person is needed; costs no failure."""
    sets = {"error": reason, **UNSENT, **UNASKED}
    return _settle(claim, AttemptOutcome.HELD, note, lambda: _leave(claim, Status.HELD, sets=sets))


def outcome_of(fence: int) -> str | None:
    """
    Return an attempt's outcome by a locking read: what became of a COMMIT without a reply.

    The lock waits for a transaction of ours that the server has not given up yet.
    """
    with transaction.atomic(using=alias()):
        attempt = attempts().select_for_update().filter(pk=fence).first()
        return attempt.outcome if attempt else None


def note_late(fence: int, ending: AttemptOutcome) -> None:
    """Remember what an attempt did after it was given up; its outcome stands."""
    attempts().filter(pk=fence, late_ending="").exclude(outcome=None).update(late_ending=ending)


# ---- attempts whose worker is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """An attempt that was taken from its owner, and where its job went."""

    job_pk: int
    key: str
    name: str
    fence: int
    outcome: AttemptOutcome
    status: Status | None


def bury(fence: int, reason: str) -> Lost | None:
    """RUNNING → as reclaim, at once: only by the parent that has reaped its own horse."""
    return _lose(fence, Q(), reason)


def reclaim(fence: int, *, beat_at: datetime, ahead_of: float | None, reason: str) -> Lost | None:
    """
    RUNNING → RETRYING, HELD or DEAD: the lease has expired, in the UPDATE itself.

    ``beat_at`` is the beat that the caller has seen stand still by its own clock. ``ahead_of``
    (seconds): also take a lease that ends later than that from now, which no beat of a right
    clock has written. Locked rows are skipped: somebody is at work on them.
    """
    expired = Q(lease_until__lt=DbNow())
    if ahead_of is not None:
        expired |= Q(lease_until__gt=DbNow(ahead_of))
    return _lose(fence, Q(beat_at=beat_at) & expired, reason)


def _lose(fence: int, expired: Q, reason: str) -> Lost | None:
    with transaction.atomic(using=alias()):
        attempt = _skip_locked(attempts().filter(expired, pk=fence, outcome=None)).first()
        if attempt is None:
            return None
        job = _skip_locked(jobs().filter(pk=attempt.job_id)).first()
        if job is None:
            return None
        begun = attempt.began_at is not None
        outcome = AttemptOutcome.LOST if begun else AttemptOutcome.RETURNED
        ended = attempts().filter(expired, pk=fence, outcome=None)
        if not ended.update(outcome=outcome, ended_at=DbNow(), reason=reason):
            return None
        status = _after_loss(_claim_of(attempt, job), job, begun, reason)
        probes.reach("reclaim.uncommitted")
    return Lost(
        job_pk=job.pk,
        key=job.key,
        name=job.name,
        fence=fence,
        outcome=outcome,
        status=status,
    )


def _after_loss(claim: Claim, job: ProcessedJob, begun: bool, reason: str) -> Status | None:
    """Move the locked job on; a loss before user code began costs nothing."""
    options = registry.options_of(job.name)
    counted: dict[str, Any] = {"error": reason}
    if begun:
        counted["lost_count"] = F("lost_count") + 1
    if begun and options.on_lost == "hold":
        return _leave(claim, Status.HELD, sets={**counted, **UNSENT})
    if job.cancel_requested:
        return _cancelled(claim, counted)
    if begun and job.lost_count + 1 >= options.max_lost:
        return _die(claim, options.on_dead, {**counted, **UNASKED})
    if job.hold_requested:
        return _leave(claim, Status.HELD, sets={**counted, **UNSENT, **UNASKED})
    return _leave(claim, Status.RETRYING, sets={**counted, "run_after": DbNow(), **UNSENT})


# ---- an operator's arrows, guarded by the version that was looked at


def cancel(pk: int, version: int, reason: str = "cancelled by an operator") -> Status | None:
    """Waiting, HELD → CANCELLED; a RUNNING job is asked to stop and stays RUNNING until then."""
    seen = jobs().filter(pk=pk, version=version)
    for rerun, words in ((False, reason), (True, f"{reason}; a waiting rerun was dropped")):
        done = seen.filter(status__in=(*WAITING, Status.HELD), rerun_args__isnull=not rerun).update(
            status=Status.CANCELLED,
            version=F("version") + 1,
            rerun_args=None,
            rerun_fingerprint=None,
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
    """DEAD, CANCELLED, RETRYING → PENDING now, same generation, fresh budgets."""
    return _put_back(pk, version, (Status.DEAD, Status.CANCELLED, Status.RETRYING))


def unhold(pk: int, version: int) -> Status | None:
    """HELD → PENDING now, same generation, fresh budgets."""
    return _put_back(pk, version, (Status.HELD,))


def _put_back(pk: int, version: int, from_: tuple[Status, ...]) -> Status | None:
    seen = jobs().filter(pk=pk, version=version, status__in=from_)
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
    return Status.PENDING if seen.exclude(rerun_args=None).update(**_rerun_sets()) else None


def database_now() -> datetime:
    """Return the database's present moment."""
    return clock.read_db_now(connections[alias()])


def seconds_until_due(pk: int) -> float:
    """Return how long a job still waits by the database's clock; 0 if it does not."""
    row = jobs().filter(pk=pk).annotate(db_now=DbNow()).values_list("run_after", "db_now").first()
    return max((row[0] - row[1]).total_seconds(), 0.0) if row else 0.0


# ---- hand-over: which rows wait for a message, and which one was last sent


def mark_sent(pk: int, version: int, dispatch_id: str | None) -> str | None:
    """
    Give a waiting row a new RQ id, or return None if it has moved on or was sent meanwhile.

    ``dispatch_id`` is the one as read: of two senders, one wins.
    """
    sent_as = new_dispatch_id()
    row = jobs().filter(pk=pk, version=version, status__in=WAITING, dispatch_id=dispatch_id)
    return sent_as if row.update(dispatch_id=sent_as, dispatched_at=DbNow()) else None


def mark_unsent(dispatch_ids: list[str]) -> int:
    """Forget hand-overs that failed, so that the coordinator's next round makes them again."""
    return jobs().filter(dispatch_id__in=dispatch_ids, status__in=WAITING).update(**UNSENT)


# ---- writes that several arrows share


class _NotMineError(Exception):
    """Somebody else decided: roll back what this ending has written."""


def _settle(
    claim: Claim,
    outcome: AttemptOutcome,
    note: Note,
    move: Callable[[], Status | None],
    **guards: Any,
) -> Status | None:
    """End the attempt, then move the job; both or neither."""
    probes.reach("settle.before")
    try:
        with transaction.atomic(using=alias()):
            mine = attempts().filter(pk=claim.fence, outcome=None, **guards)
            if not mine.update(outcome=outcome, ended_at=DbNow(), **_written(note)):
                raise _NotMineError
            probes.reach("settle.between")
            status = move()
            if status is None:
                raise _NotMineError
            probes.reach("settle.uncommitted")
    except _NotMineError:
        return None
    probes.reach("settle.committed")
    return status


def _written(note: Note) -> dict[str, Any]:
    error = note.error
    return {
        "reason": note.reason,
        "run_time": note.run_time,
        "error_class": error.type if error else "",
        "error_message": error.message if error else "",
        "traceback": error.traceback if error else "",
    }


def _headline(note: Note) -> str:
    return f"{note.error.type}: {note.error.message}" if note.error else note.reason


def _leave(claim: Claim, to: Status, *, sets: dict[str, Any], **guards: Any) -> Status | None:
    """Move the job on from RUNNING if this attempt is still its newest."""
    row = jobs().filter(pk=claim.job_pk, status=Status.RUNNING, attempts=claim.number, **guards)
    return to if row.update(status=to, version=F("version") + 1, **sets) else None


def _take_up(claim: Claim) -> Status | None:
    """A rerun waits: the job runs again in a new generation, with the newest arguments."""
    row = jobs().filter(pk=claim.job_pk, status=Status.RUNNING, attempts=claim.number)
    taken = row.exclude(rerun_args=None).update(**_rerun_sets())
    return Status.PENDING if taken else None


def _rerun_sets() -> dict[str, Any]:
    # In this order: MySQL assigns from left to right and would copy a NULL otherwise.
    return {
        "status": Status.PENDING,
        "version": F("version") + 1,
        "generation": F("generation") + 1,
        "args": F("rerun_args"),
        "fingerprint": F("rerun_fingerprint"),
        "rerun_args": None,
        "rerun_fingerprint": None,
        "run_after": DbNow(),
        "enqueued_at": DbNow(),
        "finished_at": None,
        "error": "",
        **UNSENT,
        **FRESH,
    }


def _die(claim: Claim, on_dead: str, sets: dict[str, Any]) -> Status | None:
    """DEAD; a waiting rerun is taken up, but kept for the operator's retry under "block"."""
    sets = {**sets, "finished_at": DbNow()}
    if on_dead == "block":
        return _leave(claim, Status.DEAD, sets=sets)
    return _leave(claim, Status.DEAD, rerun_args=None, sets=sets) or _take_up(claim)


def _obey(claim: Claim, counted: dict[str, Any] | None = None) -> Status | None:
    """A request waits where the job would wait for another attempt: cancel goes before hold."""
    counted = counted or {}
    return _cancelled(claim, counted, cancel_requested=True) or _leave(
        claim,
        Status.HELD,
        hold_requested=True,
        sets={**counted, "error": "held on request", **UNSENT, **UNASKED},
    )


def _cancelled(claim: Claim, counted: dict[str, Any], **guards: Any) -> Status | None:
    """CANCELLED on request; a waiting rerun is dropped, and named."""
    for waits, words in ((False, "cancelled on request"), (True, "a waiting rerun was dropped")):
        sets = {
            **counted,
            "error": words if not waits else f"cancelled on request; {words}",
            "rerun_args": None,
            "rerun_fingerprint": None,
            "finished_at": DbNow(),
            **UNASKED,
        }
        moved = _leave(claim, Status.CANCELLED, rerun_args__isnull=not waits, sets=sets, **guards)
        if moved:
            return moved
    return None


def _skip_locked(rows: QuerySet[Any]) -> QuerySet[Any]:
    """Lock the rows that nobody holds; SQLite has one writer and needs no row locks."""
    if connections[alias()].features.has_select_for_update_skip_locked:
        return rows.select_for_update(skip_locked=True)
    return rows
