"""An hour of a busy shop, as its tables and the coordinator would have left it."""

from __future__ import annotations

import json
import random
from datetime import datetime, timedelta

from dedupjobs import lifecycle, summaries
from dedupjobs.models import (
    AttemptOutcome,
    DuplicateCount,
    JobAttempt,
    ProcessedJob,
    Status,
)
from dedupjobs.summaries import HOUR, MINUTE
from tests.admin_rows import make

NAMES = {"default": "shop.send_receipt", "high": "shop.charge", "low": "shop.build_report"}
OUTCOMES = {
    AttemptOutcome.SUCCEEDED: 94,
    AttemptOutcome.FAILED: 4,
    AttemptOutcome.TIMED_OUT: 1,
    AttemptOutcome.LOST: 1,
}
ASKED_AGAIN = {"producer": 4, "replay": 2, "race": 1}  # at most, a minute
MINUTES = 65


def write() -> None:
    """Write what ended in the last hour, and its summaries."""
    chance = random.Random(7)
    now = lifecycle.database_now()
    rows = {queue: make(Status.SUCCEEDED, queue=queue, name=name) for queue, name in NAMES.items()}
    _attempts(chance, now, rows)
    asked_again = dict.fromkeys(ASKED_AGAIN, 0)
    for minutes in range(MINUTES, -1, -1):
        begin = summaries.floor(now - timedelta(minutes=minutes), MINUTE)
        summaries._make_minute(begin)
        for cause, most in ASKED_AGAIN.items():
            asked_again[cause] += chance.randint(0, most)
        gauges = {(queue, ""): _backlog(chance, begin, queue) for queue in NAMES}
        gauges["", ""] = json.dumps({"duplicates": asked_again, "cut": []})
        summaries._write_gauges(MINUTE, begin, gauges)
    for hours in (0, 1):
        summaries._make_hour(summaries.floor(now - timedelta(hours=hours), HOUR))
    DuplicateCount.objects.bulk_create(
        DuplicateCount(name="shop.charge", cause=cause, count=count, first_at=now, last_at=now)
        for cause, count in asked_again.items()
    )


def _attempts(chance: random.Random, now: datetime, rows: dict[str, ProcessedJob]) -> None:
    found = []
    for minutes in range(MINUTES):
        for _ in range(22 + round(10 * abs(30 - minutes) / 30) + chance.randint(-4, 4)):
            outcome = chance.choices(list(OUTCOMES), list(OUTCOMES.values()))[0]
            ended = now - timedelta(minutes=minutes, seconds=chance.random() * 50)
            number = len(found) + 1
            row = rows[chance.choice(list(rows))]
            found.append(
                JobAttempt(
                    job=row,
                    number=number,
                    generation=1,
                    owner=f"history-{number}",
                    lease_until=ended,
                    beat_at=ended,
                    claimed_at=ended,
                    ended_at=ended,
                    outcome=outcome,
                    queue_delay=chance.lognormvariate(-3, 0.9),
                    run_time=chance.lognormvariate(-2, 0.7),
                )
            )
    JobAttempt.objects.bulk_create(found)


def _backlog(chance: random.Random, minute: datetime, queue: str) -> str:
    number = list(NAMES).index(queue)
    waiting = max(0, round(14 - 4 * number + 6 * chance.random() - minute.minute % 17 / 3))
    return json.dumps({"PENDING": waiting, "RUNNING": 2, "RETRYING": number})
