"""
The world that is on stage, and the doors through which the tested code meets it.

``dedupjobs.clock`` and ``probes.hook`` are the only attributes of ours that are replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from dedupjobs import clock, probes
from tests.simulation.redis_model import Store

if TYPE_CHECKING:
    from tests.simulation.world import World

world: World | None = None

EPOCH = datetime(2030, 1, 1)
_outside = Store(lambda: 0)  # answers what a client asks while no world is on stage


def enter(entering: World) -> None:
    """Put a world on stage: from now on it is all that the tested code sees."""
    global world  # noqa: PLW0603 - there is one stage
    world = entering
    from dedupjobs import counters, load  # when called: they need the settings

    counters.forget_owed()
    load.forget()
    clock.monotonic = entering.monotonic
    clock.sleep = entering.sleep
    clock.uniform = entering.uniform
    clock.utcnow = entering.utcnow
    clock.token = entering.token
    clock.wait = entering.wait
    clock.start = entering.start
    probes.hook = entering.reach


def leave() -> None:
    """Clear the stage and put the real clock back."""
    global world  # noqa: PLW0603 - there is one stage
    world = None
    for name, value in _real.items():
        setattr(clock, name, value)
    probes.hook = None


def on_stage() -> World:
    """Return the world that is on stage."""
    assert world is not None
    return world


def exchange(db: int, commands: list[tuple[Any, ...]]) -> list[Any]:
    """Send commands to the world's Redis and return the replies."""
    if world is None:
        return _outside.exchange(db, commands)
    return world.exchange(db, commands)


def strftime(form: str, moment: str, shift: str = "+0 seconds") -> str:
    """SQLite's function, with the world's time as "now"."""
    seconds = float(shift.split(maxsplit=1)[0])
    now = world.db_now() if world is not None else 0
    return text_of(now + round(seconds * 1000))


def text_of(milliseconds: int) -> str:
    """Return a moment as the database writes it."""
    return (EPOCH + timedelta(milliseconds=milliseconds)).isoformat(" ", "milliseconds")


def moment_of(text: str) -> int:
    """Return the milliseconds of what the database has written."""
    return milliseconds_of(datetime.fromisoformat(text))


def milliseconds_of(moment: datetime) -> int:
    """Return the milliseconds of a moment in UTC, aware or not."""
    return round((moment.replace(tzinfo=None) - EPOCH).total_seconds() * 1000)


def utc(milliseconds: int) -> datetime:
    """Return a moment as an aware datetime."""
    return (EPOCH + timedelta(milliseconds=milliseconds)).replace(tzinfo=UTC)


_real: dict[str, Any] = {
    name: getattr(clock, name)
    for name in ("monotonic", "sleep", "uniform", "utcnow", "token", "wait", "start")
}

Target = Callable[[], None]
Event = threading.Event
