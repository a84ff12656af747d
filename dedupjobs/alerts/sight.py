"""
Looking: what the rules judge, by bounded queries that go by an index, and few trips to Redis.

What happened is told by summaries, which are in the database, and by counters, whose differences
``Past`` keeps; a coordinator that has just begun to look knows no past yet.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from django.db import DatabaseError, InterfaceError, connections
from django.db.models import Min

from dedupjobs import (
    census,
    clock,
    conf,
    controls,
    counters,
    criteria,
    dispatch,
    lifecycle,
    load,
    pressure,
    summaries,
    traffic,
)
from dedupjobs.alerts import book
from dedupjobs.alerts.rules import Job, Queue, Server, Sight, Target, Untold
from dedupjobs.exceptions import UnknownQueue
from dedupjobs.models import DuplicateCount, Status, Watch
from dedupjobs.pressure import Load
from dedupjobs.summaries import MINUTE, Point, Totals
from dedupjobs.wire import UNREACHABLE

MOST_QUEUES = 50
MOST_CAUSES = 5_000  # rows of DuplicateCount
COUNTED = 5_000  # waiting rows of a queue
NAMED = 1_000  # rows of which the jobs are named, the newest ones
GROWING = 60.0  # seconds over which the growth of the backlog is measured
LOCKS = "locks and counters"
ALL = ""
LOCK_LOST = "lock_expired_before_completion_total"
AWAY = (*UNREACHABLE, UnknownQueue)


@dataclass(slots=True)
class Past:
    """What was counted at earlier looks, by our own clock; enough to tell differences."""

    looks: deque[tuple[float, Mapping[str, int]]] = field(default_factory=deque)

    def note(self, now: float, counts: Mapping[str, int], *, kept: float) -> None:
        """Remember a look; of those older than ``kept`` seconds, the newest stays."""
        self.looks.append((now, dict(counts)))
        while len(self.looks) > 1 and now - self.looks[1][0] >= kept:
            self.looks.popleft()

    def gained(self, name: str) -> int:
        """Return by how much a count has grown; one that began anew has grown from 0."""
        numbers = [counts.get(name, 0) for _, counts in self.looks]
        return sum(b - a if b >= a else b for a, b in pairwise(numbers))

    def ago(self, now: float, seconds: float) -> Mapping[str, int] | None:
        """Return the newest look that is at least that old; None: there is none yet."""
        old = [counts for at, counts in self.looks if now - at >= seconds]
        return old[-1] if old else None

    def growth(self, now: float) -> float:
        """Return the share that all has gained per minute; 0 until it was watched for a while."""
        at, first = self.looks[0]
        if now - at < GROWING / 2:
            return 0.0
        return max(pressure.growth(first[ALL], self.looks[-1][1][ALL], now - at), 0.0)


@dataclass(slots=True)
class Looker:
    """Looks again and again, and remembers what it needs of earlier looks."""

    due: Past = field(default_factory=Past)
    waiting: Past = field(default_factory=Past)
    locks_lost: Past = field(default_factory=Past)
    duplicates: Past = field(default_factory=Past)
    evicted: Past = field(default_factory=Past)
    totals: dict[str, Totals] = field(default_factory=dict)
    totals_at: float = -math.inf

    def look(self) -> tuple[Sight, Load]:
        """Look at everything; raises what the database raises, never for a Redis that is away."""
        now, at, told = clock.monotonic(), lifecycle.database_now(), conf.alerts()
        points = summaries.points(MINUTE, at - timedelta(seconds=told.STALLED_FOR + MINUTE))
        servers = self._servers(now)
        asks = not any(s.trouble for s in servers if not s.has_locks)
        queues = self._queues(now, at, points, asks=asks)
        sight = Sight(
            stuck=_named(criteria.stuck(longer=told.STUCK_FOR), "job__name"),
            silent=_named(criteria.silent(), "job__name"),
            dead=_named(_standing(Status.DEAD).order_by("-finished_at"), "name"),
            held=_named(_standing(Status.HELD), "name"),
            queues=queues,
            servers=servers,
            jobs=tuple(self._jobs(now, at)),
            locks_lost=self._locks_lost(now),
            clocks={"the database": database_ahead(), **{_of(s): s.ahead for s in servers}},
            lags={**dict(_database_lag()), **{_of(s): s.lag for s in servers}},
            untold=tuple(_untold(at)),
            targets=tuple(_targets(at)),
            inbox_held={seen.consumer: seen.held for seen in traffic.incoming()},
        )
        measured = Load(
            delay=_delay(points, queues, at),
            growth=self.waiting.growth(now),
            memory=max((s.used / s.limit for s in servers if s.limit), default=0.0),
        )
        return sight, measured

    def _servers(self, now: float) -> tuple[Server, ...]:
        seen = [*_lock_servers(), *map(_queue_server, dispatch.one_queue_per_server())]
        totals = {server.name: server.evicted for server in seen if not server.trouble}
        if totals:
            self.evicted.note(now, totals, kept=conf.alerts().WITHIN)
        return tuple(replace(s, evicted=self.evicted.gained(s.name)) for s in seen)

    def _queues(
        self, now: float, at: datetime, points: Sequence[Point], *, asks: bool
    ) -> tuple[Queue, ...]:
        """Look at the queues; ``asks``: their Redis too."""
        length = conf.alerts().STALLED_FOR
        before, ended = self.due.ago(now, length), _ended(points, at, length)
        seen, waiting = [], 0
        for name in dispatch.queue_names()[:MOST_QUEUES]:
            found, workers = criteria.backlog(name, most=COUNTED), _workers(name) if asks else None
            # A list's length has no bound; rows are counted to one.
            messages = workers.messages if workers and found.due == COUNTED else 0
            seen.append(
                Queue(
                    name=name,
                    due=max(found.due, messages),
                    oldest=(at - found.oldest).total_seconds() if found.oldest else 0.0,
                    before=None if before is None else before.get(name, 0),
                    ended=ended[name],
                    workers=workers.count if workers else None,
                    last_sign=workers.newest if workers else None,
                )
            )
            waiting += max(found.waiting, messages)
        self.due.note(now, {queue.name: queue.due for queue in seen}, kept=length)
        self.waiting.note(now, {ALL: waiting}, kept=GROWING)
        return tuple(seen)

    def _jobs(self, now: float, at: datetime) -> Iterator[Job]:
        told = conf.alerts()
        if now - self.totals_at >= conf.get().SUMMARISE_EVERY / 2:  # they move no oftener
            # Whole minutes: what happened within WITHIN, and up to a minute more.
            since = summaries.floor(at - timedelta(seconds=told.WITHIN), MINUTE)
            self.totals, self.totals_at = summaries.by_job(since), now
        table = DuplicateCount._base_manager.using(lifecycle.alias()).order_by("pk")
        rows = table.values_list("name", "cause", "count")[:MOST_CAUSES]
        counts = {f"{name}|{cause}": number for name, cause, number in rows}
        self.duplicates.note(now, counts, kept=told.WITHIN)
        away: dict[str, dict[str, int]] = {}
        for entry in counts:
            name, _, cause = entry.rpartition("|")
            if number := self.duplicates.gained(entry):
                away.setdefault(name, {})[cause] = number
        for name in sorted({*self.totals, *away}):
            yield _job(name, self.totals.get(name, Totals()), away.get(name, {}))

    def _locks_lost(self, now: float) -> dict[str, int] | None:
        try:
            counts = counters.read().counters[LOCK_LOST]
        except AWAY:
            return None
        by_job = {job: number for (job,), number in counts.items()}
        self.locks_lost.note(now, by_job, kept=conf.alerts().WITHIN)
        return {job: gained for job in by_job if (gained := self.locks_lost.gained(job))}


# ---- events


def _targets(now: datetime) -> Iterator[Target]:
    for seen in traffic.outgoing():
        age = seen.age(now)
        known = conf.outbox().targets.get(seen.target)
        waits = known is None or known.on_dead == "wait"
        yield Target(name=seen.target, due=seen.due, age=age, dead=seen.dead, waits=waits)


# ---- rows


def _named(rows: Any, column: str) -> dict[str, int]:
    """Count rows by job, of the first NAMED."""
    return dict(Counter(rows.values_list(column, flat=True)[:NAMED]))


def _standing(status: Status) -> Any:
    return lifecycle.jobs().filter(status=status)


def _job(name: str, totals: Totals, duplicates: Mapping[str, int]) -> Job:
    often = sum(totals.runs.values()) >= conf.alerts().RUNS
    return Job(
        name=name,
        failed=totals.numbers["failed"],
        timed_out=totals.numbers["timed_out"],
        lost=totals.numbers["lost"],
        p99=summaries.percentile(totals.runs, 0.99) if often else None,
        lease=controls.current().options_of(name).lease,
        duplicates=duplicates,
    )


def _ended(points: Iterable[Point], at: datetime, seconds: float) -> Counter[str]:
    """Return how many runs have ended since then, by queue, in whole minutes."""
    since = summaries.floor(at - timedelta(seconds=seconds), MINUTE)
    ended: Counter[str] = Counter()
    for point in points:
        if point.begin > since or seconds < MINUTE:
            ended[point.queue] += sum(point.totals.numbers.values())
    return ended


def _delay(points: Iterable[Point], queues: Iterable[Queue], at: datetime) -> float:
    """
    Return the average queue delay of what ended in this minute and the last one, in seconds.

    Where nothing ended: what waits has waited for half as long as the oldest, on average.
    """
    since = summaries.floor(at, MINUTE) - timedelta(seconds=MINUTE)
    recent = summaries.merged(p.totals for p in points if not p.queue and p.begin >= since)
    mean = summaries.mean(recent.delays)
    return max((q.oldest / 2 for q in queues), default=0.0) if mean is None else mean


def _untold(at: datetime) -> Iterator[Untold]:
    for channel in book.channels():
        waiting = book.notices(channel)
        oldest = waiting.filter(tries__gt=0).aggregate(Min("made_at"))["made_at__min"]
        if oldest is not None:
            first = waiting.order_by("pk").first()
            yield Untold(
                channel=channel,
                waiting=waiting.count(),
                age=(at - oldest).total_seconds(),
                error=first.error if first else "",
            )


# ---- servers and clocks


def _lock_servers() -> Iterator[Server]:
    for at, member in enumerate(census.take()):
        seen = _server(f"locks {member.alias}" if at else LOCKS, member.facts)
        yield replace(
            seen,
            has_locks=True,
            trouble=member.trouble[:300],
            complaint=member.complaint[:300],
            took=member.took,
            ahead=surely(member.ahead, member.took / 2),
        )


def _queue_server(queue: str) -> Server:
    name = f"queue {queue}"
    begun = clock.monotonic()
    try:
        theirs = dispatch.server_time(queue)
        took = clock.monotonic() - begun
        ours = clock.utcnow().timestamp() - took / 2
        facts = dispatch.server_facts(queue)
    except AWAY as error:
        return Server(name=name, trouble=f"{type(error).__name__}: {error}"[:300])
    return replace(_server(name, facts), took=took, ahead=surely(theirs - ours, took / 2))


def _server(name: str, facts: Mapping[str, Any]) -> Server:
    return Server(
        name=name,
        evicted=_whole(facts.get("evicted_keys")),
        used=_whole(facts.get("used_memory")),
        limit=_whole(facts.get("maxmemory")),
        lag=max((float(_whole(r.get("lag"))) for r in _replicas(facts)), default=0.0),
    )


def _replicas(facts: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what a Redis says of its replicas: ``slave0``, ``slave1``, … of INFO."""
    for number in range(min(_whole(facts.get("connected_slaves")), 20)):
        found = facts.get(f"slave{number}")
        if isinstance(found, Mapping):
            yield found


def _of(server: Server) -> str:
    return f"the Redis of {server.name}"


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def database_ahead() -> float:
    """Return by how many seconds the database's clock is ahead of ours."""
    before = clock.utcnow()
    theirs = lifecycle.database_now()
    took = (clock.utcnow() - before).total_seconds()
    return surely((theirs - before).total_seconds() - took / 2, abs(took) / 2)


def surely(ahead: float, doubt: float) -> float:
    """Return the part of a difference that a slow answer can not explain."""
    return ahead - doubt if ahead > doubt else ahead + doubt if ahead < -doubt else 0.0


def _workers(queue: str) -> dispatch.Workers | None:
    try:
        return dispatch.workers(queue)
    except AWAY:
        return None


def _database_lag() -> Iterator[tuple[str, float]]:
    """
    Yield how far the replica is behind: by the time of the last look that it has.

    Our own rows tell it on every database, also where nothing else is written.
    """
    replica = conf.alerts().REPLICA
    if replica is None or replica not in connections.settings:
        return
    here = load.last()
    try:
        there = Watch._base_manager.using(replica).filter(pk=load.THE_ONE).first()
    except (DatabaseError, InterfaceError):
        return  # it is away, which whoever reads it notices
    if here is not None:
        seen = there.at if there else here.at - timedelta(seconds=MINUTE * 60)
        yield f"database {replica}", max((here.at - seen).total_seconds(), 0.0)
