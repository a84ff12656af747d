"""
A job's life as a picture, drawn to scale: calls, waiting, attempts and beats, one lane each.

Only geometry: moments and durations in, positions out. The template draws it as inline SVG, with
attributes instead of styles, and a table behind it tells the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import zip_longest

from django.utils.translation import gettext as _

from dedupjobs.admin.spoken import span
from dedupjobs.models import DuplicateSample, JobAttempt, ProcessedJob

LEFT, WIDTH, RIGHT = 90, 1000, 30  # of the drawing, in its own units
LANE, TOP, BAR = 34, 14, 18
NARROWEST = 3.0  # so that a short attempt in a long life can still be seen
TICKS = 5
LANES = ("calls", "waiting", "attempts", "beats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened; ``end`` is None for a moment. ``kind`` is a CSS class."""

    lane: str
    kind: str
    begin: datetime
    end: datetime | None
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event in the drawing."""

    kind: str
    x: float
    y: float
    width: float
    middle: float
    is_moment: bool
    words: str
    corners: str = ""  # of a triangle, so that colour is not all that tells a duplicate


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    x: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    y: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """All that the template draws; numbers are in the drawing's own units."""

    marks: tuple[Mark, ...]
    ticks: tuple[Tick, ...]
    lanes: tuple[Lane, ...]
    events: tuple[Event, ...]
    begin: datetime
    total: str
    left: float = LEFT
    right: float = WIDTH - RIGHT
    width: float = WIDTH
    height: float = TOP + len(LANES) * LANE + 22
    floor: float = TOP + len(LANES) * LANE


def draw(events: Iterable[Event]) -> Drawing | None:
    """Place all events between the first and the last; None: there are none."""
    ordered = sorted(events, key=lambda event: (event.begin, LANES.index(event.lane)))
    if not ordered:
        return None
    begin = ordered[0].begin
    end = max((event.end or event.begin) for event in ordered)
    total = max((end - begin).total_seconds(), 0.001)
    scale = (WIDTH - LEFT - RIGHT) / total

    def x_of(at: datetime) -> float:
        return round(LEFT + (at - begin).total_seconds() * scale, 1)

    return Drawing(
        marks=tuple(_mark(event, x_of) for event in ordered),
        ticks=tuple(_ticks(total)),
        lanes=tuple(
            Lane(y=TOP + i * LANE + LANE / 2, words=words) for i, words in enumerate(_lane_names())
        ),
        events=tuple(ordered),
        begin=begin,
        total=span(total),
    )


def events_of(
    row: ProcessedJob,
    attempts: Sequence[JobAttempt],
    duplicates: Sequence[DuplicateSample],
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
    return found


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


def _after(
    attempt: JobAttempt, following: JobAttempt | None, row: ProcessedJob, now: datetime
) -> Iterator[Event]:
    """The pause between an attempt and the next one, or the one that is planned."""
    begin = attempt.ended_at or now
    if following is not None:
        delay = timedelta(seconds=following.queue_delay or 0)
        end = following.claimed_at - delay
    elif row.status == "RETRYING":
        end = row.run_after
    else:
        return
    if end > begin:
        words = _("retry after %(span)s") % {"span": span((end - begin).total_seconds())}
        yield Event(lane="waiting", kind="pause", begin=begin, end=end, words=words)


def _moment(lane: str, kind: str, at: datetime, words: str) -> Event:
    return Event(lane=lane, kind=kind, begin=at, end=None, words=words)


def _lane_names() -> tuple[str, ...]:
    return (_("calls"), _("waiting"), _("attempts"), _("beats"))


def _mark(event: Event, x_of: Callable[[datetime], float]) -> Mark:
    x = x_of(event.begin)
    width = x_of(event.end) - x if event.end is not None else 0.0
    middle = TOP + LANES.index(event.lane) * LANE + LANE / 2
    return Mark(
        kind=event.kind,
        x=x,
        y=middle - BAR / 2,
        width=max(round(width, 1), NARROWEST),
        middle=middle,
        is_moment=event.end is None,
        words=event.words,
        corners=_triangle(x, middle) if event.kind == "duplicate" else "",
    )


def _triangle(x: float, y: float) -> str:
    return f"{x:.1f},{y - 7:.1f} {x + 7:.1f},{y + 6:.1f} {x - 7:.1f},{y + 6:.1f}"


def _ticks(total: float) -> Iterator[Tick]:
    for i in range(TICKS):
        part = i / (TICKS - 1)
        x = round(LEFT + part * (WIDTH - LEFT - RIGHT), 1)
        yield Tick(x=x, words="0" if i == 0 else f"+{span(total * part)}")
