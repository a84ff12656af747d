"""The whole story of one job: what happened, newest last; what Redis says; why it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from django.db.models import Q

from dedupjobs import controls, criteria, dispatch, lifecycle, locks, registry
from dedupjobs.exceptions import UnknownQueue
from dedupjobs.models import DuplicateSample, JobAttempt, Operation, ProcessedJob
from dedupjobs.story import events, parts, progress, why
from dedupjobs.story.situation import situation, where
from dedupjobs.story.spoken import span
from dedupjobs.wire import UNREACHABLE

MOST_ATTEMPTS, MOST_SAMPLES, MOST_OPERATIONS = 200, 50, 100
NEAR = 3  # keys that are named where none was found
SHORTEST_KEY = 3  # characters that two keys must share to be near


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Something that happened."""

    at: datetime
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """``stores``: what the lock and RQ say. ``left_out``: attempts before those told."""

    row: ProcessedJob
    events: tuple[Told, ...]
    stores: dict[str, str]
    why: why.Why
    left_out: int

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it; no arguments and no result."""
        row = self.row
        return {
            "row": row.pk,
            "job": row.name,
            "key": row.key,
            "key_hash": row.key_hash,
            "scope": row.scope,
            "queue": row.queue,
            "status": row.status,
            "version": row.version,
            "generation": row.generation,
            "attempts": row.attempts,
            "failures": row.failures,
            "lost": row.lost_count,
            "duplicates": row.duplicates,
            "events": [{"at": e.at.isoformat(), "words": e.words} for e in self.events],
            "left_out": self.left_out,
            "stores": self.stores,
            "why": asdict(self.why),
        }


def find(text: str, *, most: int) -> list[ProcessedJob]:
    """Return the rows that have this key, id, key hash or RQ id; an id before a key."""
    wanted = criteria.clean(text)
    if not wanted:
        return []
    rows = lifecycle.jobs().defer("args", "rerun_args", "result")
    number = criteria.primary_key(wanted)
    if number is not None and (found := list(rows.filter(pk=number))):
        return found
    same = Q(key=wanted[:200]) | Q(key_hash=wanted) | Q(dispatch_id=wanted)
    return list(rows.filter(same).order_by("-pk")[:most])


def near(text: str) -> list[str]:
    """Return keys that begin as ``text`` does, by ever shorter beginnings; there may be none."""
    wanted = criteria.clean(text) or ""
    length = len(wanted)
    while length >= SHORTEST_KEY:
        begin = criteria.starts_with(wanted[:length])
        keys = lifecycle.jobs().filter(begin).values_list("key", flat=True)
        if found := list(dict.fromkeys(keys[:100])):
            return found[:NEAR]
        length //= 2
    return []


def tell(row: ProcessedJob) -> Story:
    """Read all that is known of a row, at a bounded cost; Redis may be away."""
    now = lifecycle.database_now()
    newest_first = lifecycle.attempts().filter(job_id=row.pk).order_by("-number")
    attempts = list(newest_first.defer("traceback")[:MOST_ATTEMPTS])
    newest = attempts[0] if attempts else None
    oldest_first = attempts[::-1]
    samples = _newest(DuplicateSample, row, MOST_SAMPLES)
    steps = parts.steps_of(row, newest)
    told = [
        *(_told(e) for e in events.events_of(row, oldest_first, samples, steps, now)),
        *_progress(oldest_first),
        *_errors(oldest_first),
        *_operations(row),
    ]
    return Story(
        row=row,
        events=tuple(sorted(told, key=lambda event: event.at)),
        stores={"Lock": _said(_lock, row), "RQ": _said(_message, row), **_in_force(row)},
        why=why.explain(situation(row, newest, now)),
        left_out=max(row.attempts - len(attempts), 0) if attempts else 0,
    )


def _newest(model: Any, row: ProcessedJob, most: int) -> list[Any]:
    found = model._base_manager.using(lifecycle.alias()).filter(job_id=row.pk)
    return list(found.order_by("-pk")[:most])


def _told(event: events.Event) -> Told:
    # An attempt is told when it ended, or it would come before what happened in it.
    ends = event.lane in ("attempts", "steps") and event.kind != "open"
    return Told(at=event.end if ends and event.end else event.begin, words=event.words)


def _progress(attempts: list[JobAttempt]) -> Iterator[Told]:
    for attempt in attempts:
        if said := progress.read(attempt.progress):
            words = f"progress of attempt {attempt.number}, as of its last beat: {said.words}"
            yield Told(at=attempt.beat_at, words=words)


def _errors(attempts: list[JobAttempt]) -> Iterator[Told]:
    for attempt in attempts:
        begun = f"attempt {attempt.number} claimed on {where(attempt)}, fence {attempt.pk}"
        yield Told(at=attempt.claimed_at, words=begun)
        at = attempt.ended_at or attempt.claimed_at
        if attempt.error_class:
            what = f"{attempt.error_class}: {attempt.error_message}".rstrip(": ")
            yield Told(at=at, words=f"error of attempt {attempt.number}: {what}")
        elif attempt.reason:
            yield Told(at=at, words=f"reason of attempt {attempt.number}: {attempt.reason}")
        if attempt.late_ending:
            late = f"attempt {attempt.number} ended after all: {attempt.late_ending}. It may have"
            yield Told(at=at, words=f"{late} had its effect beside a later one's.")


def _operations(row: ProcessedJob) -> Iterator[Told]:
    for done in _newest(Operation, row, MOST_OPERATIONS):
        reason = f": {done.reason}" if done.reason else ""
        words = f"{done.action} by {done.by}, {done.before} → {done.after}{reason}"
        yield Told(at=done.at, words=words)


def _said(ask: Callable[[ProcessedJob], str], row: ProcessedJob) -> str:
    try:
        return ask(row)
    except (*UNREACHABLE, UnknownQueue) as error:
        return f"can not be asked ({type(error).__name__}: {error})"


def _lock(row: ProcessedJob) -> str:
    seen = locks.seen([row.pk]).get(row.pk)
    if seen is None and not registry.options_of(row.name).takes_lock:
        return 'none is taken: concurrency_control="optimistic"'
    if seen is None:
        return "nobody has it"
    left = "for ever" if seen.ttl is None else f"for another {span(seen.ttl)}"
    return f"held by {seen.owner} {left}"


def _in_force(row: ProcessedJob) -> dict[str, str]:
    """Return the live controls that are about a row, if there are any."""
    rules = controls.current(at_most=0.0).about(row)
    return {"In force": "; ".join(str(rule) for rule in rules)} if rules else {}


def _message(row: ProcessedJob) -> str:
    if lifecycle.is_aside(row):
        return "no message: the row is set aside until it may run"
    if row.dispatch_id is None:
        return "no message was sent for what comes next"
    found = dispatch.trace(row.queue, row.dispatch_id)
    if found.place is not None:
        return f"message {row.dispatch_id} stands at {found.place} of {found.length} in its queue"
    state = "is at a worker" if found.popped or found.started else "is in no queue"
    status = f", its hash says {found.status}" if found.status else ""
    return f"message {row.dispatch_id} {state}{status}"
