"""
Six incidents, played with real workers and servers: the right alert rises, the right counter tells
the cause, a lever ends it, and the alert clears.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.management import call_command
from django.db import connections

from dedupjobs import counters, operations, readings
from dedupjobs.models import Alert, AttemptOutcome, JobAttempt, ProcessedJob, Status
from tests import live
from tests.app import jobs
from tests.proxy import Proxy
from tests.waiting import until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.large,
    pytest.mark.timeout(300),  # longer than SLOW_TO_CLEAR
]

WITHIN = 6.0  # seconds; summaries keep what happened for up to a minute more
ALERTS = {
    "EVERY": 0.3,
    "RAISE_AFTER": 0.5,
    "CLEAR_AFTER": 1.0,
    "WITHIN": WITHIN,
    "STALLED_FOR": 3.0,
    "NO_WORKER_FOR": 1.0,
    "RETRIES": 6,
    "DUPLICATES": 50,
    "NEAR_LEASE": 100.0,
}
SWIFT: dict[str, Any] = {
    "ALERTS": ALERTS, "SUMMARISE_EVERY": 0.5, "FOLD_EVERY": 0.5, "LOCK_TIMEOUT": 5,
}  # fmt: skip
SLOW_TO_CLEAR = 150  # seconds: a minute of summaries, and a busy machine


def rises(kind: str, subject: str) -> Alert:
    """Wait until the alert is open."""
    rows = Alert.objects.filter(kind=kind, subject=subject, is_open=True)
    return until(rows.first, live.PATIENCE, what=f"{kind} {subject} rises: {all_open()}")


def clears(kind: str, subject: str) -> None:
    """Wait until the alert is cleared; it was raised once."""
    rows = Alert.objects.filter(kind=kind, subject=subject)
    until(
        lambda: not rows.get().is_open, SLOW_TO_CLEAR, what=f"{kind} {subject} clears: {all_open()}"
    )
    assert rows.get().times == 1


def all_open() -> list[tuple[str, str]]:
    return list(Alert.objects.filter(is_open=True).values_list("kind", "subject"))


def counted(metric: str, *labels: str) -> int:
    return counters.read().counters[metric].get(labels, 0)


def gauge(name: str, *labels: str) -> float:
    (family,) = (f for f in readings.collect() if f.name == name)
    return float(family.samples.get(labels, 0))


def lever(*words: str) -> None:
    """Pull a live control."""
    call_command("dedupjobs_control", *words, "--by", "siti", "--reason", "an incident")


@contextmanager
def stock() -> Iterator[None]:
    """Write messages that stock workers read."""
    with live.changed(RQ={"WORKER_CLASS": live.STOCK}):
        yield


@contextmanager
def calling(call: Callable[[int], Any]) -> Iterator[None]:
    """Let a producer call again and again while the block runs."""
    over = threading.Event()

    def run() -> None:
        try:
            number = 0
            while not over.wait(0.01):
                number += 1
                call(number)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(live.PATIENCE)


def test_lease_too_short_for_a_job_that_keeps_its_beats_out(spawn: live.Spawn) -> None:
    spawn("dedupjobs_coordinator", **live.env_of(live.DEDUP, **SWIFT))
    reads_json = ("default", "--serializer", "rq.serializers.JSONSerializer")
    live.start_worker(spawn, *reads_json, worker=live.STOCK, **SWIFT)
    with live.brisk(**SWIFT):
        first = jobs.hold_gil.enqueue(tag="a", seconds=4)
        alert = rises("locks_lost", "testapp.hold_gil")
        assert "lost their lock before they ended" in alert.words
        assert counted("lock_expired_before_completion_total", "testapp.hold_gil") >= 1
        assert counted("stale_processing_records_total", "testapp.hold_gil") >= 1
        assert AttemptOutcome.LOST in live.outcomes(first)

        lever("lease", "60", "--job", "testapp.hold_gil")
        second = jobs.hold_gil.enqueue(tag="b", seconds=4)
        live.wait_for(second, seconds=90)
        assert live.outcomes(second) == [AttemptOutcome.SUCCEEDED]
        clears("locks_lost", "testapp.hold_gil")


def test_job_that_ends_its_workers_processes(spawn: live.Spawn) -> None:
    live.start_worker(spawn, **SWIFT)
    with live.brisk(**SWIFT):
        jobs.leave.enqueue_many([{"tag": str(n), "how": "os._exit"} for n in range(200)])
        alert = rises("retries", "testapp.leave")
        assert " lost." in alert.words
        until(lambda: counted("recovered_total", "death") >= 6, live.PATIENCE)
        lever("pause", "--job", "testapp.leave")
        began = settled_number_of_attempts()
        assert (
            ProcessedJob.objects.filter(name="testapp.leave").exclude(status=Status.DEAD).exists()
        ), "it was stopped in the middle"
        clears("retries", "testapp.leave")
        assert JobAttempt.objects.count() == began, "none has begun since"


def settled_number_of_attempts() -> int:
    """Return the number of attempts once it has stood still for two seconds."""
    seen: list[int] = []

    def stands_still() -> bool:
        seen.append(JobAttempt.objects.count())
        return len(seen) > 10 and len(set(seen[-10:])) == 1

    until(stands_still, live.PATIENCE, every=0.2)
    return seen[-1]


def test_redis_that_is_slow(spawn: live.Spawn) -> None:
    port = int(settings.RQ_URL.rpartition(":")[2].partition("/")[0])
    with Proxy(port) as proxy:
        through = {"DEDUPJOBS_TEST_REDIS": f"redis://127.0.0.1:{proxy.port}"}
        live.start_coordinator(spawn, env=through, **SWIFT)
        patience = {**SWIFT, "LOCK_TIMEOUT": 0.12}
        live.start_worker(spawn, worker=live.SIMPLE, env=through, **patience)
        with stock(), live.brisk(**SWIFT):
            proxy.delay(0.2)
            alerts = [
                rises("redis_slow", "locks and counters"),
                rises("redis_slow", "queue default"),
            ]
            assert all("ms for one command" in alert.words for alert in alerts)
            live.wait_for(jobs.record.enqueue(tag="a"))
            until(lambda: counted("lock_acquire_failed_total", "unreachable"), live.PATIENCE)
            lever("bypass-cache", "--all")
            proxy.delay(0.0)
            clears("redis_slow", "queue default")
            clears("redis_slow", "locks and counters")


def test_producer_that_sends_everything_again(spawn: live.Spawn) -> None:
    live.start_worker(spawn, **SWIFT)
    for number in range(5):
        live.wait_for(jobs.record.enqueue(tag=str(number)))
    with live.brisk(**SWIFT), calling(lambda n: jobs.record.enqueue(tag=str(n % 5))):
        alert = rises("duplicates", "testapp.record")
        assert "replay" in alert.words
        assert gauge("duplicate_detected_total", "testapp.record", "replay") >= 50
        lever("filter", "--job", "testapp.record")
        clears("duplicates", "testapp.record")
    assert JobAttempt.objects.count() == 5, "whatever they sent, each ran once"


def test_job_that_is_poison(spawn: live.Spawn) -> None:
    live.start_worker(spawn, **SWIFT)

    def call(number: int) -> None:
        jobs.record.enqueue(tag=str(number % 3))
        if number % 50 == 1:  # DEAD at every look in between
            jobs.fail_for_good.enqueue(tag="poison")

    with live.brisk(**SWIFT), calling(call):
        alert = rises("dead", "testapp.fail_for_good")
        assert alert.words == "1 row of testapp.fail_for_good DEAD."
        until(lambda: counted("jobs_dead_total", "testapp.fail_for_good") >= 2, live.PATIENCE)
        assert counted("jobs_dead_total", "testapp.record") == 0
        lever("filter", "--key", "failonce:poison")
        until(purged, live.PATIENCE, every=0.2)
        clears("dead", "testapp.fail_for_good")


def purged() -> bool:
    """Purge what is dead; True once nothing reopens it."""
    row = ProcessedJob.objects.filter(key="failonce:poison").first()
    if row is not None and row.status == Status.DEAD:
        operations.purge(row, by="siti", reason="wrong order")
    return row is None


def test_queue_that_stands_still(spawn: live.Spawn, tmp_path: Path) -> None:
    live.start_worker(spawn, **SWIFT)
    with live.brisk(**SWIFT):
        jobs.wait.enqueue(tag="hangs", release=str(tmp_path / "never"))
        live.begun("hangs")
        waiting = [jobs.record.enqueue(tag=str(number)) for number in range(5)]
        alert = rises("stalled", "default")
        assert alert.words.startswith("5 jobs are due in queue default")
        assert gauge("backlog", "default") == 5
        assert gauge("active_lock_oldest_age_seconds") >= 3

        lever("timeout", "1s", "--job", "testapp.wait")
        for outcome in waiting:
            live.wait_for(outcome)
        clears("stalled", "default")


def test_queue_without_a_worker(spawn: live.Spawn) -> None:
    live.start_coordinator(spawn, **SWIFT)
    with live.brisk(**SWIFT):
        outcome = jobs.record_high.enqueue(tag="a")
        rises("no_worker", "high")
        assert gauge("workers", "high") == 0
        live.start_worker(spawn, "high", **SWIFT)
        live.wait_for(outcome)
        clears("no_worker", "high")
