"""
Fail-overs of Sentinel under load, and a count of what was lost or done twice.

    python -m tests.faults.sentinels --help        (make sentinel)

One primary, two replicas, three sentinels; DedupWorkers, an RQ Worker and a SimpleWorker side by
side; callers all the time. The exit status is 1 if anything was lost or done twice.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import redis

from tests.faults import house as houses
from tests.faults import play, report
from tests.faults.house import House, KeptPostgreSQL, new_seed
from tests.servers import HOST, Sentinel, Valkey
from tests.waiting import until

if TYPE_CHECKING:
    from tests.faults.stage import Stage

DEDUP = "dedupjobs.worker.DedupWorker"
SENTINELS = 3
REPLICAS = 2
QUORUM = 2
PROMOTED = 60.0  # seconds that a fail-over may take
PACE = 0.1  # seconds between two calls of one caller
CALLERS = 2


class Watched(House):
    """PostgreSQL, and a Redis that three sentinels watch over; nobody stands in between."""

    def __init__(self, home: Path) -> None:
        self.database = "postgresql"
        self.home = home
        self.server: Any = KeptPostgreSQL()
        self.redises: list[Valkey] = []
        self.sentinels: list[Sentinel] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._stack.enter_context(self.server)
            first = self._enter(self.redises, Valkey(bundled=True))
            for _ in range(REPLICAS):
                replica = Valkey("--replicaof", HOST, str(first.port), bundled=True)
                self._enter(self.redises, replica)
            for _ in range(SENTINELS):
                self._enter(self.sentinels, Sentinel(first, quorum=QUORUM))
            until(self.is_whole, PROMOTED, what="all replicas and sentinels know each other")
        except BaseException:
            self._stack.close()
            raise
        return self

    def _enter(self, group: list[Any], server: Valkey) -> Valkey:
        group.append(server)
        return self._stack.enter_context(server)

    def env(self, **kwargs: Any) -> dict[str, str]:
        """Return the variables of a process, whether it drives or acts."""
        ports = json.dumps([sentinel.port for sentinel in self.sentinels])
        return {
            **super().env(**kwargs),
            "DJANGO_SETTINGS_MODULE": "tests.faults.watched_settings",
            "FAULTS_SENTINELS": ports,
        }

    def redis_url(self, *, direct: bool) -> str:
        return self.redises[0].url

    def server_address(self, *, direct: bool) -> str:
        return f"{HOST}:{self.server.port}"

    # ---- who is what

    def primary(self) -> Valkey:
        """Return the server that the sentinels take for the primary."""
        port = self.sentinels[0].primary_port()
        return next(server for server in self.redises if server.port == port)

    def is_whole(self) -> bool:
        """Whether the primary has all its replicas, and each sentinel sees all others."""
        try:
            with self.primary().client() as client:
                facts: Any = client.info("replication")
            return (
                facts["role"] == "master"
                and facts["connected_slaves"] == REPLICAS
                and all(map(_sees_all, self.sentinels))
            )
        except redis.RedisError:
            return False

    def agree_on(self, server: Valkey) -> bool:
        """Whether all sentinels take this server for the primary."""
        return {sentinel.primary_port() for sentinel in self.sentinels} == {server.port}

    def await_other_than(self, old: Valkey) -> None:
        """Wait until the sentinels agree on another primary than this."""
        until(lambda: self.primary() is not old, PROMOTED, what="a replica is promoted")
        until(lambda: self.agree_on(self.primary()), PROMOTED, what="all sentinels agree")


def _sees_all(sentinel: Sentinel) -> bool:
    with sentinel.client() as client:
        state = client.sentinel_master(Sentinel.SERVICE)
    others = state["num-other-sentinels"] == SENTINELS - 1
    return bool(others and state["num-slaves"] == REPLICAS)


# ---- fail-overs: each strikes, lets callers go on in its block, and heals


@contextmanager
def kill_primary(house: Watched, _: Stage) -> Iterator[None]:
    """SIGKILL; the old one comes back empty, and is made a replica."""
    old = house.primary()
    old.kill()
    yield
    house.await_other_than(old)
    old.restart()


@contextmanager
def kill_primary_and_sentinel(house: Watched, stage: Stage) -> Iterator[None]:
    """The first sentinel that everybody asks goes as well; two of three are a majority."""
    old, gone = house.primary(), house.sentinels[0]
    gone.kill()
    old.kill()
    yield
    rest = house.sentinels[1:]
    until(lambda: {s.primary_port() for s in rest} != {old.port}, PROMOTED, what="promoted")
    stage.pause(2)
    gone.restart()
    old.restart()


@contextmanager
def ask_for_failover(house: Watched, _: Stage) -> Iterator[None]:
    """SENTINEL FAILOVER, as before maintenance."""
    old = house.primary()

    def starts() -> bool:
        with house.sentinels[0].client() as client:
            try:
                return bool(client.execute_command("SENTINEL", "FAILOVER", Sentinel.SERVICE))
            except redis.ResponseError:  # another one is not over yet
                return False

    until(starts, PROMOTED, every=0.5)
    yield
    house.await_other_than(old)


@contextmanager
def stop_primary(house: Watched, stage: Stage) -> Iterator[None]:
    """SIGSTOP; it wakes up as a second primary, which whoever is connected still believes."""
    old = house.primary()
    assert old.process is not None
    old.process.send_signal(signal.SIGSTOP)
    try:
        yield
        house.await_other_than(old)
        stage.pause(1)
    finally:
        old.process.send_signal(signal.SIGCONT)


@contextmanager
def wipe_primary(house: Watched, stage: Stage) -> Iterator[None]:
    """Restarted faster than a sentinel looks: an empty primary, and replicas that copy it."""
    house.primary().restart()
    yield
    stage.pause(1)


FailOver = Callable[[Watched, "Stage"], AbstractContextManager[None]]
FAILOVERS: dict[str, FailOver] = {
    "primary killed": kill_primary,
    "SENTINEL FAILOVER": ask_for_failover,
    "primary stopped, back as a second one": stop_primary,
    "primary and a sentinel killed": kill_primary_and_sentinel,
    "primary restarted empty, unnoticed": wipe_primary,
}
FIRST = ": first job"
ALL = ": all jobs"


def _fail_over(stage: Stage, name: str) -> None:
    house = stage.house
    assert isinstance(house, Watched)
    stage.pause(1)  # so that there is work in all places
    waiting = stage.at_hand()
    with FAILOVERS[name](house, stage):
        since = time.time()
        called = stage.burst(5)
        stage.struck(name + FIRST, jobs=called, since=since, first=True)
        everything = stage.struck(name + ALL, jobs=[*waiting, *called], since=since)
    stage.wait_until(lambda: stage.goes_on(everything), stage.bound)
    until(house.is_whole, PROMOTED, what="the old primary has become a replica")


# ---- the play


def _make(house: Watched, seed: str, settings: dict[str, Any]) -> Stage:
    from tests.faults.stage import Stage

    class Crowd(Stage):
        """Workers of all classes, on one queue."""

        def cast(self) -> None:
            for argv in crowd():
                self.add("worker", *argv)
            for _ in range(CALLERS):
                self.add("enqueuer")
            self.add("consumer", "dedupjobs_consume")

    return Crowd(house, DEDUP, seed, settings, PACE)


def crowd() -> list[list[str]]:
    """Return the commands of two DedupWorkers, and of stock ones that read their messages."""
    plain = ["rqworker", "default"]
    # Else they would wait for 415 s in one read, whatever became of who should answer.
    reading = [*plain, "--worker-ttl", "20", "--serializer", "rq.serializers.JSONSerializer"]
    reading.append("--worker-class")
    return [plain, plain, [*reading, "rq.Worker"], [*reading, "rq.SimpleWorker"]]


def _strike(stage: Stage, names: list[str], rounds: int, seconds: float) -> list[str]:
    from django.conf import settings

    begun = time.monotonic()
    stage.wait_until(lambda: stage.active() > 0, 20)
    for _ in range(rounds):
        for name in names:
            if not seconds or time.monotonic() - begun < seconds:
                _fail_over(stage, name)
    house = stage.house
    assert isinstance(house, Watched)
    settings.RQ_URL, settings.CACHE_URL = (f"{house.primary().url}/{db}" for db in (0, 1))
    return []


def run(home: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Play, and return what came of it."""
    settings = houses.USUAL if options.usual else {**houses.BRISK, "PUSH_TIMEOUT": 0.5}
    names = options.only or list(FAILOVERS)
    with Watched(home) as house:
        play.enter(house, settings=settings, worker=DEDUP, seed=options.seed)
        stage = _make(house, options.seed, settings)
        result = play.perform(
            stage, lambda stage: _strike(stage, names, options.rounds, options.seconds)
        )
        from tests.faults import judge

        result["violations"] += judge.stuck(play.QUIET)
    return result


def text_of(result: dict[str, Any], *, seed: str) -> str:
    """Return what docs/hosts.md says about a run."""
    failovers = sum(n for kind, n in result["kinds"].items() if kind.endswith(FIRST))
    return "\n".join(
        [
            f"Seed `{seed}`, {result['seconds']:.0f} s, {report.machine()}.",
            "",
            f"**{result['jobs']:,} jobs, {result['calls']:,} committed calls, "
            f"{result['attempts']:,} attempts, {failovers} fail-overs: "
            f"{len(result['violations'])} violations.** "
            f"All had ended {result['quiet']:.1f} s after the last call.",
            "",
            "| fault | fail-overs | first job (s): p50, max | all jobs | p50, p99, max (s) |",
            "|---|---|---|---|---|",
            *(_line(name, result) for name in FAILOVERS if name + FIRST in result["kinds"]),
        ]
    )


def _line(name: str, result: dict[str, Any]) -> str:
    first, everything = (report.spread(result["recovery"].get(name + e, [])) for e in (FIRST, ALL))
    cells = [
        name,
        str(result["kinds"][name + FIRST]),
        f"{first[1]}, {first[3]}",
        everything[0],
        ", ".join(everything[1:]),
    ]
    return "| " + " | ".join(cells) + " |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.sentinels", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="of all kinds of fail-over")
    parser.add_argument("--seconds", type=float, default=0, help="begin none after this")
    parser.add_argument("--only", action="append", choices=list(FAILOVERS))
    parser.add_argument("--usual", action="store_true", help="the default settings of time")
    parser.add_argument("--seed", default=new_seed())
    parser.add_argument("--write", type=Path, help="the page that gets the figures")
    parser.add_argument("--keep", action="store_true", help="keep the folder of a bad run")
    return parser.parse_args()


def end_well() -> None:
    """Let SIGTERM end this process as an error does: with its servers."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def main() -> int:
    end_well()
    options = _options()
    print(f"seed {options.seed}", flush=True)
    home = Path(tempfile.mkdtemp(prefix="dedupjobs-faults-"))
    try:
        result = run(home, options)
    finally:
        if not options.keep:
            shutil.rmtree(home, ignore_errors=True)
    text = text_of(result, seed=options.seed)
    print(text)
    complaints = [*result["violations"], *result["errors"]]
    print("\n".join(f"FAILED: {complaint}" for complaint in complaints))
    if options.write and not complaints:
        report.insert(options.write, "sentinel", text)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
