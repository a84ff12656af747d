"""
How hard the system is pressed, as a coordinator has measured it last, and what a process does by
it: ``pressure`` has the arithmetic.

It stands in the database, so that it works while Redis is down, and counts for OLD seconds: where
nobody measures, nothing is stretched.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from django.db import DatabaseError, InterfaceError

from dedupjobs import clock, conf, lifecycle, pressure
from dedupjobs.clock import DbNow
from dedupjobs.models import Watch
from dedupjobs.pressure import CALM, Level, Load

FRESH = 1.0  # seconds that a process believes what it has read
OLD = 60.0  # seconds after which a measurement says nothing any more
THE_ONE = 1  # primary key


@dataclass(slots=True)
class _Known:
    level: Level = CALM
    read: float = -math.inf
    failing: bool = False


_known = _Known()


def forget() -> None:
    """Know nothing: after a fork, and where another world begins."""
    global _known  # noqa: PLW0603 - a forked child has had no failure yet
    _known = _Known()


os.register_at_fork(after_in_child=forget)


def note(measured: Load, level: Level, owner: str) -> None:
    """Write down what a coordinator has seen, and when."""
    sets = {
        "at": DbNow(),
        "owner": owner,
        "score": level.score,
        "penalised": level.penalised,
        "delay": measured.delay,
        "growth": measured.growth,
        "memory": measured.memory,
    }
    if not _rows().filter(pk=THE_ONE).update(**sets):
        _rows().bulk_create([Watch(pk=THE_ONE, **sets)], ignore_conflicts=True)


def last() -> Watch | None:
    """Return what was seen last, however old, with the database's clock as ``db_now``."""
    found: Watch | None = _rows().filter(pk=THE_ONE).annotate(db_now=DbNow()).first()
    return found


def age(seen: Any) -> float:
    """Return the seconds since a look, as ``last`` has returned it."""
    return float((seen.db_now - seen.at).total_seconds())


def level() -> Level:
    """Return how hard the system is pressed; read at most once in FRESH seconds."""
    if clock.monotonic() - _known.read >= FRESH:
        _known.read = clock.monotonic()
        rows = _rows().filter(pk=THE_ONE, at__gte=DbNow(-OLD))
        found = rows.values_list("score", "penalised").first() if conf.limits().ON else None
        _known.level = Level(score=found[0], penalised=found[1]) if found else CALM
    return _known.level


def retry(delay: float) -> float:
    """Return the seconds that a failed run waits instead of ``delay``."""
    return pressure.retry(delay, level(), conf.limits())


def tick(pause: float) -> float:
    """Return the seconds between two rounds of a coordinator instead of ``pause``."""
    return pressure.tick(pause, level(), conf.limits(), most=conf.get().LEADER_TTL / 2)


def ended(*, well: bool) -> None:
    """Remember how this process's last run ended; a success resets what it rests."""
    _known.failing = not well


def rest() -> float:
    """Return the seconds that a DedupWorker rests before its next fetch."""
    if not _known.failing:
        return 0.0
    try:
        return pressure.rest(level(), conf.limits())
    except (DatabaseError, InterfaceError):
        return 0.0


def _rows() -> Any:
    return Watch._base_manager.using(lifecycle.alias())
