"""
One stage from start to verdict, in a process of its own since Django's settings are global.

    python -m tests.faults.play postgresql rq.Worker --seed abc --each 1 --out result.json

Until all kinds have struck ``--each`` times, or until ``--seconds`` are over, or both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.faults import house as houses
from tests.faults.house import House

if TYPE_CHECKING:
    from tests.faults.kinds import Kind
    from tests.faults.stage import Stage

ACTIONS = ("kill", "term", "term twice")
ARMED_AT_ONCE = 6
GAP = 0.25  # seconds between two kinds
LAST_CHANCE = 25.0  # seconds for probes that nobody has come by


def main() -> None:
    options = _options()
    home = Path(tempfile.mkdtemp(prefix="dedupjobs-faults-"))
    try:
        result = _play(options, home)
        Path(options.out).write_text(json.dumps(result))
        keep = bool(result["violations"]) and options.keep
        if keep:
            print(f"{options.database} {options.worker}: kept {home}", file=sys.stderr)
    except BaseException:
        keep = options.keep
        raise
    finally:
        if not keep:
            shutil.rmtree(home, ignore_errors=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.play")
    parser.add_argument("database", choices=("sqlite", "postgresql", "mariadb"))
    parser.add_argument("worker")
    parser.add_argument("--seed", required=True)
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--pace", type=float, default=0.15)
    parser.add_argument("--usual", action="store_true", help="the default settings of time")
    parser.add_argument("--only", action="append", default=[], help="these kinds; no probes")
    parser.add_argument("--keep", action="store_true", help="keep the folder of a bad stage")
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def _play(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    settings = houses.USUAL if options.usual else houses.BRISK
    with House(options.database, home) as house:
        os.environ.update(house.env(direct=True, settings=settings, worker=options.worker))
        os.environ["FAULTS_SEED"] = options.seed
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", run_syncdb=True, verbosity=0)
        from tests.faults.stage import Stage

        stage = Stage(house, options.worker, options.seed, settings, options.pace)
        begun = time.monotonic()
        with stage:
            unhit = _strike(stage, options)
            struck_for = time.monotonic() - begun
            quiet = _calm(stage)
            verdict = _judge(stage)
        return {
            "database": options.database,
            "worker": options.worker,
            "seconds": time.monotonic() - begun,
            "struck_for": struck_for,
            "quiet": quiet,
            "unhit": unhit,
            **verdict,
        }


# ---- faults


def _strike(stage: Stage, options: argparse.Namespace) -> list[str]:
    """Let everything strike; return the armed probes that nobody has come by."""
    stage.wait_until(lambda: stage.active() or _any_row(), 20)
    begun = time.monotonic()
    rounds = 0
    while rounds < options.each or time.monotonic() - begun < options.seconds:
        _one_round(stage, options)
        rounds += 1
        if options.only and rounds >= options.each:
            break
    stage.wait_until(lambda: not stage.armed() or _nudge(stage), LAST_CHANCE)
    return stage.disarm()


def _any_row() -> bool:
    from dedupjobs.models import ProcessedJob

    return ProcessedJob.objects.exists()


def _one_round(stage: Stage, options: argparse.Namespace) -> None:
    """Each kind once, in a random order, while probes are armed one after the other."""
    kinds = _kinds(stage, options)
    probes = [] if options.only else _probes(stage)
    stage.rng.shuffle(kinds)
    stage.rng.shuffle(probes)
    while kinds or probes:
        _arm(stage, probes)
        if kinds and (not probes or stage.rng.random() < len(kinds) / (len(probes) + len(kinds))):
            _apply(stage, kinds.pop())
        stage.pause(GAP)
        stage.steady()


def _kinds(stage: Stage, options: argparse.Namespace) -> list[Kind]:
    from tests.faults.kinds import KINDS

    here = [k for k in KINDS if stage.house.database in k.databases]
    return [k for k in here if not options.only or k.name in options.only]


def _probes(stage: Stage) -> list[tuple[str, str, str]]:
    """Return (role, point, action): every pair is killed at, and told to end in one of two ways."""
    from tests.faults import arming, points

    pairs = points.by_role(stage.worker)
    found = [(role, point, action) for role, point in pairs for action in ACTIONS]
    found += [("horse", point, arming.KILL_ALL) for role, point in pairs if role == "horse"]
    stops = [pair for pair in pairs if pair[0] != "enqueuer"]
    found += [(role, point, arming.STOP) for role, point in stage.rng.sample(stops, 4)]
    return found


def _arm(stage: Stage, probes: list[tuple[str, str, str]]) -> None:
    for probe in list(probes):
        if len(stage.armed()) >= ARMED_AT_ONCE:
            return
        if stage.arm(*probe):
            probes.remove(probe)


def _apply(stage: Stage, kind: Kind) -> None:
    try:
        kind.apply(stage)
    except Exception:
        stage.errors.append(f"{kind.name}: {traceback.format_exc()}")


def _nudge(stage: Stage) -> bool:
    """Do what brings actors to the probes that are still armed: messages lost, and reclaims."""
    from tests.faults import kinds

    stage.steady()
    kinds.refuse(stage)
    kinds.kill_worker(stage)
    return False


# ---- quiet, verdict


def _calm(stage: Stage) -> float:
    """End the faults and the calls; return the seconds until all jobs had ended."""
    stage.wake_all()
    for actor in stage.alive("enqueuer"):
        stage.end(actor)
    for actor in stage.actors:
        if actor.role == "enqueuer":
            actor.wanted = False
    begun = time.monotonic()
    stage.wait_until(lambda: not stage.active(), stage.bound)
    quiet = time.monotonic() - begun
    stage.pause(6)  # the locks of the last ones go with their leases, at the latest
    return quiet


def _judge(stage: Stage) -> dict[str, Any]:
    from dedupjobs.models import JobAttempt, ProcessedJob
    from tests.faults import judge, ledger, recovery

    lines = ledger.read()
    strikes = [line for line in lines if line["what"] == "strike"]
    found = judge.violations(lines)
    found += [f"I8: {left}" for left in stage.left_behind()]
    kinds = Counter(strike.kind for strike in stage.strikes)
    kinds.update(recovery.name_of(line) for line in strikes if line["point"])
    late = JobAttempt.objects.exclude(late_ending="").count()
    return {
        "violations": found,
        "errors": stage.errors,
        "jobs": ProcessedJob.objects.count(),
        "calls": sum(line["what"] == "committed" for line in lines),
        "attempts": JobAttempt.objects.count(),
        "outcomes": Counter(JobAttempt.objects.values_list("outcome", flat=True)),
        "late": late,
        "effects": sum(line["what"] == "effect" for line in lines),
        "kills": sum("kill" in line["action"] for line in strikes)
        + sum(line["action"] == "kill all" for line in strikes),
        "kinds": kinds,
        "hit": sorted({f"{line['point']} {line['action']}" for line in strikes if line["point"]}),
        "recovery": recovery.times(stage.strikes, lines),
        "ended": stage.ended,
    }


if __name__ == "__main__":
    main()
