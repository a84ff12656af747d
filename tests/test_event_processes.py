"""Real coordinators and consumers: killed, told to end, and with Redis wiped under them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings
from django.db import transaction

from dedupjobs import outbox
from dedupjobs.models import InboxMessage
from tests import live, outlet
from tests.app.models import Ledger
from tests.live import PATIENCE, Spawn
from tests.outlet import STREAM
from tests.processes import Spawned
from tests.waiting import until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.large]

CONSUMERS: dict[str, Any] = {
    "ledger": {"stream": "orders", "claim_after": 1},
    "audit": {"stream": "orders"},
}
CONSUME = ("dedupjobs_consume", "--consumer", "ledger")
GIVEN: dict[str, Any] = {
    "OUTBOX": STREAM,
    "INBOX": {"CONSUMERS": CONSUMERS},
    "AUTODISCOVER": ["jobs", "consumed"],
}


@pytest.fixture(autouse=True)
def _outbox() -> Iterator[None]:
    with outlet.outbox(STREAM):
        yield


def start(spawn: Spawn, *command: str) -> Spawned:
    process = spawn(*command, **live.env_of(**GIVEN))
    process.wait_for_output(" started", PATIENCE)
    return process


def tags() -> list[str]:
    return sorted(Ledger.objects.values_list("tag", flat=True))


def test_events_are_applied_once_although_everybody_is_killed_and_redis_is_wiped(
    spawn: Spawn,
) -> None:
    coordinator, consumer = start(spawn, "dedupjobs_coordinator"), start(spawn, *CONSUME)
    expected = []
    for number in range(40):
        with transaction.atomic():
            outbox.publish("order.paid", str(number), key=f"k{number % 4}")
        expected.append(str(number))
        if number == 10:
            consumer.signal(signal.SIGKILL)
            consumer = start(spawn, *CONSUME)
        if number == 20:
            for url in (settings.RQ_URL, settings.CACHE_URL):  # the server is others', too
                with redis.Redis.from_url(url) as client:
                    client.flushdb()
        if number == 30:
            coordinator.signal(signal.SIGKILL)
            coordinator = start(spawn, "dedupjobs_coordinator")
    until(lambda: len(tags()) >= 40, PATIENCE, what="all events are applied")
    assert tags() == sorted(expected)
    for process in (coordinator, consumer):
        process.signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert tags() == sorted(expected)


def test_message_of_a_consumer_that_is_killed_in_its_handler_is_applied_by_another(
    spawn: Spawn, tmp_path: Path
) -> None:
    begun, release = tmp_path / "begun", tmp_path / "release"
    outbox.publish("order.paid", {"begun": str(begun), "release": str(release)})
    outlet.relayed()  # before: on SQLite nobody else writes while a handler is at work
    first = start(spawn, *CONSUME)
    until(begun.exists, PATIENCE, what="the handler is at work")
    first.signal(signal.SIGKILL)
    first.wait(PATIENCE)
    assert not InboxMessage.objects.exists()
    release.touch()
    start(spawn, *CONSUME)
    until(lambda: bool(tags()), PATIENCE, what="another one applies it")
    assert (Ledger.objects.count(), InboxMessage.objects.count()) == (1, 1)


def test_consumer_that_is_told_to_end_lets_its_message_end(spawn: Spawn, tmp_path: Path) -> None:
    begun, release = tmp_path / "begun", tmp_path / "release"
    outbox.publish("order.paid", {"begun": str(begun), "release": str(release)})
    outbox.publish("order.paid", "next")
    outlet.relayed()
    consumer = start(spawn, *CONSUME)
    until(begun.exists, PATIENCE, what="the handler is at work")
    consumer.signal(signal.SIGTERM)
    release.touch()
    assert consumer.wait(PATIENCE) == 0
    assert "Consumer stopped." in consumer.output
    assert Ledger.objects.count() == 1
    start(spawn, *CONSUME)
    until(lambda: len(tags()) == 2, PATIENCE, what="another one takes the rest at once")
