"""What an application calls: enqueue a job, and learn what became of the call."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asgiref.sync import sync_to_async
from django.db import DatabaseError, connections, transaction
from django.dispatch import Signal

from dedupjobs import (
    cache,
    clock,
    conf,
    controls,
    dispatch,
    invalidation,
    keys,
    lifecycle,
    locks,
    signals,
    spans,
    stats,
)
from dedupjobs.cache import Known
from dedupjobs.clock import DbNow
from dedupjobs.controls import Rule
from dedupjobs.dispatch import Delivery
from dedupjobs.exceptions import (
    ArgumentError,
    DedupJobsError,
    JobConflict,
    JobDefinitionError,
    NoResult,
    NotMigrated,
    PayloadMismatch,
    PayloadTooLarge,
    ResultTimeout,
)
from dedupjobs.lifecycle import Answer, Change
from dedupjobs.models import FINAL, Cause, Kind, ProcessedJob, Status
from dedupjobs.registry import Call, Job, Variant

MISSING_TABLE = {"42P01", "1146"}  # as PostgreSQL and MySQL number it
POLL_FIRST, POLL_LAST = 0.02, 0.5  # seconds between two looks for a result, doubling


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The attempt that is at work on a key. ``beat_age``: seconds since its last heartbeat."""

    status: Status
    attempt: int
    host: str
    pid: int | None
    beat_age: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """
    What an enqueue did: always an object, always true.

    ``job`` is the row that holds the key: the new one, or the one in the way; where the call was
    turned away (BLOCKED by a live control or on_redis_error="refuse"), it is not stored and has no
    ``pk``. ``control`` is the number of the live control that has turned the call away or has had
    it held (``job.status`` is HELD). ``reason`` is a sentence for
    people. ``error`` is what the job's policy makes of it; ``enqueue`` raises it,
    ``enqueue_many`` leaves it here, so that one call does not hide what became of the others.
    """

    kind: Kind
    job: ProcessedJob
    reason: str
    error: DedupJobsError | None = None
    control: int | None = None

    @property
    def created(self) -> bool:
        """Whether a run follows because of this call alone."""
        return self.kind is Kind.CREATED

    def __bool__(self) -> bool:
        return True

    def raise_for_conflict(self) -> Outcome:
        """Return self, or raise JobConflict or PayloadMismatch if the call was turned away."""
        if self.error is not None:
            raise self.error
        if self.kind in (Kind.DUPLICATE, Kind.BLOCKED):
            raise JobConflict(self)
        return self

    @property
    def holder(self) -> Holder | None:
        """The attempt that is at work on the key right now, or None; reads the database."""
        open_one = lifecycle.attempts().filter(job_id=self.job.pk, outcome=None)
        attempt: Any = open_one.select_related("job").annotate(db_now=DbNow()).last()
        if attempt is None:
            return None
        return Holder(
            status=Status(attempt.job.status),
            attempt=attempt.number,
            host=attempt.host,
            pid=attempt.pid,
            beat_age=(attempt.db_now - attempt.beat_at).total_seconds(),
        )

    def result(self, timeout: float = 0) -> Any:
        """
        Return what the job returned, waiting up to ``timeout`` seconds for its success.

        ResultTimeout: it is not there yet. NoResult: there will be none (dead, cancelled, held,
        or not kept). A success may have returned None: that is a result.
        """
        for pause in _pauses(timeout):
            if (found := self._look(pause)) is not None:
                return found.value
            clock.sleep(pause or 0)
        raise AssertionError("the last look raises")

    async def aresult(self, timeout: float = 0) -> Any:
        """As ``result``, from async code; leaves the database to others between two looks."""
        for pause in _pauses(timeout):
            if (found := await sync_to_async(self._look)(pause)) is not None:
                return found.value
            await asyncio.sleep(pause or 0)
        raise AssertionError("the last look raises")

    def _look(self, pause: float | None) -> _Found | None:
        """Read the row once; ``pause`` is None at the last look, which raises."""
        if self.job.pk is None:
            raise NoResult(f"{self.job.name} {self.job.key!r}: {self.reason}")
        row = lifecycle.jobs().filter(pk=self.job.pk).first()
        if row is None:
            raise NoResult(f"{self.job.name} {self.job.key!r} has ended and was pruned")
        if row.status in (*FINAL, Status.HELD):
            return _Found(_result_of(row))
        if connections[lifecycle.alias()].in_atomic_block:
            raise ResultTimeout(
                f"{row.name} {row.key!r} is {row.status}; inside atomic() its end can not be "
                "waited for. Ask after the commit."
            )
        if pause is None:
            raise ResultTimeout(f"{row.name} {row.key!r} is still {row.status}")
        return None


@dataclass(frozen=True, slots=True)
class _Found:
    value: Any


def _pauses(timeout: float) -> Iterator[float | None]:
    """Yield how long to wait after each look, doubling; at the deadline, None."""
    if not isinstance(timeout, (int, float)) or math.isnan(timeout):
        raise ArgumentError(f"timeout={timeout!r}; give a number of seconds")
    deadline, pause = clock.monotonic() + timeout, POLL_FIRST
    while (left := deadline - clock.monotonic()) > 0:
        yield min(pause, left)
        pause = min(pause * 2, POLL_LAST)
    yield None


def enqueue(
    variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any], *, refuses: bool = True
) -> Outcome:
    """
    Make sure that this call runs once, and say what is.

    Writes one row inside the caller's transaction, if there is one; no message reaches Redis
    before its outermost commit, and a rollback leaves nothing. ``refuses``: a call may be turned
    away by on_redis_error="refuse"; the schedule has nobody who would hear of it.
    """
    outcome = reserve(variant, args, kwargs, sends=True, refuses=refuses)
    if outcome.error is not None:
        raise outcome.error
    return outcome


async def aenqueue(variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
    """Enqueue from async code, in the thread that Django keeps for its database."""
    return await sync_to_async(enqueue)(variant, args, kwargs)


def status(variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Status | None:
    """Return how the job with this key stands, by the status cache; None: there is no such key."""
    known = _known(variant, args, kwargs)
    return known.status if known else None


async def astatus(variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Status | None:
    """As ``status``; leaves the event loop only where this process does not know."""
    known = cache.peek(variant.job.key_hash_of(args, kwargs, variant.key))
    if controls.known().bypasses_cache(variant.job.name):
        known = None
    return known.status if known else await sync_to_async(status)(variant, args, kwargs)


def result(variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of the job with this key: ResultTimeout, NoResult as ``Outcome.result``."""
    known = _known(variant, args, kwargs)
    if known is None:
        raise NoResult(f"{variant.job.name}: nothing was enqueued under this key, or it was pruned")
    row = known.row()
    if known.status == Status.SUCCEEDED and known.result is None:
        row = lifecycle.jobs().filter(pk=row.pk).first() or row
    if row.status in (*FINAL, Status.HELD):
        return _result_of(row)
    raise ResultTimeout(f"{row.name} {row.key!r} is still {row.status}")


async def aresult(variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As ``result``, from async code."""
    return await sync_to_async(result)(variant, args, kwargs)


def _known(variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | None:
    invalidation.ensure_listening()
    job = variant.job
    key_hash = job.key_hash_of(args, kwargs, variant.key)
    bypassed = controls.current().bypasses_cache(job.name)
    known: Known | None = _migrated(
        lambda: cache.read(key_hash, holds=_holds(job), bypassed=bypassed)
    )
    return known


def enqueue_many(variant: Variant, calls: Iterable[Mapping[str, Any]]) -> list[Outcome]:
    """
    Enqueue one call per dict of keyword arguments; outcomes come in the order of the calls.

    Raises for none of them: what ``enqueue`` would raise is each outcome's ``error``. Wrong
    arguments do raise, before anything is written.
    """
    job = variant.job
    bound = [_call(variant, (), _kwargs(job, call)) for call in calls]
    _check_queue(variant)
    if not bound:
        return []
    force = controls.current()
    met = {i: rule for i, call in enumerate(bound) if (rule := force.ingress(call)) is not None}
    free = iter(_enqueue_free(variant, [c for i, c in enumerate(bound) if i not in met]))
    return [
        _met(job, call, met[i], sends=True) if i in met else next(free)
        for i, call in enumerate(bound)
    ]


def _enqueue_free(variant: Variant, bound: list[Call]) -> list[Outcome]:
    """Enqueue calls that no control is about."""
    if not bound:
        return []
    job = variant.job
    if trouble := _trouble_of_locks(job):
        return [_refused(job, call, trouble) for call in bound]
    queue = variant.queue or job.options.queue
    with spans.producing(job.name, queue, len(bound)) as span:
        if span is not None:
            bound = [replace(call, traceparent=span.traceparent) for call in bound]
        answers = _migrated(
            lambda: lifecycle.enqueue_many(bound, options=job.options, holds=_holds(job))
        )
        if span is not None:
            span.answered(answers)
    news: list[_News] = []
    outcomes = [_outcome(job, call, a, news) for call, a in zip(bound, answers, strict=True)]
    _hand_over([answer.row for answer in answers if answer.sends])
    _tell_later(news)
    return outcomes


def reserve(
    variant: Variant,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    sends: bool,
    refuses: bool = True,
) -> Outcome:
    """Enqueue without raising for policies; without ``sends`` the row gets no message from us."""
    job = variant.job
    call = _call(variant, args, kwargs)
    _check_queue(variant)
    if (rule := controls.current().ingress(call)) is not None:
        return _met(job, call, rule, sends=sends)
    if refuses and (trouble := _trouble_of_locks(job)):
        return _refused(job, call, trouble)
    with spans.producing(job.name, call.queue) as span:
        if span is not None:
            call = replace(call, traceparent=span.traceparent)
        answer = _answer(job, call)
        if span is not None:
            span.answered([answer])
    news: list[_News] = []
    outcome = _outcome(job, call, answer, news)
    if sends and answer.sends:
        _hand_over([answer.row])
    _tell_later(news)
    return outcome


# ---- what a live control turns away or has held, and what is refused without locks


def _met(job: Job[..., Any], call: Call, rule: Rule, *, sends: bool) -> Outcome:
    """Answer a call that a filter or drain is about."""
    answer = _held(job, call, rule) if rule.holds else None
    if answer is None:
        return _turned_away(job, call, rule)
    news: list[_News] = []
    outcome = _outcome(job, call, answer, news)
    if answer.row.status == Status.HELD and answer.kind is not Kind.BLOCKED:
        words = f"accepted and held by {rule}; it runs once somebody unholds it"
        outcome = replace(outcome, reason=words, control=rule.pk)
    elif sends and answer.sends:
        _hand_over([answer.row])
    _tell_later(news)
    return outcome


def _trouble_of_locks(job: Job[..., Any]) -> str:
    """Return why a job that says on_redis_error="refuse" takes no calls now, or an empty text."""
    asks = job.options.needs_lock and job.options.on_redis_error == "refuse"
    return locks.why_unreachable() if asks else ""


def _refused(job: Job[..., Any], call: Call, trouble: str) -> Outcome:
    words = (
        f"refused: no lock can be had ({trouble}), and on_redis_error='refuse'; call again later"
    )
    return _blocked(job, call, words, control=None)


def _turned_away(job: Job[..., Any], call: Call, rule: Rule) -> Outcome:
    return _blocked(job, call, f"turned away by {rule}", control=rule.pk)


def _blocked(job: Job[..., Any], call: Call, reason: str, *, control: int | None) -> Outcome:
    """Return the answer without asking the database: in an incident, calls come in floods."""
    row = ProcessedJob(
        name=call.name,
        queue=call.queue,
        key=call.key,
        key_hash=call.key_hash,
        scope=call.scope,
        fingerprint=call.fingerprint,
    )
    _tell_later([(signals.call_turned_away, job.name, {"control": control, "key": call.key})])
    return Outcome(kind=Kind.BLOCKED, job=row, reason=reason, control=control)


def _held(job: Job[..., Any], call: Call, rule: Rule) -> Answer | None:
    """
    Enqueue and hold in one transaction; None: it can not be held, so it is turned away.

    That is a call whose run would follow one that is at work: a hold is about one run.
    """
    try:
        with transaction.atomic(using=lifecycle.alias()):
            answer: Answer = _migrated(
                lambda: lifecycle.enqueue(call, options=job.options, holds=_holds(job))
            )
            if answer.kind not in (Kind.CREATED, Kind.REPLACED, Kind.RERUN, Kind.DEBOUNCED):
                return answer
            held = lifecycle.hold(answer.row.pk, answer.row.version, f"held by {rule}")
            if held != Status.HELD:
                raise _NotHeldError
            row = lifecycle.jobs().get(pk=answer.row.pk)
            return replace(answer, row=row, sends=False)
    except _NotHeldError:
        return None


class _NotHeldError(Exception):
    """Undo the call."""


def _answer(job: Job[..., Any], call: Call) -> Answer:
    answer = _replayed(job, call)
    if answer is None:
        answer = _migrated(lambda: lifecycle.enqueue(call, options=job.options, holds=_holds(job)))
        _remember(answer)
    return answer


def _replayed(job: Job[..., Any], call: Call) -> Answer | None:
    """Answer from the status cache alone, where it knows a success that holds this key."""
    if not _holds(job) or controls.known().bypasses_cache(job.name):
        return None
    known = cache.success(call.key_hash)
    if known is None or known.fingerprint != call.fingerprint:
        return None
    invalidation.ensure_listening()
    return Answer(kind=Kind.REPLAYED, row=known.row())


def _remember(answer: Answer) -> None:
    """Bring a success that was found in the database to the cache, after the commit."""
    if answer.kind is not Kind.REPLAYED or not cache.is_on():
        return
    key_hash = answer.row.key_hash

    def bring() -> None:
        cache.bring(key_hash)

    transaction.on_commit(bring, using=lifecycle.alias(), robust=True)


# ---- the call


def _call(variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    job = variant.job
    if variant.run_after is not None and _reruns(job):
        raise JobDefinitionError(
            f"{job.name}: run_after does not go with on_conflict='rerun' or debounce, which say "
            "themselves when a call that meets another one runs"
        )
    call = job.call_of(job.bind(args, kwargs), variant, unkeyed=clock.token())
    size, limit = len(call.args.encode()), conf.get().MAX_PAYLOAD
    if size > limit:
        raise PayloadTooLarge(
            f"{job.name}: the arguments take {size:,} bytes, MAX_PAYLOAD allows {limit:,}. Store "
            "them in a table or file and pass the pk."
        )
    return call


def _reruns(job: Job[..., Any]) -> bool:
    return job.options.on_conflict == "rerun" or job.options.debounce is not None


def _kwargs(job: Job[..., Any], call: Any) -> dict[str, Any]:
    if isinstance(call, Mapping):
        return dict(call)
    raise ArgumentError(
        f"{job.name}.enqueue_many() takes dicts of keyword arguments, not {type(call).__name__}"
    )


def _check_queue(variant: Variant) -> None:
    dispatch.check_queue(variant.queue or variant.job.options.queue)


def _holds(job: Job[..., Any]) -> bool:
    return job.unique_for is not None


def _migrated(ask: Any) -> Any:
    try:
        return ask()
    except DatabaseError as error:
        if _is_missing_table(error):
            raise NotMigrated("The dedupjobs tables are missing. Run: manage.py migrate") from error
        raise


def _is_missing_table(error: DatabaseError) -> bool:
    return "no such table" in str(error) or bool(MISSING_TABLE & lifecycle.codes(error))


# ---- the answer


def _hand_over(rows: Sequence[ProcessedJob]) -> None:
    """Push a message per RQ id; rows that were inserted together may share one."""
    sharing: dict[str | None, list[ProcessedJob]] = {}
    for row in rows:
        sharing.setdefault(row.dispatch_id, []).append(row)
    dispatch.push_on_commit([Delivery.of_all(group, rq_id) for rq_id, group in sharing.items()])


_News = tuple[Signal, str, dict[str, Any]]  # what is to be told, of which job, and the facts


def _outcome(job: Job[..., Any], call: Call, answer: Answer, news: list[_News]) -> Outcome:
    row = answer.row
    outcome = Outcome(kind=answer.kind, job=row, reason=_reason(answer))
    if answer.conflicted:
        news.append((signals.insert_lost, job.name, {"job": row}))
    if answer.kind in (Kind.CREATED, Kind.REPLACED, Kind.RERUN, Kind.DEBOUNCED):
        news.append((signals.job_enqueued, row.name, {"job": row, "kind": answer.kind}))
        if answer.reopens:
            news.append((signals.job_changed, row.name, {"changes": [Change.of(row, row.status)]}))
        return outcome
    cause = Cause.REPLAY if answer.kind is Kind.REPLAYED else Cause.PRODUCER
    facts = {"job_pk": row.pk, "cause": cause, "detail": outcome.reason}
    news.append((signals.duplicate_detected, job.name, facts))
    if answer.mismatch:
        outcome = _mismatched(job, call, outcome, news)
    if outcome.error is not None:
        return outcome
    if job.options.on_conflict == "raise" and answer.kind is Kind.DUPLICATE:
        return replace(outcome, error=JobConflict(outcome))
    return outcome


def _tell_later(news: list[_News]) -> None:
    """Tell after the outermost commit, since receivers may talk to Redis."""

    def tell() -> None:
        with stats.gathering():
            for signal, name, facts in news:
                signals.tell(signal, name, **facts)

    transaction.on_commit(tell, using=lifecycle.alias(), robust=True)


def _mismatched(job: Job[..., Any], call: Call, outcome: Outcome, news: list[_News]) -> Outcome:
    """Say by the job's policy that the key is held by other arguments."""
    row, policy = outcome.job, job.options.on_mismatch
    found = keys.differing(row.args, call.args)
    differing = tuple(name for name in found if name in (job.fingerprint or found))
    error = PayloadMismatch(
        outcome, differing=differing, stored=row.fingerprint, given=call.fingerprint
    )
    facts = {"job": row, "differing": differing, "policy": policy}
    news.append((signals.mismatch_detected, job.name, facts))
    if policy == "raise":
        return replace(outcome, error=error)
    if policy == "warn":
        return replace(outcome, reason=f"{outcome.reason}; {error}")
    return outcome


def _reason(answer: Answer) -> str:  # noqa: PLR0911 - a table
    row = answer.row
    match answer.kind:
        case Kind.CREATED:
            return "a run follows"
        case Kind.REPLACED:
            return f"what waited in row {row.pk} now runs with these arguments"
        case Kind.RERUN:
            return f"row {row.pk} is {row.status}; these arguments run afterwards"
        case Kind.DEBOUNCED:
            return f"row {row.pk} runs once calls have stopped, with the newest arguments"
        case Kind.REPLAYED:
            until = row.unique_until
            held = f"until {until:%Y-%m-%d %H:%M:%S} UTC" if until else "for ever"
            return f"row {row.pk} has succeeded and holds this key {held}"
        case Kind.DUPLICATE:
            return f"an active job (row {row.pk}, {row.status}) has this key"
    return _why_blocked(row)


def _why_blocked(row: ProcessedJob) -> str:
    if row.cancel_requested:
        return f"row {row.pk} is {row.status} and being cancelled; call again once it has ended"
    if row.status == Status.HELD:
        return f"row {row.pk} is held for a person: {row.error or 'no reason given'}"
    return f"row {row.pk} is {row.status} and on_dead='block' keeps its key: {row.error}"


def _result_of(row: ProcessedJob) -> Any:
    if row.status != Status.SUCCEEDED:
        raise NoResult(f"{row.name} {row.key!r} is {row.status}: {row.error or 'no reason given'}")
    if row.result is None and row.is_tombstone:
        raise NoResult(f"{row.name} {row.key!r} has succeeded, but its result was pruned")
    value = keys.decode(row.result or "null")
    if isinstance(value, keys.NotKept):
        raise NoResult(f"{row.name} {row.key!r} has succeeded, but its {value.reason}")
    return value
