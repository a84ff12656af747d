"""
All that can be measured from outside, read when it is asked for: counters from Redis, gauges from
the tables, Redis and RQ.

Every query is bounded and goes by an index, so that a reading costs the same whatever the history.
What can not be read is left out, and ``database_up`` or ``redis_up`` says so: a 0 that nobody
counted would be a lie.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import DatabaseError, InterfaceError
from django.db.models import Count, Min

from dedupjobs import census, coordinator, counters, criteria, dispatch, lifecycle, load, traffic
from dedupjobs.alerts import book
from dedupjobs.clock import DbNow
from dedupjobs.counters import OTHER, Counts
from dedupjobs.exceptions import UnknownQueue
from dedupjobs.models import WAITING, Cause, DuplicateCount
from dedupjobs.thresholds import KINDS
from dedupjobs.wire import UNREACHABLE, Memory

PREFIX = "dedupjobs_"
COUNTED = 5_000  # waiting rows of a queue, and stale attempts, beyond which nobody counts
MOST_QUEUES = 50
MOST_CAUSES = 5_000  # rows of DuplicateCount

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """
    A metric with all its samples, by label values. ``kind``: "counter", "gauge", "histogram".
    ``name`` has no prefix; a counter's ends with "_total".
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    samples: dict[Labels, Any] = field(default_factory=dict)


DUPLICATES = Family(
    "duplicate_detected_total",
    "counter",
    "Calls and messages that were turned away, as the coordinator has brought them to the tables.",
    ("job", "cause"),
)
GAUGES = {
    name: Family(name, "gauge", words, labels)
    for name, words, labels in (
        (
            "stale_processing_records",
            f"Attempts at work whose lease has expired ({COUNTED:,} at the most).",
            (),
        ),
        (
            "backlog",
            f"Rows that are due and wait for a worker ({COUNTED:,} at the most).",
            ("queue",),
        ),
        (
            "delayed",
            "Rows that wait for their time: a retry, a debounce, a later start.",
            ("queue",),
        ),
        ("backlog_oldest_age_seconds", "For how long the oldest due row has been due.", ("queue",)),
        (
            "outbox_age_seconds",
            "For how long the oldest due row has been without a message.",
            (),
        ),
        (
            "active_locks",
            f"Rows that an attempt at work holds, by their leases ({COUNTED:,} at the most).",
            (),
        ),
        ("active_lock_oldest_age_seconds", "For how long the oldest of them is at work.", ()),
        (
            "coordinator_heartbeat_age_seconds",
            "Since a coordinator's last round; absent after a day, or where Redis was lost.",
            (),
        ),
        ("alerts", "Alerts that are open, by kind.", ("kind",)),
        (
            "events_due",
            f"Events that are to be delivered ({traffic.COUNTED:,} of a state at the most).",
            ("target",),
        ),
        (
            "events_oldest_age_seconds",
            "Since the oldest event that is to be delivered was published.",
            ("target",),
        ),
        ("events_dead", "Events that were given up and wait for a person.", ("target",)),
        ("inbox_retrying", "Messages that failed and are tried again.", ("consumer",)),
        ("inbox_held", "Messages that wait for a person.", ("consumer",)),
        (
            "pressure_score",
            "How hard the system is pressed, from 0 to 1: the adaptive backoff's score; absent "
            "where nobody measures it.",
            (),
        ),
        ("messages", "Messages in RQ's list, however many; rows may have more.", ("queue",)),
        ("workers", "Workers that listen to a queue, by RQ's books.", ("queue",)),
        (
            "worker_heartbeat_age_seconds",
            "Since the last sign of life of the liveliest worker of a queue.",
            ("queue",),
        ),
        ("redis_memory_used_bytes", "Memory that a Redis server uses.", ("server",)),
        ("redis_memory_limit_bytes", "Its maxmemory; 0: none.", ("server",)),
        ("counters_since_timestamp_seconds", "When the counters in Redis began at 0.", ()),
        ("database_up", "Whether the tables could be read (1 or 0).", ()),
        ("redis_up", "Whether the counters could be read (1 or 0).", ()),
        (
            "redis_server_up",
            "Whether a Redis server answers, and one of the locks can be written to (1 or 0).",
            ("server",),
        ),
    )
}


def names() -> list[str]:
    """Return the names of all metrics that a reading may have, without prefix."""
    return sorted([DUPLICATES.name, *GAUGES, *counters.METRICS])


def empty() -> list[Family]:
    """Return all families without samples."""
    counted = [_family(metric.name, {}) for metric in counters.METRICS.values()]
    return [DUPLICATES, *counted, *GAUGES.values()]


def collect() -> list[Family]:
    """Read everything; never raises for a database or a Redis that is away."""
    found = _Found()
    _read_tables(found)
    _read_counters(found)
    _read_lock_servers(found)
    _read_queues(found)
    return found.families()


@dataclass(slots=True)
class _Found:
    gauges: dict[str, dict[Labels, float]] = field(default_factory=dict)
    duplicates: dict[Labels, int] | None = None
    counts: Counts | None = None
    now: datetime | None = None

    def gauge(self, name: str, value: float, *labels: str) -> None:
        self.gauges.setdefault(name, {})[labels] = value

    def server(self, name: str, memory: Memory | None, *, up: bool) -> None:
        self.gauge("redis_server_up", up, name)
        if memory is not None:
            self.gauge("redis_memory_used_bytes", memory.used, name)
            self.gauge("redis_memory_limit_bytes", memory.limit, name)

    def age(self, at: datetime | None) -> float:
        """Return the seconds since a moment of the database; 0 where there is none."""
        if at is None or self.now is None:
            return 0.0
        return max((self.now - at).total_seconds(), 0.0)

    def families(self) -> list[Family]:
        made = []
        if self.duplicates is not None:
            made.append(_with(DUPLICATES, self.duplicates))
        if self.counts is not None:
            both: dict[str, Any] = {**self.counts.counters, **self.counts.histograms}
            made += [_family(name, samples) for name, samples in both.items()]
        made += [_with(f, self.gauges[n]) for n, f in GAUGES.items() if n in self.gauges]
        return made


def _with(family: Family, samples: dict[Labels, Any]) -> Family:
    return Family(family.name, family.kind, family.help, family.labels, family.bounds, samples)


def _family(name: str, samples: dict[Labels, Any]) -> Family:
    """Return a counted metric; one without labels that was never counted stands at 0."""
    metric = counters.METRICS[name]
    kind = "histogram" if metric.bounds else "counter"
    if not metric.labels and not samples:
        samples = {(): 0}
    return Family(name, kind, metric.help, metric.labels, metric.bounds, samples)


# ---- the tables


def _read_tables(found: _Found) -> None:
    try:
        found.now = lifecycle.database_now()
        found.gauge("stale_processing_records", criteria.stuck()[:COUNTED].count())
        for queue in _queues():
            _read_backlog(found, queue)
        _read_outbox(found)
        found.duplicates = _duplicates()
        _read_leases(found)
        _read_alerts(found)
        _read_events(found)
        found.gauge("database_up", 1)
    except (DatabaseError, InterfaceError):
        found.gauges.clear()  # all or nothing
        found.gauge("database_up", 0)


def _queues() -> list[str]:
    return dispatch.queue_names()[:MOST_QUEUES]


def _read_backlog(found: _Found, queue: str) -> None:
    seen = criteria.backlog(queue, most=COUNTED)
    found.gauge("backlog", seen.due, queue)
    found.gauge("delayed", seen.waiting - seen.due, queue)
    found.gauge("backlog_oldest_age_seconds", found.age(seen.oldest), queue)


def _read_outbox(found: _Found) -> None:
    unsent = lifecycle.jobs().filter(
        status__in=WAITING, dispatched_at=None, run_after__lte=DbNow(steady=True)
    )
    firsts = [
        unsent.filter(status=status).order_by("run_after").values_list("run_after", flat=True)[:1]
        for status in WAITING
    ]
    found.gauge(
        "outbox_age_seconds", max((found.age(*first) for first in firsts if first), default=0.0)
    )


def _read_leases(found: _Found) -> None:
    alive = lifecycle.attempts().filter(outcome=None, lease_until__gte=DbNow(steady=True))
    seen = alive[:COUNTED].aggregate(number=Count("pk"), oldest=Min("claimed_at"))
    found.gauge("active_locks", seen["number"])
    found.gauge("active_lock_oldest_age_seconds", found.age(seen["oldest"]))


def _read_alerts(found: _Found) -> None:
    opened = Counter(alert.kind for alert in book.standing())
    for kind in KINDS:
        found.gauge("alerts", opened[kind], kind)
    last = load.last()
    if last is not None and load.age(last) <= load.OLD:
        found.gauge("pressure_score", last.score)


def _read_events(found: _Found) -> None:
    for going in traffic.outgoing():
        target = counters.bounded_label("target", going.target)
        found.gauge("events_due", going.due, target)
        found.gauge("events_oldest_age_seconds", found.age(going.oldest), target)
        found.gauge("events_dead", going.dead, target)
    for coming in traffic.incoming():
        consumer = counters.bounded_label("consumer", coming.consumer)
        found.gauge("inbox_retrying", coming.retrying, consumer)
        found.gauge("inbox_held", coming.held, consumer)


def _duplicates() -> dict[Labels, int]:
    table = DuplicateCount._base_manager.using(lifecycle.alias()).order_by("pk")
    counted: Counter[Labels] = Counter()
    for name, cause, count in table.values_list("name", "cause", "count")[:MOST_CAUSES]:
        known = cause if cause in Cause.values else OTHER
        counted[counters.bounded_label("job", name), known] += count
    return dict(counted)


# ---- Redis


def _read_counters(found: _Found) -> None:
    try:
        found.counts = counters.read(coordinator.ROLE)
        found.gauge("redis_up", 1)
    except UNREACHABLE:
        found.gauge("redis_up", 0)
        return
    if found.counts.since is not None:
        found.gauge("counters_since_timestamp_seconds", found.counts.since)
    for age in found.counts.signs.values():
        found.gauge("coordinator_heartbeat_age_seconds", age)


def _read_lock_servers(found: _Found) -> None:
    for at, member in enumerate(census.take()):
        memory = None if member.trouble else member.memory
        found.server(f"locks {member.alias}" if at else "locks", memory, up=not member.complaint)


def _read_queues(found: _Found) -> None:
    for queue in dispatch.one_queue_per_server()[:MOST_QUEUES]:
        try:
            found.server(f"queue {queue}", dispatch.memory(queue), up=True)
        except (*UNREACHABLE, UnknownQueue):
            found.server(f"queue {queue}", None, up=False)
            found.gauge("redis_up", 0)
            return
    for queue in _queues():
        try:
            workers = dispatch.workers(queue)
        except (*UNREACHABLE, UnknownQueue):
            return
        found.gauge("messages", workers.messages, queue)
        found.gauge("workers", workers.count, queue)
        if workers.newest is not None:
            found.gauge("worker_heartbeat_age_seconds", workers.newest, queue)
