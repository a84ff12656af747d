"""Handlers for `dedupjobs_listen --exec`."""

from __future__ import annotations

from dedupjobs.invalidation import Message
from tests.app.models import Ledger

NOTHING = "no function"


def note(message: Message) -> None:
    Ledger.objects.create(tag="heard", note=message.event)


def broken(message: Message) -> None:
    raise ValueError("broken")
