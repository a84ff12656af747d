"""enqueue, join, rerun, replace, debounce, reopen: what a call does to the row of its key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from django.db import OperationalError, connections, transaction
from django.db.models import Exists, F, OuterRef

from dedupjobs import clock, conf, probes
from dedupjobs.clock import DbNow
from dedupjobs.exceptions import DedupJobsError, TransactionLost
from dedupjobs.lifecycle import pouring, together
from dedupjobs.lifecycle.rows import (
    FRESH,
    NEXT_VERSION,
    NO_RERUN,
    UNSENT,
    alias,
    attempts,
    codes,
    jobs,
)
from dedupjobs.lifecycle.sending import new_dispatch_id
from dedupjobs.lifecycle.statements import NOW, Select, Slot, can_return_updated, insert
from dedupjobs.models import ACTIVE, Kind, ProcessedJob, Status
from dedupjobs.registry import Call, Options

T = TypeVar("T")

LOOPS = 10  # read → insert or change; each loop means that somebody else moved the row
DEADLOCKS = {"1213", "1205"}  # as MySQL numbers a deadlock and a lock wait time-out
CHUNK = 500  # calls per statement of enqueue_many
COMPUTED = ("id", "created_at", "enqueued_at", "run_after", "debounce_deadline", "dispatched_at")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """
    What an enqueue found or made.

    ``mismatch``: the key is held by other arguments. ``sends``: the row waits for a message
    that this call is to push after its commit. ``reopens``: the key had ended before, and others
    may remember it so. ``conflicted``: another call's row was in the way of our INSERT.
    """

    kind: Kind
    row: ProcessedJob
    mismatch: bool = False
    sends: bool = False
    reopens: bool = False
    conflicted: bool = False


def enqueue(call: Call, *, options: Options, holds: bool) -> Answer:
    """
    Return the key's row, PENDING because of this call or held by an earlier one.

    ``holds``: a success keeps the key (``unique_for`` is not None). Starts with a plain read, so
    a duplicate costs one SELECT and no lock; only a miss inserts.
    """
    conflicted = False
    for _ in range(LOOPS):
        row, made = _found_or_made(call, options)
        if made is not None:
            return _new(made)
        if row is None:
            conflicted = True
            continue
        answer = _or_read_again(partial(_answer, row, call, options, holds), None)
        if answer is not None:
            return replace(answer, conflicted=True) if conflicted else answer
    raise DedupJobsError(
        f"{call.name} {call.key!r}: moved by others {LOOPS} times in a row; try again"
    )


def enqueue_many(calls: Sequence[Call], *, options: Options, holds: bool) -> list[Answer]:
    """
    Do the same for many calls with few statements; answers come in the order of the calls.

    Keys are written in the order of their hashes, so two opposite batches do not deadlock. Of
    calls with the same key the first makes the row, and the others find it there. Only a call
    that has to change a row costs statements of its own.
    """
    firsts = {call.key_hash: call for call in reversed(calls)}
    made, there = _poured(calls, firsts, options)
    answers: dict[int, Answer] = {}
    for i in sorted(range(len(calls)), key=lambda i: calls[i].key_hash):
        call = calls[i]
        if firsts[call.key_hash] is call and call.key_hash in made:
            answers[i] = _new(made[call.key_hash])
            continue
        row = there.rows.get(call.key_hash)
        kind = _held_as(row, options, holds) if row is not None else None
        if kind is None or (kind is Kind.DUPLICATE and options.newest_wins):
            there.rows.pop(call.key_hash, None)  # the row changes: later calls read it again
            answers[i] = enqueue(call, options=options, holds=holds)
        else:
            answers[i] = _turned_away(kind, row, call)
        if call.key_hash in there.lost and firsts[call.key_hash] is call:
            answers[i] = replace(answers[i], conflicted=True)
    return [answers[i] for i in range(len(calls))]


def _poured(
    calls: Sequence[Call], firsts: dict[str, Call], options: Options
) -> tuple[dict[str, ProcessedJob], _There]:
    """Insert the first call of each key that has no row; return those made, and those met."""
    times = Counter(call.key_hash for call in calls)
    made: dict[str, ProcessedJob] = {}
    there = _There()
    for chunk in _chunks(sorted(firsts)):
        known = {row.key_hash: row for row in _rows(key_hash__in=chunk)}
        missing = [k for k in chunk if k not in known]
        made |= _insert_many([firsts[k] for k in missing], options)
        there.lost |= set(missing) - made.keys()
        unread = [k for k in missing if k in there.lost or times[k] > 1]
        found = {row.key_hash: row for row in _rows(key_hash__in=unread)} if unread else {}
        there.rows |= known | found
    return made, there


@dataclass(slots=True)
class _There:
    """The rows that calls of a batch meet, by key hash; ``lost``: keys that others made first."""

    rows: dict[str, Any] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)


def _new(row: ProcessedJob) -> Answer:
    return Answer(kind=Kind.CREATED, row=row, sends=row.dispatched_at is not None)


def _turned_away(kind: Kind, row: Any, call: Call) -> Answer:
    return Answer(kind=kind, row=row, mismatch=row.fingerprint != call.fingerprint)


def _chunks(keys: list[str]) -> Iterator[list[str]]:
    left = iter(keys)
    while chunk := list(islice(left, CHUNK)):
        yield chunk


def _rows(**which: Any) -> Any:
    """Return rows with the database's clock and whether their present generation was tried."""
    tried = attempts().filter(job_id=OuterRef("pk"), generation=OuterRef("generation"))
    return jobs().filter(**which).annotate(db_now=DbNow(), tried=Exists(tried))


_KEY_HASH = Slot("key_hash", ProcessedJob._meta.get_field("key_hash"))
_BY_KEY = Select(ProcessedJob, "by key", lambda: _rows(key_hash=_KEY_HASH))


def _row_of(key_hash: str) -> Any:
    return _BY_KEY.first(alias(), key_hash=key_hash)


def _sent(row: Any, dispatch_id: str) -> bool:
    """Whether the row still waits for the message whose id we have drawn."""
    return row.dispatch_id == dispatch_id and row.dispatched_at is not None


def _answer(row: Any, call: Call, options: Options, holds: bool) -> Answer | None:
    """Turn the call away, or change the row for it; None: the row has moved, read it again."""
    kind = _held_as(row, options, holds)
    if kind is Kind.DUPLICATE and options.newest_wins:
        return _renew(row, call, options)
    if kind is not None:
        return _turned_away(kind, row, call)
    drawn = new_dispatch_id()
    if not _reopen(row, call, options, drawn):
        return None
    fresh = _row_of(call.key_hash) or row
    return Answer(kind=Kind.CREATED, row=fresh, sends=_sent(fresh, drawn), reopens=True)


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


# ---- on a key that is free


def _found_or_made(call: Call, options: Options) -> tuple[Any, ProcessedJob | None]:
    """Return the key's row, or a new one; neither: somebody else's came between."""
    if together.serves(alias()):
        values = _new_row(call, options, new_dispatch_id())
        found, made = together.find_or_make(alias(), _BY_KEY, values, returning=COMPUTED)
        probes.reach("enqueue.inserted")
        return found, made
    row = _row_of(call.key_hash)
    probes.reach("enqueue.read")
    return row, None if row else _insert(call, options)


def _insert(call: Call, options: Options) -> ProcessedJob | None:
    """
    Insert a row and return it; None if somebody else has inserted this key.

    A conflict must not abort the caller's transaction, so the insert ignores it. A loser waits
    for an open winner, and wins if that one rolls back.
    """
    if not can_return_updated(alias()):
        return _insert_many([call], options).get(call.key_hash)
    values = _new_row(call, options, new_dispatch_id())
    row = insert(ProcessedJob, alias(), returning=COMPUTED, ignore_conflicts=True, **values)
    probes.reach("enqueue.inserted")
    return row  # type: ignore[no-any-return]


def _insert_many(calls: Sequence[Call], options: Options) -> dict[str, ProcessedJob]:
    """
    Insert rows, and return those that are ours by their key's hash.

    Not every database says which rows of a statement were inserted: whose row it is shows by
    the dispatch id, which is drawn before.
    """
    if not calls:
        return {}
    drawn = _drawn(calls, options)
    rows = [_new_row(c, options, drawn[c.key_hash]) for c in calls]
    if pouring.serves(alias()):
        made = pouring.insert_many(alias(), rows, returning=COMPUTED)
        probes.reach("enqueue.inserted")
        return {row.key_hash: row for row in made}
    return _or_read_again(lambda: _inserted([ProcessedJob(**row) for row in rows], drawn), {})


def _drawn(calls: Sequence[Call], options: Options) -> dict[str, str]:
    """Return an RQ id by key hash; rows that may share a message have one id."""
    size = conf.get().BATCH if options.batch else 1
    drawn: dict[str, str] = {}
    for start in range(0, len(calls), size):
        shared = new_dispatch_id()
        drawn |= {call.key_hash: shared for call in calls[start : start + size]}
    return drawn


def _new_row(call: Call, options: Options, dispatch_id: str) -> dict[str, Any]:
    return {
        "key_hash": call.key_hash,
        "key": call.key,
        "scope": call.scope,
        "created_at": NOW,
        **_payload(call, options, dispatch_id),
    }


def _or_read_again(write: Callable[[], T], missed: T) -> T:
    """
    Return what ``write`` does, or ``missed`` if MariaDB has ended it to resolve a deadlock.

    Inside a caller's transaction all of his work is rolled back then, and he is told so.
    """
    try:
        return write()
    except OperationalError as error:
        if not codes(error) & DEADLOCKS:
            raise
        connection = connections[alias()]
        if not connection.in_atomic_block:
            return missed
        connection.needs_rollback = True  # whether or not the server has done it already
        raise TransactionLost(
            "The database has rolled this transaction back, because it and another one that "
            "wanted the same key waited for each other (a deadlock). Repeat the transaction."
        ) from error


def _inserted(rows: list[ProcessedJob], drawn: dict[str, str]) -> dict[str, ProcessedJob]:
    # One transaction, so that no coordinator can send a row again before we have looked.
    with transaction.atomic(using=alias()):
        mine = jobs().filter(key_hash__in=list(drawn))
        if connections[alias()].vendor == "mysql":
            # Losers that wait at the insert get deadlocks when the winner rolls back; a locking
            # read of the keys first makes them queue up. INSERT IGNORE would ignore too much: of
            # what a column can not hold, it stores something else.
            list(mine.select_for_update().order_by("key_hash").values_list("pk"))
            jobs().bulk_create(rows, update_conflicts=True, update_fields=["key_hash"])
        else:
            jobs().bulk_create(rows, ignore_conflicts=True)
        probes.reach("enqueue.inserted")
        return {row.key_hash: row for row in mine if row.dispatch_id == drawn[row.key_hash]}


def _reopen(row: ProcessedJob, call: Call, options: Options, drawn: str) -> bool:
    """
    Put a final row back to PENDING for this call; guarded by the version that was read.

    A success starts a new generation, and so does a failed key with other arguments: its
    effects belong to another intention. The same call on a failed key goes on in the same one,
    since its effects may have happened under that idempotency key.
    """
    probes.reach("reopen.before")
    other = row.fingerprint != call.fingerprint
    grows = row.status == Status.SUCCEEDED or (other and row.attempts > 0)
    return bool(
        jobs()
        .filter(pk=row.pk, status=row.status, version=row.version)
        .update(
            status=Status.PENDING,
            version=NEXT_VERSION,
            generation=F("generation") + int(grows),
            **NO_RERUN,
            finished_at=None,
            unique_until=None,
            result=None,
            error="",
            **FRESH,
            **_payload(call, options, drawn),
        )
    )


def _payload(call: Call, options: Options, dispatch_id: str) -> dict[str, Any]:
    """Return what a new run of a key gets from its call: what to run, where, and when."""
    delay = _delay(call, options)
    return {
        "name": call.name,
        "queue": call.queue,
        "args": call.args,
        "fingerprint": call.fingerprint,
        "traceparent": call.traceparent,
        "enqueued_at": NOW,
        "run_after": delay if isinstance(delay, datetime) else DbNow(delay) if delay else NOW,
        "debounce_deadline": DbNow(options.max_wait) if options.max_wait else None,
        # A run that is not due yet has no message: the coordinator hands it over in time.
        "dispatch_id": dispatch_id,
        "dispatched_at": None if _is_later(delay) else NOW,
    }


def _delay(call: Call, options: Options) -> datetime | float:
    if call.run_after is not None:
        return call.run_after
    return min(options.debounce or 0.0, options.max_wait or float("inf"))


def _is_later(delay: datetime | float) -> bool:
    # This machine's clock only decides who sends the message; the claim asks the database's.
    return delay > clock.utcnow() if isinstance(delay, datetime) else delay > 0


# ---- on an active key whose newest payload wins


def _renew(row: Any, call: Call, options: Options) -> Answer | None:
    """Replace what waits, or ask for another run after the present one, by the job's policy."""
    if row.status == Status.PENDING and not row.tried:
        return _replace(row, call, options)
    if options.on_conflict == "replace" and not options.debounce:
        return Answer(kind=Kind.DUPLICATE, row=row)
    if row.cancel_requested:  # the stop would drop what nobody has seen
        return Answer(kind=Kind.BLOCKED, row=row)
    kind = Kind.DEBOUNCED if options.debounce else Kind.RERUN
    if (_is_free() and row.rerun_args == call.args) or _rerun(row, call):
        return Answer(kind=kind, row=row)
    return None


def _is_free() -> bool:
    """
    Whether a call that changes nothing may leave the row unlocked.

    Inside a caller's transaction it may not: the run that waits could start and end before his
    commit, without seeing what he changed, and nobody would run afterwards.
    """
    return not connections[alias()].in_atomic_block


def _replace(row: Any, call: Call, options: Options) -> Answer | None:
    """
    PENDING without an attempt in this generation → same, with new arguments.

    Guarded by the version as read: a claim in between has read the old arguments. A debounced
    row moves on to now + debounce, at most ``max_wait`` after the first call.
    """
    seen = jobs().filter(pk=row.pk, status=Status.PENDING, version=row.version)
    if not options.debounce and row.args == call.args and call.run_after is None:
        # What waits is this very call: nothing to write, at most the row to hold.
        if _is_free() or seen.update(version=NEXT_VERSION):
            return Answer(kind=Kind.DUPLICATE, row=row)
        return None
    probes.reach("replace.before")
    drawn = new_dispatch_id()
    changes = _payload(call, options, drawn)
    for kept in ("enqueued_at", "debounce_deadline"):
        del changes[kept]
    if options.debounce:
        due = row.db_now + timedelta(seconds=options.debounce)
        changes |= {"run_after": min(due, row.debounce_deadline or due), **UNSENT}
    if not seen.update(version=NEXT_VERSION, **changes):
        return None
    fresh = _row_of(call.key_hash) or row
    if options.debounce:
        return Answer(kind=Kind.DEBOUNCED, row=fresh)
    return Answer(kind=Kind.REPLACED, row=fresh, sends=_sent(fresh, drawn))


def _rerun(row: Any, call: Call) -> bool:
    """
    RUNNING, RETRYING, or PENDING with an attempt → same, and the call's arguments run next.

    In one UPDATE with the test of the status, so that no wake-up is lost when the run ends at
    this instant: then 0 rows match, and the caller reads again.
    """
    probes.reach("rerun.before")
    seen = jobs().filter(
        pk=row.pk, status__in=ACTIVE, generation=row.generation, cancel_requested=False
    )
    return bool(
        seen.update(
            rerun_args=call.args,
            rerun_fingerprint=call.fingerprint,
            rerun_name=call.name,
            rerun_queue=call.queue,
            version=NEXT_VERSION,
        )
    )
