"""
What goes wrong, one function each: it strikes, heals, and notes what should go on since when.

The strikes at probes are not here: ``points`` says which exist, ``play`` arms them all.
"""

from __future__ import annotations

import pickle
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import pymysql
import redis
from django.conf import settings
from django.db import connection
from redis.exceptions import RedisError
from rq import Queue
from rq.job import Job as RqJob
from rq.serializers import DefaultSerializer, JSONSerializer

from dedupjobs import dispatch, hardening, lifecycle
from dedupjobs.dispatch import Delivery
from dedupjobs.exceptions import PayloadTooLarge
from dedupjobs.models import ACTIVE, JobAttempt, ProcessedJob
from tests.faults import house, ledger
from tests.faults.stage import Stage

SHORT = 1.2  # seconds that an outage lasts
WORKERS = ("rq.Worker", "rq.SimpleWorker", "dedupjobs.worker.DedupWorker")
DATABASES = ("sqlite", "postgresql", "mariadb")
SERVERS = ("postgresql", "mariadb")


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    apply: Callable[[Stage], None]
    databases: tuple[str, ...]
    locks: tuple[str, ...] = house.LOCKS

    def strikes(self, here: house.House) -> bool:
        """Whether there is what it strikes."""
        return here.database in self.databases and here.locks in self.locks


KINDS: list[Kind] = []


def kind(
    name: str, databases: tuple[str, ...] = DATABASES, locks: tuple[str, ...] = house.LOCKS
) -> Callable[[Any], Any]:
    """Register a fault."""

    def register(apply: Callable[[Stage], None]) -> Callable[[Stage], None]:
        KINDS.append(Kind(name, apply, databases, locks))
        return apply

    return register


# ---- Redis forgets


def _wiped(stage: Stage, name: str, wipe: Callable[[redis.Redis], Any]) -> None:
    stage.burst(12)
    with stage.house.valkey.client() as client:
        jobs = stage.waiting()
        wipe(client)
    stage.struck(name, jobs=jobs)
    stage.pause(SHORT)


@kind("FLUSHALL")
def flush(stage: Stage) -> None:
    _wiped(stage, "FLUSHALL", lambda client: client.flushall())


@kind("Redis killed, back without its data")
def restart_redis(stage: Stage) -> None:
    def kill_and_restart(_: redis.Redis) -> None:
        stage.house.valkey.kill()
        stage.house.valkey.restart()

    _wiped(stage, "Redis killed, back without its data", kill_and_restart)


# ---- Redis is there and can not


def _sick(stage: Stage, name: str, sicken: Callable[[], Any], heal: Callable[[], Any]) -> None:
    sicken()
    stage.burst(3)
    stage.pause(SHORT)
    heal()
    stage.struck(name, jobs=stage.waiting(), first=True)
    stage.pause(0.5)


def _configured(stage: Stage, name: str, sick: dict[str, Any], well: dict[str, Any]) -> None:
    with stage.house.valkey.client() as client:
        _sick(
            stage,
            name,
            lambda: [client.config_set(*item) for item in sick.items()],
            lambda: [client.config_set(*item) for item in well.items()],
        )


@kind("maxmemory reached")
def full_memory(stage: Stage) -> None:
    _configured(stage, "maxmemory reached", {"maxmemory": 1}, {"maxmemory": 0})


@kind("Redis's disk full")
def full_disk(stage: Stage) -> None:
    """A snapshot fails, and the server itself answers MISCONF to writes."""
    in_the_way = stage.house.valkey.home / "dump.rdb"
    in_the_way.mkdir(exist_ok=True)
    with stage.house.valkey.client() as client:

        def sicken() -> None:
            client.config_set("save", "3600 1000000")
            with suppress(RedisError):
                client.bgsave()

        def heal() -> None:
            client.config_set("save", "")
            # A snapshot that still goes on would find the way free.
            stage.wait_until(lambda: not client.info("persistence")["rdb_bgsave_in_progress"], 20)
            in_the_way.rmdir()  # or the server could not start again

        _sick(stage, "Redis's disk full", sicken, heal)


@kind("read-only replica")
def replica(stage: Stage) -> None:
    with stage.house.valkey.client() as client:
        _sick(
            stage,
            "read-only replica",
            lambda: client.replicaof("127.0.0.1", 1),
            lambda: client.replicaof("no", "one"),
        )


@kind("CLIENT KILL")
def kill_clients(stage: Stage) -> None:
    with stage.house.valkey.client() as client:
        for _ in range(3):
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            stage.struck("CLIENT KILL", jobs=stage.waiting(), first=True)
            stage.pause(0.2)


@kind("SCRIPT FLUSH")
def flush_scripts(stage: Stage) -> None:
    with stage.house.valkey.client() as client:
        for _ in range(3):
            client.script_flush()
            stage.struck("SCRIPT FLUSH", jobs=stage.waiting(), first=True)
            stage.pause(0.2)


if house.LIBFAKETIME:

    @kind("Redis's clock jumps")
    def move_redis(stage: Stage) -> None:
        for seconds in (60, -3600, 0):
            stage.house.valkey.move(seconds)
            stage.burst(2)
            stage.struck("Redis's clock jumps", jobs=stage.waiting(), first=True)
            stage.pause(1.3)

    # SQLite has no clock but that of the process which asks, so there it would be the database's.
    @kind("one worker's clock jumps", SERVERS)
    def move_worker(stage: Stage) -> None:
        """A worker whose wall clock is wrong, first ahead and then behind, beside right ones."""
        offset = stage.home / f"clock{len(stage.actors)}"
        offset.write_text("+600\n")
        actor = stage.add("worker", *_command(stage), wanted=False, CLOCK=str(offset))
        stage.pause(2.5)
        for seconds in ("-600", "+0"):
            offset.write_text(seconds + "\n")
            stage.struck("one worker's clock jumps", jobs=stage.burst(3), first=True)
            stage.pause(1.2)
        stage.end(actor)


def _command(stage: Stage) -> list[str]:
    return ["rqworker", "default", "--worker-class", stage.worker]


# ---- the way to Redis


def _switched(stage: Stage, name: str, switch: Callable[[Any], Any]) -> None:
    proxy = stage.house.redis_proxy
    _sick(stage, name, lambda: switch(proxy), proxy.pass_through)


@kind("Redis refuses connections")
def refuse(stage: Stage) -> None:
    def refuse_all(proxy: Any) -> None:
        proxy.refuse()
        proxy.cut()

    _switched(stage, "Redis refuses connections", refuse_all)


@kind("connections to Redis reset")
def reset(stage: Stage) -> None:
    _switched(stage, "connections to Redis reset", lambda proxy: proxy.reset())


@kind("Redis answers nothing")
def swallow(stage: Stage) -> None:
    _switched(stage, "Redis answers nothing", lambda proxy: proxy.black_hole())
    stage.house.redis_proxy.cut()  # replies that were swallowed never come


@kind("Redis's replies in slices")
def slices(stage: Stage) -> None:
    _switched(stage, "Redis's replies in slices", lambda proxy: proxy.slice(3))


@kind("Redis's replies delayed")
def delay(stage: Stage) -> None:
    _switched(stage, "Redis's replies delayed", lambda proxy: proxy.delay(0.05))


REQUESTS = (b"RPUSH", b"EVALSHA", b"SET", b"BLMOVE", b"EXEC", b"ZADD", b"HSET")


@kind("cut after the request, before Redis's reply")
def cut_reply(stage: Stage) -> None:
    proxy = stage.house.redis_proxy
    for marker in stage.rng.sample(REQUESTS, 3):
        proxy.swallow_reply_to(marker)
        stage.burst(1)
        stage.wait_until(proxy.swallowed.is_set, 2)
        name = "cut after the request, before Redis's reply"
        stage.struck(name, jobs=stage.waiting(), first=True)
    proxy.pass_through()


# ---- the lock servers, where there are three


def _lock_servers(name: str, number: int) -> Callable[[Any], Any]:
    """Register a fault of ``number`` of the lock servers: it yields once they are struck."""

    def register(strike: Callable[[Stage, list[int]], Any]) -> Any:
        def apply(stage: Stage) -> None:
            struck = stage.rng.sample(range(len(stage.house.lock_servers)), number)
            with strike(stage, struck):
                stage.burst(3)
                stage.burst(2, "patient")
                stage.pause(SHORT)
            stage.struck(name, jobs=stage.waiting(), first=True)
            stage.pause(0.5)

        return kind(name, locks=("quorum",))(apply)

    return register


@contextmanager
def _killed(stage: Stage, struck: list[int]) -> Iterator[None]:
    for at in struck:
        stage.house.lock_servers[at].kill()
    yield
    for at in struck:
        stage.house.lock_servers[at].restart()  # empty


@contextmanager
def _stopped(stage: Stage, struck: list[int]) -> Iterator[None]:
    pids = [stage.house.lock_servers[at].process.pid for at in struck]
    for pid in pids:
        stage.signal(pid, signal.SIGSTOP)
    yield
    for pid in pids:
        stage.signal(pid, signal.SIGCONT)


@contextmanager
def _flushed(stage: Stage, struck: list[int]) -> Iterator[None]:
    for at in struck:
        with stage.house.lock_servers[at].client() as client:
            client.flushall()
    yield


@contextmanager
def _following(stage: Stage, struck: list[int]) -> Iterator[None]:
    clients = [stage.house.lock_servers[at].client() for at in struck]
    for client in clients:
        client.replicaof("127.0.0.1", 1)
    yield
    for client in clients:
        client.replicaof("no", "one")
        client.close()


def _on_the_way(switch: Callable[[Any], Any]) -> Any:
    @contextmanager
    def strike(stage: Stage, struck: list[int]) -> Iterator[None]:
        for at in struck:
            switch(stage.house.lock_proxies[at])
        yield
        for at in struck:
            stage.house.lock_proxies[at].pass_through()
            stage.house.lock_proxies[at].cut()

    return strike


for _number in (1, 2):
    _which = "a lock server" if _number == 1 else "two lock servers"
    _lock_servers(f"{_which} killed, back without data", _number)(_killed)
    _lock_servers(f"{_which} stopped", _number)(_stopped)
    _lock_servers(f"{_which} read-only", _number)(_following)
    _lock_servers(f"{_which} answers nothing", _number)(_on_the_way(lambda p: p.black_hole()))
    _lock_servers(f"{_which} delayed", _number)(_on_the_way(lambda p: p.delay(0.1)))
_lock_servers("all lock servers wiped", 3)(_flushed)
_lock_servers("all lock servers killed, back without data", 3)(_killed)


# ---- the database


def _database_outage(stage: Stage, name: str, harm: Callable[[], Any]) -> None:
    harm()
    stage.struck(name, jobs=[*stage.waiting(), *stage.running(), *stage.burst(3)], first=True)
    stage.pause(SHORT)


@kind("database sessions terminated", SERVERS)
def terminate(stage: Stage) -> None:
    _database_outage(stage, "database sessions terminated", _terminate_all)


def _terminate_all() -> None:
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            return
        cursor.execute(
            "SELECT id FROM information_schema.processlist "
            "WHERE db = DATABASE() AND id <> CONNECTION_ID()"
        )
        for (session,) in cursor.fetchall():
            with suppress(Exception):
                cursor.execute(f"KILL {session}")


@kind("database restarted at once", SERVERS)
def restart_database(stage: Stage) -> None:
    """PostgreSQL's immediate shutdown, MariaDB killed; both recover by their log."""
    connection.close()

    def harm() -> None:
        server = stage.house.server
        if stage.house.database == "postgresql":
            server.process.send_signal(signal.SIGQUIT)
            server.process.wait(20)
            server.process = None
        else:
            server.kill()
        time.sleep(0.5)
        server.restart()

    _database_outage(stage, "database restarted at once", harm)


@kind("connections to the database cut", SERVERS)
def cut_database(stage: Stage) -> None:
    _database_outage(stage, "connections to the database cut", stage.house.db_proxy.reset)


def _at_commits(stage: Stage, name: str, prepare: Callable[[bytes], Any]) -> None:
    proxy = stage.house.db_proxy
    assert proxy is not None
    for _ in range(4):
        prepare(b"COMMIT")
        stage.wait_until(proxy.swallowed.is_set, 3)
        if proxy.swallowed.is_set():
            stage.struck(name, jobs=stage.running(), first=True)
    proxy.pass_through()


@kind("COMMIT done, its reply lost", SERVERS)
def commit_reply(stage: Stage) -> None:
    _at_commits(stage, "COMMIT done, its reply lost", stage.house.db_proxy.swallow_reply_to)


@kind("cut before COMMIT arrives", SERVERS)
def commit_cut(stage: Stage) -> None:
    _at_commits(stage, "cut before COMMIT arrives", stage.house.db_proxy.cut_before)


@kind("host gone with a transaction open on a job's row", SERVERS)
def vanished_host(stage: Stage) -> None:
    """A worker's connection that holds a row and is never heard of again: no FIN, no RST."""
    pk = stage.burst(1, "completing")[0]
    stage.wait_until(lambda: ProcessedJob.objects.filter(pk=pk).exists(), 5)
    held = stage.house.server.connect("postgres") if connection.vendor == "postgresql" else None
    held = held or pymysql.connect(
        host="127.0.0.1", port=stage.house.server.port, user="root", database="stage"
    )
    cursor = held.cursor()
    if connection.vendor == "postgresql":
        cursor.execute(hardening._POSTGRESQL, [f"{hardening.idle_limit()}s"])
    else:
        cursor.execute(hardening._MARIADB, [hardening.idle_limit()])
    cursor.execute("BEGIN")
    cursor.execute("SELECT 1 FROM dedupjobs_processedjob WHERE id = %s FOR UPDATE", [pk])
    cursor.execute("UPDATE dedupjobs_processedjob SET duplicates = 0 WHERE id = %s", [pk])
    stage.vanished.append(held)  # its socket stays open; the server must end it
    name = "host gone with a transaction open on a job's row"
    stage.struck(name, jobs=[pk] if pk in stage.waiting() else [])


@kind("SQLite locked for 6 s", ("sqlite",))
def lock_sqlite(stage: Stage) -> None:
    stage.set_pace(0.5)
    held = sqlite3.connect(settings.DATABASES["default"]["NAME"], isolation_level=None, timeout=20)
    held.execute("BEGIN IMMEDIATE")
    stage.pause(6)
    held.rollback()
    held.close()
    stage.struck("SQLite locked for 6 s", jobs=stage.waiting(), first=True)


# ---- messages


def _queue_key() -> str:
    return "rq:queue:default"


@kind("messages doubled")
def double(stage: Stage) -> None:
    pks = stage.burst(5)
    rows = list(ProcessedJob.objects.filter(pk__in=pks))
    rows += list(ProcessedJob.objects.exclude(status__in=ACTIVE).order_by("-pk")[:5])
    for _ in range(2):
        dispatch.push(
            [
                Delivery(
                    queue=row.queue,
                    dispatch_id=lifecycle.new_dispatch_id(),
                    name=row.name,
                    rows=((row.pk, row.generation),),
                )
                for row in rows
            ]
        )
    stage.struck("messages doubled", jobs=pks)
    stage.pause(0.3)


@kind("messages lost")
def lose(stage: Stage) -> None:
    """Take messages out of the queue, as a worker on two queues does that dies after its pop."""
    pks = stage.burst(12)
    with stage.house.valkey.client() as client:
        popped = client.rpop(_queue_key(), 6) or []
    ids = [found.decode() for found in popped]
    lost = ProcessedJob.objects.filter(pk__in=pks, dispatch_id__in=ids)
    stage.struck("messages lost", jobs=list(lost.values_list("pk", flat=True)))


@kind("messages forged")
def forge(stage: Stage) -> None:
    rows: list[Any] = [
        [[1, 99]],
        [[2**62, 1]],
        [["1; DROP TABLE x", 1]],
        [[-1, -1]],
        [None],
        "rows",
        [[1, 1, 1]],
        [[True, 1]],
        {"a": 1},
    ]
    for value in rows:
        _push(stage, dispatch.ENTRY, [value])
    if stage.dedup:
        _push(stage, "os.system", [f"touch {stage.home}/owned"])
        _push_raw(stage, pickle.dumps((dispatch.ENTRY, None, ([[1, 1]],), {})))
    with stage.house.valkey.client() as client:
        client.rpush(_queue_key(), "no-such-job", b"\xff\xfe")
    stage.struck("messages forged", jobs=stage.burst(2), first=True)
    stage.pause(0.3)


@kind("messages and calls too large")
def oversize(stage: Stage) -> None:
    _push(stage, dispatch.ENTRY, [["x" * 5_000_000]])
    _push(stage, dispatch.ENTRY, [[[1, 99]] * 50_000])
    from tests.faults.app import jobs

    try:
        jobs.plain.enqueue(tag="x" * 70_000)
    except PayloadTooLarge:
        ledger.write("refused", kind="plain", tag="too large", number=0)
    else:
        stage.errors.append("a call with 70,000 bytes was taken")
    stage.struck("messages and calls too large", jobs=stage.burst(2), first=True)
    stage.pause(0.3)


def _push(stage: Stage, function: str, args: list[Any]) -> None:
    serializer = JSONSerializer if stage.dedup else DefaultSerializer
    with stage.house.valkey.client() as client:
        queue = Queue("default", connection=client, serializer=serializer)
        queue.enqueue(function, args=args, job_timeout=20, result_ttl=10, failure_ttl=10)


def _push_raw(stage: Stage, data: bytes) -> None:
    """Push an RQ job whose description of the call are these bytes."""
    with stage.house.valkey.client() as client:
        queue = Queue("default", connection=client, serializer=JSONSerializer)
        forged = RqJob.create(dispatch.ENTRY, connection=client, serializer=JSONSerializer)
        forged.save()
        client.hset(forged.key, "data", data)
        client.rpush(queue.key, forged.id)


# ---- deploys, hosts


@kind("old and new code side by side")
def two_versions(stage: Stage) -> None:
    """A worker with the code of before, beside new ones; then it ends, as the deploy goes on."""
    old = stage.add("worker", *_command(stage), wanted=False, FAULTS_CODE="old")
    stage.pause(2.0)
    pks = [*stage.burst(3, "newcomer"), *stage.burst(3, "grown"), *stage.burst(3)]
    stage.struck("old and new code side by side", jobs=pks)
    stage.pause(1.5)
    stage.end(old)
    stage.wait_until(lambda: old.pid == 0, 10)
    stage.unhold()


@kind("a job forks while messages are doubled")
def fork_and_double(stage: Stage) -> None:
    """Neither a child's end nor another message may give its parent's lock up (I8)."""
    pks = stage.burst(2, "forking")
    double(stage)
    stage.struck("a job forks while messages are doubled", jobs=pks)


@kind("worker killed anywhere")
def kill_worker(stage: Stage) -> None:
    """Not at a probe: in the middle of a job where there is one, and its horse with it."""
    at_work = _at_work(stage)
    parents = {actor.pid for actor in stage.alive("worker")}
    for pid in at_work[:1]:
        parent = _parent(pid)
        _kill(stage, "worker killed anywhere", *([parent] if parent in parents else []), pid)
    if not at_work and parents:
        parent = stage.rng.choice(sorted(parents))
        _kill(stage, "worker killed anywhere", parent, *_children(parent))
    stage.pause(0.1)


@kind("horse killed anywhere")
def kill_horse(stage: Stage) -> None:
    """In the middle of a job, which SimpleWorker runs by itself."""
    for pid in _at_work(stage)[:1]:
        name = "worker" if stage.worker == "rq.SimpleWorker" else "horse"
        _kill(stage, f"{name} killed anywhere", pid)
    stage.pause(0.1)


def _at_work(stage: Stage) -> list[int]:
    """Return the processes that have an attempt open, in a random order."""
    stage.burst(2, "slow")
    pids: list[int] = []

    def found() -> bool:
        listed = JobAttempt.objects.filter(outcome=None).values_list("pid", flat=True)
        pids[:] = [pid for pid in listed if pid and psutil.pid_exists(pid)]
        return bool(pids)

    stage.wait_until(found, 20)
    stage.rng.shuffle(pids)
    return pids


def _parent(pid: int) -> int:
    with suppress(psutil.Error):
        return psutil.Process(pid).ppid()
    return 0


def _kill(stage: Stage, name: str, *pids: int) -> None:
    """SIGKILL, noting the jobs whose attempts these processes have open."""
    found = JobAttempt.objects.filter(pid__in=pids, outcome=None)
    jobs = list(found.values_list("job_id", flat=True))
    stage.struck(name, jobs=jobs)
    for pid in pids:
        ledger.write("strike", action="kill", role=name, point="", job=None, main=pid)
        stage.signal(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children()]
    return []
