"""
A job's life as a picture, drawn to scale: calls, waiting, attempts and beats, one lane each.

Only geometry: moments and durations in, positions out. The template draws it as inline SVG, with
attributes instead of styles, and a table behind it tells the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from django.utils.translation import gettext as _

from dedupjobs.story.events import LANES, Event
from dedupjobs.story.spoken import span

LEFT, WIDTH, RIGHT = 90, 1000, 30  # of the drawing, in its own units
LANE, TOP, BAR = 34, 14, 18
NARROWEST = 3.0  # so that a short attempt in a long life can still be seen
TICKS = 5


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

    @property
    def floor(self) -> float:
        """Where the lanes end."""
        return TOP + len(self.lanes) * LANE

    @property
    def height(self) -> float:
        """Of all, with the words below."""
        return self.floor + 22


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

    present = [n for n in LANES if n != "steps" or any(e.lane == n for e in ordered)]
    names = _lane_names()
    return Drawing(
        marks=tuple(_mark(event, present.index(event.lane), x_of) for event in ordered),
        ticks=tuple(_ticks(total)),
        lanes=tuple(
            Lane(y=TOP + i * LANE + LANE / 2, words=names[lane]) for i, lane in enumerate(present)
        ),
        events=tuple(ordered),
        begin=begin,
        total=span(total),
    )


def _lane_names() -> dict[str, str]:
    names = (_("calls"), _("waiting"), _("attempts"), _("steps"), _("beats"))
    return dict(zip(LANES, names, strict=True))


def _mark(event: Event, lane: int, x_of: Callable[[datetime], float]) -> Mark:
    x = x_of(event.begin)
    width = x_of(event.end) - x if event.end is not None else 0.0
    middle = TOP + lane * LANE + LANE / 2
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
