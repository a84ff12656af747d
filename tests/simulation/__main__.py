"""
Run seeds: ``python -m tests.simulation --seeds 5000 --jobs 2`` (``make simulate SEEDS=5000``).

The corpus comes first. Of a failure it prints seed, faults and the end of the trace, makes it
smaller, adds it to corpus.json, and exits with 1. ``--show SEED`` prints the trace of one run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

from tests.simulation.prepare import prepare
from tests.simulation.seeds import Seen, keep, run_all


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="SEED")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--stop", action="store_true", help="end with the first failure, as it is")
    parser.add_argument(
        "--keep", metavar="FILE", help="with --stop: make it smaller, keep it there"
    )
    parser.add_argument("--digests", action="store_true", help="print each run's hash")
    parser.add_argument("--locks", choices=("one", "quorum", "none"), default="one")
    parser.add_argument("--show", type=int, metavar="SEED")
    options = parser.parse_args()
    os.environ["SIMULATION_LOCKS"] = options.locks
    if options.show is not None:
        prepare()
        return _show(options.show)
    seeds = range(options.first, options.first + options.seeds)
    runs: list[Seen] = []
    begun = time.monotonic()
    for seen in run_all(seeds, options.jobs, options.stop):
        runs.append(seen)
        if options.digests:
            print(seen.seed, seen.digest)
        if seen.failed and options.stop:
            if options.keep:
                keep(seen.seed, options.keep)
            break
    return _summary(runs, time.monotonic() - begun)


def _summary(runs: list[Seen], seconds: float) -> int:
    faults = Counter(kind for seen in runs for kind in seen.happened)
    print(f"{faults.total()} faults:", ", ".join(f"{n} {kind}" for kind, n in faults.most_common()))
    failed = sum(seen.failed for seen in runs)
    spent = max(sum(seen.seconds for seen in runs), 0.001)
    steps = sum(seen.steps for seen in runs) // len(runs)
    print(
        f"{len(runs)} runs in {seconds:.0f} s, {failed} failed; "
        f"{len(runs) / spent:.0f} runs per second of one core, {steps} steps each"
    )
    return 1 if failed else 0


def _show(seed: int) -> int:
    from tests.simulation.run import Plan, run

    result = run(Plan.of(seed))
    print(result.text(len(result.trace)))
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
