"""
What happened, counted for all processes in one hash of Redis: horses are forked and die, so none
of them can keep counts of its own.

    <PREFIX>:{counters}           hash   "<metric>|<label>|…" → count; the free label stands last
                                         "<histogram>|<bound or sum>|<label>|…"; a sum in µs
                                         "since" → Unix seconds of the first count
    <PREFIX>:{counters}:<role>    text   a sign of life of a role; how old it is shows in its TTL

A process gathers what it counts and sends it at most once in EVERY seconds, at its exit, or, in a
worker, with the command that gives the job's lock up (``wire.Cargo``). A Redis that was lost
starts from 0 again. Labels are job names of the registry, queues of RQ_QUEUES or words of a fixed
list; anything else is "other", when it is counted and when it is read.
"""

from __future__ import annotations

import atexit
import math
import os
import re
import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, islice
from typing import Any

from django.conf import settings
from django_redis import get_redis_connection
from redis.exceptions import TimeoutError as RedisTimeout

from dedupjobs import clock, conf, registry, wire
from dedupjobs.models import AttemptOutcome
from dedupjobs.wire import UNREACHABLE, Cargo, Load

EVERY = 1.0  # seconds between two trips of a process that counts
TTL = 30 * 86_400
SIGN_TTL = 86_400_000  # milliseconds that a sign of life is remembered
OWED = 10_000  # different fields that one process keeps while Redis is away
READ = 50_000  # fields that a reader looks at; a forged hash may have more
MOST_JOBS = 500  # whose names are labels; those behind them in the alphabet are "other"
OTHER = "other"
SINCE = "since"

# KEYS[1]: the counters. ARGV: seconds they live, the moment; then field, number, field, number, …
# What somebody else has put there, as a field or instead of the hash, keeps nothing from counting.
ADD = """
local kind = redis.call('type', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('del', KEYS[1]) end
for i = 3, #ARGV, 2 do redis.pcall('hincrby', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('hsetnx', KEYS[1], 'since', ARGV[2])
return redis.call('expire', KEYS[1], ARGV[1])
"""

FAST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600, 3600)
SLOW = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 21_600)

RETRIES = ("error", "timeout", "asked", "snoozed", "lost", "returned", "interrupted", "operator")
CAUSES = ("lease", "death", "lost", "wiped")
FREE = ("job", "queue", "target", "consumer")  # labels that a project's names fill
WORDS: dict[str, tuple[str, ...]] = {
    "reason": (*RETRIES, "busy", "unreachable"),
    "outcome": tuple(AttemptOutcome.values),
    "cause": CAUSES,
    "level": ("process", "redis"),
    "fate": ("applied", "duplicate", "failed", "held", "behind", "unknown"),
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric that is counted here. ``bounds``: of a histogram's buckets, in seconds."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


METRICS = {
    metric.name: metric
    for metric in (
        Metric("lock_acquire_success_total", "Deliveries that got their Redis lock."),
        Metric(
            "lock_acquire_failed_total",
            "Deliveries that did not get their Redis lock: busy, or Redis unreachable.",
            ("reason",),
        ),
        Metric(
            "lock_expired_before_completion_total",
            "Attempts whose Redis lock was gone or another's before they ended; the row decides.",
            ("job",),
        ),
        Metric("job_retry_total", "Runs that another one follows, by why.", ("reason", "job")),
        Metric(
            "idempotency_conflict_total",
            "Calls that lost a race at the unique constraint of the key.",
            ("job",),
        ),
        Metric(
            "stale_processing_records_total",
            "Attempts that were found with an expired lease, and taken.",
            ("job",),
        ),
        Metric("attempts_total", "Attempts by how they ended.", ("outcome", "job")),
        Metric("jobs_dead_total", "Jobs that ended DEAD and wait for a person.", ("job",)),
        Metric("recovered_total", "Jobs taken from dead or silent workers.", ("cause",)),
        Metric(
            "requeued_stuck_total", "Messages sent again because RQ lost them.", ("cause", "queue")
        ),
        Metric("cache_hits_total", "Reads that the status cache answered.", ("level",)),
        Metric("cache_misses_total", "Reads that the status cache could not answer."),
        Metric("invalidations_sent_total", "Changes that were announced."),
        Metric("invalidations_received_total", "Changes that listeners have heard of."),
        Metric("events_delivered_total", "Events that a target has taken.", ("target",)),
        Metric("events_refused_total", "Tries at which a target took an event not.", ("target",)),
        Metric("events_dead_total", "Events that were given up and wait.", ("target",)),
        Metric(
            "inbox_messages_total",
            "Messages that a consumer got, by what became of them.",
            ("fate", "consumer"),
        ),
        Metric("job_processing_duration_seconds", "How long attempts ran.", ("job",), bounds=FAST),
        Metric("queue_delay_seconds", "From due to claimed, by queue.", ("queue",), bounds=FAST),
        Metric(
            "lock_wait_seconds",
            "From the first delivery that met a busy lock to the claim.",
            ("job",),
            bounds=FAST,
        ),
        Metric(
            "recovery_seconds",
            "From the last sign of life of an attempt or message to its recovery.",
            ("cause",),
            bounds=SLOW,
        ),
    )
}


# ---- counting


def add(metric: str, *labels: str, number: int = 1) -> None:
    """Count; ``labels`` in the order of the metric's. Never raises, and rarely asks Redis."""
    if conf.get().METRICS:
        _count({_field(metric, labels): number})


def observe(metric: str, *labels: str, seconds: float, number: int = 1) -> None:
    """Put a duration into a histogram, ``number`` times; one that a clock made negative is 0."""
    if conf.get().METRICS:
        seconds = seconds if 0 <= seconds < math.inf else 0.0
        edge = _edges(metric)[bisect_left(METRICS[metric].bounds, seconds)]
        _count(
            {
                _field(metric, (edge, *labels), 1): number,
                _field(metric, ("sum", *labels), 1): round(seconds * 1_000_000) * number,
            }
        )


@lru_cache
def _edges(metric: str) -> tuple[str, ...]:
    """Return the bounds of a histogram as its fields name them."""
    return tuple(f"{bound:g}" for bound in (*METRICS[metric].bounds, math.inf))


_fields: dict[tuple[str, tuple[str, ...]], str] = {}  # that were made; those of known names only


def _field(metric: str, values: tuple[str, ...], fixed: int = 0) -> str:
    """Return the field of the hash; the first ``fixed`` values are ours."""
    found = _fields.get((metric, values))
    if found is not None:
        return found
    names = METRICS[metric].labels
    bounded = [bounded_label(n, v) for n, v in zip(names, values[fixed:], strict=True)]
    made = "|".join((metric, *values[:fixed], *bounded))
    if tuple(bounded) == values[fixed:] and len(_fields) < OWED:
        _fields[metric, values] = made
    return made


def bounded_label(label: str, value: str) -> str:
    """Return the value if it is one that the label may have, or "other"."""
    if label == "job":
        job = registry.find(value)
        return job.name if job else OTHER
    if label == "queue":
        return value if value in getattr(settings, "RQ_QUEUES", {}) else OTHER
    if label == "target":
        return value if value in conf.outbox().targets else OTHER
    if label == "consumer":
        return value if value in conf.inbox().consumers else OTHER
    return value if value in WORDS[label] else OTHER


@dataclass(slots=True)
class _Owed:
    """What this process has counted and Redis does not know yet."""

    counts: Counter[str] = field(default_factory=Counter)
    guard: threading.Lock = field(default_factory=threading.Lock)
    gathering: int = 0
    paid: float = -math.inf

    def add(self, counts: Mapping[str, int]) -> None:
        with self.guard:
            for name, number in counts.items():
                if name in self.counts or len(self.counts) < OWED:
                    self.counts[name] += number

    def take(self) -> Counter[str]:
        with self.guard:
            taken, self.counts, self.paid = self.counts, Counter(), clock.monotonic()
        return taken


_owed = _Owed()
# Their own: counts must not cost jobs their messages.
_budget = wire.Budget()

sources: list[Callable[[], Mapping[str, int]]] = []
"""Functions that return fields which were counted elsewhere since they were last asked."""


def forget_owed() -> None:
    """Owe nothing: after a fork, and where another world begins."""
    global _owed  # noqa: PLW0603 - a forked child owes nothing of what its parent does
    _owed = _Owed()


os.register_at_fork(after_in_child=forget_owed)


def _count(counts: Mapping[str, int]) -> None:
    _owed.add(counts)
    pay_if_due()


@contextmanager
def gathering() -> Iterator[None]:
    """Make no trip for what is counted in the block: somebody carries it, or it waits."""
    owed = _owed
    with owed.guard:
        owed.gathering += 1
    try:
        yield
    finally:
        with owed.guard:
            owed.gathering -= 1


# ---- sending


@dataclass(slots=True)
class Payment:
    """Counts on their way, as ``wire.Cargo``."""

    counts: Counter[str]

    def load(self, pipe: Any) -> None:
        """Add the command to a pipeline, if there is something to count."""
        if self.counts:
            words = [part for pair in self.counts.items() for part in pair]
            pipe.eval(ADD, 1, _key(), TTL, int(clock.utcnow().timestamp()), *words)

    def left_behind(self, error: BaseException) -> None:
        """Owe it again; but what was sent and only had no answer may have been counted."""
        if not isinstance(error, RedisTimeout) or isinstance(error, wire.NotSent):
            _owed.add(self.counts)


def payment(*, due: bool = False) -> Payment:
    """
    Return what this process owes, for a command that goes to the locks' server anyway.

    ``due``: nothing, if it has paid within EVERY seconds.
    """
    return Payment(Counter()) if due and not _is_due() else _payment()


def _is_due() -> bool:
    return clock.monotonic() - _owed.paid >= EVERY


def _payment() -> Payment:
    if conf.get().METRICS:
        for source in sources:
            _owed.add(source())
    return Payment(_owed.take())


def pay_if_due() -> None:
    """Send what is owed, unless that was done within EVERY seconds; never raises."""
    if not _owed.gathering and _is_due():
        pay()


def pay(role: str = "") -> None:
    """Send what is owed, and a sign of life of ``role``; never raises."""
    paying = _payment()
    if not paying.counts and not role:
        return
    try:
        with _client().spending(_budget):
            pipe = _client().redis.pipeline(transaction=False)
            paying.load(pipe)
            if role:
                pipe.set(f"{_key()}:{role}", "", px=SIGN_TTL)
            pipe.execute()
    except UNREACHABLE as error:
        paying.left_behind(error)


def carry(others: Sequence[Cargo], *, due: bool = False) -> None:
    """
    Send what is owed, and others' cargo for the same server, in one round trip; never raises.

    ``due``: as for ``payment``.
    """
    load = Load([payment(due=due), *others])
    try:
        with _client().spending(_budget):
            pipe = _client().redis.pipeline(transaction=False)
            load.load(pipe)
            if len(pipe):
                load.arrived(pipe.execute(raise_on_error=False))
    except UNREACHABLE as error:
        load.left_behind(error)


@atexit.register
def _pay_at_exit() -> None:
    with suppress(Exception):
        pay()


# ---- reading


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram: how many were at most each bound, and +Inf last; and the sum in seconds."""

    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """
    All that was counted, by metric and by label values in the order of the metric's labels.

    ``since``: Unix seconds of the first count; None: nothing was counted yet. ``signs``: seconds
    since the last sign of life, by role.
    """

    counters: dict[str, dict[tuple[str, ...], int]]
    histograms: dict[str, dict[tuple[str, ...], Buckets]]
    since: int | None
    signs: dict[str, float]


_NUMBER = re.compile("[0-9]{1,18}")


def read(*roles: str) -> Counts:
    """Read the counters and the roles' signs of life; raises what Redis raises."""
    with _client().deadline(conf.get().LOCK_TIMEOUT):
        redis = _client().redis
        pipe = redis.pipeline(transaction=False)
        pipe.type(_key())
        for role in roles:
            pipe.pttl(f"{_key()}:{role}")
        kind, *lives = pipe.execute()
        found: dict[str, int] = {}
        if _text(kind) == "hash":
            for name, value in islice(redis.hscan_iter(_key(), count=5_000), READ):
                if _NUMBER.fullmatch(number := _text(value)):
                    found[_text(name)] = int(number)
    signs = {
        role: (SIGN_TTL - life) / 1000
        for role, life in zip(roles, lives, strict=True)
        if 0 <= life <= SIGN_TTL
    }
    return _counts_of(found, signs)


def sums() -> dict[str, dict[str, int]]:
    """
    Return how often the status cache was read, by who answered ("missed": the database), and how
    long runs waited for a lock, by bucket; raises what Redis raises.
    """
    seen = read()
    reads = {level: number for (level,), number in seen.counters["cache_hits_total"].items()}
    reads["missed"] = seen.counters["cache_misses_total"].get((), 0)
    waits: Counter[str] = Counter()
    bounds = _bounds(METRICS["lock_wait_seconds"])
    for buckets in seen.histograms["lock_wait_seconds"].values():
        below = 0
        for bound, number in zip(bounds, buckets.counts, strict=False):
            waits[bound] += number - below
            below = number
    return {"reads": reads, "waits": {bound: number for bound, number in waits.items() if number}}


def _counts_of(found: dict[str, int], signs: dict[str, float]) -> Counts:
    counters: dict[str, Counter[tuple[str, ...]]] = {n: Counter() for n in METRICS}
    parts: dict[str, dict[tuple[str, ...], Counter[str]]] = {
        n: defaultdict(Counter) for n in METRICS
    }
    for name, number in found.items():
        metric, values = _parsed(name)
        if metric is None:
            continue
        if metric.bounds:
            parts[metric.name][values[1:]][values[0]] += number
        else:
            counters[metric.name][values] += number
    histograms = {
        name: {labels: _buckets(METRICS[name], by_bound) for labels, by_bound in by_labels.items()}
        for name, by_labels in parts.items()
        if METRICS[name].bounds
    }
    plain = {n: dict(values) for n, values in counters.items() if not METRICS[n].bounds}
    return Counts(counters=plain, histograms=histograms, since=found.get(SINCE), signs=signs)


def _parsed(name: str) -> tuple[Metric | None, tuple[str, ...]]:
    """Return the metric and label values of a field, or None for what is none of ours."""
    head, _, rest = name.partition("|")
    metric = METRICS.get(head)
    if metric is None:
        return None, ()
    fixed = 1 if metric.bounds else 0
    wanted = fixed + len(metric.labels)
    values = tuple(rest.split("|", wanted - 1)) if wanted else ()
    if len(values) != wanted or (fixed and values[0] not in _bounds(metric)):
        return None, ()
    labels = zip(metric.labels, values[fixed:], strict=True)
    return metric, (*values[:fixed], *(_read_label(n, v) for n, v in labels))


def _read_label(label: str, value: str) -> str:
    bounded = bounded_label(label, value)
    return bounded if label != "job" or bounded in _named_jobs() else OTHER


def _named_jobs() -> frozenset[str]:
    return frozenset(registry.names()[:MOST_JOBS])


def _bounds(metric: Metric) -> tuple[str, ...]:
    return (*(f"{bound:g}" for bound in metric.bounds), "inf", "sum")


def _buckets(metric: Metric, by_bound: Counter[str]) -> Buckets:
    *bounds, _ = _bounds(metric)
    counts = tuple(accumulate(by_bound[bound] for bound in bounds))
    return Buckets(counts, by_bound["sum"] / 1_000_000)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


# ---- the client


def forget_clients() -> None:
    """Drop the client and what is owed, after a change of settings."""
    _fields.clear()
    wire.close(_client)
    _budget.reset()
    forget_owed()


def _key() -> str:
    return f"{conf.get().PREFIX}:{{counters}}"


@lru_cache(maxsize=1)
def _client() -> wire.Client:
    source: Any = get_redis_connection(conf.get().lock_home)
    return wire.Client.to(source, timeout=conf.get().PUSH_TIMEOUT)
