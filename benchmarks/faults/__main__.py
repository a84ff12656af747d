"""
Run the fault script against every contestant: python -m benchmarks.faults

Lost: called without an error, and no effect. Doubled: more than one effect of one number.
"""
# ruff: noqa: PLC0415 - what imports models can be imported only once Django is set up

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STOCK, DEDUP = "rq.Worker", "dedupjobs.worker.DedupWorker"


@dataclass(frozen=True, slots=True)
class Contestant:
    name: str
    dress: str
    worker: str
    queues: int = 1
    retry: bool = False


CONTESTANTS = [
    Contestant("plain RQ", "plain", STOCK),
    Contestant("plain RQ, two queues", "plain", STOCK, queues=2),
    Contestant("plain RQ with Retry", "plain", STOCK, retry=True),
    Contestant("plain RQ with Retry, two queues", "plain", STOCK, queues=2, retry=True),
    Contestant("hand-made decorator with Retry", "hand_made", STOCK, retry=True),
    Contestant("hand-made, Retry, two queues", "hand_made", STOCK, queues=2, retry=True),
    Contestant("dedupjobs, effect outside", "outside", DEDUP),
    Contestant("dedupjobs, atomic", "atomic", DEDUP),
    Contestant("dedupjobs, atomic, two queues", "atomic", DEDUP, queues=2),
]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--one", type=int, help="play this contestant, for the process that does")
    parser.add_argument("--parallel", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(play(CONTESTANTS[options.one])))
        return 0
    with ThreadPoolExecutor(options.parallel) as pool:
        results = list(pool.map(_in_a_process, range(len(CONTESTANTS))))
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def _in_a_process(number: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.faults", "--one", str(number)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{CONTESTANTS[number].name} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{result['name']}: done", file=sys.stderr, flush=True)
    return result


def play(contestant: Contestant) -> dict[str, Any]:
    """Play the script on servers of this contestant's own; return what came of it."""
    from tests.proxy import Proxy
    from tests.servers import Valkey

    with (
        tempfile.TemporaryDirectory(prefix="dedupjobs-bench-") as folder,
        Valkey() as valkey,
        Proxy(valkey.port) as proxy,
    ):
        home = Path(folder)
        (home / "work").mkdir()
        os.environ.update(
            DJANGO_SETTINGS_MODULE="benchmarks.faults.settings",
            BENCH_HOME=folder,
            BENCH_REDIS=f"redis://127.0.0.1:{proxy.port}/0",
            BENCH_WORKER=contestant.worker,
        )
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", run_syncdb=True, verbosity=0)
        from benchmarks.faults import jobs
        from benchmarks.faults.models import Effect
        from benchmarks.faults.script import Script
        from dedupjobs.models import ACTIVE, ProcessedJob

        queues = ["default", "low"][: contestant.queues]

        def moves() -> int:
            """Count what changes while something goes on: effects, and our rows still at it."""
            active = ProcessedJob.objects.filter(status__in=ACTIVE).count()
            return Effect.objects.count() + (time.monotonic_ns() if active else 0)

        script = Script(home, valkey, proxy, queues, moves)
        script.play(
            lambda number, queue: jobs.call(
                contestant.dress, number, retry=contestant.retry, queue=queue
            )
        )
        states = Counter(ProcessedJob.objects.values_list("status", flat=True))
        effects = Counter(Effect.objects.values_list("number", flat=True))
    return {
        "name": contestant.name,
        "called": len(script.called),
        "lost": len(script.called - set(effects)),
        "doubled": sum(count > 1 for count in effects.values()),
        "effects": sum(effects.values()),
        "faults": Counter(script.faults),
        "states": states,
    }


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| | jobs called | lost | doubled | effects |", "|---|---|---|---|---|"]
    for r in results:
        cells = [r["name"], r["called"], r["lost"], r["doubled"], r["effects"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    faults = results[0]["faults"]
    struck = ", ".join(f"{count} × {name}" for name, count in faults.items())
    return "\n".join([*lines, "", f"Faults: {struck}."])


if __name__ == "__main__":
    sys.exit(main())
