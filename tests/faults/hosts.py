"""
Workers, callers, a coordinator, Redis and PostgreSQL on hosts of their own, cut off in turn.

    python -m tests.faults.hosts --help        (make hosts)

Each cut drops packets, silently, one way or both; then it heals, and all that stood still goes on.
The exit status is 1 if anything was lost or done twice, 2 if no networks can be made here.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

from tests.faults import house as houses
from tests.faults import network as networks
from tests.faults import play, report, sentinels
from tests.faults.house import House, KeptPostgreSQL, new_seed
from tests.faults.network import SWITCH, Network, Way, both
from tests.faults.sentinels import DEDUP
from tests.servers import Valkey

if TYPE_CHECKING:
    from tests.faults.stage import Actor

REDIS, POSTGRESQL, CALLERS = "redis", "postgresql", "callers"
WORKER_A, WORKER_B, COORDINATOR = "worker-a", "worker-b", "coordinator"
HOSTS = (REDIS, POSTGRESQL, CALLERS, WORKER_A, WORKER_B, COORDINATOR)
CUT_FOR = 7.0  # seconds: longer than a lease, the sweep and a job's time-out
BACK = 60.0  # seconds that a host may take to work again
PACE = 0.1  # seconds between two calls of one caller

PLAIN = ("rqworker", "default")
PATIENCE = ("--worker-ttl", "20")  # else a stock worker waits for 415 s in one read
JSON = ("--serializer", "rq.serializers.JSONSerializer")
STOCK = (*PLAIN, *PATIENCE, "--worker-class", "rq.Worker")
SIMPLE = (*PLAIN, *PATIENCE, "--worker-class", "rq.SimpleWorker")

Fleet = list[tuple[str, str, tuple[str, ...]]]  # role, host, command
FLEETS: dict[str, tuple[str, Fleet]] = {
    "mixed": (
        DEDUP,
        [
            ("worker", WORKER_A, PLAIN),
            ("worker", WORKER_A, (*STOCK, *JSON)),
            ("worker", WORKER_B, PLAIN),
            ("worker", WORKER_B, (*SIMPLE, *JSON)),
            ("coordinator", COORDINATOR, ("dedupjobs_coordinator",)),
            *[("enqueuer", CALLERS, ())] * 2,
            *[("consumer", host, ("dedupjobs_consume",)) for host in (CALLERS, WORKER_B)],
        ],
    ),
    "stock": (
        "rq.Worker",
        [
            ("worker", WORKER_A, STOCK),
            ("worker", WORKER_A, SIMPLE),
            ("worker", WORKER_B, STOCK),
            ("worker", WORKER_B, SIMPLE),
            ("coordinator", COORDINATOR, ("dedupjobs_coordinator",)),
            *[("enqueuer", CALLERS, ())] * 2,
            *[("consumer", host, ("dedupjobs_consume",)) for host in (CALLERS, WORKER_B)],
        ],
    ),
}
"""By what the project's WORKER_CLASS is. Stock workers leave recovery to the coordinator's host."""

CUTS: dict[str, tuple[Way, ...]] = {
    "worker A ↔ everyone": (Way(WORKER_A, "*"), Way("*", WORKER_A)),
    "worker A ↔ Redis": both(WORKER_A, REDIS),
    "worker A → Redis": (Way(WORKER_A, REDIS),),
    "Redis → worker A": (Way(REDIS, WORKER_A),),
    "worker A ↔ PostgreSQL": both(WORKER_A, POSTGRESQL),
    "worker A → PostgreSQL": (Way(WORKER_A, POSTGRESQL),),
    "PostgreSQL → worker A": (Way(POSTGRESQL, WORKER_A),),
    "coordinator ↔ Redis": both(COORDINATOR, REDIS),
    "coordinator ↔ PostgreSQL": both(COORDINATOR, POSTGRESQL),
    "callers ↔ Redis": both(CALLERS, REDIS),
    "callers ↔ PostgreSQL": both(CALLERS, POSTGRESQL),
    "Redis ↔ everyone": (Way(REDIS, "*"), Way("*", REDIS)),
    "PostgreSQL ↔ everyone": (Way(POSTGRESQL, "*"), Way("*", POSTGRESQL)),
    "5 % of all packets lost": (Way("*", "*", loss=5),),
}
BRIEF = ("worker A ↔ everyone", "Redis ↔ everyone")


class Spread(House):
    """Redis and PostgreSQL on hosts of their own; whoever drives the stage stands in the switch."""

    def __init__(self, network: Network, home: Path) -> None:
        self.database = "postgresql"
        self.home = home
        self.network = network
        self.valkey: Any = self._placed(Valkey(bundled=True), REDIS)
        self.server: Any = self._placed(KeptPostgreSQL(), POSTGRESQL)
        self.hosts = {name: network.inside(name) for name in (*HOSTS[2:], SWITCH)}
        self._stack = ExitStack()

    def _placed(self, server: Any, name: str) -> Any:
        return server.placed(self.network.address(name), self.network.inside(name))

    def __enter__(self) -> Self:
        try:
            self._stack.enter_context(self.valkey)
            self._stack.enter_context(self.server)
        except BaseException:
            self._stack.close()
            raise
        return self

    def env(self, **kwargs: Any) -> dict[str, str]:
        """Return the variables of a process, wherever it is."""
        settings = {"DJANGO_SETTINGS_MODULE": "tests.faults.spread_settings"}
        return {**super().env(**kwargs), **settings}

    def redis_url(self, *, direct: bool) -> str:
        return str(self.valkey.url)

    def server_address(self, *, direct: bool) -> str:
        return f"{self.server.host}:{self.server.port}"


# ---- cuts


def _cut(stage: Any, name: str) -> None:
    """Cut, heal, and measure: when the jobs at hand went on, and when the hosts worked again."""
    house = stage.house
    assert isinstance(house, Spread)
    stage.burst(8, "slow")
    stage.wait_until(lambda: all(map(stage.is_busy, _workers_of(name) or {WORKER_A})), 5)
    jobs = stage.at_hand()
    with house.network.cut(*CUTS[name]):
        everything = stage.struck(f"{name}: jobs at hand", jobs=jobs)
        stage.pause(CUT_FOR)
        dropped = house.network.dropped()
    if not dropped:
        stage.errors.append(f"{name}: no packet was dropped")
    healed = stage.struck(f"{name}: back after it has healed", jobs=stage.burst(3), first=True)
    for host in sorted(_workers_of(name)):
        if not stage.wait_until(lambda h=host: stage.works(h, healed.since), BACK):
            stage.errors.append(f"{name}: {host} does not work {BACK:g} s after it has healed")
        stage.backs.append((name, host, time.time() - healed.since))
    stage.wait_until(lambda: stage.goes_on(everything) and stage.goes_on(healed), stage.bound)


def _workers_of(name: str) -> set[str]:
    """Return the hosts of workers that a cut has cut off."""
    ends = {end for way in CUTS[name] for end in (way.source, way.target)}
    if ends & {REDIS, POSTGRESQL} and "*" in ends:
        return {WORKER_A, WORKER_B}
    return ends & {WORKER_A, WORKER_B}


# ---- the play


def _tree(actor: Actor) -> set[int]:
    try:
        process = psutil.Process(actor.pid)
        return {actor.pid, *(child.pid for child in process.children(recursive=True))}
    except (psutil.Error, ValueError):
        return set()


def _make(house: Spread, fleet: str, seed: str, settings: dict[str, Any]) -> Any:
    from dedupjobs.models import JobAttempt
    from tests.faults.stage import Stage

    worker, actors = FLEETS[fleet]

    class Hosts(Stage):
        """
        Actors on several hosts. ``backs``: per cut and host, the seconds until it worked again.
        """

        backs: list[tuple[str, str, float]]

        def cast(self) -> None:
            self.backs = []
            for role, host, argv in actors:
                self.add(role, *argv, host=host)

        def is_busy(self, host: str) -> bool:
            """Whether a process of a host has an attempt open."""
            return self._any_of(host, JobAttempt.objects.filter(outcome=None))

        def works(self, host: str, since: float) -> bool:
            """Whether a process of a host has begun a job since then."""
            moment = datetime.fromtimestamp(since, UTC)
            return self._any_of(host, JobAttempt.objects.filter(claimed_at__gt=moment))

        def _any_of(self, host: str, attempts: Any) -> bool:
            pids = set(attempts.values_list("pid", flat=True))
            here = [actor for actor in self.actors if actor.host == host]
            return any(pid in pids for actor in here for pid in _tree(actor))

    return Hosts(house, worker, seed, settings, PACE)


def _strike(stage: Any, names: list[str], rounds: int) -> list[str]:
    stage.wait_until(lambda: stage.active() > 0, 20)
    for _ in range(rounds):
        for name in names:
            _cut(stage, name)
    return []


def run(network: Network, home: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Play with one fleet, from within the switch; return what came of it."""
    settings = houses.USUAL if options.usual else {**houses.BRISK, "PUSH_TIMEOUT": 0.5}
    fleet = options.fleet[0]
    with Spread(network, home) as house:
        play.enter(house, settings=settings, worker=FLEETS[fleet][0], seed=options.seed)
        stage = _make(house, fleet, options.seed, settings)
        result = play.perform(stage, lambda stage: _strike(stage, options.only, options.rounds))
        from tests.faults import judge

        result["violations"] += judge.stuck(play.QUIET)
        return {**result, "fleet": fleet, "backs": stage.backs}


def text_of(results: list[dict[str, Any]], *, seed: str) -> str:
    """Return what docs/hosts.md says about a run."""
    cuts = sum(n for r in results for kind, n in r["kinds"].items() if kind.endswith("at hand"))
    totals = {key: sum(r[key] for r in results) for key in ("jobs", "calls", "attempts", "late")}
    lost = sum(r["outcomes"].get("LOST", 0) for r in results)
    violations = sum(len(r["violations"]) for r in results)
    seconds = sum(r["seconds"] for r in results)
    return "\n".join(
        [
            f"Seed `{seed}`, {seconds:.0f} s, {report.machine()}.",
            "",
            f"**{totals['jobs']:,} jobs, {totals['calls']:,} committed calls, "
            f"{totals['attempts']:,} attempts, {cuts} cuts of {CUT_FOR:g} s: "
            f"{violations} violations.** {lost} attempts were given up as lost, and "
            f"{totals['late']} of them came back too late and were refused.",
            "",
            *_backs(results),
        ]
    )


def _backs(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| cut off | fleet | jobs at hand went on after (s): p50, max | "
        "work after it has healed (s) | each cut-off host works again (s) |",
        "|---|---|---|---|---|",
    ]
    for name in CUTS:
        for r in results:
            if f"{name}: jobs at hand" not in r["kinds"]:
                continue
            at_hand = sorted(r["recovery"].get(f"{name}: jobs at hand", []))
            healed = r["recovery"].get(f"{name}: back after it has healed", [])
            backs = [f"{seconds:.1f}" for cut, _, seconds in r["backs"] if cut == name]
            spread = f"{at_hand[len(at_hand) // 2]:.1f}, {at_hand[-1]:.1f}" if at_hand else ""
            first = f"{max(healed):.1f}" if healed else ""
            cells = [name, r["fleet"], spread, first, ", ".join(backs)]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.hosts", description=__doc__)
    parser.add_argument("--fleet", action="append", choices=list(FLEETS))
    parser.add_argument("--only", action="append", choices=list(CUTS))
    parser.add_argument("--brief", action="store_true", help="a few cuts, with one fleet")
    parser.add_argument("--rounds", type=int, default=1, help="of all cuts")
    parser.add_argument("--usual", action="store_true", help="the default settings of time")
    parser.add_argument("--seed", default=new_seed())
    parser.add_argument("--write", type=Path, help="the page that gets the figures")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.fleet = options.fleet or (["mixed"] if options.brief else list(FLEETS))
    options.only = options.only or list(BRIEF if options.brief else CUTS)
    return options


def main() -> int:
    sentinels.end_well()
    options = _options()
    if options.inside:
        return _play(options)
    if reason := networks.why_not():
        print(f"Networks can not be cut here: {reason}.")
        return 2
    print(f"seed {options.seed}", flush=True)
    results = [_apart(fleet, options) for fleet in options.fleet]
    text = text_of(results, seed=options.seed)
    print(text)
    complaints = [what for r in results for what in (*r["violations"], *r["errors"])]
    print("\n".join(f"FAILED: {complaint}" for complaint in complaints))
    if options.write and not complaints:
        report.insert(options.write, "hosts", text)
    return 1 if complaints else 0


def _apart(fleet: str, options: argparse.Namespace) -> dict[str, Any]:
    """Play with one fleet in a process of its own, which stands in the switch."""
    with Network(HOSTS) as network, tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        arguments = ["--inside", network.mark, "--out", str(out), "--fleet", fleet]
        arguments += ["--seed", options.seed, "--rounds", str(options.rounds)]
        arguments += [word for name in options.only for word in ("--only", name)]
        arguments += ["--usual"] if options.usual else []
        command = [sys.executable, "-m", "tests.faults.hosts", *arguments]
        with ending(subprocess.Popen([*network.inside(SWITCH), *command])) as playing:
            if playing.wait():
                raise RuntimeError("the stage has ended badly")
        result: dict[str, Any] = json.loads(out.read_text())
        return result


@contextmanager
def ending(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Let a process clean up if this one is interrupted."""
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _play(options: argparse.Namespace) -> int:
    home = Path(tempfile.mkdtemp(prefix="dedupjobs-faults-"))
    try:
        result = run(Network(HOSTS, options.inside), home, options)
        options.out.write_text(json.dumps(result))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
