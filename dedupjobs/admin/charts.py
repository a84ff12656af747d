"""Charts as shapes and words; the template makes SVG of them, and a table of the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.utils import timezone

WIDTH, HEIGHT = 600, 200
TOP, BOTTOM = 26, 28  # what the words need
GAP = 0.25  # of a bar's place
TICKS = 5
LINES = (0.0, 0.5, 1.0)  # of the height


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """
    One line, or one layer of the bars. ``values``: None where nothing is known. ``kind``: which
    colour and pattern it has.
    """

    kind: int = 0
    label: str
    values: Sequence[float | None]
    total: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A bar, or the place of one moment with what is to be said about it."""

    x: float
    y: float
    width: float
    height: float
    words: str = ""
    kind: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stroke:
    """A line, in pieces where something is unknown; a piece of one point is a dot."""

    kind: int
    paths: tuple[str, ...]
    dots: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A word at the axis."""

    at: float
    words: str
    anchor: str = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """All of one chart. ``empty``: what to say instead of drawing it, or ""."""

    key: str
    title: str
    hint: str
    series: tuple[Series, ...]
    bars: tuple[Box, ...]
    strokes: tuple[Stroke, ...]
    places: tuple[Box, ...]
    grid: tuple[Mark, ...]
    ticks: tuple[Mark, ...]
    rows: tuple[tuple[datetime, tuple[str, ...]], ...]
    empty: str
    width: int = WIDTH
    height: int = HEIGHT
    floor: int = HEIGHT - BOTTOM


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """
    What is to be drawn. ``stacked``: as bars upon each other; else as lines. ``least``: where the
    axis ends at least.
    """

    key: str
    title: str
    hint: str
    series: tuple[Series, ...]
    stacked: bool
    say: Callable[[float], str]
    least: float = 0.0
    empty: str


def draw(plan: Plan, moments: Sequence[datetime]) -> Chart:
    """Return the chart of values at these moments, each the begin of a minute or hour."""
    known = [v for series in plan.series for v in series.values if v is not None]
    step = WIDTH / max(len(moments), 1)
    highest = _ceiling(max(_highest(plan, moments), plan.least))
    return Chart(
        key=plan.key,
        title=plan.title,
        hint=plan.hint,
        series=plan.series,
        bars=tuple(_bars(plan, step, highest)) if plan.stacked else (),
        strokes=() if plan.stacked else tuple(_strokes(plan, step, highest)),
        places=tuple(
            Box(x=i * step, y=0, width=step, height=HEIGHT - BOTTOM, words=_words(plan, moment, i))
            for i, moment in enumerate(moments)
        ),
        grid=tuple(
            Mark(at=_y(share * highest, highest), words=plan.say(share * highest))
            for share in LINES
        ),
        ticks=tuple(_ticks(moments, step)),
        rows=tuple(
            (moment, tuple(_said(plan, series.values[i]) for series in plan.series))
            for i, moment in reversed(list(enumerate(moments)))
            if any(series.values[i] for series in plan.series)
        ),
        empty="" if any(known) else plan.empty,
    )


def _highest(plan: Plan, moments: Sequence[datetime]) -> float:
    at_once = [[series.values[i] or 0 for series in plan.series] for i in range(len(moments))]
    return max(((sum if plan.stacked else max)(v) for v in at_once if v), default=0)


def _ceiling(value: float) -> float:
    """Return the next number above of which the half is round, too."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit * power for digit in (1, 2, 4, 6, 8, 10) if digit * power >= value * 0.999)


def _y(value: float, highest: float) -> float:
    return HEIGHT - BOTTOM - value / highest * (HEIGHT - BOTTOM - TOP)


def _bars(plan: Plan, step: float, highest: float) -> list[Box]:
    found = []
    heights: dict[int, float] = {}
    for series in plan.series:
        for i, value in enumerate(series.values):
            if value:
                below = heights.get(i, 0.0)
                heights[i] = below + value
                y = _y(heights[i], highest)
                height = _y(below, highest) - y
                x, width = (i + GAP / 2) * step, (1 - GAP) * step
                found.append(Box(x=x, y=y, width=width, height=height, kind=series.kind))
    return found


def _strokes(plan: Plan, step: float, highest: float) -> list[Stroke]:
    found = []
    for series in plan.series:
        pieces: list[list[tuple[float, float]]] = [[]]
        for i, value in enumerate(series.values):
            if value is None:
                pieces.append([])
            else:
                pieces[-1].append(((i + 0.5) * step, _y(value, highest)))
        paths = tuple(
            " ".join(f"{x:.1f},{y:.1f}" for x, y in piece) for piece in pieces if len(piece) > 1
        )
        dots = tuple(piece[0] for piece in pieces if len(piece) == 1)
        found.append(Stroke(kind=series.kind, paths=paths, dots=dots))
    return found


def _ticks(moments: Sequence[datetime], step: float) -> list[Mark]:
    found = []
    for number in range(TICKS if len(moments) >= TICKS else len(moments)):
        i = round(number * (len(moments) - 1) / max(TICKS - 1, 1))
        anchor = {0: "start", TICKS - 1: "end"}.get(number, "middle")
        at = {"start": i * step, "end": (i + 1) * step}.get(anchor, (i + 0.5) * step)
        found.append(Mark(at=at, words=_clock(moments[i]), anchor=anchor))
    return found


def _clock(moment: datetime) -> str:
    here = timezone.localtime(moment)
    return f"{here:%H:%M}"


def _words(plan: Plan, moment: datetime, i: int) -> str:
    said = [f"{series.label}: {_said(plan, series.values[i])}" for series in plan.series]
    return "\n".join([_clock(moment), *said])


def _said(plan: Plan, value: float | None) -> str:
    return "–" if value is None else plan.say(value)
