"""
How fast events are published and relayed: ``python -m benchmarks.outbox [EVENTS] [DATABASE]``.

Servers of our own, the database with its full durability. Every tenth event shares its key with
nine others, as those of an order would; the target is a Redis stream. The middle of ROUNDS.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import rounds

ROUNDS = 3
PUBLISHED = 1_000  # events of one transaction
SINGLE = 500  # events that are published one by one


def measure(number: str) -> dict[str, Any]:
    """Return events per second; ``number``: events of a round."""
    from django.test import override_settings  # noqa: PLC0415

    given = {"PUSH_TIMEOUT": 10, "OUTBOX": {"TARGETS": {"bench": {"stream": "bench"}}}}
    with override_settings(DEDUPJOBS=given):
        found = [_round(int(number)) for _ in range(ROUNDS + 1)][1:]  # the first one warms up
    return {
        "events": int(number),
        **{name: round(statistics.median(one[name] for one in found)) for name in found[0]},
    }


def _round(number: int) -> dict[str, float]:
    from dedupjobs import outbox  # noqa: PLC0415
    from dedupjobs.models import OutboxEvent  # noqa: PLC0415
    from dedupjobs.outbox.relay import relay_all  # noqa: PLC0415

    OutboxEvent.objects.all()._raw_delete(OutboxEvent.objects.db)
    events = [
        {"name": "order.paid", "payload": {"order": i, "amount": "9.90"}, "key": f"o:{i // 10}"}
        for i in range(number)
    ]
    pages = [events[i : i + PUBLISHED] for i in range(0, number, PUBLISHED)]
    many = _seconds(lambda: [outbox.publish_many(page) for page in pages])
    relayed: list[int] = []
    begun = time.process_time()
    relay = _seconds(lambda: relayed.append(relay_all()))
    cpu = time.process_time() - begun
    assert relayed == [number], relayed
    single = _seconds(lambda: [outbox.publish(**event) for event in events[:SINGLE]])  # type: ignore[arg-type]
    relay_all()
    return {
        "relayed_per_second": number / relay,
        "cpu_us_per_relayed_event": cpu / number * 1e6,
        "published_together_per_second": number / many,
        "published_one_by_one_per_second": SINGLE / single,
    }


def _seconds(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def main(number: str = "20000", database: str = "postgresql") -> None:
    rounds.by_itself("outbox", database, number)


if __name__ == "__main__":
    main(*sys.argv[1:])
