"""Specimen handlers of events: they write the ledger, and fail or wait when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dedupjobs import inbox
from dedupjobs.inbox import Event
from tests.app.models import Ledger
from tests.waiting import until

PATIENCE = 40  # seconds

before: dict[str, Callable[[], object]] = {}
"""What to do, by an event's id or its payload, once the ledger is written."""


def book(event: Event) -> None:
    """Write a line, and then do what the test wants; or wait for a file that the event names."""
    if isinstance(event.payload, dict):
        _wait(Path(event.payload["begun"]), Path(event.payload["release"]))
    Ledger.objects.create(tag=str(event.payload), note=event.id)
    for known in (event.id, str(event.payload)):
        if act := before.get(known):
            act()


def _wait(begun: Path, release: Path) -> None:
    begun.touch()
    until(release.exists, PATIENCE, what="the test lets the handler go on")


def audit(event: Event) -> None:
    """Write a line for another consumer."""
    Ledger.objects.create(tag=f"audit {event.payload}")


def register() -> None:
    """Let consumers of the suite have these handlers; no other test has such consumers."""
    inbox.handler("order.paid", consumer="ledger")(book)
    inbox.handler("order.shipped", consumer="ledger")(book)
    inbox.handler("order.*", consumer="audit")(audit)
