"""
Apply each mutant in a scratch copy and let the simulation look for it: ``make mutants``.

Prints a line per mutant: which invariant caught it, after how many seeds, and under which faults;
or the test that did. Exits with 1 if one was not caught, or does not fit the code any more.
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


def try_out(mutant: Mutant, seeds: int, keep: str) -> tuple[str, str]:
    """Return after how much it was caught and by what; or an empty text, and what was printed."""
    with tempfile.TemporaryDirectory(prefix="dedupjobs-mutant-") as scratch:
        for part in ("dedupjobs", "tests"):
            shutil.copytree(ROOT / part, Path(scratch, part))
        shutil.copy(ROOT / "pyproject.toml", scratch)
        apply(mutant, Path(scratch, "dedupjobs"))
        if mutant.test:
            done = _run(scratch, "pytest", "-x", "-q", "-n", "0", f"tests/{mutant.test}")
            return ("a test", mutant.test) if done.returncode == 1 else ("", done.stdout[-2000:])
        kept = ("--keep", str(Path(keep).resolve())) if keep else ()
        done = _run(scratch, "tests.simulation", "--stop", "--seeds", str(seeds), *kept)
    found = re.search(r"^seed (\d+): (.*)$", done.stdout, re.MULTILINE)
    if found is None:
        return "", done.stderr[-2000:]
    return f"{int(found[1]) + 1} seeds", found[2]


def _run(scratch: str, *command: str) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": scratch, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=scratch,
        env={**os.environ, **paths, "DEDUPJOBS_TEST_DB": "sqlite"},
        capture_output=True,
        text=True,
        check=False,
    )


def apply(mutant: Mutant, package: Path) -> None:
    """Make the changes, each of which must fit exactly once."""
    for name, old, new in mutant.changes:
        path = package / name
        text = path.read_text()
        if text.count(old) != 1:
            sys.exit(f"{mutant.name}: stands {text.count(old)} times in {name}, not once:\n{old}")
        path.write_text(text.replace(old, new))


def _report(mutant: Mutant, after: str, by: str) -> bool:
    print(f"{mutant.name:<58}{after or 'NOT CAUGHT':>10}  {by}", flush=True)
    return bool(after)


if __name__ == "__main__":
    sys.exit(main())
