"""The dashboard beside real workers: after kills it still counts right, and it holds nobody up."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.urls import reverse

from dedupjobs import dispatch, locks, summaries
from dedupjobs.admin import board
from dedupjobs.models import JobAttempt, ProcessedJob, Status, Summary
from dedupjobs.summaries import HOUR, MINUTE
from tests.admin_rows import address
from tests.app import jobs
from tests.processes import Spawned
from tests.waiting import until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.large,
    pytest.mark.timeout(300),
]

SETTINGS = {"PUSH_TIMEOUT": 30, "LOCK_TIMEOUT": 30}
QUICK = json.dumps({**SETTINGS, "SUMMARISE_EVERY": 0.5, "RECLAIM_EVERY": 0.5})


@pytest.fixture(autouse=True)
def _patient(settings: Any) -> Iterator[None]:
    settings.DEDUPJOBS = SETTINGS
    dispatch.forget_clients()
    locks.forget_clients()
    yield
    dispatch.forget_clients()
    locks.forget_clients()


def ended(status: Status, number: int) -> bool:
    return ProcessedJob.objects.filter(status=status).count() >= number


def kill(worker: Spawned) -> None:
    """Kill a worker and what it has forked."""
    children = worker.children()
    worker.signal(signal.SIGKILL)
    worker.wait()
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def counted(table: str, column: str) -> Counter[str]:
    """Return what the table holds, asked in plain SQL."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {column}, COUNT(*) FROM {table} GROUP BY {column}")
        return Counter(dict(cursor.fetchall()))


def test_after_kills_all_numbers_are_those_of_the_tables(
    spawn: Callable[..., Spawned], admin_client: Client, tmp_path: Any
) -> None:
    """S-112: tiles, list, summaries and a raw count differ by nothing once it has settled."""
    release = tmp_path / "release"
    for tag in range(12):
        jobs.wait.enqueue(tag=str(tag), release=str(release))
    workers = [spawn("rqworker", "default", DEDUPJOBS_TEST_SETTINGS=QUICK) for _ in range(2)]
    for victim in workers[:2]:
        until(lambda: ProcessedJob.objects.filter(status=Status.RUNNING).exists(), 60)
        kill(victim)
        workers.append(spawn("rqworker", "default", DEDUPJOBS_TEST_SETTINGS=QUICK))
    release.touch()
    until(lambda: ended(Status.SUCCEEDED, 12), 120, what="all have succeeded")
    for worker in workers[2:]:
        worker.signal(signal.SIGTERM)
        worker.wait(60)
    summaries.keep()
    for begin in {row.begin for row in Summary.objects.filter(span=HOUR)}:
        summaries._make_hour(begin)  # as the next minute does
    by_outcome = counted("dedupjobs_jobattempt", "outcome")
    by_status = counted("dedupjobs_processedjob", "status")
    assert by_outcome["LOST"] >= 1
    assert by_status == {"SUCCEEDED": 12}
    shown = {tile.key: tile.value for tile in _tiles()}
    assert {shown[key] for key in ("pending", "running", "retrying", "dead", "stuck")} == {"0"}
    assert (shown["succeeded"], shown["recovered"]) == ("12", str(by_outcome["LOST"]))
    for span in (MINUTE, HOUR):
        rows = Summary.objects.filter(span=span, queue="", name="")
        total = sum(getattr(row, name) for row in rows for name in summaries.NUMBERS)
        assert total == JobAttempt.objects.count(), span
    listed = admin_client.get(f"{address('changelist')}?state=SUCCEEDED").context["cl"]
    assert listed.result_count == 12


def _tiles() -> list[Any]:
    found = board.read("hour")
    return [*found.tiles, *found.happened]


def test_people_who_refresh_all_pages_hold_no_job_up(spawn: Callable[..., Spawned]) -> None:
    """S-121: every page while jobs are claimed; no page and no job meets a lock."""
    boss = User.objects.create_superuser("boss")
    for tag in range(60):
        jobs.record.enqueue(tag=str(tag))
    with refreshing(boss, readers=3) as (answers, troubles):
        spawn("rqworker", "--burst", "default", DEDUPJOBS_TEST_SETTINGS=QUICK).wait(120)
    assert troubles == []
    assert set(answers) == {200}
    assert ended(Status.SUCCEEDED, 60)
    assert set(JobAttempt.objects.values_list("outcome", flat=True)) == {"SUCCEEDED"}
    assert JobAttempt.objects.count() == 60


@contextmanager
def refreshing(user: User, *, readers: int) -> Iterator[tuple[list[int], list[Exception]]]:
    """Ask for the pages again and again in the block; yield what they answered, and failures."""
    over = threading.Event()
    answers: list[int] = []
    troubles: list[Exception] = []
    names = [
        reverse("admin:dedupjobs_dashboard_changelist"),
        *map(address, ("changelist", "locks")),
    ]

    def refresh() -> None:
        client = Client(raise_request_exception=False)
        client.force_login(user)
        try:
            while not over.is_set():
                answers.extend(client.get(name).status_code for name in names)
        except Exception as error:
            troubles.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=refresh) for _ in range(readers)]
    for thread in threads:
        thread.start()
    try:
        yield answers, troubles
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
