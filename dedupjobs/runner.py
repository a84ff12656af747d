"""
What a worker calls: take a row, run its function, settle how it ended.

Read ``deliver`` first: it is the table of contents. A run's ending is decided as one frozen
value and written afterwards, through ``lifecycle`` alone; whatever Redis says, the row decides.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from django.db import (
    InterfaceError,
    OperationalError,
    connections,
    reset_queries,
    transaction,
)

from dedupjobs import (
    clock,
    conf,
    hardening,
    interrupts,
    keys,
    lifecycle,
    locks,
    probes,
    registry,
    signals,
)
from dedupjobs.backoff import Exponential
from dedupjobs.context import Attempt, entered
from dedupjobs.endings import (
    MESSAGE_LIMIT,
    Ending,
    Error,
    Failed,
    Interrupted,
    Lapsed,
    Parked,
    Snoozed,
    Stopped,
    Succeeded,
    clip,
)
from dedupjobs.exceptions import (
    ArgumentError,
    Cancel,
    CutOff,
    Hold,
    LeaseLost,
    Retry,
    ShutdownReached,
    Snooze,
    TimeoutReached,
)
from dedupjobs.heartbeat import Heart, beating
from dedupjobs.lifecycle import Claim, Note, Place
from dedupjobs.locks import Grip
from dedupjobs.models import WAITING, AttemptOutcome, Status
from dedupjobs.registry import LONGEST, Job, Options

T = TypeVar("T")

CONNECTION_ERRORS = (OperationalError, InterfaceError)
FIRST_LEASE = Options().lease  # a lock's TTL until the claim tells which job it is
PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0)  # seconds between tries to reach the database; the last repeats
CLAIM_PATIENCE = 5.0  # seconds; afterwards the row waits for the coordinator

LARGEST = 2**63  # a primary key is smaller

_NOTHING: Any = object()


@dataclass(slots=True)
class Host:
    """The process that runs deliveries: who owns their attempts, and who is told of them."""

    owner: str = ""
    rq_id: str = ""

    def claimed(self, claim: Claim, options: Options) -> None:
        """A row is claimed and about to run."""

    def settled(self, claim: Claim) -> None:
        """Its ending is written, or somebody else's stands."""


host = Host()
"""Replaced by a work horse of DedupWorker, whose parent has minted the owner."""


def run(deliveries: list[list[int]]) -> None:
    """Run the rows of an RQ message, ``[[pk, generation], …]``, one after the other."""
    hardening.harden_connections()
    reset_queries()  # under DEBUG Django keeps every statement, in a worker for ever
    owner = host.owner or clock.token()
    for index, (pk, generation) in enumerate(_checked(deliveries)):
        if interrupts.shutting_down.is_set():
            lifecycle.mark_unsent([host.rq_id or _rq_id()])
            return
        deliver(pk, generation, owner=owner if len(deliveries) == 1 else f"{owner}.{index}")


def deliver(pk: int, generation: int, *, owner: str, lock: bool = True) -> Status | None:
    """
    Run one row if it is waiting and due; return where it went, or None if there was nothing.

    A delivery that finds nothing to take is dropped: whoever holds the row finishes it, or the
    coordinator recovers it.
    """
    grip = locks.acquire(pk, owner, ttl=FIRST_LEASE) if lock else Grip.UNUSED
    if grip is Grip.BUSY and _is_taken(pk):
        _drop(pk, owner, Grip.BUSY, "its lock and its row are taken")
        return None
    claim = _claim_surely(pk, generation, owner)
    if claim is None:
        _drop(pk, owner, grip, "nothing to take: not waiting, not due, or an old message")
        return None
    options = registry.options_of(claim.name)
    _hold_lock(claim, grip, options)
    host.claimed(claim, options)
    heart = Heart(job_pk=pk, fence=claim.fence, owner=owner, name=claim.name, lease=options.lease)
    signals.tell(signals.attempt_started, claim.name, claim=claim)
    begun = clock.monotonic()
    with beating(heart):
        ending, status = perform(claim, heart)
    host.settled(claim)
    _free_lock(claim, grip, ending, status)
    _tell_end(claim, ending, status, clock.monotonic() - begun)
    if isinstance(ending, Interrupted) and ending.reraise:
        raise KeyboardInterrupt
    return status


# ---- before the run


def _checked(deliveries: Any) -> list[tuple[int, int]]:
    """Return the message's rows; a forged or foreign one is an error, not code to run."""
    if isinstance(deliveries, list):
        pairs = [d for d in deliveries if isinstance(d, list) and list(map(type, d)) == [int, int]]
        if len(pairs) == len(deliveries) and all(0 <= n < LARGEST for p in pairs for n in p):
            return [(pk, generation) for pk, generation in pairs]
    raise ArgumentError(f"{str(deliveries)[:100]!r} is no list of [pk, generation]")


def _is_taken(pk: int) -> bool:
    """Return whether the row is not waiting: then a busy lock tells the truth."""
    return not lifecycle.jobs().filter(pk=pk, status__in=WAITING).exists()


def _claim_surely(pk: int, generation: int, owner: str) -> Claim | None:
    """Claim; where COMMIT had no reply, look for the attempt by its owner before another try."""
    place = Place(host=socket.gethostname(), pid=os.getpid(), rq_id=host.rq_id or _rq_id())

    def look_or_claim(first: bool) -> Claim | None:
        if not first and (found := lifecycle.claimed_by(owner)):
            return found[0]
        return lifecycle.claim(pk, generation, owner=owner, place=place)

    return _persist(look_or_claim, patience=CLAIM_PATIENCE)


def _rq_id() -> str:
    from rq import get_current_job  # noqa: PLC0415 - only a worker has one

    job = get_current_job()
    return job.id if job else ""


def _drop(pk: int, owner: str, grip: Grip, detail: str) -> None:
    if grip is Grip.HELD:
        locks.release(pk, owner)
    signals.tell(signals.duplicate_detected, "", job_pk=pk, cause="redelivery", detail=detail)


def _hold_lock(claim: Claim, grip: Grip, options: Options) -> None:
    if grip is Grip.BUSY:
        grip = locks.replace(claim.job_pk, claim.owner, ttl=options.lease)
    elif grip is Grip.HELD and options.lease != FIRST_LEASE:
        grip = locks.extend(claim.job_pk, claim.owner, ttl=options.lease)
    if grip in (Grip.BUSY, Grip.UNREACHABLE):
        signals.tell(signals.lock_trouble, claim.name, job_pk=claim.job_pk, grip=grip)


# ---- the run


def perform(claim: Claim, heart: Heart) -> tuple[Ending, Status | None]:
    """Run a claimed row's function and settle its ending; the status is None if it was not ours."""
    job = registry.find(claim.name)
    if job is None:
        reason = f"no job called {claim.name!r} is known to this worker; deploy it, then retry"
        parked = Parked(reason=reason)
        return parked, _settle_surely(claim, parked, Note(reason=reason), None)
    if job.options.atomic:
        return _perform_atomically(job, claim, heart)
    ending, note = execute(job, claim, heart)
    return ending, _settle_surely(claim, ending, note, job)


def execute(job: Job[..., Any], claim: Claim, heart: Heart) -> tuple[Ending, Note]:
    """Call the function and say how it ended; never raises for the job's own errors."""
    bound = _bound(job, claim)
    if isinstance(bound, Parked):
        return bound, Note(reason=bound.reason)
    returned = _NOTHING
    pid, begun = os.getpid(), clock.monotonic()
    ending: Ending
    probes.reach("user_code.before")
    try:
        with entered(Attempt(claim, heart)), interrupts.armed(job.options.timeout) as cutter:
            returned = job.func(*bound.args, **bound.kwargs)
            if inspect.iscoroutine(returned):
                returned = asyncio.run(returned)
    except BaseException as raised:
        _leave_if_forked(pid, 1)
        if isinstance(raised, CutOff):
            _drop_connections()
        # A signal between the function's return and the end of the block changes nothing.
        ending = (
            _ending_of(raised, job.options, heart) if returned is _NOTHING else _success(returned)
        )
    else:
        _leave_if_forked(pid, 0)
        ending = _success(returned)
        if cutter.timed_out and job.options.atomic:
            ending = _ending_of(TimeoutReached("swallowed by the job"), job.options, heart)
    probes.reach("user_code.after")
    return ending, _note(ending, clock.monotonic() - begun)


def _bound(job: Job[..., Any], claim: Claim) -> inspect.BoundArguments | Parked:
    try:
        return job.bound(claim.args)
    except (Exception, SystemExit, GeneratorExit) as error:  # reviving values runs the job's types
        what = f"{type(error).__name__}: {error}"
        reason = f"the stored arguments no longer fit: {what}. Deploy code that takes them, retry"
        return Parked(reason=clip(reason, MESSAGE_LIMIT))


def _perform_atomically(
    job: Job[..., Any], claim: Claim, heart: Heart
) -> tuple[Ending, Status | None]:
    """Function and settle in one transaction: its effects and its success, or neither."""
    ending: Ending = Interrupted(reason="not run")
    note = lifecycle.NO_NOTE
    status: Status | None = None
    try:
        with transaction.atomic(using=lifecycle.alias()):
            ending, note = execute(job, claim, heart)
            if isinstance(ending, Succeeded):
                status = settle(claim, ending, note, job)
            if status is None:
                raise _UndoError
        return ending, status
    except _UndoError:
        if isinstance(ending, Succeeded):
            lifecycle.note_late(claim.fence, AttemptOutcome.SUCCEEDED)
            return Lapsed(), None
    except Exception as error:
        ending, note, done = _after_doubtful_commit(claim, job, error, heart)
        if done:
            return ending, Status.SUCCEEDED
    return ending, _settle_surely(claim, ending, note, job)


class _UndoError(Exception):
    """Roll the job's transaction back."""


def _after_doubtful_commit(
    claim: Claim, job: Job[..., Any], error: Exception, heart: Heart
) -> tuple[Ending, Note, bool]:
    """
    Read what became of an atomic job's COMMIT: (ending, note, whether it is done).

    Done: only the reply was lost, or a hook of the job failed after the commit. Not done by a
    connection's fault: interrupted. Otherwise the database refused it, which is a failure.
    """
    signals.tell(signals.settle_troubled, claim.name, claim=claim, error=error)
    if isinstance(error, CONNECTION_ERRORS):
        _drop_connections()
    outcome = _persist(lambda first: lifecycle.outcome_of(claim.fence), patience=heart.lease)
    ending: Ending
    if outcome == AttemptOutcome.SUCCEEDED:
        return Succeeded(result="null"), lifecycle.NO_NOTE, True
    if isinstance(error, CONNECTION_ERRORS):
        ending = Interrupted(reason=f"its COMMIT did not happen: {error}"[:500])
    else:
        ending = _ending_of(error, job.options, heart)
    return ending, _note(ending, None), False


def _leave_if_forked(pid: int, status: int) -> None:
    # A child that the job has forked must not settle its parent's attempt.
    if os.getpid() != pid:
        os._exit(status)


def _drop_connections() -> None:
    """
    Cancel what runs on the server, and close: a signal may have hit in the middle of a query.

    A connection in somebody else's transaction (a test's) is left alone.
    """
    for connection in connections.all(initialized_only=True):
        blocks = getattr(connection, "atomic_blocks", ())
        if connection.connection is None or any(b._from_testcase for b in blocks):
            continue
        try:
            if cancel := getattr(connection.connection, "cancel_safe", None):
                cancel(timeout=1.0)
            elif interrupt := getattr(connection.connection, "interrupt", None):
                interrupt()
        except Exception as error:
            signals.tell(signals.settle_troubled, "", claim=None, error=error)
        connection.close()


# ---- how it ended


def _success(returned: Any) -> Succeeded:
    """Encode the result; one that can not be stored never turns success into failure."""
    try:
        text = keys.encode_value(returned)
    except Exception as error:
        lost = f"{type(returned).__module__}.{type(returned).__qualname__}"
        return Succeeded(result=keys.encode_value(None), note=f"result not stored: {lost}: {error}")
    limit = conf.get().MAX_RESULT
    if len(text) > limit:
        reason = f"result not stored: {len(text):,} bytes, MAX_RESULT is {limit:,}"
        return Succeeded(result=keys.encode_value(None), note=reason)
    return Succeeded(result=text)


def _ending_of(  # noqa: C901, PLR0911 - a table
    raised: BaseException, options: Options, heart: Heart
) -> Ending:
    match raised:
        case Retry():
            return Failed(error=_error(raised), after=raised.after)
        case Snooze():
            return Snoozed(after=raised.after, reason=raised.reason)
        case Cancel():
            return Stopped(
                reason=raised.reason or "cancelled by the job", requested=raised.requested
            )
        case Hold():
            return Parked(reason=str(raised))
        case LeaseLost() if heart.lost.is_set():
            return Lapsed()
        case TimeoutReached():
            final = issubclass(TimeoutError, options.give_up_on or ())
            return Failed(error=_error(raised), final=final, timed_out=True)
        case ShutdownReached():
            return Interrupted(reason=str(raised))
        case KeyboardInterrupt():
            return Interrupted(reason="KeyboardInterrupt", reraise=True)
        case Exception():
            wanted = isinstance(raised, options.retry_on)
            final = isinstance(raised, options.give_up_on) or not wanted
            return Failed(error=_error(raised), final=final)
    return Failed(error=_error(raised))  # SystemExit and the like: no success, whatever its code


def _error(raised: BaseException) -> Error:
    return Error.of(raised, limit=conf.get().MAX_TRACEBACK)


def _note(ending: Ending, run_time: float | None) -> Note:
    error = ending.error if isinstance(ending, Failed) else None
    reason = ending.note if isinstance(ending, Succeeded) else getattr(ending, "reason", "")
    return Note(error=error, reason=reason, run_time=run_time)


# ---- settling


def settle(  # noqa: PLR0911 - a table
    claim: Claim, ending: Ending, note: Note, job: Job[..., Any] | None
) -> Status | None:
    """Write the ending by its one arrow; None if somebody else had decided."""
    options = job.options if job else Options()
    match ending:
        case Succeeded():
            unique_for = job.unique_for if job else None
            return lifecycle.complete(claim, ending.result, unique_for=unique_for, note=note)
        case Failed():
            return _fail_or_give_up(claim, ending, note, options)
        case Snoozed():
            return lifecycle.snooze(claim, after=ending.after, note=note)
        case Stopped():
            return lifecycle.stop(claim, requested=ending.requested, note=note)
        case Interrupted():
            return lifecycle.interrupt(claim, on_lost=options.on_lost, note=note)
        case Parked():
            return lifecycle.park(claim, ending.reason, note)
        case Lapsed():
            return None


def _fail_or_give_up(claim: Claim, ending: Failed, note: Note, options: Options) -> Status | None:
    failures = claim.failures + 1
    if ending.final or failures >= (claim.max_attempts or options.max_attempts):
        return lifecycle.give_up(
            claim, on_dead=options.on_dead, note=note, timed_out=ending.timed_out
        )
    after = _pause(options, failures) if ending.after is None else ending.after
    return lifecycle.fail(claim, after=after, note=note, timed_out=ending.timed_out)


def _pause(options: Options, failures: int) -> float:
    """Ask the job's backoff; a broken one must not keep the failure from being recorded."""
    try:
        seconds = float(options.backoff(failures, clock.uniform))
        if 0 <= seconds <= LONGEST:
            return seconds
    except Exception as error:
        signals.tell(signals.settle_troubled, "", claim=None, error=error)
    return Exponential()(failures, clock.uniform)


def _settle_surely(
    claim: Claim, ending: Ending, note: Note, job: Job[..., Any] | None
) -> Status | None:
    """
    Settle; where COMMIT had no reply, read the attempt before another try.

    Tried for as long as the lease would last without us; then the coordinator recovers the job.
    """
    lease = registry.options_of(claim.name).lease

    def read_or_settle(first: bool) -> Status | None:
        if not first and lifecycle.outcome_of(claim.fence) is not None:
            return Status(lifecycle.jobs().values_list("status", flat=True).get(pk=claim.job_pk))
        return settle(claim, ending, note, job)

    status = _persist(read_or_settle, patience=lease, claim=claim)
    if status is None and (late := _late(ending)):
        lifecycle.note_late(claim.fence, late)
    return status


def _late(ending: Ending) -> AttemptOutcome | None:
    return {
        Succeeded: AttemptOutcome.SUCCEEDED,
        Failed: AttemptOutcome.FAILED,
        Interrupted: AttemptOutcome.INTERRUPTED,
        Stopped: AttemptOutcome.CANCELLED,
        Snoozed: AttemptOutcome.SNOOZED,
        Parked: AttemptOutcome.HELD,
    }.get(type(ending))


def _persist(ask: Callable[[bool], T], *, patience: float, claim: Claim | None = None) -> T:
    """
    Ask the database, again on a fresh connection while it is out of reach, up to ``patience`` s.

    ``ask`` is told whether this is the first try. Inside somebody's transaction there is one.
    """
    deadline = clock.monotonic() + patience
    first = True
    for pause in _pauses():
        try:
            return ask(first)
        except CONNECTION_ERRORS as error:
            first = False
            connection = connections[lifecycle.alias()]
            if connection.in_atomic_block or clock.monotonic() + pause > deadline:
                raise
            connection.close()
            if claim is not None:
                signals.tell(signals.settle_troubled, claim.name, claim=claim, error=error)
            clock.sleep(pause)
    raise AssertionError("the pauses never end")


def _pauses() -> Iterator[float]:
    yield from PAUSES
    while True:
        yield PAUSES[-1]


# ---- after the run


def _free_lock(claim: Claim, grip: Grip, ending: Ending, status: Status | None) -> None:
    """Release the lock, or leave it to show and filter until the retry is due."""
    if grip in (Grip.UNREACHABLE, Grip.UNUSED):
        return
    if status == Status.RETRYING:
        after = lifecycle.seconds_until_due(claim.job_pk)
        if after > 0:
            locks.extend(claim.job_pk, claim.owner, ttl=after)
            return
    locks.release(claim.job_pk, claim.owner)


def _tell_end(claim: Claim, ending: Ending, status: Status | None, run_time: float) -> None:
    signals.tell(
        signals.attempt_ended,
        claim.name,
        claim=claim,
        ending=ending,
        status=status,
        run_time=run_time,
    )
    if status == Status.DEAD:
        signals.tell(
            signals.job_dead, claim.name, job_pk=claim.job_pk, key=claim.key, reason="failures"
        )
