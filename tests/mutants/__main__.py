"""
Apply each mutant in a scratch copy and let the simulation look for it: ``make mutants``.

Prints a line per mutant: which invariant caught it, and after how many seeds. Exits with 1 if one
was not caught, or does not fit the code any more.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.table import ALL, SEEDS, Mutant

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name contains this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--keep", default="", metavar="FILE", help="a corpus to add the runs to")
    options = parser.parse_args()
    chosen = [mutant for mutant in ALL if options.only in mutant.name]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda mutant: try_out(mutant, options.seeds, options.keep), chosen)
        caught = [_report(mutant, *found) for mutant, found in zip(chosen, results, strict=True)]
    print(f"{sum(caught)} of {len(chosen)} mutants were caught")
    return 0 if all(caught) else 1


def try_out(mutant: Mutant, seeds: int, keep: str) -> tuple[int | None, str]:
    """Return after how many seeds it was caught and by what, or None and what was printed."""
    with tempfile.TemporaryDirectory(prefix="dedupjobs-mutant-") as scratch:
        for part in ("dedupjobs", "tests"):
            shutil.copytree(ROOT / part, Path(scratch, part))
        apply(mutant, Path(scratch, "dedupjobs"))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.simulation", "--stop", "--seeds", str(seeds)),
                *(("--keep", str(Path(keep).resolve())) if keep else ()),
            ],
            cwd=scratch,
            env={**os.environ, "PYTHONPATH": scratch, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    found = re.search(r"^seed (\d+): (.*)$", done.stdout, re.MULTILINE)
    if found is None:
        return None, done.stderr[-2000:]
    return int(found[1]) + 1, found[2]


def apply(mutant: Mutant, package: Path) -> None:
    """Make the changes, each of which must fit exactly once."""
    for name, old, new in mutant.changes:
        path = package / name
        text = path.read_text()
        if text.count(old) != 1:
            sys.exit(f"{mutant.name}: stands {text.count(old)} times in {name}, not once:\n{old}")
        path.write_text(text.replace(old, new))


def _report(mutant: Mutant, seeds: int | None, by: str) -> bool:
    what = f"{seeds:>5} seeds  {by}" if seeds else f"  NOT CAUGHT  {by}"
    print(f"{mutant.name:<58}{what}", flush=True)
    return seeds is not None


if __name__ == "__main__":
    sys.exit(main())
