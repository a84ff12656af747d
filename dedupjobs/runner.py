"""
What a worker calls: take a row, run its function, settle how it ended.

Read ``deliver`` first: it is the table of contents. A run's ending is decided as one frozen
value and written afterwards, through ``lifecycle`` alone; whatever Redis says, the row decides.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any

from django.db import connections, reset_queries, transaction

from dedupjobs import (
    asides,
    clock,
    controls,
    counters,
    dispatch,
    execution,
    fields,
    hardening,
    interrupts,
    invalidation,
    lifecycle,
    load,
    locks,
    patience,
    queries,
    registry,
    signals,
    spans,
    stats,
)
from dedupjobs.backoff import Exponential
from dedupjobs.context import Attempt
from dedupjobs.endings import (
    Ending,
    Failed,
    Interrupted,
    Lapsed,
    Parked,
    Snoozed,
    Stopped,
    Succeeded,
)
from dedupjobs.exceptions import ArgumentError, GroupUnknown
from dedupjobs.heartbeat import B, Heart, Pacemaker, beating
from dedupjobs.invalidation import News
from dedupjobs.lifecycle import Claim, Note, Place, Refusal, Refused
from dedupjobs.locks import Grip, Taken
from dedupjobs.models import WAITING, AttemptOutcome, Cause, Status
from dedupjobs.registry import LONGEST, Job, Options
from dedupjobs.signals import LockEvent
from dedupjobs.wire import Cargo

if TYPE_CHECKING:
    from rq.job import Job as RqJob

CONNECTION_ERRORS, persist = patience.CONNECTION_ERRORS, patience.persist
FIRST_LEASE = registry.USUAL_LEASE  # a lock's TTL until the claim tells which job it is
CLAIM_PATIENCE = 5.0  # seconds; afterwards the row waits for the coordinator

LOST_TO_ANOTHER = (AttemptOutcome.LOST, AttemptOutcome.RETURNED)
LARGEST = 2**63  # a primary key is smaller
MOST_ROWS = 1_000  # of one message; a forged one must not keep a worker for hours


@dataclass(slots=True)
class Host:
    """The process that runs deliveries: who owns their attempts, and who is told of them."""

    owner: str = ""
    rq_id: str = ""
    description: str = ""  # what the message says of itself
    pays_when_idle: bool = False  # it tells what was counted although no other job may come

    def claimed(
        self, claim: Claim, options: Options, *, since: float | None = None, alone: bool = True
    ) -> None:
        """
        A row is claimed and about to run, or runs ``since`` then, by the monotonic clock.

        ``alone``: no other one runs in this process.
        """

    def settled(self, claim: Claim) -> None:
        """Its ending is written, or somebody else's stands."""

    def beating(self, heart: B) -> AbstractContextManager[B]:
        """Keep its lease, or those of its batch, alive while it runs."""
        return beating(heart)


@dataclass(slots=True)
class Resident(Host):
    """A process that runs one message after the other, as RQ's SimpleWorker does."""

    pays_when_idle: bool = True
    pacemaker: Pacemaker = field(default_factory=lambda: Pacemaker(when_idle=_pay_quietly))

    def beating(self, heart: B) -> AbstractContextManager[B]:
        """Keep its lease, or those of its batch, alive while it runs."""
        return self.pacemaker.beating(heart)


def _pay_quietly() -> None:
    with suppress(Exception):  # another thread may just be closing the client
        counters.pay()


host = Host()
"""Replaced by a work horse of DedupWorker, whose parent has minted the owner."""
_messages = 0


def _settle_in() -> None:
    """Stay, if this process gets a second message: a forked horse of RQ gets one only."""
    global host, _messages  # noqa: PLW0603 - there is one per process
    _messages += 1
    if _messages > 1 and type(host) is Host and current_thread() is main_thread():
        host = Resident()


def _be_new() -> None:
    """Be as a process that has run nothing: a forked child has no thread that beats."""
    global host, _messages  # noqa: PLW0603 - there is one per process
    _messages = 0
    if isinstance(host, Resident):
        host = Host()


os.register_at_fork(after_in_child=_be_new)


Rows = list[tuple[int, int]]  # pk, generation


def run(deliveries: list[list[int]]) -> None:
    """Run the rows of an RQ message, ``[[pk, generation], …]``, one after the other."""
    serve(deliveries, one_by_one)


def serve(deliveries: list[list[int]], run_all: Callable[[Rows, str], None]) -> None:
    """Run the rows of an RQ message in the way of ``run_all``, which is told their owner."""
    hardening.harden_connections()
    fields.worker = fields.worker or _rq_worker()
    reset_queries()  # under DEBUG Django keeps every statement, in a worker for ever
    _settle_in()
    try:
        if not _met_stranger():
            run_all(_checked(deliveries), host.owner or clock.token())
    finally:
        stats.flush()  # a horse's memory ends with its run
        spans.flush()


def _met_stranger() -> bool:
    """Return whether the message is another project's; then it is handed on."""
    message, description = _message(), _description()
    if message is None or not dispatch.is_of_others(description):
        return False
    handed_on = dispatch.hand_on(message)
    signals.tell(signals.stranger_met, "", message=description, handed_on=handed_on)
    return True


def one_by_one(rows: Rows, owner: str) -> None:
    """Run rows one after the other, each claimed when its turn has come."""
    lock = takes_lock()
    for index, (pk, generation) in enumerate(rows):
        if interrupts.shutting_down.is_set():
            lifecycle.mark_unsent([rq_id()])
            return
        mine = owner if len(rows) == 1 else f"{owner}.{index}"
        deliver(pk, generation, owner=mine, lock=lock)


def deliver(pk: int, generation: int, *, owner: str, lock: bool = True) -> Status | None:
    """
    Run one row if it is waiting and due; return where it went, or None if there was nothing.

    ``lock``: try to take its lock first. What is not known before the claim is mended after it.
    A delivery that finds nothing to take is dropped: whoever holds the row finishes it, or the
    coordinator recovers it.
    """
    signals.tell(signals.delivery_received, "", job_pk=pk, generation=generation)
    with counters.gathering():
        return _deliver(pk, generation, owner, lock=lock)


def _deliver(pk: int, generation: int, owner: str, *, lock: bool) -> Status | None:
    controls.current()
    taken = locks.take(pk, owner, ttl=FIRST_LEASE) if lock else Taken(Grip.UNUSED)
    grip = taken.grip
    if grip is Grip.BUSY and _is_taken(pk):
        _drop(pk, owner, Grip.BUSY)
        return None
    claim = _claimed(pk, generation, owner, taken)
    if claim is None:
        return None
    options = controls.known().options_of(claim.name)
    grip = _hold_lock(claim, grip, options)
    host.claimed(claim, options)
    heart = Heart(job_pk=pk, fence=claim.fence, owner=owner, name=claim.name, lease=options.lease)
    signals.tell(signals.attempt_started, claim.name, claim=claim)
    begun = clock.monotonic()
    with spans.consuming(claim) as span, host.beating(heart):
        ending, status = perform(claim, heart, borrowed=in_transaction())
        if span is not None:
            error = ending.error.type if isinstance(ending, Failed) else ""
            span.ended(outcome_of(ending), status, error)
    host.settled(claim)
    with invalidation.gathering() as news:
        tell_end(claim, ending, status, clock.monotonic() - begun)
    free_lock(claim, grip, status, heart, news)
    _let_next_in(claim)
    if isinstance(ending, Interrupted) and ending.reraise:
        raise KeyboardInterrupt
    return status


# ---- before the run


def takes_lock() -> bool:
    """Return whether the job takes locks that the message says it is of."""
    return registry.options_of(dispatch.name_in(_description())).takes_lock


def _checked(deliveries: Any) -> list[tuple[int, int]]:
    """Return the message's rows; a forged or foreign one is an error, not code to run."""
    if isinstance(deliveries, list) and len(deliveries) <= MOST_ROWS:
        pairs = [d for d in deliveries if isinstance(d, list) and list(map(type, d)) == [int, int]]
        if len(pairs) == len(deliveries) and all(0 <= n < LARGEST for p in pairs for n in p):
            return [(pk, generation) for pk, generation in pairs]
    raise ArgumentError(
        f"{str(deliveries)[:100]!r} is no list of at most {MOST_ROWS} [pk, generation]"
    )


def in_transaction() -> bool:
    """Whether we run inside somebody's transaction."""
    return connections[lifecycle.alias()].in_atomic_block


def _is_taken(pk: int) -> bool:
    """Return whether the row is not waiting: then a busy lock tells the truth."""
    waiting = lifecycle.jobs().filter(pk=pk, status__in=WAITING)
    return not persist(lambda first: waiting.all().exists(), patience=CLAIM_PATIENCE)


def _claimed(pk: int, generation: int, owner: str, taken: Taken) -> Claim | None:
    """Claim the row, or do with its message what has to be done."""
    try:
        claim = _claim_surely(pk, generation, owner, taken)
    except Refused as refused:
        _put_aside(pk, generation, owner, taken.grip, refused.refusal)
        return None
    if claim is None:
        _drop(pk, owner, taken.grip)
    return claim


def _claim_surely(pk: int, generation: int, owner: str, taken: Taken) -> Claim | None:
    """Claim; where COMMIT had no reply, look for the attempt by its owner before another try."""
    place, unreachable = place_of(taken.waited), taken.grip is Grip.UNREACHABLE

    def look_or_claim(first: bool) -> Claim | None:
        if not first and (found := lifecycle.claimed_by(owner)):
            return found[0]
        return _claim(pk, generation, owner, place, locks=not unreachable)

    return persist(look_or_claim, patience=CLAIM_PATIENCE)


def place_of(lock_wait: float | None = None) -> Place:
    """Return where an attempt of this process runs."""
    return Place(host=socket.gethostname(), pid=os.getpid(), rq_id=rq_id(), lock_wait=lock_wait)


def rq_id() -> str:
    """Return the id under which the message was sent that is being run, or an empty text."""
    return dispatch.id_as_sent(host.rq_id or ((message := _message()) and message.id) or "")


def _claim(
    pk: int, generation: int, owner: str, place: Place, *, locks: bool = True
) -> Claim | None:
    """
    Claim under the controls in force; a group that nobody has counted yet is made first.

    ``locks``: they can be had.
    """
    gate = controls.known().gate(locks=locks)
    try:
        return lifecycle.claim(pk, generation, owner=owner, place=place, gate=gate)
    except GroupUnknown as unknown:
        controls.make_group(str(unknown))
        return _claim(pk, generation, owner, place, locks=locks)


def _put_aside(pk: int, generation: int, owner: str, grip: Grip, refusal: Refusal) -> None:
    """Let a row wait that may not run yet, unless another message of it is on its way."""
    _leave(pk, owner, grip)
    mine = rq_id()
    if not mine or refusal.sent_as in (mine, None):
        asides.put(pk, generation, refusal)


def _leave(pk: int, owner: str, grip: Grip) -> None:
    """Give up what was taken of a row that does not run here, and tell what was counted."""
    if grip is Grip.HELD:
        locks.release(pk, owner, cargo=[counters.payment(due=host.pays_when_idle)])
    elif grip is not Grip.UNREACHABLE and not host.pays_when_idle:
        counters.pay()


def _message() -> RqJob | None:
    from rq import get_current_job  # noqa: PLC0415 - only a worker has one

    return get_current_job()


def _description() -> str:
    return host.description or ((message := _message()) and message.description) or ""


def _rq_worker() -> str:
    return ((message := _message()) and message.worker_name) or ""


def _drop(pk: int, owner: str, grip: Grip) -> None:
    """Drop a delivery, because the row remembers; say whether a race or a redelivery brought it."""
    columns = ("name", "status", "queue", "traceparent")
    row = lifecycle.jobs().filter(pk=pk).values_list(*columns).first()
    name, status, queue, traceparent = row or ("", "gone", "", "")
    cause = Cause.RACE if status == Status.RUNNING else Cause.REDELIVERY
    detail = f"a message found the row {status}"
    signals.tell(
        signals.duplicate_detected,
        name,
        job_pk=pk,
        cause=cause,
        detail=detail,
        queue=queue,
        traceparent=traceparent,
    )
    tell_lock(name, pk, AT_FIRST[grip], None)
    _leave(pk, owner, grip)


AT_FIRST = {
    Grip.HELD: LockEvent.ACQUIRED,
    Grip.BUSY: LockEvent.BUSY,
    Grip.UNREACHABLE: LockEvent.UNREACHABLE,
    Grip.UNUSED: None,
}


def tell_lock(name: str, pk: int, event: LockEvent | None, claim: Claim | None) -> None:
    """Tell what became of a row's lock, if anything did."""
    if event is not None:
        signals.tell(signals.lock_moved, name, job_pk=pk, event=event, claim=claim)


def _hold_lock(claim: Claim, grip: Grip, options: Options) -> Grip:
    """Give a lock that was taken before its job was known what the job wants; return the grip."""
    if not options.takes_lock:
        if grip is Grip.HELD:
            locks.release(claim.job_pk, claim.owner)
        return Grip.UNUSED
    first = grip
    event = AT_FIRST[grip]
    if grip is Grip.BUSY:
        grip = locks.replace(claim.job_pk, claim.owner, ttl=options.lease)
        event = LockEvent.TAKEN_OVER if grip is Grip.HELD else AT_FIRST[grip]
    elif grip is Grip.HELD and options.lease != FIRST_LEASE:
        grip = locks.extend(claim.job_pk, claim.owner, ttl=options.lease)
        event = AT_FIRST[grip] if grip is Grip.UNREACHABLE else event
    tell_lock(claim.name, claim.job_pk, event, claim)
    return first


# ---- the run


def perform(claim: Claim, heart: Heart, *, borrowed: bool) -> tuple[Ending, Status | None]:
    """
    Run a claimed row's function and settle its ending; the status is None if it was not ours.

    ``borrowed``: we run inside somebody's transaction (a test's, or a caller of ``run_now``),
    whose connection is not ours to close.
    """
    job = registry.find(claim.name)
    if job is None:
        reason = f"no job called {claim.name!r} is known to this worker; deploy it, then retry"
        parked = Parked(reason=reason)
        return parked, settle_surely(claim, parked, Note(reason=reason), None)
    if job.options.atomic:
        return perform_atomically(job, claim, heart, borrowed=borrowed)
    attempt = Attempt(claim, heart)
    ending, note = execution.execute(job, claim, attempt, heart, borrowed=borrowed)
    return conclude(attempt, claim, ending, note, job, heart)


def conclude(
    attempt: Attempt, claim: Claim, ending: Ending, note: Note, job: Job[..., Any], heart: Heart
) -> tuple[Ending, Status | None]:
    """Settle how a function that is not atomic has ended; return the ending that stands."""
    if attempt.completed:
        return _after_own_completion(claim, ending, note, job, heart)
    return ending, settle_surely(claim, ending, note, job)


def _after_own_completion(
    claim: Claim, ending: Ending, note: Note, job: Job[..., Any], heart: Heart
) -> tuple[Ending, Status | None]:
    """Read what became of ``attempt.complete()``, which the function's own COMMIT decides."""
    outcome = persist(lambda first: lifecycle.outcome_of(claim.fence), patience=heart.lease)
    if outcome == AttemptOutcome.SUCCEEDED:
        return Succeeded(result="null"), _status_of(claim)
    if isinstance(ending, Succeeded) or _is_of_connection(ending):  # it was not committed
        ending = Interrupted(reason="the transaction with its completion was not committed")
        note = execution.note_of(ending, note.run_time)
    return ending, settle_surely(claim, ending, note, job)


def _is_of_connection(ending: Ending) -> bool:
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in CONNECTION_ERRORS}
    return isinstance(ending, Failed) and ending.error.type in names


def _status_of(claim: Claim) -> Status:
    return Status(lifecycle.jobs().values_list("status", flat=True).get(pk=claim.job_pk))


def perform_atomically(
    job: Job[..., Any], claim: Claim, heart: Heart, *, borrowed: bool
) -> tuple[Ending, Status | None]:
    """Function and settle in one transaction: its effects and its success, or neither."""
    ending: Ending = Interrupted(reason="not run")
    note = lifecycle.NO_NOTE
    status: Status | None = None
    mark = f"dedupjobs_{claim.fence}"
    try:
        with transaction.atomic(using=lifecycle.alias()):
            lifecycle.mark_transaction(mark)
            attempt = Attempt(claim, heart)
            ending, note = execution.execute(job, claim, attempt, heart, borrowed=borrowed)
            if isinstance(ending, Succeeded):
                lifecycle.assert_unbroken(mark)
                status = settle(claim, ending, note, job)
            if status is None:
                raise _UndoError
        return ending, status
    except _UndoError:
        if isinstance(ending, Succeeded):
            lifecycle.note_late(claim.fence, AttemptOutcome.SUCCEEDED)
            return Lapsed(), None
    except Exception as error:
        if borrowed and isinstance(error, CONNECTION_ERRORS):
            raise  # the owner of the transaction must deal with this
        ending, note, done = _after_doubtful_commit(claim, job, error, heart)
        if done:
            return ending, _status_of(claim)
    return ending, settle_surely(claim, ending, note, job)


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
        queries.drop_connections()
    outcome = persist(lambda first: lifecycle.outcome_of(claim.fence), patience=heart.lease)
    ending: Ending
    if outcome == AttemptOutcome.SUCCEEDED:
        return Succeeded(result="null"), lifecycle.NO_NOTE, True
    if isinstance(error, CONNECTION_ERRORS):
        ending = Interrupted(reason=f"its COMMIT did not happen: {error}"[:500])
    else:
        ending = execution.ending_of(error, job.options, heart)
    return ending, execution.note_of(ending, None), False


# ---- settling


def settle(  # noqa: PLR0911 - a table
    claim: Claim, ending: Ending, note: Note, job: Job[..., Any] | None
) -> Status | None:
    """Write the ending by its one arrow; None if somebody else had decided."""
    options = job.options if job else Options()
    load.ended(well=not isinstance(ending, Failed))
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
    most = claim.max_attempts or controls.known().options_of(claim.name).max_attempts
    if ending.final or failures >= most:
        return lifecycle.give_up(
            claim, on_dead=options.on_dead, note=note, timed_out=ending.timed_out
        )
    after = load.retry(_pause(options, failures)) if ending.after is None else ending.after
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


def settle_surely(
    claim: Claim, ending: Ending, note: Note, job: Job[..., Any] | None, *, tried: bool = False
) -> Status | None:
    """
    Settle; where COMMIT had no reply, read the attempt before another try.

    Tried for as long as the lease would last without us; then the coordinator recovers the job.
    ``tried``: a COMMIT of ours may have settled it already.
    """
    lease = controls.known().options_of(claim.name).lease

    def read_or_settle(first: bool) -> Status | None:
        outcome = None if first and not tried else lifecycle.outcome_of(claim.fence)
        if outcome is None:
            return settle(claim, ending, note, job)
        return None if outcome in LOST_TO_ANOTHER else _status_of(claim)

    status = persist(read_or_settle, patience=lease, claim=claim)
    if status is None and (late := outcome_of(ending)):
        lifecycle.note_late(claim.fence, late)
    return status


def outcome_of(ending: Ending) -> AttemptOutcome | None:
    """Return the outcome that an ending writes; None: it writes nothing."""
    if isinstance(ending, Failed) and ending.timed_out:
        return AttemptOutcome.TIMED_OUT
    return OUTCOMES.get(type(ending))


OUTCOMES: dict[type[Ending], AttemptOutcome] = {
    Succeeded: AttemptOutcome.SUCCEEDED,
    Failed: AttemptOutcome.FAILED,
    Interrupted: AttemptOutcome.INTERRUPTED,
    Stopped: AttemptOutcome.CANCELLED,
    Snoozed: AttemptOutcome.SNOOZED,
    Parked: AttemptOutcome.HELD,
}


# ---- after the run


def free_lock(claim: Claim, grip: Grip, status: Status | None, heart: Heart, news: News) -> None:
    """
    Release the lock, or leave it to show and filter until the retry is due.

    The last word to Redis: it carries the news of the job, and what was counted, since a horse
    is about to end.
    """
    cargo: list[Cargo] = [news] if news.travels else []
    if not news.travels:
        news.send()
    if grip in (Grip.UNREACHABLE, Grip.UNUSED):  # nothing else goes there
        counters.carry(cargo, due=host.pays_when_idle and grip is Grip.UNUSED)
        return
    cargo.append(counters.payment(due=host.pays_when_idle))
    event = LockEvent.RELEASED
    after = lifecycle.seconds_until_due(claim.job_pk) if status == Status.RETRYING else 0.0
    if after > 0:
        event = LockEvent.KEPT
        freed = locks.extend(claim.job_pk, claim.owner, ttl=after, waited=False, cargo=cargo)
    else:
        freed = locks.release(claim.job_pk, claim.owner, waited=False, cargo=cargo)
    if freed is Grip.HELD:
        tell_lock(claim.name, claim.job_pk, event, claim)
    elif freed is Grip.BUSY and not has_successor(claim, status):
        heart.miss_lock()
        counters.pay()


def _let_next_in(claim: Claim) -> None:
    """Wake a row that has waited for the room that this attempt took, once that is committed."""

    def wake() -> None:
        asides.freed(claim)

    if controls.known().limits(claim.name, claim.args):
        transaction.on_commit(wake, using=lifecycle.alias(), robust=True)


def has_successor(claim: Claim, status: Status | None) -> bool:
    """Whether the lock may be another's because this attempt had ended when that one began."""
    later = lifecycle.attempts().filter(job_id=claim.job_pk, number__gt=claim.number)
    try:
        return status is not None and later.exists()
    except CONNECTION_ERRORS:
        return True  # not known, and not worth a wait


def tell_end(claim: Claim, ending: Ending, status: Status | None, run_time: float | None) -> None:
    """Tell how an attempt ended; ``run_time``: seconds, None where nobody has measured them."""
    signals.tell(
        signals.attempt_ended,
        claim.name,
        claim=claim,
        ending=ending,
        status=status,
        run_time=run_time,
    )
    if status is not None:
        signals.tell(signals.job_changed, claim.name, changes=[claim.change(status)])
    else:
        detail = f"{type(ending).__name__} after its lease was lost"
        facts = {"job_pk": claim.job_pk, "cause": Cause.LEASE, "detail": detail}
        signals.tell(signals.duplicate_detected, claim.name, **facts)
    if status == Status.DEAD:
        signals.tell(
            signals.job_dead, claim.name, job_pk=claim.job_pk, key=claim.key, reason="failures"
        )
