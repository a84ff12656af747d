"""Asking a database that may be out of reach for a moment, until it answers or time is up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from django.db import InterfaceError, OperationalError, connections

from dedupjobs import clock, lifecycle, signals
from dedupjobs.lifecycle import Claim

T = TypeVar("T")

CONNECTION_ERRORS = (OperationalError, InterfaceError)
PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0)  # seconds between tries to reach the database; the last repeats


def persist(ask: Callable[[bool], T], *, patience: float, claim: Claim | None = None) -> T:
    """
    Ask the database, again on a fresh connection while it is out of reach, up to ``patience`` s.

    ``ask`` is told whether this is the first try. Inside somebody's transaction there is one.
    """
    deadline = clock.monotonic() + patience
    first = True
    for pause in _pauses():
        try:
            return ask(first)
        except CONNECTION_ERRORS as error:
            first = False
            connection = connections[lifecycle.alias()]
            if lifecycle.waited_in_vain(error):
                deadline = clock.monotonic() + patience  # a database that says so is in reach
            if connection.in_atomic_block or clock.monotonic() + pause > deadline:
                raise
            connection.close()
            if claim is not None:
                signals.tell(signals.settle_troubled, claim.name, claim=claim, error=error)
            clock.sleep(pause)
    raise AssertionError("the pauses never end")


def _pauses() -> Iterator[float]:
    yield from PAUSES
    while True:
        yield PAUSES[-1]
