"""What is an alert: the thresholds of ``DEDUPJOBS["ALERTS"]``, and how any threshold is judged."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

KINDS = (
    "stuck",
    "stalled",
    "retries",
    "dead",
    "held",
    "near_lease",
    "locks_lost",
    "duplicates",
    "no_coordinator",
    "no_worker",
    "redis_down",
    "redis_slow",
    "redis_evicting",
    "redis_full",
    "replica_lag",
    "silent",
    "clocks",
    "untold",
    "outbox_late",
    "outbox_dead",
    "inbox_held",
)
"""All alerts that there are."""

MONTH = 30 * 86_400.0


def seconds(default: float) -> Any:
    """Return a field that holds seconds, or takes a timedelta."""
    words = "give seconds from 0.001 to 2,592,000, or a timedelta."
    return checked(default, lambda v: is_number(plain(v), 0.001, MONTH), words)


def number(default: float, *, low: float, high: float = 1e9) -> Any:
    """Return a field that holds a number between two bounds."""
    words = f"give a number from {low:g} to {high:,.0f}."
    return checked(default, lambda v: is_number(v, low, high), words)


def count(default: int) -> Any:
    """Return a field that holds how many of something are too many."""
    words = "give a whole number of at least 1."
    return checked(default, lambda v: type(v) is int and 1 <= v <= 10**9, words)


def share(default: float) -> Any:
    """Return a field that holds a share of a whole."""
    return checked(default, lambda v: is_number(v, 0.001, 1.0), "give a share from 0.001 to 1.")


def flag(default: bool) -> Any:
    """Return a field that is on or off."""
    return checked(default, lambda v: isinstance(v, bool), "give True or False.")


def checked(default: Any, fits: Any, words: str) -> Any:
    """Return a field that holds what ``fits``; ``words``: what to give instead."""
    return field(default=default, metadata={"fits": fits, "words": words})


def is_number(value: Any, low: float, high: float) -> bool:
    """Whether this is a number between two bounds."""
    return type(value) in (int, float) and math.isfinite(value) and low <= value <= high


def plain(value: Any) -> Any:
    """Return a duration as seconds, anything else as it is."""
    return value.total_seconds() if isinstance(value, timedelta) else value


def _is_kinds(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(kind in KINDS for kind in value)


def _is_alias(value: Any) -> bool:
    return value is None or (isinstance(value, str) and bool(value))


def is_address(value: Any) -> bool:
    """Whether this is an http or https address, or None."""
    if value is None:
        return True
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, AttributeError, TypeError):
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """``DEDUPJOBS["ALERTS"]``: when something is an alert, and who is told."""

    EVERY: float = seconds(3.0)  # between two looks
    RAISE_AFTER: float = seconds(10.0)  # that a trouble must last before it is raised
    CLEAR_AFTER: float = seconds(60.0)  # that it must be gone before it is cleared
    WITHIN: float = seconds(300.0)  # in which what happens is counted
    STUCK_FOR: float = seconds(30.0)  # past the end of the lease
    STALLED_FOR: float = seconds(300.0)  # without an ending, while due jobs do not get fewer
    RETRIES: int = count(100)  # failed runs of a job
    DEAD: int = count(1)
    HELD: int = count(1)
    NEAR_LEASE: float = number(0.8, low=0.01, high=100.0)  # run time p99, as a share of the lease
    RUNS: int = count(20)  # of a job, below which its p99 says nothing
    LOCKS_LOST: int = count(1)
    DUPLICATES: int = count(1_000)  # calls and messages of a job that were turned away
    NO_COORDINATOR: float = seconds(30.0)  # since one has looked
    NO_WORKER_FOR: float = seconds(30.0)  # that a job was due in a queue without a worker
    WORKER_SILENT: float = seconds(600.0)  # a stock worker may say nothing for seven minutes
    REDIS_SLOW: float = seconds(0.1)  # for one command
    EVICTED: int = count(1)  # keys
    REDIS_FULL: float = share(0.9)  # of maxmemory
    REPLICA: str | None = checked(None, _is_alias, "name an alias of DATABASES, or None.")
    REPLICA_LAG: float = seconds(10.0)
    SILENT: int = count(1)
    CLOCKS: float = seconds(1.0)  # between two clocks
    UNTOLD_FOR: float = seconds(60.0)  # that a notice could not be delivered
    OUTBOX_LATE: float = seconds(60.0)  # since the oldest undelivered event was published
    OUTBOX_DEAD: int = count(1)
    INBOX_HELD: int = count(1)
    OFF: tuple[str, ...] = checked((), _is_kinds, f"give a tuple of kinds: {', '.join(KINDS)}.")
    MAIL: bool = flag(True)  # to ADMINS
    WEBHOOK: str | None = checked(None, is_address, "give an http or https address, or None.")
    WEBHOOK_TIMEOUT: float = seconds(5.0)  # for one try, as a whole


def hint(given: Any, known: Iterable[str]) -> str:
    """Return what a name that nobody knows may mean, or which names there are."""
    names = list(known)
    near = difflib.get_close_matches(str(given), names, 1, 0.5)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(names) or 'none'}."


def problems(kind: Any, given: Any, name: str, *, one: str = "threshold") -> Iterator[str]:
    """Yield a sentence per mistake in a mapping that settings call ``name``; ``one``: of these."""
    if not isinstance(given, Mapping):
        yield f"{name} is {given!r}; it must be a dict."
        return
    known = {f.name: f for f in fields(kind)}
    for key, value in given.items():
        if key not in known:
            yield f"{name}[{key!r}] is not {_a(one)}. {hint(key, known)}"
        elif not known[key].metadata["fits"](value):
            yield f"{name}[{key!r}] = {value!r}: {known[key].metadata['words']}"


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def made(kind: Any, given: Mapping[str, Any]) -> Any:
    """Return the thresholds; what is not given has its default."""
    return kind(**{name: plain(value) for name, value in given.items()})
