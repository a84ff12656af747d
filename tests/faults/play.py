"""
One stage from start to verdict, in a process of its own since Django's settings are global.

    python -m tests.faults.play postgresql rq.Worker --seed abc --each 1 --out result.json

Goes on until all kinds have struck ``--each`` times and there are ``--jobs`` rows.
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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.faults import house as houses
from tests.faults.house import House

if TYPE_CHECKING:
    from tests.faults.kinds import Kind
    from tests.faults.stage import Stage

LOSS_EVERY = 2.0  # seconds
QUIET = 6.0  # seconds between the last job and the verdict
LAST_CHANCE = 120.0  # seconds for probes that nobody has come by


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
    parser.add_argument("--jobs", type=int, default=0, help="go on until there are so many")
    parser.add_argument("--seconds", type=float, default=0, help="but no longer than this")
    parser.add_argument("--alone", type=int, default=1, help="how often to measure recovery")
    parser.add_argument("--armed", type=int, default=12, help="probes at the same time")
    parser.add_argument("--backlog", type=int, default=12, help="that faults wait for")
    parser.add_argument("--gap", type=float, default=0.25, help="seconds between two kinds")
    parser.add_argument("--action", action="append", default=[], help="at each probe")
    parser.add_argument("--pace", type=float, default=0.15)
    parser.add_argument("--usual", action="store_true", help="the default settings of time")
    parser.add_argument("--only", action="append", default=[], help="these kinds; no probes")
    parser.add_argument("--locks", choices=houses.LOCKS, default="one")
    parser.add_argument("--keep", action="store_true", help="keep the folder of a bad stage")
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def _play(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    settings = houses.USUAL if options.usual else houses.BRISK

    def make(house: House) -> Stage:
        from tests.faults.stage import Stage

        stage = Stage(house, options.worker, options.seed, settings, options.pace)
        stage.backlog = options.backlog
        return stage

    with House(options.database, home, options.locks) as house:
        enter(house, settings=settings, worker=options.worker, seed=options.seed)
        return perform(make(house), lambda stage: _strike(stage, options))


def enter(house: House, *, settings: dict[str, Any], worker: str, seed: str) -> None:
    """Make this process the one that drives and judges a stage in this house."""
    os.environ.update(house.env(direct=True, settings=settings, worker=worker))
    os.environ["FAULTS_SEED"] = seed
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", run_syncdb=True, verbosity=0)


def perform(stage: Stage, strike: Callable[[Stage], list[str]]) -> dict[str, Any]:
    """
    Let a stage run, and return what came of it; ``strike`` lets everything go wrong, and returns
    the probes that nobody has come by.
    """
    begun = time.monotonic()
    with stage:
        unhit = strike(stage)
        struck_for = time.monotonic() - begun
        quiet = _calm(stage)
        verdict = _judge(stage)
    usual = {"RECLAIM_EVERY": 5, "LEADER_TTL": 10, **stage.settings}
    return {
        "database": stage.house.database,
        "worker": stage.worker,
        "locks": stage.house.locks,
        "seconds": time.monotonic() - begun,
        "struck_for": struck_for,
        "quiet": quiet,
        "lease": float(os.environ["FAULTS_LEASE"]),
        "reclaim_every": usual["RECLAIM_EVERY"],
        "leader_ttl": usual["LEADER_TTL"],
        "unhit": unhit,
        **verdict,
    }


# ---- faults


def _strike(stage: Stage, options: argparse.Namespace) -> list[str]:
    """Let everything strike; return the armed probes that nobody has come by."""
    stage.wait_until(_any_row, 20)
    begun = time.monotonic()
    _measure(stage, options.alone)

    def over() -> bool:
        return bool(options.seconds) and time.monotonic() - begun > options.seconds

    rounds = 0
    while rounds < options.each or (_rows() < options.jobs and not over()):
        _one_round(stage, options, over)
        rounds += 1
    stage.wait_until(lambda: not stage.armed() or _nudge(stage), LAST_CHANCE)
    return stage.disarm()


def _measure(stage: Stage, times: int) -> None:
    """Let faults strike one at a time, and wait for what they hit: how long recovery takes."""
    from tests.faults import kinds

    alone = [kinds.kill_horse, kinds.kill_worker, kinds.flush, kinds.restart_redis]
    if stage.house.server is not None:
        alone.append(kinds.restart_database)
    pace, stage.pace = stage.pace, 1.0  # so that no backlog stands before what is measured
    stage.set_pace(stage.pace)
    for _ in range(times):
        for apply in alone:
            stage.breathe(60, most=2)
            before = len(stage.strikes)
            apply(stage)
            for strike in stage.strikes[before:]:
                strike.kind += ", alone"
                stage.wait_until(lambda s=strike: stage.goes_on(s), 30)
    stage.pace = pace


def _rows() -> int:
    from dedupjobs.models import ProcessedJob

    return ProcessedJob.objects.count()


def _any_row() -> bool:
    return _rows() > 0


def _one_round(stage: Stage, options: argparse.Namespace, over: Callable[[], bool]) -> None:
    """Each kind once, in a random order, while probes are armed one after the other."""
    kinds = _kinds(stage, options)
    probes = [] if options.only else _probes(stage, options.action)
    stage.rng.shuffle(kinds)
    stage.rng.shuffle(probes)
    while (kinds or probes) and not over():
        _arm(stage, probes, options.armed)
        _bring_losses(stage)
        if kinds and (not probes or stage.rng.random() < len(kinds) / (len(probes) + len(kinds))):
            _apply(stage, kinds.pop())
        stage.pause(options.gap)
        stage.breathe()


def _kinds(stage: Stage, options: argparse.Namespace) -> list[Kind]:
    from tests.faults.kinds import KINDS

    here = [k for k in KINDS if k.strikes(stage.house)]
    return [k for k in here if not options.only or k.name in options.only]


def _probes(stage: Stage, actions: list[str]) -> list[tuple[str, str, str]]:
    """Return (role, point, action): each action at each point, and some of the others."""
    from tests.faults import arming, points

    pairs = points.by_role(stage.worker, stage.house.database, stage.house.locks)
    found = [(role, point, action) for role, point in pairs for action in actions]
    horses = [pair for pair in pairs if pair[0] == "horse"]
    some = stage.rng.sample(horses, min(len(horses), 8))
    found += [(role, point, arming.KILL_ALL) for role, point in some]
    for one in sorted({role for role, _ in pairs} - {"enqueuer"}):
        point = stage.rng.choice([point for role, point in pairs if role == one])
        found.append((one, point, arming.STOP))
    return found


def _arm(stage: Stage, probes: list[tuple[str, str, str]], most: int) -> None:
    for probe in list(probes):
        if len(stage.armed()) >= most:
            return
        if stage.arm(*probe):
            probes.remove(probe)


def _apply(stage: Stage, kind: Kind) -> None:
    try:
        kind.apply(stage)
    except Exception:
        stage.errors.append(f"{kind.name}: {traceback.format_exc()}")


def _bring_losses(stage: Stage) -> None:
    """Kill in mid-job where somebody waits for a loss: whole workers, for coordinators."""
    from tests.faults import kinds

    if time.monotonic() - stage.losses_brought < LOSS_EVERY:
        return
    stage.losses_brought = time.monotonic()
    armed = stage.armed()
    if any(name.startswith("coordinator.reclaim") for name in armed):
        kinds.kill_worker(stage)
    if any(name.startswith("worker.reclaim") for name in armed):
        kinds.kill_horse(stage)


def _nudge(stage: Stage) -> bool:
    """Do what brings actors to the probes that are still armed."""
    from tests.faults import kinds

    stage.breathe()
    _bring_losses(stage)
    if any("mark_unsent" in name for name in stage.armed()):
        kinds.refuse(stage)
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
    stage.wait_until(stage.told, stage.bound)
    stage.pause(QUIET)  # the locks of the last ones go with their leases, at the latest
    return quiet


def _judge(stage: Stage) -> dict[str, Any]:
    from dedupjobs.models import JobAttempt, OutboxEvent, ProcessedJob
    from tests.faults import judge, ledger, recovery
    from tests.faults.app.models import Applied

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
        "events": OutboxEvent.objects.count(),
        "applied": Applied.objects.count(),
        "kills": sum("kill" in line["action"] for line in strikes)
        + sum(line["action"] == "kill all" for line in strikes),
        "kinds": kinds,
        "hit": sorted({f"{line['point']} {line['action']}" for line in strikes if line["point"]}),
        "recovery": recovery.times(stage.strikes, lines),
        "ended": stage.ended,
        "reasons": stage.reasons,
    }


if __name__ == "__main__":
    main()
