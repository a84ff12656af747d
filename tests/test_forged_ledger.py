"""Whatever somebody writes into the ledger in Redis keeps no true count from the tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from dedupjobs import stats
from dedupjobs.models import DuplicateCount, DuplicateSample
from tests import live
from tests.app import jobs

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def client() -> Iterator[Redis]:
    with live.cache_client() as one:
        yield one


SAMPLE = {
    "job": 1,
    "cause": "producer",
    "at": "2026-11-30T00:00:00+00:00",
    "host": "h",
    "pid": 1,
    "request": "",
    "detail": "",
}
FORGED_SAMPLES: list[Any] = [
    "[" * 100_000,
    {**SAMPLE, "pid": "x"},
    {**SAMPLE, "pid": -1},
    {**SAMPLE, "pid": 10**30},
    {**SAMPLE, "pid": True},
    {**SAMPLE, "host": {"a": 1}},
    {**SAMPLE, "host": "h" * 1_000},
    {**SAMPLE, "request": "r" * 1_000},
    {**SAMPLE, "detail": "a\x00b"},
    {**SAMPLE, "detail": "\ud800"},
    {**SAMPLE, "detail": ["x"]},
    {**SAMPLE, "job": 2**70},
    {**SAMPLE, "job": -(2**70)},
    {**SAMPLE, "job": True},
    {**SAMPLE, "at": "2026-11-30T00:00:00"},
    {**SAMPLE, "at": "0001-01-01T00:00:00+14:00"},
    {**SAMPLE, "at": "9999-12-31T23:59:59-14:00"},
    {**SAMPLE, "at": 7},
    [],
    None,
    7,
]


@pytest.mark.parametrize("forged", FORGED_SAMPLES, ids=lambda forged: str(forged)[-60:])
def test_forged_sample_keeps_no_other_from_the_tables(client: Redis, forged: Any) -> None:
    row = jobs.record.enqueue(tag="a").job
    jobs.record.enqueue(tag="a")
    stats.flush()
    if isinstance(forged, dict) and forged["job"] is SAMPLE["job"]:
        forged = {**forged, "job": row.pk}
    text = forged if isinstance(forged, str) else json.dumps(forged)
    client.lpush("dedupjobs:{ledger}:samples", text)
    assert stats.fold().duplicates == 1
    assert DuplicateSample.objects.filter(job=row).count() == 1


@pytest.mark.parametrize(
    "entry",
    [
        f"{2**70}:producer:testapp.record",
        f"1:producer:{'n' * 10_000}",
        "1:producer:a\x00b",
        f"1:{'c' * 500}:testapp.record",
        "-1:producer:x",
    ],
    ids=lambda entry: entry[:40].replace("\x00", "NUL"),
)
def test_forged_count_keeps_no_other_from_the_tables(client: Redis, entry: str) -> None:
    jobs.record.enqueue(tag="a")
    jobs.record.enqueue(tag="a")
    stats.flush()
    client.hset("dedupjobs:{ledger}:duplicates", entry, 1)
    client.hset("dedupjobs:{ledger}:duplicates", b"1:producer:\xff", 1)
    client.hset("dedupjobs:{ledger}:duplicates", "1:producer:huge", 2**62)
    stats.fold()
    assert DuplicateCount.objects.get(name="testapp.record", cause="producer").count >= 1
