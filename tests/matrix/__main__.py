"""
Run the suite on every Python, Django, database and Redis that this machine has: ``make matrix``.

Each row of CELLS is a combination; what the machine lacks is named, with how to get it. ``--ci``
runs a chosen few with fewer tests, ``--write`` puts the table into a page.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.matrix import machine
from tests.matrix.machine import Missing

ROOT = Path(__file__).parents[2]
COUNT = re.compile(r"(\d+) (passed|failed|error|skipped)")
# What depends on the versions: SQL, Redis commands, RQ's and Django's insides.
CHOSEN = (
    *("enqueue", "lifecycle", "runner", "locks", "cache", "coordinator", "workers", "ledger"),
    *("tasks", "testing", "checks", "multidb", "admin", "dashboard", "outbox", "inbox"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination. ``ci``: "whole" suite or "chosen" tests in `.ci/run`, or not at all."""

    python: str
    django: str
    database: str
    redis: str
    ci: str = ""

    @property
    def title(self) -> str:
        return f"Python {self.python}, Django {self.django}, {self.database}, {self.redis}"


CELLS = (
    Cell(python="3.11", django="5.2", database="SQLite", redis="Valkey 9"),
    Cell(python="3.11", django="5.2", database="PostgreSQL 18", redis="Valkey 9"),
    Cell(python="3.11", django="5.2", database="PostgreSQL 15", redis="Redis 7.0"),
    Cell(python="3.11", django="5.2", database="MariaDB", redis="Redis 6.2"),
    Cell(python="3.11", django="lowest", database="SQLite", redis="Redis 6.2", ci="chosen"),
    Cell(python="3.12", django="6.0", database="SQLite", redis="Redis 8.2"),
    Cell(python="3.12", django="6.0", database="PostgreSQL 15", redis="Redis 7.0", ci="chosen"),
    Cell(python="3.12", django="6.0", database="MariaDB", redis="Valkey 9"),
    Cell(python="3.13", django="6.1", database="SQLite", redis="Redis 8.2", ci="whole"),
    Cell(python="3.13", django="6.1", database="PostgreSQL 18", redis="Valkey 9"),
    Cell(python="3.13", django="6.1", database="MariaDB", redis="Redis 7.0"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a cell: how its tests ended, or why it was left out."""

    cell: Cell
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0
    tests: str = ""
    versions: str = ""
    left_out: str = ""

    @property
    def is_green(self) -> bool:
        return not self.left_out and not self.failed and self.passed > 0


def main() -> None:
    options = _options()
    results = []
    for cell in _chosen(options):
        print(f"\n=== {cell.title}", flush=True)
        chosen = options.chosen or (options.ci and cell.ci == "chosen")
        result = run(cell, chosen=chosen, extra=options.pytest)
        print(f"=== {_words(result)}", flush=True)
        results.append(result)
    if options.write:
        _write(Path(options.write), results)
    print("\n".join(("", *map(_line, results))))
    if any(not r.is_green and not r.left_out for r in results):
        sys.exit("the matrix is not green")


def run(cell: Cell, *, chosen: bool, extra: list[str]) -> Result:
    """Run one cell's tests in its own environment, with its own servers."""
    try:
        python = machine.environment(cell.python, cell.django)
        env = machine.servers(cell.database, cell.redis)
    except Missing as missing:
        return Result(cell=cell, left_out=str(missing))
    versions = machine.versions(python, env)
    begun, output = time.monotonic(), []
    command = [str(python), "-m", "pytest", "-n", "2", "-q", "-m", "not large"]
    command += _files(cell, chosen) + extra
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            output.append(line)
    counts = {kind: int(count) for count, kind in COUNT.findall(output[-1] if output else "")}
    broken = process.returncode != 0
    return Result(
        cell=cell,
        passed=counts.get("passed", 0),
        failed=max(counts.get("failed", 0) + counts.get("error", 0), int(broken)),
        skipped=counts.get("skipped", 0),
        seconds=time.monotonic() - begun,
        tests="chosen" if chosen else "all",
        versions=versions,
    )


def _files(cell: Cell, chosen: bool) -> list[str]:
    if chosen:
        return [f"tests/test_{name}.py" for name in CHOSEN]
    apart = ("simulation", "mutants", "faults", "browser", "exhaustive", "matrix")
    return [f"--ignore=tests/{name}" for name in apart]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--ci", action="store_true", help="only what .ci/run runs")
    parser.add_argument("--chosen", action="store_true", help="only what depends on versions")
    parser.add_argument("--only", metavar="TEXT", help="combinations whose title has this text")
    parser.add_argument("--write", metavar="PAGE", help="put the table between this page's marks")
    parser.add_argument("pytest", nargs="*", help="handed to pytest, after --")
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> Iterator[Cell]:
    for cell in CELLS:
        if (cell.ci or not options.ci) and (options.only or "") in cell.title:
            yield cell


# ---- telling


def _words(result: Result) -> str:
    if result.left_out:
        return f"left out: {result.left_out}"
    counts = f"{result.passed} passed, {result.failed} failed, {result.skipped} skipped"
    return f"{counts} in {result.seconds:.0f} s ({result.versions})"


def _line(result: Result) -> str:
    mark = "left out" if result.left_out else "green" if result.is_green else "RED"
    return f"{mark:9} {result.cell.title}: {_words(result)}"


def _write(page: Path, results: list[Result]) -> None:
    """Put the results into the page's table; rows of combinations that did not run stay."""
    text = page.read_text()
    before, _, rest = text.partition("<!-- table -->\n")
    table, end, after = rest.partition("<!-- /table -->")
    if not end:
        sys.exit(f"{page} has no <!-- table --> … <!-- /table -->")
    rows = {_head(cell): f"{_head(cell)} not run | | | | | |" for cell in CELLS}
    for line in table.splitlines():
        rows |= {head: line for head in rows if line.startswith(head)}
    rows |= {_head(result.cell): _row(result) for result in results}
    page.write_text(f"{before}<!-- table -->\n{HEADING}{chr(10).join(rows.values())}\n{end}{after}")


HEADING = """\
| Python | Django | database | Redis | exactly | tests | passed | failed | skipped | seconds |
|---|---|---|---|---|---|---|---|---|---|
"""


def _head(cell: Cell) -> str:
    return f"| {cell.python} | {cell.django} | {cell.database} | {cell.redis} |"


def _row(result: Result) -> str:
    if result.left_out:
        return f"{_head(result.cell)} left out: {result.left_out} | | | | | |"
    counts = f"{result.passed} | {result.failed} | {result.skipped} | {result.seconds:.0f}"
    return f"{_head(result.cell)} {result.versions} | {result.tests} | {counts} |"


if __name__ == "__main__":
    main()
