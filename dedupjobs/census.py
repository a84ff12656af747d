"""
What the lock servers say of themselves, and whether they can be written to: asked by checks, the
doctor, the dashboard, alerts and metrics, never by a run. One question to each, LOCK_TIMEOUT long
at the most. A question changes nothing, so that pages may ask: it sets a key only if there is one,
and nobody makes it. A server that refuses writes refuses that one, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django_redis import get_redis_connection
from redis import Redis
from redis.exceptions import MovedError

from dedupjobs import clock, conf, votes, wire
from dedupjobs.wire import UNREACHABLE

ODD_CLOCK = 1.0  # seconds between two servers' clocks that deserve a word


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """
    One lock server. ``trouble``: why it can not be asked. ``refusal``: what it answers to a write,
    if not yes. ``facts``: its INFO. ``run_id``: of its process. ``upstream``: of a replica, whom it
    follows. ``took``: seconds of one command. ``ahead``: seconds by which its clock is before this
    machine's.
    """

    alias: str
    trouble: str = ""
    refusal: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    run_id: str = ""
    upstream: str = ""
    is_replica: bool = False
    is_cluster: bool = False
    took: float = 0.0
    ahead: float = 0.0

    @property
    def complaint(self) -> str:
        """Why no lock is to be had there, or an empty text."""
        if self.trouble:
            return f"does not answer: {self.trouble}".rstrip(".")
        return f"refuses to write: {self.refusal}".rstrip(".") if self.refusal else ""

    @property
    def memory(self) -> wire.Memory:
        """What it uses, and may use; of one that could be asked."""
        return wire.memory_in(self.facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong among lock servers. ``number``: of the check. ``is_fatal``: no lock is safe."""

    number: str
    words: str
    cure: str
    is_fatal: bool


def take() -> list[Member]:
    """Ask each lock server; never raises because one can not be reached."""
    return [_ask(alias) for alias in conf.get().lock_caches]


def can_lock(members: Sequence[Member]) -> bool:
    """Whether locks can be had: a majority answers, and can be written to."""
    return taking(members) >= votes.majority(len(members))


def taking(members: Sequence[Member]) -> int:
    """Return how many of them take locks."""
    return sum(not member.complaint for member in members)


def _ask(alias: str) -> Member:
    try:
        with _asking(alias) as client:
            client.connection_pool.release(client.connection_pool.get_connection())  # connects
            begun = clock.monotonic()
            now = wire.time_of(client)
            took = clock.monotonic() - begun
            ours = clock.utcnow().timestamp() - took / 2
            said, refusal = _facts(client, _probe(alias))
    except (*UNREACHABLE, ImproperlyConfigured) as error:
        return Member(alias=alias, trouble=f"{type(error).__name__}: {error}")
    replica = said.get("role") == "slave"
    return Member(
        alias=alias,
        refusal=refusal,
        facts=said,
        run_id=str(said.get("run_id", "")),
        is_replica=replica,
        upstream=f"{said.get('master_host')}:{said.get('master_port')}" if replica else "",
        is_cluster=bool(said.get("cluster_enabled")),
        took=took,
        ahead=now - ours,
    )


def _facts(client: Redis, key: str) -> tuple[dict[str, Any], str]:
    """Return what a server says of itself, and why it does not write, in one round trip."""
    pipe = client.pipeline(transaction=False)
    pipe.info()
    pipe.set(key, "", xx=True)
    said, wrote = pipe.execute(raise_on_error=False)
    if isinstance(said, Exception):
        raise said
    # Of a cluster, another node may have that key.
    refused = isinstance(wrote, Exception) and not isinstance(wrote, MovedError)
    return dict(said), f"{type(wrote).__name__}: {wrote}" if refused else ""


def _probe(alias: str) -> str:
    cache: Any = caches[alias]
    return str(cache.client.make_key(f"{conf.get().PREFIX}:asked"))


@contextmanager
def _asking(alias: str) -> Iterator[Redis]:
    """Give a client for one question: those who look at all servers do so rarely."""
    source: Any = get_redis_connection(alias)
    asking = wire.Client.to(source, timeout=conf.get().LOCK_TIMEOUT)
    try:
        with asking.deadline(conf.get().LOCK_TIMEOUT):
            yield asking.redis
    finally:
        asking.redis.connection_pool.disconnect(inuse_connections=False)


# ---- what is wrong with them. Pure: members in, sentences out


def problems(members: Sequence[Member]) -> Iterator[Problem]:
    """Yield what is wrong: the same server twice, replicas, clusters, too few, clocks."""
    well = [member for member in members if not member.trouble]
    yield from _same(well)
    for member in well:
        if member.is_replica:
            yield Problem(
                number="E041",
                words=f"CACHES[{member.alias!r}] is a replica of {member.upstream}, which can "
                "not write: no lock is ever taken there.",
                cure="Name the primary, or let Sentinel find it. After a fail-over that nobody "
                "followed, point the alias at the new one.",
                is_fatal=True,
            )
        if member.is_cluster and len(members) > 1:
            yield Problem(
                number="E042",
                words=f"CACHES[{member.alias!r}] is a node of a Redis Cluster, which can not be "
                "one of several lock servers: the locks of a batch are in different slots.",
                cure="Use independent servers for a quorum, or the cluster as the only one.",
                is_fatal=True,
            )
    yield from _missing(members)
    yield from _clocks(well)


def at_one_address() -> list[Problem]:
    """Return what is wrong where aliases name the same address; asks no server."""
    by_address: dict[str, list[str]] = defaultdict(list)
    for alias in conf.get().lock_caches:
        source: Any = get_redis_connection(alias)
        known = source.connection_pool.connection_kwargs
        where = known.get("path") or f"{known.get('host', alias)}:{known.get('port', '')}"
        by_address[where].append(alias)
    # Databases of one server are lost together.
    return [same(names, f"at {where}") for where, names in by_address.items() if len(names) > 1]


def _same(members: Sequence[Member]) -> Iterator[Problem]:
    by_process: dict[str, list[str]] = defaultdict(list)
    for member in members:
        by_process[member.run_id or member.alias].append(member.alias)
    for run_id, aliases in by_process.items():
        if len(aliases) > 1:
            yield same(aliases, f"they have the run_id {run_id}")


def same(aliases: Sequence[str], why: str) -> Problem:
    """Return what is wrong where several aliases lead to one server."""
    names = " and ".join(repr(alias) for alias in aliases)
    return Problem(
        number="E040",
        words=f'DEDUPJOBS["LOCK_CACHE"]: {names} are one server ({why}), which would have '
        f"{len(aliases)} votes: its loss alone could cost the majority.",
        cure="Give each alias a server of its own, on a machine of its own.",
        is_fatal=True,
    )


def _missing(members: Sequence[Member]) -> Iterator[Problem]:
    away = [member for member in members if member.complaint and not _is_told(member, members)]
    if not away:
        return
    number, taken, needed = len(members), taking(members), votes.majority(len(members))
    names = "; ".join(f"{member.alias} {member.complaint}" for member in away)
    fatal = not can_lock(members)
    what = "no lock can be had" if fatal else f"{taken - needed} more may fail"
    yield Problem(
        number="W020",
        words=f"{taken} of {number} lock server(s) take locks, {needed} must: {what} ({names}).",
        cure=NO_LOCKS_CURE if fatal else ENOUGH_CURE,
        is_fatal=fatal,
    )


def _is_told(member: Member, members: Sequence[Member]) -> bool:
    """Whether others say it: E041, E042, or of an only server whoever finds it away."""
    if len(members) == 1 and member.trouble:
        return True
    return member.is_replica or (member.is_cluster and len(members) > 1)


NO_LOCKS_CURE = (
    "Start what is away, and let what refuses write (memory, disk, replicas). Meanwhile jobs do "
    "what their on_redis_error says; the rows decide."
)
ENOUGH_CURE = (
    "Start it again, or let it write (memory, disk, replicas). Jobs run on meanwhile. It need not "
    "stay away if it has lost its keys: the rows decide."
)


def _clocks(members: Sequence[Member]) -> Iterator[Problem]:
    if len(members) < 2:  # noqa: PLR2004 - to differ
        return
    ordered = sorted(members, key=lambda member: member.ahead)
    slow, fast = ordered[0], ordered[-1]
    apart = fast.ahead - slow.ahead
    if apart >= ODD_CLOCK:
        yield Problem(
            number="W021",
            words=f"The clock of lock server {fast.alias!r} is {apart:.1f} s ahead of that of "
            f"{slow.alias!r}.",
            cure="Let NTP set them, slewing and not stepping. That they differ is harmless, since "
            "a TTL is counted by its own server; a clock that is set forward by as much ends its "
            "server's locks that much too early, and one set back keeps dead ones.",
            is_fatal=False,
        )
