"""``python -m tests.exhaustive``: explore, compare, or drop the guards; see ``--help``."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.exhaustive import explorer, mutants
from tests.exhaustive.explorer import Report


def explore(seconds: float, only: str) -> bool:
    """Explore configuration after configuration; return whether nothing is violated."""
    deadline, total, done = time.monotonic() + seconds, Report(), 0
    for config in explorer.configurations(explorer.BOUNDS):
        if only not in str(config):
            continue
        report = explorer.explore(config, deadline)
        total.add(report)
        done += report.completed
        print(f"  {config!s:45} {report.states:9,} states {report.steps:10,} steps", flush=True)
        if not report.completed:
            break
    print(f"explored: {total.states:,} states, {total.steps:,} steps in {done} configurations")
    for text, (config, trace) in sorted(total.violations.items()):
        print(f"VIOLATED {text}\n    {config}: {'; '.join(trace)}")
    return not total.violations


def compare(seconds: float, only: str) -> bool:
    """Hold the real lifecycle to the model; return whether they never differ."""
    from tests.exhaustive import twin

    deadline, total, done = time.monotonic() + seconds, twin.Comparison(), 0
    for attempts, gaps in ((1, False), (2, False), (1, True), (2, True)):
        for config in explorer.configurations([(0, 0, 0)], modes=("plain",)):
            if only not in str(config) or time.monotonic() > deadline:
                continue
            found = twin.compare(config, attempts=attempts, gaps=gaps, deadline=deadline)
            total.add(found)
            done += found.completed
            bounds = f"attempts ≤ {attempts}{', calls with gaps' * gaps}"
            print(
                f"  {str(config).removesuffix(' plain 0/0/0'):30} {bounds:31}"
                f" {found.states:6,} states {found.pairs:8,} pairs",
                flush=True,
            )
    print(
        f"compared with the code: {total.pairs:,} pairs of state and arrow, {total.refused:,} of "
        f"them refusals, in {total.states:,} states; {done} comparisons complete"
    )
    for text in total.differences:
        print(f"DIFFERS {text}")
    return not total.differences


def drop(seconds: float, only: str) -> bool:
    """Drop each guard; return whether a check caught every one."""
    missed, begun = [], time.monotonic()
    for mutant in mutants.MUTANTS:
        if only not in str(mutant):
            continue
        report = mutants.caught(mutant, time.monotonic() + seconds)
        checks = ", ".join(sorted(report.violations)) or "NOT CAUGHT"
        print(f"  {mutant!s:38} {report.states:9,} states: {checks}", flush=True)
        if not report.violations:
            missed.append(str(mutant))
    print(
        f"dropped: {len(mutants.MUTANTS)} guards or pairs in {time.monotonic() - begun:.0f} s; "
        f"not caught: {', '.join(missed) or 'none'}"
    )
    for guard, why in mutants.NO_CHECK.items():
        print(f"  by itself no check misses {guard}: {why}")
    return not missed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.exhaustive", description=__doc__)
    parser.add_argument("what", nargs="*", help="explore, compare; both unless named")
    parser.add_argument("--seconds", type=float, default=120, help="in all; per mutant")
    parser.add_argument("--mutants", action="store_true", help="drop each guard of the model")
    parser.add_argument("--only", default="", help="configurations or guards with this text")
    options = parser.parse_args()
    if options.mutants:
        return 0 if drop(options.seconds, options.only) else 1
    modes = {"explore": explore, "compare": compare}
    chosen = [modes[name] for name in options.what or modes]
    _set_up_django()
    each = options.seconds / len(chosen)
    fine = [run(each, options.only) for run in chosen]
    return 0 if all(fine) else 1


def _set_up_django() -> None:
    """Use the suite's settings with a database in memory."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    os.environ["DEDUPJOBS_TEST_DB"] = "sqlite"
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)


sys.exit(main())
