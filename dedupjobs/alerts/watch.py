"""
The watch: look, judge, raise and clear; measure the pressure; deliver.

``Watch.round()`` is one look and ``couriers.deliver()`` one delivery; ``standing()`` runs both in
threads of a coordinator, so that neither a slow Redis nor a webhook that hangs delays a tick.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from django.db import connections

from dedupjobs import clock, conf, load, pressure, signals
from dedupjobs.alerts import book, couriers, rules
from dedupjobs.alerts.book import Key
from dedupjobs.alerts.rules import Found
from dedupjobs.alerts.sight import Looker
from dedupjobs.pressure import CALM, Level, Load

ABSENT = ("no_coordinator", "")
FORGET_EVERY = 3600.0  # seconds
GOING = 2.0  # seconds that a coordinator waits for its threads at its end


@dataclass(slots=True)
class Patience:
    """For how long each trouble has lasted, or has been gone, by our own clock: no flapping."""

    since: dict[Key, tuple[bool, float]] = field(default_factory=dict)

    def lasts(self, key: Key, *, present: bool, now: float) -> float:
        """Return the seconds for which this has been so at every look."""
        was, at = self.since.get(key, (not present, now))
        if was is not present:
            at = now
        self.since[key] = (present, at)
        return now - at

    def keep(self, keys: set[Key]) -> None:
        """Forget all others."""
        self.since = {key: seen for key, seen in self.since.items() if key in keys}


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What one round did: the alerts that it raised and cleared."""

    raised: tuple[Key, ...] = ()
    cleared: tuple[Key, ...] = ()


@dataclass(slots=True)
class Watch:
    """Keeps between rounds only what it has seen itself."""

    owner: str = field(default_factory=clock.token)
    _looker: Looker = field(default_factory=Looker)
    _patience: Patience = field(default_factory=Patience)
    _level: Level = CALM
    _looked: float = 0.0
    _next_forget: float = 0.0

    def round(self, *, leads: bool = True) -> Done:
        """Look once. One that does not lead only sees to it that somebody does."""
        raised: list[Key] = []
        gap = book.absence()
        # At the very first look of all nobody was missing yet.
        if gap is not None and gap.age is not None and book.announce(*_missing(gap.age)):
            raised.append(ABSENT)
        if not leads:
            self._looker = Looker()  # its past would have a hole
            return Done(raised=tuple(raised))
        sight, measured = self._looker.look()
        load.note(measured, self._eased(measured), self.owner)
        more, cleared = self._settle(rules.judge(sight, conf.alerts()))
        self._forget_old()
        return Done(raised=(*raised, *more), cleared=tuple(cleared))

    def _eased(self, measured: Load) -> Level:
        now = clock.monotonic()
        level = pressure.level(measured, conf.limits())
        self._level = pressure.eased(self._level, level, now - self._looked)
        self._looked = now
        return self._level

    def _settle(self, verdicts: Mapping[str, list[Found] | None]) -> tuple[list[Key], list[Key]]:
        now, told = clock.monotonic(), conf.alerts()
        opened = book.open_keys()
        raised: list[Key] = []
        present: dict[Key, Found] = {}
        unknown = {kind for kind, found in verdicts.items() if found is None}
        for kind, found in verdicts.items():
            present |= {(kind, each.subject[:200]): each for each in found or ()}
        for key, each in present.items():
            lasts = self._patience.lasts(key, present=True, now=now)
            if key in opened:
                book.renew(opened[key], each)
            elif lasts >= told.RAISE_AFTER and book.announce(key[0], each):
                raised.append(key)
        gone = [key for key in opened if key not in present and key[0] not in unknown]
        cleared = [
            key
            for key in gone
            if self._patience.lasts(key, present=False, now=now) >= told.CLEAR_AFTER
            and book.clear(opened[key])
        ]
        self._patience.keep({*present, *opened})
        return raised, cleared

    def _forget_old(self) -> None:
        if clock.monotonic() >= self._next_forget:
            self._next_forget = clock.monotonic() + FORGET_EVERY
            book.forget()


def _missing(age: float) -> tuple[str, Found]:
    return ABSENT[0], rules.missing(age)


# ---- beside the ticks of a coordinator


@contextmanager
def standing(leads: Callable[[], bool]) -> Iterator[None]:
    """Watch and deliver, each in a thread of its own, while the block runs."""
    over = threading.Event()
    watch = Watch()
    joins = [_loop("watch", lambda: watch.round(leads=leads()), over)]
    for channel in couriers.SEND:
        joins.append(_loop(channel, partial(_deliver, channel, leads), over))
    try:
        yield
    finally:
        over.set()
        until = clock.monotonic() + GOING
        for join in joins:
            join(max(until - clock.monotonic(), 0.0))


def _deliver(channel: str, leads: Callable[[], bool]) -> None:
    if leads() and channel in book.channels():
        couriers.deliver(channel)


def _loop(name: str, step: Callable[[], object], over: threading.Event) -> Callable[[float], None]:
    def run() -> None:
        try:
            while not clock.wait(over, conf.alerts().EVERY):
                _try(step)
        finally:
            connections.close_all()

    return clock.start(run, name=f"dedupjobs-{name}")


def _try(step: Callable[[], object]) -> None:
    try:
        step()
    except Exception as error:  # looked at again, with a fresh connection
        signals.tell(signals.coordinator_failed, "", error=error)
        connections.close_all()
