"""Every contestant in turn, round by round, each measured by a fresh process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.servers import CannotRun

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 600  # seconds for one measurement
FAST = 5  # times as many jobs and calls where nothing forks, so that they last long enough


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to dress the job, on a worker class. ``messages``: of its drain, if not the usual."""

    dressing: str
    worker: str
    messages: int = 0
    threads: int = 1

    @property
    def name(self) -> str:
        return f"{self.dressing} on {self.worker.rpartition('.')[2]}"

    @property
    def forks(self) -> bool:
        return self.worker == "rq.Worker"


CONTESTANTS = (
    Contestant("plain RQ", "rq.Worker"),
    Contestant("hand-made", "rq.Worker"),
    Contestant("dedupjobs", "rq.Worker"),
    Contestant("dedupjobs", "dedupjobs.worker.DedupWorker"),
    Contestant("plain RQ", "rq.SimpleWorker"),
    Contestant("hand-made", "rq.SimpleWorker"),
    Contestant("dedupjobs", "rq.SimpleWorker"),
)
BATCHED = (
    Contestant("each ending written", "rq.SimpleWorker", 10),
    Contestant("atomic", "rq.SimpleWorker", 20),
    Contestant("group", "rq.SimpleWorker", 40),
    Contestant("each ending written", "rq.Worker", 10),
    Contestant("group", "rq.Worker", 40),
    Contestant("fetched together", "dedupjobs.worker.DedupWorker", 1_000),
    Contestant("each ending written", "dedupjobs.worker.DedupWorker", 10),
    Contestant("atomic", "dedupjobs.worker.DedupWorker", 20),
    Contestant("group", "dedupjobs.worker.DedupWorker", 40),
)
WAITING = (
    Contestant("10 ms, one at a time", "rq.SimpleWorker", 100),
    Contestant("10 ms, 16 threads", "rq.SimpleWorker", 10, threads=16),
)
BULK = ("Queue.enqueue_many", "dedupjobs one by one", "dedupjobs in bulk")
CALLS = 5_000  # of a bulk
WAYS = ("Queue.enqueue", "Queue.enqueue(unique=True)", "dedupjobs")

Rounds = dict[str, list[dict[str, float]]]


def run(
    name: str, redis_url: str, database: dict[str, Any], jobs: int, rounds: int
) -> dict[str, Any]:
    """Return the figures of every round, of drains and of enqueues, and the counts of SQL."""
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
        "BENCH_REDIS": redis_url,
        "BENCH_DATABASE": json.dumps(database),
        "BENCH_WORKER": "rq.Worker",
    }
    # Without bytecode on disk every forked horse would compile what it imports, again and again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    python(environment, "-m", "django", "migrate", "--run-syncdb", "--verbosity", "0")
    counted = measure(environment, "statements")
    drains: Rounds = defaultdict(list)
    enqueues: Rounds = defaultdict(list)
    bulks: Rounds = defaultdict(list)
    for number in range(rounds):
        _say(f"{name}: round {number + 1} of {rounds}")
        for one in (*CONTESTANTS, *BATCHED, *WAITING):
            environment |= {"BENCH_WORKER": one.worker, "BENCH_THREADS": str(one.threads)}
            count = one.messages or (jobs if one.forks else FAST * jobs)
            drains[one.name].append(measure(environment, "drain", one.dressing, str(count)))
        environment |= {"BENCH_WORKER": "rq.SimpleWorker", "BENCH_THREADS": "1"}
        for way in WAYS:
            enqueues[way].append(measure(environment, "enqueue", way, str(FAST * jobs)))
        for way in BULK:
            bulks[way].append(measure(environment, "bulk", way, str(CALLS)))
    return {"drains": drains, "enqueues": enqueues, "bulks": bulks, **counted}


def measure(environment: dict[str, str], *arguments: str, patience: float = PATIENCE) -> Any:
    command = ("-m", "benchmarks.measure", *arguments)
    output = python(environment, *command, patience=patience)
    return json.loads(output.splitlines()[-1])


def python(environment: dict[str, str], *arguments: str, patience: float = PATIENCE) -> str:
    """Run and return what it printed; nothing that it started survives an interruption."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches us alone
    )
    try:
        output, errors = process.communicate(timeout=patience)
    except BaseException as error:
        # Its work horses have groups of their own: they end with their job, which is at once.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise CannotRun(f"{' '.join(arguments)}: not done in {patience} s") from error
        raise
    if process.returncode:
        raise CannotRun(f"{' '.join(arguments)} failed:\n{output}{errors}")
    return output


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def by_itself(kind: str, database: str, *arguments: str) -> None:
    """Measure one kind with servers of its own, and print the figures as JSON."""
    with (
        tempfile.TemporaryDirectory(prefix="dedupjobs-bench-") as home,
        servers.redis_server(Path(home)) as redis_url,
        servers.database(database, Path(home)) as tables,
    ):
        environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
            "BENCH_REDIS": redis_url,
            "BENCH_DATABASE": json.dumps(tables),
            "BENCH_WORKER": "rq.SimpleWorker",
        }
        python(environment, "-m", "django", "migrate", "--run-syncdb", "--verbosity", "0")
        print(json.dumps(measure(environment, kind, *arguments), indent=2))
