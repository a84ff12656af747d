"""What tests of events share: targets that note what they get, and moments of the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import redis
from django.conf import settings
from django.test import override_settings

from dedupjobs import bell, streams, turns
from dedupjobs.clock import DbNow
from dedupjobs.envelope import Event
from dedupjobs.models import InboxMessage, OutboxEvent, Turn
from dedupjobs.outbox.relay import Relay, relay_all
from tests import live

STREAM = {"TARGETS": {"orders": {"stream": "orders"}}}
NOTED = {"TARGETS": {"noted": {"call": "tests.outlet.note", "attempts": 3}}}

noted: list[Event] = []
refusals: dict[str, Exception] = {}
"""Errors by the payload that is refused."""


def note(event: Event) -> None:
    """Take an event, unless its payload is to be refused."""
    if error := refusals.get(str(event.payload)):
        raise error
    noted.append(event)


async def note_async(event: Event) -> None:
    """Note nothing, when it is only called."""
    noted.append(event)


def note_in_parts(event: Event) -> Iterator[None]:
    """Note nothing, when it is only called."""
    yield noted.append(event)


def note_hidden(event: Event) -> Any:
    """Hide that nothing is noted."""
    return note_async(event)


@contextmanager
def outbox(given: Mapping[str, Any], **more: Any) -> Iterator[None]:
    """Let events go where ``given`` says."""
    noted.clear()
    refusals.clear()
    with override_settings(DEDUPJOBS={**live.BRISK, "PUSH_TIMEOUT": 5, "OUTBOX": given, **more}):
        bell.forget_clients()
        streams.forget_clients()
        yield


def payloads() -> list[Any]:
    """Return what was noted."""
    return [event.payload for event in noted]


def entries(stream: str = "orders") -> list[dict[str, str]]:
    """Return what a stream holds."""
    with redis.Redis.from_url(settings.CACHE_URL, decode_responses=True) as client:
        return [fields for _, fields in client.xrange(stream)]


def sent(stream: str = "orders") -> list[str]:
    """Return the payloads that a stream holds, as JSON."""
    return [fields["data"] for fields in entries(stream)]


def relayed() -> int:
    """Send all that is due."""
    return relay_all()


def statuses() -> list[str]:
    """Return the events' statuses in the order of their rows."""
    return list(OutboxEvent.objects.order_by("pk").values_list("status", flat=True))


def make_due() -> None:
    """Let all that waits for a retry be due."""
    OutboxEvent.objects.filter(status="RETRYING").update(due_at=DbNow(-1))


def make_messages_due() -> None:
    """Let all messages that wait for a retry be due."""
    InboxMessage.objects.filter(status="RETRYING").update(due_at=DbNow(-1))


def take_turn_away(relay: Relay, *, by: str = "another") -> None:
    """Let another process have the turn."""
    Turn.objects.filter(name=turns.sending(relay.name)).update(owner=by, until=DbNow(30))


def bell_is_rung() -> bool:
    """Return whether somebody has rung the relay's bell, and nobody has heard it yet."""
    with redis.Redis.from_url(settings.CACHE_URL) as client:
        return bool(client.exists("dedupjobs:{outbox}:bell"))


def on_the_way(target: str, status: str = "WAITING", *, age: float = 0.0) -> OutboxEvent:
    """Make an event that was published ``age`` seconds ago."""
    return OutboxEvent.objects.create(
        event_id=f"{target} {status}",
        name="order.paid",
        target=target,
        status=status,
        payload="{}",
        published_at=DbNow(-age),
        due_at=DbNow(),
    )


def taken_in(consumer: str, status: str) -> InboxMessage:
    """Make a message that a consumer has taken in."""
    return InboxMessage.objects.create(
        consumer=consumer,
        event_id=status,
        name="order.paid",
        status=status,
        received_at=DbNow(),
        due_at=DbNow(),
    )
