"""
What the dashboard shows: numbers, charts, workers, Redis and events, and what is wrong.

The number of queries is fixed, but for some per target and consumer of events; each is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dedupjobs import controls, fleet, summaries, traffic
from dedupjobs.admin import period, plans, tiles, troubles
from dedupjobs.admin.charts import Chart, draw
from dedupjobs.admin.tiles import Tile
from dedupjobs.admin.troubles import Banner
from dedupjobs.alerts import book
from dedupjobs.controls import Rule
from dedupjobs.fleet import Fleet
from dedupjobs.models import Severity
from dedupjobs.traffic import Incoming, Outgoing

MOST_JOBS = 10
MOST_CONTROLS = 50
MOST_ALERTS = 20
MOST_NAMES = 10  # targets of events, and consumers
LEVELS: dict[str, str] = {Severity.CRITICAL: "bad", Severity.WARNING: "warn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """All of it."""

    now: datetime
    span: str
    headline: str
    level: str
    banners: tuple[Banner, ...]
    alerts: tuple[Banner, ...]
    tiles: tuple[Tile, ...]
    happened: tuple[Tile, ...]
    charts: tuple[Chart, ...]
    jobs: tuple[dict[str, Any], ...]
    fleet: Fleet
    begun: bool
    controls: tuple[Rule, ...]
    outgoing: tuple[Outgoing, ...]
    incoming: tuple[Incoming, ...]


def read(name: str) -> Board:
    """Read what the dashboard shows; ``name``: of the span."""
    now = tiles.look()
    seen = fleet.look()
    shown = period.read(name, now.at)
    newest = summaries.newest()
    banners = tuple(troubles.banners(now, seen, newest, shown))
    alerts = open_alerts()
    level = troubles.worst(now, (*banners, *alerts))
    size, _number = period.SPANS[name]
    return Board(
        now=now.at,
        span=name,
        headline=troubles.headline(level, now, banners, alerts),
        level=level,
        banners=banners,
        alerts=alerts,
        tiles=tuple(tiles.now_tiles(now, shown)),
        happened=tuple(tiles.happened_tiles(shown)),
        charts=tuple(draw(plan, shown.moments) for plan in plans.plans(shown)),
        jobs=tuple(summaries.by_name(size, shown.moments[0], most=MOST_JOBS)),
        fleet=seen,
        begun=newest is not None or any(now.by_status.values()),
        controls=controls.current(at_most=0.0).rules[:MOST_CONTROLS],
        outgoing=tuple(traffic.outgoing(most=MOST_NAMES)),
        incoming=tuple(traffic.incoming(most=MOST_NAMES)),
    )


def open_alerts() -> tuple[Banner, ...]:
    """Return the alerts that are open, the critical ones first."""
    found = sorted(book.standing(), key=lambda alert: alert.severity != Severity.CRITICAL)
    return tuple(
        Banner(level=LEVELS[alert.severity], words=alert.words, cure=alert.cure)
        for alert in found[:MOST_ALERTS]
    )
