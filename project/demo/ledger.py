"""The second service's books, read from its own database as an auditor would."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

from dedupjobs.models import EventStatus, OutboxEvent


def sent() -> int:
    """Return how many events the shop has published."""
    return OutboxEvent.objects.count()


def delivered() -> int:
    """Return how many of them the stream has taken."""
    return OutboxEvent.objects.filter(status=EventStatus.DELIVERED).count()


def entries(path: Path) -> Counter[str]:
    """Return how often each payment stands in the ledger."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=20)) as books:
        found = books.execute("SELECT payment_id, COUNT(*) FROM ledger_entry GROUP BY payment_id")
        return Counter(dict(found.fetchall()))


def is_behind(path: Path) -> bool:
    """Return whether an event is on its way yet."""
    return sent() > delivered() or sent() > entries(path).total()
