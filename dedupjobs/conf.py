"""
The DEDUPJOBS setting, typed. Seconds are floats (a timedelta does too), sizes are bytes.

    DEDUPJOBS = {"RESEND_AFTER": 10, "DEFAULTS": {"lease": 5}}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from dedupjobs import routes, thresholds
from dedupjobs.pressure import PAIRS, Limits
from dedupjobs.routes import Inbox, Outbox
from dedupjobs.thresholds import Thresholds

WHEN_TO_LISTEN = ("lazy", "always", "never")
SMALLEST_QUORUM = 3
SHORTEST, LONGEST = 0.001, 30 * 86_400.0  # seconds that a setting may say


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a project may set; the defaults suit most."""

    AUTODISCOVER: tuple[str, ...] = ("jobs",)  # modules of each app that hold jobs
    LOCK_CACHE: str | tuple[str, ...] = "default"  # in CACHES: one alias, or a quorum: 3, 5, …
    STATUS_CACHE: str | None = "default"  # the same, for what is known of keys; None: no cache
    L1_TTL: float = 2.0  # that a process may believe what it has read
    L1_SIZE: int = 10_000  # keys that a process remembers
    L2_TTL: float = 3600.0  # that a success stays in Redis, if its window is that long
    LISTEN: str = "lazy"  # when a process hears of changes: from its first read, "always", "never"
    PREFIX: str = "dedupjobs"  # of every key of ours in Redis
    TICK: float = 1.0  # between two rounds of the coordinator
    RECLAIM_EVERY: float = 5.0  # between two looks for dead attempts
    RESEND_AFTER: float = 30.0  # before a message may count as lost
    LEADER_TTL: float = 10.0  # of the coordinator's leader lease
    TIMEOUT_GRACE: float = 5.0  # from a job's time-out to the kill of its process
    SHUTDOWN_GRACE: float = 25.0  # from SIGTERM to the interruption of the running job
    HORSE_JOBS: int = 1_000  # deliveries that a DedupWorker's horse runs; 1: one each, as RQ does
    HORSE_MEMORY: int | None = 256 * 1024**2  # bytes that it may grow by; 0 or None: no limit
    HEARTBEAT_FILE: str | None = None  # that workers touch while they are well, for a probe
    BATCH: int = 100  # rows that a sweep reads and a message names, messages of a pipeline
    THREADS: int = 1  # jobs of a batch that one process runs at a time
    FOREIGN_PICKLE: bool = False  # may a DedupWorker run others' RQ jobs, pickled ones too
    PRUNE_EVERY: float = 3600.0  # between two looks for rows out of retention
    FOLD_EVERY: float = 10.0  # between two moves of the duplicates' counts into the tables
    SUMMARISE_EVERY: float = 20.0  # between two looks at what ended, for the dashboard's charts
    PUSH_TIMEOUT: float = 0.25  # that a web request may lose to Redis each second
    LOCK_TIMEOUT: float = 0.5  # for one lock command
    MAX_PAYLOAD: int = 64 * 1024  # bytes of a call's arguments; larger ones are refused
    MAX_RESULT: int = 64 * 1024  # bytes of a result; a larger one is noted, not kept
    MAX_STEPS: int = 1_000  # different steps of one job, until it runs anew
    MAX_STEP_RESULT: int = 64 * 1024  # bytes of a step's result; a larger one is an error
    MAX_TRACEBACK: int = 16 * 1024  # characters of a traceback that are kept
    REDACT: tuple[str, ...] = (  # parts of argument names whose values nobody sees
        "password",
        "passwd",
        "secret",
        "token",
        "api_key",
        "apikey",
        "credential",
    )
    METRICS: bool = True  # count what happens, in Redis
    METRICS_TOKEN: str | None = None  # with which a scraper may read /metrics without a user
    LOG_KEYS: bool = False  # do log lines name keys, and not only their hashes?
    DEFAULTS: Mapping[str, Any] = field(default_factory=dict)  # option defaults for all jobs
    ALERTS: Mapping[str, Any] = field(default_factory=dict)  # thresholds.Thresholds
    PRESSURE: Mapping[str, Any] = field(default_factory=dict)  # pressure.Limits
    OUTBOX: Mapping[str, Any] = field(default_factory=dict)  # who gets events: routes.Target
    INBOX: Mapping[str, Any] = field(default_factory=dict)  # who takes them in: routes.Consumer

    @property
    def lock_caches(self) -> tuple[str, ...]:
        """The aliases of all servers that have the locks."""
        return (self.LOCK_CACHE,) if isinstance(self.LOCK_CACHE, str) else self.LOCK_CACHE

    @property
    def lock_home(self) -> str:
        """The alias of the server that has the counters and the leader's lease, too: the first."""
        return self.lock_caches[0]


def get() -> Settings:
    """Return the project's settings, or raise ImproperlyConfigured naming the first mistake."""
    return _read()


def alerts() -> Thresholds:
    """Return when something is an alert, and who is told."""
    return _read_thresholds()


def limits() -> Limits:
    """Return the thresholds of the adaptive backoff."""
    return _read_limits()


def outbox() -> Outbox:
    """Return who gets which events."""
    return _read_outbox()


def inbox() -> Inbox:
    """Return who takes events in."""
    return _read_inbox()


def option_defaults() -> dict[str, Any]:
    """Return DEDUPJOBS["DEFAULTS"] as given; jobs are decorated before checks can run."""
    given = getattr(settings, "DEDUPJOBS", {})
    defaults = given.get("DEFAULTS", {}) if isinstance(given, Mapping) else {}
    return dict(defaults) if isinstance(defaults, Mapping) else {}


def problems() -> Iterator[str]:
    """Yield a sentence per mistake in DEDUPJOBS, each with its cure."""
    given = getattr(settings, "DEDUPJOBS", {})
    if not isinstance(given, Mapping):
        yield f"DEDUPJOBS is {given!r}; it must be a dict."
        return
    known = {f.name: f for f in fields(Settings)}
    for name, value in given.items():
        if name not in known:
            yield f"DEDUPJOBS[{name!r}] is not a setting. {thresholds.hint(name, known)}"
        elif name in _NESTED:
            yield from _NESTED[name](value, f"DEDUPJOBS[{name!r}]")
        elif wrong := _wrong(name, value, str(known[name].type)):
            yield f"DEDUPJOBS[{name!r}] = {value!r}: {wrong}"


_NESTED: dict[str, Callable[[Any, str], Iterator[str]]] = {
    "ALERTS": partial(thresholds.problems, Thresholds),
    "PRESSURE": partial(thresholds.problems, Limits),
    "OUTBOX": routes.outbox_problems,
    "INBOX": routes.inbox_problems,
}


LONGER = {  # the first must be the longer one
    ("LEADER_TTL", "TICK"): "the leader would lose its lease between two rounds",
    ("L2_TTL", "L1_TTL"): "a process would believe what Redis has forgotten",
}


def contradictions() -> Iterator[tuple[str, str]]:
    """Yield a sentence and its cure per pair of right settings that do not go together."""
    if any(problems()):
        return
    for (longer, shorter), why in LONGER.items():
        one, other = getattr(get(), longer), getattr(get(), shorter)
        if one <= other:
            text = f"DEDUPJOBS[{longer!r}] = {one:g} s is not longer than {shorter} = {other:g} s"
            yield f"{text}: {why}.", f"Lengthen {longer} or shorten {shorter}."
    yield from _alert_contradictions()
    if outbox().targets and inbox().consumers and inbox().retain <= outbox().retain:
        text = f"INBOX['RETAIN'] = {inbox().retain:g} s is not longer than OUTBOX['RETAIN']"
        yield (
            f"{text} = {outbox().retain:g} s: an event that is sent again would be applied again.",
            "Lengthen the one or shorten the other.",
        )


def _alert_contradictions() -> Iterator[tuple[str, str]]:
    told, cure = alerts(), "Raise the one or lower the other."
    if told.NO_COORDINATOR <= told.EVERY:
        text = f"ALERTS['NO_COORDINATOR'] = {told.NO_COORDINATOR:g} s is not longer than EVERY"
        yield f"{text} = {told.EVERY:g} s: a coordinator would be missing between two looks.", cure
    if told.REDIS_SLOW >= get().LOCK_TIMEOUT:
        text = f"ALERTS['REDIS_SLOW'] = {told.REDIS_SLOW:g} s is not shorter than LOCK_TIMEOUT"
        yield f"{text} = {get().LOCK_TIMEOUT:g} s: a slow Redis would count as down first.", cure
    if told.REPLICA is not None and told.REPLICA not in settings.DATABASES:
        text = f"ALERTS['REPLICA'] = {told.REPLICA!r} is no alias of DATABASES"
        yield f"{text}: the lag of no replica is measured.", "Correct it, or set None."
    for low, high in PAIRS:
        first, second = getattr(limits(), low), getattr(limits(), high)
        if first >= second:
            text = f"PRESSURE[{low!r}] = {first:g} is not smaller than {high} = {second:g}"
            yield f"{text}: the score would jump from 0 to 1.", f"Lower {low} or raise {high}."


_TUPLES = {
    "AUTODISCOVER": 'module names, for example ("jobs",)',
    "REDACT": 'parts of argument names, for example ("password", "token")',
}


def _is_seconds(value: Any) -> bool:
    number = _seconds(value)
    return isinstance(number, float) and SHORTEST <= number <= LONGEST


_NUMBERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "float": (_is_seconds, "give seconds from 0.001 to 2,592,000, or a timedelta."),
    "int": (
        lambda value: type(value) is int and 1 <= value <= 2**31,
        "give a whole number of at least 1.",
    ),
    "int | None": (
        lambda value: value is None or (type(value) is int and 0 <= value < 2**63),
        "give a whole number of bytes; 0 or None for no limit.",
    ),
}


def _wrong(name: str, value: Any, kind: str) -> str:
    """Return why ``value`` does not fit, or an empty string."""
    if kind in _NUMBERS:
        is_right, wanted = _NUMBERS[kind]
        return "" if is_right(value) else wanted
    if kind == "bool":
        return "" if isinstance(value, bool) else "give True or False."
    if kind.startswith("str"):
        return _wrong_text(name, value, may_be_none=kind.endswith("None"))
    if kind.startswith("tuple"):
        fits = isinstance(value, (tuple, list)) and all(isinstance(v, str) for v in value)
        return "" if fits else f"give a tuple of {_TUPLES[name]}."
    return "" if isinstance(value, Mapping) else "give a dict of @job options."


def _wrong_text(name: str, value: Any, *, may_be_none: bool) -> str:
    if name == "LOCK_CACHE" and isinstance(value, (tuple, list)):
        return _wrong_quorum(value)
    if name == "LISTEN":
        return "" if value in WHEN_TO_LISTEN else f"give one of {', '.join(WHEN_TO_LISTEN)}."
    if value is None and may_be_none:
        return ""
    return "" if isinstance(value, str) and value else "give a non-empty string."


def _wrong_quorum(aliases: Any) -> str:
    """Return why these can not be the servers of a quorum, or an empty string."""
    if not all(isinstance(alias, str) and alias for alias in aliases):
        return 'give aliases of CACHES, for example ("locks1", "locks2", "locks3").'
    if twice := sorted({alias for alias in aliases if aliases.count(alias) > 1}):
        return f"{twice[0]!r} stands there twice, so one server would have two votes; name it once."
    if len(aliases) < SMALLEST_QUORUM:
        return "a quorum has 3 servers or more; name one alias as a text for a single server."
    if len(aliases) % 2 == 0:
        most = len(aliases) // 2 - 1
        return (
            f"{len(aliases)} servers bear the loss of {most} as {len(aliases) - 1} do, and more of "
            "them must answer; name an odd number."
        )
    return ""


def _seconds(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value.total_seconds()
    return float(value) if type(value) in (int, float) else value


@lru_cache(maxsize=1)
def _read() -> Settings:
    if first := next(problems(), None):
        raise ImproperlyConfigured(first)
    given = dict(getattr(settings, "DEDUPJOBS", {}))
    for f in fields(Settings):
        if f.name in given and str(f.type) == "float":
            given[f.name] = _seconds(given[f.name])
    if isinstance(given.get("LOCK_CACHE"), list):
        given["LOCK_CACHE"] = tuple(given["LOCK_CACHE"])
    return Settings(**given)


@lru_cache(maxsize=1)
def _read_thresholds() -> Thresholds:
    found: Thresholds = thresholds.made(Thresholds, get().ALERTS)
    return found


@lru_cache(maxsize=1)
def _read_limits() -> Limits:
    found: Limits = thresholds.made(Limits, get().PRESSURE)
    return found


@lru_cache(maxsize=1)
def _read_outbox() -> Outbox:
    return routes.outbox(get().OUTBOX)


@lru_cache(maxsize=1)
def _read_inbox() -> Inbox:
    return routes.inbox(get().INBOX)


def _forget(*, setting: str, **_: Any) -> None:
    if setting == "DEDUPJOBS":
        for read in (_read, _read_thresholds, _read_limits, _read_outbox, _read_inbox):
            read.cache_clear()


setting_changed.connect(_forget)
