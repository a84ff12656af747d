"""
What it costs to be observed: ``python -m benchmarks.observe scrape [ROWS]`` or ``overhead [JOBS]``.

Each on servers of our own, by a fresh process; prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from benchmarks import rounds, servers

DEFAULTS = {"scrape": ("postgresql", "1000000"), "overhead": ("sqlite", "100")}


def main(kind: str, *arguments: str) -> None:
    database, default = DEFAULTS[kind]
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
        rounds.python(environment, "-m", "django", "migrate", "--run-syncdb", "--verbosity", "0")
        measured = rounds.measure(environment, kind, *(arguments or (default,)))
        print(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main(*sys.argv[1:])
