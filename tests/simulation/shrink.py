"""Making a failing run smaller, and keeping it for ever."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from tests.simulation.faults import Fault
from tests.simulation.run import Plan, Result, run

NEEDED = ("worker1", "coordinator1")  # without them nothing comes to an end
CORPUS = Path(__file__).with_name("corpus.json")


def shrink(failing: Result) -> Result:
    """Leave out faults, then actors, one by one, for as long as the run still fails."""
    smallest = failing
    shrinking = True
    while shrinking:
        shrinking = False
        for plan in _smaller(smallest):
            result = run(plan)
            if _kind(result) == _kind(failing):
                smallest, shrinking = result, True
                break
    return smallest


def _kind(result: Result) -> str:
    """Return the invariant that was violated first."""
    return result.violations[0].split(" ", 1)[0] if result.violations else ""


def _smaller(result: Result) -> list[Plan]:
    plan = result.plan
    plans = [
        replace(plan, faults=plan.faults[:i] + plan.faults[i + 1 :])
        for i in range(len(plan.faults))
    ]
    others = [name for name in result.cast if name not in (*NEEDED, *plan.without)]
    return plans + [replace(plan, without=plan.without | {name}) for name in others]


def corpus() -> list[Plan]:
    """Return the runs that once failed; all must pass now."""
    entries = json.loads(CORPUS.read_text()) if CORPUS.exists() else []
    return [
        Plan(
            seed=entry["seed"],
            faults=tuple(Fault(**fault) for fault in entry["faults"]),
            without=frozenset(entry["without"]),
        )
        for entry in entries
    ]


def remember(result: Result, path: Path = CORPUS) -> None:
    """Add a run to the corpus, unless it is there."""
    plan = result.plan
    entries = json.loads(path.read_text()) if path.exists() else []
    entry = {
        "found": result.violations[0],
        "seed": plan.seed,
        "faults": [asdict(fault) for fault in plan.faults],
        "without": sorted(plan.without),
    }
    if not any(_same(entry, other) for other in entries):
        path.write_text(json.dumps([*entries, entry], indent=1) + "\n")


def _same(one: dict[str, object], other: dict[str, object]) -> bool:
    return all(one[key] == other[key] for key in ("seed", "faults", "without"))
