"""The truth screen: each way in which a store may differ from the row, and what heals it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisDown

from dedupjobs.admin.truth import Known, Stores, compare
from dedupjobs.cache import Stored
from dedupjobs.dispatch import Trace
from dedupjobs.locks import Seen
from dedupjobs.models import JobAttempt, ProcessedJob

NOW = datetime(2026, 5, 4, 14, 1, 30, tzinfo=UTC)
GONE = {"place": None, "length": 0, "popped": False, "started": False, "registries": ()}


def s(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def trace(**facts: Any) -> Trace:
    return Trace(**{**GONE, "status": None, **facts})


def known(status: str, *, attempt: dict[str, Any] | None = None, **columns: Any) -> Known:
    row = ProcessedJob(
        pk=7,
        status=status,
        **{"run_after": s(-60), "dispatched_at": s(-50), "version": 3, **columns},
    )
    newest = None
    if attempt is not None:
        facts = {"number": 2, "owner": "me", "lease_until": s(30), "beat_at": s(-5), **attempt}
        newest = JobAttempt(job_id=7, claimed_at=s(-20), **facts)
    return Known(row=row, newest=newest, now=NOW, resend_after=30)


MINE, OTHERS = Seen(owner="me", ttl=30.0), Seen(owner="ghost", ttl=None)
OPEN: dict[str, Any] = {"outcome": None}
EXPIRED = {**OPEN, "lease_until": s(-10)}
FAILED = {"outcome": "FAILED"}
QUEUED = trace(place=3, length=9, status="queued")

TABLE: list[tuple[str, Known, Any, Any, list[tuple[str, str]]]] = [
    ("running with its lock", known("RUNNING", attempt=OPEN), MINE, trace(), []),
    ("running without a lock", known("RUNNING", attempt=OPEN), None, None, [("lock", "put back")]),
    ("running, lock stolen", known("RUNNING", attempt=OPEN), OTHERS, None, [("lock", "put back")]),
    ("stuck", known("RUNNING", attempt=EXPIRED), MINE, None, [("rows", "reclaim")]),
    ("stuck, lock gone", known("RUNNING", attempt=EXPIRED), None, None, [("rows", "reclaim")]),
    ("stuck, lock stolen", known("RUNNING", attempt=EXPIRED), OTHERS, None,
     [("rows", "reclaim"), ("lock", "free lock")]),
    ("running without attempt", known("RUNNING"), None, None, [("rows", "")]),
    ("running, message queued again", known("RUNNING", attempt=OPEN), MINE, QUEUED,
     [("rq", "forget")]),
    ("waiting in the queue", known("PENDING"), None, QUEUED, []),
    ("waiting in a worker's hands", known("PENDING"), None,
     trace(popped=True, status="queued"), []),
    ("waiting, started", known("PENDING"), None, trace(started=True, status="started"), []),
    ("waiting, message lost", known("PENDING"), None, trace(), [("rq", "send again")]),
    ("waiting, hash outlived its message", known("PENDING"), None, trace(status="queued"),
     [("rq", "send again")]),
    ("waiting, message without hash", known("PENDING"), None, trace(place=0, length=1),
     [("rq", "send again")]),
    ("waiting, sent just now", known("PENDING", dispatched_at=s(-1)), None, trace(), []),
    ("not due", known("PENDING", run_after=s(60), dispatched_at=None), None, None, []),
    ("due, nobody hands it over", known("PENDING", dispatched_at=None), None, None,
     [("rows", "send again")]),
    ("due just now", known("PENDING", run_after=s(-1), dispatched_at=None), None, None, []),
    ("retrying with its lock",
     known("RETRYING", attempt=FAILED, run_after=s(9), dispatched_at=None), MINE, None, []),
    ("retrying, another's lock",
     known("RETRYING", attempt=FAILED, run_after=s(9), dispatched_at=None), OTHERS, None,
     [("lock", "free lock")]),
    ("dead with a lock", known("DEAD", attempt=FAILED), MINE, None, [("lock", "free lock")]),
    ("done, message queued", known("SUCCEEDED"), None, QUEUED, [("rq", "forget")]),
    ("done, registry without hash", known("SUCCEEDED"), None, trace(registries=("failed",)),
     [("rq", "forget")]),
    ("done, message failed", known("DEAD"), None,
     trace(registries=("failed",), status="failed"), [("rq", "forget")]),
    ("done, message finished", known("SUCCEEDED"), None,
     trace(registries=("finished",), status="finished"), []),
    ("Redis down", known("RUNNING", attempt=OPEN), RedisDown("down"), RedisDown("down"), []),
    ("Redis down, stuck", known("RUNNING", attempt=EXPIRED), RedisDown("x"), RedisDown("x"),
     [("rows", "reclaim")]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "lock", "message", "drifts"),
    [row[1:] for row in TABLE],
    ids=[row[0].replace(" ", "-") for row in TABLE],
)
def test_difference_is_named_with_what_heals_it(
    facts: Known, lock: Any, message: Any, drifts: list[tuple[str, str]]
) -> None:
    truth = compare(facts, Stores(lock=lock, message=message))
    assert [(drift.store, drift.heal) for drift in truth.drifts] == drifts
    assert all(drift.words and (drift.label or not drift.heal) for drift in truth.drifts)
    marked = [column.drifted for column in truth.columns]
    stores = {drift.store for drift in truth.drifts if not drift.harmless}
    assert marked == ["rows" in stores, "lock" in stores, False, "rq" in stores]


@pytest.mark.parametrize(
    ("status", "version", "heals"),
    [("SUCCEEDED", 3, []), ("SUCCEEDED", 2, ["uncache"]), ("CANCELLED", 3, ["uncache"])],
)
def test_entry_of_the_cache_that_is_older_than_the_row_is_named_with_what_heals_it(
    status: str, version: int, heals: list[str]
) -> None:
    entry = Stored(version=version, ttl=60.0)
    truth = compare(known(status), Stores(lock=None, message=None, entry=entry))
    assert [drift.heal for drift in truth.drifts] == heals
    assert truth.columns[2].drifted is bool(heals)
    assert [fact.value for fact in truth.columns[2].facts] == [str(version), "60 s"]


def test_store_that_can_not_be_asked_says_so_in_its_column() -> None:
    down = RedisDown("Error 111 connecting")
    truth = compare(known("RUNNING", attempt=OPEN), Stores(lock=down, message=down))
    assert [bool(column.trouble) for column in truth.columns] == [False, True, False, True]
    assert "Error 111" in truth.columns[1].trouble
