"""What is known to have happened to a job, in words: calls, waiting, attempts and beats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import zip_longest

from django.utils.translation import gettext as _

from dedupjobs.models import AttemptOutcome, DuplicateSample, JobAttempt, ProcessedJob, StepState
from dedupjobs.story.parts import Seen
from dedupjobs.story.spoken import span
from dedupjobs.visible import shown

LANES = ("calls", "waiting", "attempts", "steps", "beats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened; ``end`` is None for a moment. ``kind`` is a CSS class."""

    lane: str
    kind: str
    begin: datetime
    end: datetime | None
    words: str


def events_of(
    row: ProcessedJob,
    attempts: Sequence[JobAttempt],
    duplicates: Sequence[DuplicateSample],
    steps: Sequence[Seen],
    now: datetime,
) -> list[Event]:
    """Return what is known to have happened to a job; ``attempts`` by their numbers."""
    found = [_moment("calls", "created", row.created_at, _("enqueued for the first time"))]
    if row.enqueued_at - row.created_at > timedelta(milliseconds=1):
        found.append(_moment("calls", "enqueued", row.enqueued_at, _("enqueued again")))
    for sample in duplicates:
        words = _("duplicate: %(cause)s") % {"cause": sample.get_cause_display()}
        found.append(_moment("calls", "duplicate", sample.at, words))
    for attempt, following in zip_longest(attempts, attempts[1:]):
        found += _of_attempt(attempt, now)
        if attempt.ended_at is not None:
            found += _after(attempt, following, row, now)
    return [*found, *(_of_step(step, now) for step in steps)]


def _of_attempt(attempt: JobAttempt, now: datetime) -> Iterator[Event]:
    claimed, end = attempt.claimed_at, attempt.ended_at or now
    number = {"number": attempt.number}
    if attempt.queue_delay:
        words = _("attempt %(number)s waited %(span)s in the queue")
        yield Event(
            lane="waiting",
            kind="queue",
            begin=claimed - timedelta(seconds=attempt.queue_delay),
            end=claimed,
            words=words % {**number, "span": span(attempt.queue_delay)},
        )
    if attempt.lock_wait:
        words = _("attempt %(number)s waited %(span)s for the lock")
        yield Event(
            lane="waiting",
            kind="lock",
            begin=claimed - timedelta(seconds=attempt.lock_wait),
            end=claimed,
            words=words % {**number, "span": span(attempt.lock_wait)},
        )
    outcome = str(attempt.get_outcome_display() or _("still open"))
    took = span((end - claimed).total_seconds())
    words = _("attempt %(number)s: %(outcome)s after %(span)s")
    yield Event(
        lane="attempts",
        kind=(attempt.outcome or "open").lower(),
        begin=claimed,
        end=max(end, claimed),
        words=words % {**number, "outcome": outcome, "span": took},
    )
    if attempt.beat_at > claimed:
        words = _("last beat of attempt %(number)s") % number
        yield _moment("beats", "beat", attempt.beat_at, words)
    if attempt.outcome is None and attempt.lease_until < now:
        words = _("lease of attempt %(number)s expired") % number
        yield _moment("beats", "expired", attempt.lease_until, words)


def _of_step(seen: Seen, now: datetime) -> Event:
    step = seen.step
    end = max(step.ended_at or (step.started_at if seen.in_doubt else now), step.started_at)
    took = span((end - step.started_at).total_seconds())
    if seen.in_doubt:
        words = _("step %(name)s of attempt %(number)s: %(state)s")
    elif step.state == StepState.STARTED:
        words = _("step %(name)s of attempt %(number)s: has run for %(span)s")
    else:
        words = _("step %(name)s of attempt %(number)s: %(state)s after %(span)s")
    facts = {"name": shown(step.name), "number": step.attempt, "state": seen.words, "span": took}
    kind = "lost" if seen.in_doubt else _KINDS[step.state]
    return Event(lane="steps", kind=kind, begin=step.started_at, end=end, words=words % facts)


_KINDS = {"STARTED": "open", "SUCCEEDED": "succeeded", "FAILED": "failed"}


def _after(
    attempt: JobAttempt, following: JobAttempt | None, row: ProcessedJob, now: datetime
) -> Iterator[Event]:
    """The pause between an attempt and the next one, or the one that is planned."""
    begin = attempt.ended_at or now
    if following is not None:
        if following.generation != attempt.generation:
            return  # another run, which a call or a rerun has asked for
        delay = timedelta(seconds=following.queue_delay or 0)
        end = following.claimed_at - delay
    elif row.status == "RETRYING":
        end = row.run_after
    else:
        return
    if end > begin:
        words = _pause(attempt) % {"span": span((end - begin).total_seconds())}
        yield Event(lane="waiting", kind="pause", begin=begin, end=end, words=words)


def _pause(attempt: JobAttempt) -> str:
    if attempt.outcome == AttemptOutcome.HELD:
        return _("held for %(span)s")
    if attempt.outcome in (AttemptOutcome.FAILED, AttemptOutcome.TIMED_OUT):
        return _("retry after %(span)s")
    return _("next attempt after %(span)s")


def _moment(lane: str, kind: str, at: datetime, words: str) -> Event:
    return Event(lane=lane, kind=kind, begin=at, end=None, words=words)
