"""What of events waits to go out, and what came in and waits for a person; by bounded queries."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Min

from dedupjobs import conf, lifecycle
from dedupjobs.models import EventStatus, InboxMessage, MessageStatus, OutboxEvent

COUNTED = 10_000  # rows that are counted; more are as many
MOST_NAMES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """What waits for a target; ``oldest``: when the oldest of it was published."""

    target: str
    waiting: int
    retrying: int
    behind: int
    dead: int
    oldest: datetime | None

    @property
    def due(self) -> int:
        """All that is still to be delivered."""
        return self.waiting + self.retrying + self.behind

    def age(self, now: datetime) -> float:
        """Return for how many seconds the oldest of it waits."""
        return (now - self.oldest).total_seconds() if self.oldest else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """What a consumer has taken in and not applied."""

    consumer: str
    retrying: int
    behind: int
    held: int

    @property
    def due(self) -> int:
        """All that is still to be applied."""
        return self.retrying + self.behind


def outgoing(*, most: int = MOST_NAMES) -> list[Outgoing]:
    """Look at all targets: those of the settings, and those that have rows."""
    stored = lifecycle.values_of("target", most=most, model=OutboxEvent)
    return [_outgoing(name) for name in sorted({*conf.outbox().targets, *stored})[:most]]


def incoming(*, most: int = MOST_NAMES) -> list[Incoming]:
    """Look at all consumers: those of the settings, and those that have messages."""
    stored = lifecycle.values_of("consumer", most=most, model=InboxMessage)
    return [_incoming(name) for name in sorted({*conf.inbox().consumers, *stored})[:most]]


def _outgoing(name: str) -> Outgoing:
    rows = OutboxEvent._base_manager.using(lifecycle.alias()).filter(target=name)
    going = (EventStatus.WAITING, EventStatus.RETRYING, EventStatus.BEHIND)
    counts = {status: _count(rows.filter(status=status)) for status in (*going, EventStatus.DEAD)}
    firsts = [_oldest(rows.filter(status=status)) for status in going if counts[status]]
    return Outgoing(
        target=name,
        waiting=counts[EventStatus.WAITING],
        retrying=counts[EventStatus.RETRYING],
        behind=counts[EventStatus.BEHIND],
        dead=counts[EventStatus.DEAD],
        oldest=min(filter(None, firsts), default=None),
    )


def _incoming(name: str) -> Incoming:
    rows = InboxMessage._base_manager.using(lifecycle.alias()).filter(consumer=name)
    return Incoming(
        consumer=name,
        retrying=_count(rows.filter(status=MessageStatus.RETRYING)),
        behind=_count(rows.filter(status=MessageStatus.BEHIND)),
        held=_count(rows.filter(status=MessageStatus.HELD)),
    )


def _count(rows: Any) -> int:
    return int(rows.order_by()[:COUNTED].count())


def _oldest(rows: Any) -> datetime | None:
    """Return when the oldest of the first COUNTED was published, as an index has them."""
    first = rows.order_by("due_at", "pk")[:COUNTED]
    found: datetime | None = first.aggregate(oldest=Min("published_at"))["oldest"]
    return found
