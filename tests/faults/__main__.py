"""
Run stages and judge them: python -m tests.faults

Without arguments what a push runs: every kind at least three times, over stock Worker,
SimpleWorker and DedupWorker. With --jobs or --minutes the large one; --write puts its table into a
page. The exit status is 1 if anything was lost or done twice, or a probe was never hit.
"""

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
from pathlib import Path
from typing import Any

from tests.faults import house, points, report

WORKERS = ("dedupjobs.worker.DedupWorker", "rq.Worker", "rq.SimpleWorker")
DATABASES = ("postgresql", "sqlite")
ENDS = ("term", "term twice")
AT_LEAST = 3
MARKER = "<!-- what follows is written by make campaign -->"

Result = dict[str, Any]


def main() -> int:
    options = _options()
    begun = time.monotonic()
    seed = options.seed or house.new_seed()
    print(f"seed {seed}", flush=True)
    stages = [(database, worker) for database in options.database for worker in WORKERS]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.parallel) as pool:
        playing = [
            pool.submit(_play, options, seed, number, stage, Path(folder))
            for number, stage in enumerate(stages)
        ]
        results = [one.result() for one in playing]
    text = report.summary(results, seed=seed, seconds=time.monotonic() - begun)
    print(text)
    complaints = _complaints(results, options)
    print("\n".join(f"FAILED: {complaint}" for complaint in complaints))
    if options.write:
        _write(options.write, text)
    if options.json:
        options.json.write_text(json.dumps(results))
    return 1 if complaints else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--database", action="append", choices=(*DATABASES, "mariadb"))
    parser.add_argument("--seed", default="")
    parser.add_argument("--parallel", type=int, default=3, help="stages at the same time")
    parser.add_argument("--jobs", type=int, default=0, help="of all stages together, at least")
    parser.add_argument("--minutes", type=float, default=0, help="go on for so long at the most")
    parser.add_argument("--hours", type=float, default=0, help="the same in hours")
    parser.add_argument("--each", type=int, default=1, help="rounds of all kinds per stage")
    parser.add_argument("--write", type=Path, help="the page that gets the table")
    parser.add_argument("--json", type=Path, help="the figures")
    parser.add_argument("--locks", choices=house.LOCKS, default="one", help="and where they are")
    parser.add_argument("--keep", action="store_true", help="keep the folders of bad stages")
    options = parser.parse_args()
    options.database = options.database or list(DATABASES)
    options.minutes = options.minutes or 60 * options.hours
    if options.minutes and not options.jobs:
        options.jobs = sys.maxsize
    return options


def _play(
    options: argparse.Namespace, seed: str, number: int, stage: tuple[str, str], folder: Path
) -> Result:
    """Play one stage in a process of its own."""
    database, worker = stage
    out = folder / f"{number}.json"
    large = bool(options.jobs)
    count = len(options.database) * len(WORKERS)
    arguments = [database, worker, "--seed", f"{seed} {number}", "--out", str(out)]
    arguments += ["--each", str(options.each), "--locks", options.locks, "--action", "kill"]
    for action in ENDS if large else [ENDS[number % 2]]:
        arguments += ["--action", action]
    if large:
        turns = -(-count // options.parallel)
        seconds = options.minutes * 60 / turns - REST if options.minutes else 0
        jobs = min(options.jobs // count + 1, 10**9)
        arguments += ["--usual", "--jobs", str(jobs), "--seconds", str(seconds)]
        arguments += ["--pace", "0.03", "--alone", "3", "--gap", "0.4"]
        arguments += ["--armed", "4", "--backlog", "40"]
    if options.keep:
        arguments.append("--keep")
    command = [sys.executable, "-m", "tests.faults.play", *arguments]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    name = f"{worker.rpartition('.')[2]} on {database}"
    if done.returncode:
        print(f"{name} ended badly:\n{done.stderr[-4000:]}", flush=True)
        return {**EMPTY, "database": database, "worker": worker, "errors": ["ended badly"]}
    result: Result = json.loads(out.read_text())
    bad = f"{len(result['violations'])} violations, {len(result['errors'])} errors"
    print(f"{name}: {result['jobs']} jobs in {result['seconds']:.0f} s, {bad}", flush=True)
    return result


REST = 75.0  # seconds of a large stage for start, last probes, quiet and verdict
EMPTY: Result = {
    **dict.fromkeys(("jobs", "calls", "attempts", "late", "kills", "effects"), 0),
    **dict.fromkeys(("quiet", "seconds", "lease", "reclaim_every", "leader_ttl"), 0.0),
    **{"violations": [], "hit": [], "unhit": []},
    **{"outcomes": {}, "kinds": {}, "recovery": {}},
}


def _complaints(results: list[Result], options: argparse.Namespace) -> list[str]:
    """Return why this run has failed."""
    found = []
    for r in results:
        name = f"{r['worker']} on {r['database']}"
        found += [f"{name}: {what}" for what in (*r["violations"], *r["errors"])]
    hit = Counter(entry for r in results for entry in r["hit"])
    for action in ("kill", *ENDS):
        missed = {p for p in points.all_points(options.locks) if not hit[f"{p} {action}"]}
        found += [f"nobody was struck by {action!r} at {point}" for point in sorted(missed)]
    kinds = Counter()
    for r in results:
        kinds.update(r["kinds"])
    rare = {kind for kind, count in kinds.items() if count < AT_LEAST}
    found += [f"{kind!r} struck {kinds[kind]} times only" for kind in sorted(rare)]
    return found


def _write(page: Path, text: str) -> None:
    """Replace what stands behind the marker."""
    before = page.read_text().partition(MARKER)[0] if page.exists() else ""
    page.write_text(f"{before}{MARKER}\n\n{text}\n")


if __name__ == "__main__":
    sys.exit(main())
