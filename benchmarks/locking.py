"""
What a lock costs: ``python -m benchmarks.locking [JOBS]``, on servers of our own; prints a table.

Jobs that do nothing are claimed, run and settled in one process, without RQ around them: with one
lock server, with three, and with none (optimistic). The ways take turns, and each round's drains
follow each other, so that a busy machine disturbs all of them; ``ratio`` is the middle of the
rounds' own ratios. CPU is that of the process, without its servers'.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks import rounds, servers

ROUNDS = 9
BATCH = 100
WAYS = {  # a job, single and in batches, and where its locks are
    "optimistic": ("free", "free_grouped", "default"),
    "one lock server": ("deduplicated", "grouped", "default"),
    "three lock servers": ("deduplicated", "grouped", ["locks0", "locks1", "locks2"]),
}
_numbers = count()


def main(number: str = "300") -> None:
    with tempfile.TemporaryDirectory(prefix="dedupjobs-bench-") as home, ExitStack() as stack:
        homes = [Path(home) / str(i) for i in range(4)]
        for path in homes:
            path.mkdir()
        urls = [stack.enter_context(servers.redis_server(path)) for path in homes]
        tables = stack.enter_context(servers.database("postgresql", homes[0]))
        environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
            "BENCH_REDIS": urls[0],
            "BENCH_LOCKS": " ".join(urls[1:]),
            "BENCH_DATABASE": json.dumps(tables),
            "BENCH_WORKER": "rq.SimpleWorker",
        }
        rounds.python(environment, "-m", "django", "migrate", "--run-syncdb", "--verbosity", "0")
        measured = rounds.measure(environment, "locking", number)
    print(table(measured))


def table(measured: dict[str, Any]) -> str:
    lines = ["| locks | single: CPU ms | ratio | ms | in batches: CPU ms | ratio | ms |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|")
    for way in WAYS:
        single, batch = measured["single"][way], measured["batch"][way]
        cells = [f"{one[k]:.3f}" if k != "ratio" else f"{one[k]:.2f}×"
                 for one in (single, batch) for k in ("cpu", "ratio", "wall")]  # fmt: skip
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measure(number: str) -> dict[str, Any]:
    """Return CPU and seconds per job, in milliseconds; ``number``: jobs of a drain."""
    return {
        "single": _compared(int(number), 1),
        "batch": _compared(10 * int(number), BATCH),
    }


def _compared(number: int, size: int) -> dict[str, Any]:
    taken: list[dict[str, tuple[float, float]]] = []
    for i in range(-1, ROUNDS):
        order = list(WAYS) if i % 2 else list(WAYS)[::-1]
        drained = {way: _drain(way, number, size) for way in order}
        if i >= 0:  # the first one imports, connects and compiles
            taken.append(drained)
    first = next(iter(WAYS))
    return {
        way: {
            "cpu": statistics.median(one[way][0] for one in taken) / number * 1000,
            "ratio": statistics.median(one[way][0] / one[first][0] for one in taken),
            "wall": statistics.median(one[way][1] for one in taken) / number * 1000,
        }
        for way in WAYS
    }


def _drain(way: str, number: int, size: int) -> tuple[float, float]:
    """Return the CPU seconds and seconds that running so many jobs takes."""
    from django.test import override_settings  # noqa: PLC0415 - after the set-up

    from benchmarks import jobs  # noqa: PLC0415
    from dedupjobs import batches, dispatch, locks, runner  # noqa: PLC0415

    single, batch, alias = WAYS[way]
    job = getattr(jobs, batch if size > 1 else single)
    rows = [
        [outcome.job.pk, 1]
        for outcome in job.enqueue_many([{"number": next(_numbers)} for _ in range(number + size)])
    ]
    messages = [rows[at : at + size] for at in range(0, len(rows), size)]
    run = batches.run if size > 1 else runner.run
    described = dispatch.described(job.name)
    with override_settings(DEDUPJOBS={"PUSH_TIMEOUT": 10, "LOCK_CACHE": alias}):
        locks.forget_clients()
        runner.host.description = described  # as a message says it
        run(messages[0])
        runner.host.description = described
        begun, used = time.perf_counter(), time.process_time()
        for message in messages[1:]:
            run(message)
        return time.process_time() - used, time.perf_counter() - begun


if __name__ == "__main__":
    main(*sys.argv[1:])
