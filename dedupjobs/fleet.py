"""
Who is at work, and how the Redis servers are: for people to look at, never to judge by.

Two round trips to each server, bounded in time and in what they read.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from redis.exceptions import RedisError

from dedupjobs import census, clock, conf, dispatch, locks, wire
from dedupjobs.census import Problem
from dedupjobs.exceptions import UnknownQueue
from dedupjobs.wire import UNREACHABLE

MOST_WORKERS = 200  # of one server
_FIELDS = ("hostname", "pid", "queues", "state", "current_job", "last_heartbeat", "birth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """An RQ worker, as it says itself. ``beat_age``: seconds, by two machines' clocks."""

    name: str
    host: str
    pid: str
    queues: tuple[str, ...]
    busy: bool
    beat_age: float | None
    born: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A Redis that queues live on. ``limit``: bytes, 0 for none; ``trouble``: it can't be asked."""

    address: str
    queues: tuple[str, ...]
    used: int = 0
    limit: int = 0
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The coordinator that leads. ``beat_age``: seconds since it said so."""

    owner: str
    beat_age: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """
    All of it. ``leader_trouble``: why the leader can not be known. ``lock_troubles``: what is
    wrong among the lock servers.
    """

    workers: tuple[Worker, ...]
    servers: tuple[Server, ...]
    leader: Leader | None
    leader_trouble: str
    lock_troubles: tuple[Problem, ...] = ()


def look() -> Fleet:
    """Ask all servers; never raises because one can not be reached."""
    queues: dict[str, list[str]] = defaultdict(list)
    for queue in dispatch.queue_names():
        queues[dispatch.server_of(queue)].append(queue)
    workers: dict[str, Worker] = {}
    servers = []
    for theirs in queues.values():
        server, found = _ask(tuple(theirs))
        servers.append(server)
        workers.update(found)
    members = census.take()
    leader, trouble = _leader(members[0].complaint)
    return Fleet(
        workers=tuple(workers[name] for name in sorted(workers)),
        servers=tuple(servers),
        leader=leader,
        leader_trouble=trouble,
        lock_troubles=tuple(census.problems(members)),
    )


def _ask(queues: tuple[str, ...]) -> tuple[Server, dict[str, Worker]]:
    address = queues[0]
    try:
        client = dispatch.client_of(queues[0])
        address = wire.address_of(client.redis)
        with client.deadline(conf.get().LOCK_TIMEOUT):
            pipe = client.redis.pipeline(transaction=False)
            pipe.info("memory")
            pipe.srandmember("rq:workers", MOST_WORKERS)
            memory, keys = pipe.execute()
            workers = _workers(client, keys)
    except (RedisError, OSError, UnknownQueue) as error:
        trouble = f"{type(error).__name__}: {error}"
        return Server(address=address, queues=queues, trouble=trouble), {}
    used, limit = memory.get("used_memory", 0), memory.get("maxmemory", 0)
    return Server(address=address, queues=queues, used=used, limit=limit), workers


def _workers(client: wire.Client, keys: Any) -> dict[str, Worker]:
    pipe = client.redis.pipeline(transaction=False)
    for key in keys:
        pipe.hmget(key, *_FIELDS)
    found = {}
    for key, values in zip(keys, pipe.execute(raise_on_error=False), strict=True):
        if isinstance(values, list) and any(values):  # RQ forgets the key of a dead one late
            name = _text(key).removeprefix("rq:worker:")
            found[name] = _worker(name, dict(zip(_FIELDS, map(_text, values), strict=True)))
    return found


def _worker(name: str, said: dict[str, str]) -> Worker:
    beat = _moment(said["last_heartbeat"])
    return Worker(
        name=name,
        host=said["hostname"],
        pid=said["pid"],
        queues=tuple(filter(None, said["queues"].split(","))),
        busy=bool(said["current_job"]) or said["state"] == "busy",
        beat_age=None if beat is None else max((clock.utcnow() - beat).total_seconds(), 0.0),
        born=_moment(said["birth"]),
    )


def _leader(complaint: str) -> tuple[Leader | None, str]:
    """Ask who leads; ``complaint``: of the server on which that stands."""
    try:
        seen = locks.leader()
    except UNREACHABLE as error:
        return None, f"{type(error).__name__}: {error}"
    if seen is None:
        return None, complaint  # nobody can take the lease there
    age = conf.get().LEADER_TTL - (seen.ttl or 0.0)
    return Leader(owner=seen.owner, beat_age=max(age, 0.0)), ""


def _moment(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
