"""What tests of real processes share: starting workers, looking at rows, killing by pid."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psutil
import pytest
import redis
from django.conf import settings
from django.core.cache import caches
from django.db import connection, connections, transaction
from django.db.models import QuerySet
from django.test import override_settings
from rq.job import Job as RqJob
from rq.serializers import JSONSerializer

from dedupjobs import cache, clock, counters, dispatch, lifecycle, locks, runner, stats
from dedupjobs.clock import DbNow
from dedupjobs.lifecycle import Claim, Place
from dedupjobs.models import AttemptOutcome, JobAttempt, ProcessedJob, Status
from tests.app.models import Ledger
from tests.processes import Spawned
from tests.proxy import Proxy
from tests.settings import WORKER_NUMBER
from tests.waiting import until

STOCK = "rq.Worker"
SIMPLE = "rq.SimpleWorker"
DEDUP = "dedupjobs.worker.DedupWorker"

BRISK: dict[str, Any] = {
    "TICK": 0.2,
    "RECLAIM_EVERY": 0.3,
    "RESEND_AFTER": 2,
    "LEADER_TTL": 1,
    "SHUTDOWN_GRACE": 1,
    "TIMEOUT_GRACE": 1,
    "LOCK_TIMEOUT": 5,
}
"""Settings under which workers and coordinators act soon."""

PATIENCE = 40  # seconds; generous, since the machine may be busy

# Slow tests of processes run where they can find most, once or on the servers.
with_sqlite = pytest.mark.skipif(
    connection.vendor != "sqlite",
    reason="about processes, messages or Redis alone; runs with SQLite",
)
with_server = pytest.mark.skipif(
    connection.vendor == "sqlite",
    reason="about processes and their connections; runs with PostgreSQL and MariaDB",
)

Spawn = Callable[..., Spawned]
T = TypeVar("T")


# ---- processes


def env_of(worker: str = DEDUP, **changes: Any) -> dict[str, str]:
    """Return the variables of a brisk process; ``changes`` are fields of DEDUPJOBS."""
    return {
        "DEDUPJOBS_TEST_WORKER": worker,
        "DEDUPJOBS_TEST_SETTINGS": json.dumps({**BRISK, **changes}),
    }


def start_worker(
    spawn: Spawn,
    *queues: str,
    worker: str = DEDUP,
    env: dict[str, str] | None = None,
    **changes: Any,
) -> Spawned:
    """Start a plain ``rqworker`` and wait until it listens."""
    process = spawn(
        "rqworker", *(queues or ("default",)), **env_of(worker, **changes), **(env or {})
    )
    process.wait_for_output("Listening on", PATIENCE)
    return process


def start_coordinator(spawn: Spawn, env: dict[str, str] | None = None, **changes: Any) -> Spawned:
    """Start ``dedupjobs_coordinator`` and wait until it ticks."""
    process = spawn("dedupjobs_coordinator", **env_of(STOCK, **changes), **(env or {}))
    process.wait_for_output("Coordinator started.", PATIENCE)
    return process


def coordinator_of(parent: Spawned) -> int:
    """Return the pid of a DedupWorker's only child that has run no job."""
    return until(lambda: _only(idle_children(parent)), PATIENCE, what="one such child")


def idle_children(parent: Spawned) -> list[int]:
    """Return the pids of a worker's children that have run no job, so are no horses."""
    horses = set(JobAttempt.objects.values_list("pid", flat=True))
    return [c.pid for c in psutil.Process(parent.pid).children() if c.pid not in horses]


def _only(pids: list[int]) -> int | None:
    return pids[0] if len(pids) == 1 else None


def is_running(pid: int) -> bool:
    """Tell whether the process exists and is no zombie."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal a process that a test has started."""
    os.kill(pid, number)


def begun(tag: str, number: int = 1) -> int:
    """Wait until attempt ``number`` of a waiting job has begun; return its process's pid."""
    head = f"begin {number} "
    note = until(
        lambda: Ledger.objects.filter(tag=tag, note__startswith=head).first(),
        PATIENCE,
        what=f"attempt {number} of {tag} begins",
    )
    return int(note.note.removeprefix(head))


# ---- what is in the database


def row_of(outcome: Any) -> ProcessedJob:
    """Return the present row of an ``Outcome``."""
    return ProcessedJob.objects.get(pk=outcome.job.pk)


def wait_for(outcome: Any, status: Status = Status.SUCCEEDED, seconds: float = PATIENCE) -> Any:
    """Return the row once it has this status."""
    return until(
        lambda: ProcessedJob.objects.filter(pk=outcome.job.pk, status=status).first(),
        seconds,
        what=f"row {outcome.job.pk} is {status} and not {row_of(outcome).status}",
    )


def outcomes(outcome: Any) -> list[str | None]:
    """Return how the row's attempts ended, in their order."""
    found = JobAttempt.objects.filter(job_id=outcome.job.pk).order_by("number")
    return list(found.values_list("outcome", flat=True))


def attempt(outcome: Any, number: int = 1) -> JobAttempt:
    """Return one attempt of the row."""
    return JobAttempt.objects.get(job_id=outcome.job.pk, number=number)


def wait_for_outcome(outcome: Any, ending: AttemptOutcome, number: int = 1) -> JobAttempt:
    """Return the row's attempt once it has ended so."""
    return until(
        lambda: JobAttempt.objects.filter(
            job_id=outcome.job.pk, number=number, outcome=ending
        ).first(),
        PATIENCE,
        what=f"attempt {number} of row {outcome.job.pk} is {ending}: {outcomes(outcome)}",
    )


def notes(tag: str) -> list[str]:
    """Return what the jobs with this tag have written, without pids."""
    found = Ledger.objects.filter(tag=tag).order_by("pk").values_list("note", flat=True)
    return [" ".join(note.split()[:2]) if note.startswith("begin") else note for note in found]


# ---- what is in Redis


def redis_at(url: str) -> dict[str, Any]:
    """Return the settings that put queues and cache on another server, as subprocesses see it."""
    rq_url, cache_url = f"{url}/{2 * WORKER_NUMBER}", f"{url}/{2 * WORKER_NUMBER + 1}"
    return {
        "RQ_QUEUES": {name: {"URL": rq_url} for name in ("default", "high", "low")},
        "CACHES": {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": cache_url}},
    }


@contextmanager
def changed(**django_settings: Any) -> Iterator[None]:
    """Use other settings in this process, with clients that know them."""
    with override_settings(**django_settings):
        _forget_clients()
        try:
            yield
        finally:
            _forget_clients()
    _forget_clients()


def _forget_clients() -> None:
    caches.close_all()
    dispatch.forget_clients()
    locks.forget_clients()
    stats.forget_clients()
    cache.forget_clients()
    counters.forget_clients()


@contextmanager
def brisk(**changes: Any) -> Iterator[None]:
    """Use BRISK settings in this process."""
    with changed(DEDUPJOBS={**BRISK, **changes}):
        yield


def lock_name(pk: int) -> str:
    """Return the lock's key in Redis, as DESIGN has it."""
    return f":1:dedupjobs:lock:{{{pk}}}"


def cache_client() -> redis.Redis:
    """Return a client of the database that locks are in; the caller closes it."""
    return redis.Redis.from_url(settings.CACHES["default"]["LOCATION"], decode_responses=True)


def rq_client(queue: str = "default") -> redis.Redis:
    """Return a client of the database that a queue is in; the caller closes it."""
    return redis.Redis.from_url(settings.RQ_QUEUES[queue]["URL"], decode_responses=True)


def locks_left() -> list[str]:
    """Return the names of all row locks."""
    with cache_client() as client:
        return list(client.scan_iter("*dedupjobs:lock:*"))


def eternal_keys() -> list[str]:
    """Return our keys without TTL, but for messages in RQ's hands, which it ends by itself."""
    found = []
    for open_client in (cache_client, rq_client):
        with open_client() as client:
            found += [k for k in client.scan_iter("*dedupjobs*") if client.ttl(k) == -1]
    return [key for key in found if key.removeprefix("rq:job:") not in _in_rqs_hands()]


def _in_rqs_hands() -> set[str]:
    known: set[str] = set()
    for queue in settings.RQ_QUEUES:
        with rq_client(queue) as client:
            known.update(client.lrange(f"rq:queue:{queue}", 0, -1))
            known.update(client.lrange(f"rq:queue:{queue}:intermediate", 0, -1))
            started = client.zrange(f"rq:wip:{queue}", 0, -1)
            known.update(execution.partition(":")[0] for execution in started)
    return known


def queued(queue: str = "default") -> list[str]:
    """Return the ids in a queue."""
    with rq_client(queue) as client:
        return client.lrange(f"rq:queue:{queue}", 0, -1)


def claimed(outcome: Any, *, lease: float = 0.3, overdue: float = 0.1) -> Claim:
    """Claim the row for a worker that dies at once; its lease has been over for ``overdue``."""
    row = row_of(outcome)
    claim = lifecycle.claim(row.pk, row.generation, owner=clock.token(), place=Place())
    assert claim is not None
    set_lease(claim.fence, beat_at=-lease - overdue, lease_until=-overdue)
    return claim


def set_lease(fence: int, *, beat_at: float, lease_until: float) -> None:
    """Set an attempt's stamps, in seconds from the database's now."""
    JobAttempt.objects.filter(pk=fence).update(
        beat_at=DbNow(beat_at), lease_until=DbNow(lease_until)
    )


def unsent(outcome: Any, *, run_after: float = 0, **changes: Any) -> None:
    """Make the row wait without a message, due ``run_after`` seconds from now."""
    changes = {"dispatch_id": None, "dispatched_at": None, **changes}
    ProcessedJob.objects.filter(pk=outcome.job.pk).update(run_after=DbNow(run_after), **changes)


def sent_ago(outcome: Any, seconds: float) -> None:
    """Let the row have been handed over ``seconds`` ago."""
    ProcessedJob.objects.filter(pk=outcome.job.pk).update(dispatched_at=DbNow(-seconds))


@contextmanager
def rows_locked(rows: QuerySet[Any]) -> Iterator[None]:
    """Hold rows locked by another connection's transaction while the block runs."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            with transaction.atomic():
                assert list(rows.select_for_update())
                held.set()
                done.wait(PATIENCE)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        until(lambda: held.is_set() or holding.done(), PATIENCE, what="the rows are locked")
        try:
            yield
        finally:
            done.set()
            holding.result(PATIENCE)


def outcomes_of(pk: int) -> list[str | None]:
    """Return how the attempts of the row with this pk ended, in their order."""
    found = JobAttempt.objects.filter(job_id=pk).order_by("number")
    return list(found.values_list("outcome", flat=True))


def deliver(row: ProcessedJob) -> Status | None:
    """Run the row once, in this process, as a worker would that has its message."""
    return runner.deliver(row.pk, row.generation, owner=clock.token())


@contextmanager
def through_proxy() -> Iterator[Proxy]:
    """Let this thread's connection to the database go through a proxy."""
    where = connection.settings_dict
    port = where["PORT"]
    with Proxy(int(port)) as proxy:
        connection.close()
        where["PORT"] = proxy.port
        try:
            yield proxy
        finally:
            connection.close()
            where["PORT"] = port


def work_off(queue: str = "default") -> int:
    """Run the messages of a queue in this process, as a worker would; return how many."""
    ran = 0
    with redis.Redis.from_url(settings.RQ_QUEUES[queue]["URL"]) as client:
        while popped := client.lpop(f"rq:queue:{queue}"):
            message = RqJob.fetch(popped.decode(), connection=client, serializer=JSONSerializer)
            message.perform()
            ran += 1
    return ran
