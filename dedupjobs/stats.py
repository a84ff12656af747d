"""
The ledger of duplicates: counted in Redis, where a hot key costs no row lock, and folded into
the tables by the coordinator. A wiped Redis loses what was not folded yet, ten seconds or so.

    <PREFIX>:{ledger}:duplicates      hash    "<row pk>:<cause>:<job>" → count
    <PREFIX>:{ledger}:samples         list    JSON of the newest SAMPLES duplicates
    <PREFIX>:{ledger}:fold            text    the token of the fold that is under way
    <PREFIX>:{ledger}:fold:<token>    hash    what it folds: the first key, renamed

The braces keep all four in one slot, where Redis is a cluster.
"""

from __future__ import annotations

import contextvars
import json
import math
import os
import re
import socket
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import F
from django_redis import get_redis_connection
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeout

from dedupjobs import clock, conf, lifecycle, wire
from dedupjobs.clock import DbNow
from dedupjobs.endings import clip
from dedupjobs.models import Cause, DuplicateCount, DuplicateSample, Fold

GATHER = 0.05  # seconds between two payments of a process that turns away many calls
SAMPLES = 1_000  # rows of DuplicateSample, and entries that wait for the fold
OWED = 10_000  # entries that one process keeps while Redis is away
KEPT_FOLDS = 100  # tokens that the tables remember
CHUNK = 500
TTL = 86_400

LATER = "later"  # stands for a cause where only the row's share is still to be added

_ENTRY = re.compile(rf"[0-9]{{1,18}}:({'|'.join((*Cause.values, LATER))}):[^\x00\n]{{0,200}}")
_NUMBER = re.compile("[0-9]{1,12}")
_FIELDS = {"job", "cause", "at", "host", "pid", "request", "detail"}
_TEXTS = (("host", 200), ("request", 200), ("detail", 500))  # characters that are kept

# KEYS[1]: a key. ARGV[1]: deleted only if it still has this value.
_DELETE_IF = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end"

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("dedupjobs_request", default="")
"""Set it in a middleware, and samples say which request asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """What one fold has brought into the tables."""

    duplicates: int = 0
    samples: int = 0


# ---- counting


@dataclass(slots=True)
class _Owed:
    """What this process has counted and Redis does not know yet."""

    counts: Counter[str] = field(default_factory=Counter)
    samples: deque[str] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    guard: threading.Lock = field(default_factory=threading.Lock)
    gathering: int = 0
    paid_at: float = -math.inf


_owed = _Owed()
# The ledger's own: duplicates of one hot key must not cost other jobs their pushes.
_budget = wire.Budget()


def _forget_owed() -> None:
    global _owed  # noqa: PLW0603 - a forked child owes nothing of what its parent does
    _owed = _Owed()


os.register_at_fork(after_in_child=_forget_owed)


def count_duplicate(job_pk: int, name: str, cause: str, detail: str) -> None:
    """
    Count a call or message that was turned away; never raises.

    Sent at once, unless this process has sent within GATHER: then with its next duplicate, or
    by ``flush``, which the ends of requests, runs and processes call.
    """
    sample = {
        "job": job_pk,
        "cause": cause,
        "at": clock.utcnow().isoformat(),
        "host": socket.gethostname()[:200],
        "pid": os.getpid(),
        "request": request_id.get()[:200],
        "detail": detail[:500],
    }
    entry = f"{job_pk}:{cause}:{name}"
    with _owed.guard:
        if entry in _owed.counts or len(_owed.counts) < OWED:
            _owed.counts[entry] += 1
            _owed.samples.append(json.dumps(sample))
    _flush_if_due()


@contextmanager
def gathering() -> Iterator[None]:
    """Send what is counted in the block at its end, in one round trip at the most."""
    _owed.gathering += 1
    try:
        yield
    finally:
        _owed.gathering -= 1
        _flush_if_due()


def _flush_if_due() -> None:
    if not _owed.gathering and clock.monotonic() - _owed.paid_at >= GATHER:
        flush()


def flush() -> None:
    """Send what is owed; what Redis does not take now stays owed until the next time."""
    if not _owed.counts:
        return
    with _owed.guard:
        counts, samples = _owed.counts, list(_owed.samples)
        _owed.counts = Counter()
        _owed.samples.clear()
        _owed.paid_at = clock.monotonic()
    if not counts:
        return  # another thread has just sent them
    try:
        with _client().spending(_budget):
            pipe = _client().redis.pipeline(transaction=True)
            for entry, number in counts.items():
                pipe.hincrby(_key("duplicates"), entry, number)
            pipe.lpush(_key("samples"), *samples)
            pipe.ltrim(_key("samples"), 0, SAMPLES - 1)
            pipe.expire(_key("duplicates"), TTL)
            pipe.expire(_key("samples"), TTL)
            pipe.execute()
    except (RedisError, OSError) as error:
        if isinstance(error, RedisTimeout) and not isinstance(error, wire.NotSent):
            return  # it was sent and only the answer is late: to send it again would count twice
        with _owed.guard:
            _owed.counts.update(counts)
            _owed.samples.extendleft(reversed(samples))


# ---- folding


def fold() -> Folded:
    """
    Move the counts into the tables; raises RedisError.

    What is folded is renamed first and has a token, which the same transaction writes into the
    tables: of two folds of one token, one counts. A fold that was cut off is made by the next.
    A row that somebody has locked is passed over, and its share is counted again later.
    """
    flush()
    token, counts, samples = _taken()
    if token is None:
        return Folded()
    by_row: Counter[int] = Counter()
    by_cause: Counter[tuple[str, str]] = Counter()
    for entry, number in counts.items():
        row, cause, name = entry.split(":", 2)
        by_row[int(row)] += number
        if cause != LATER:
            by_cause[name, cause] += number
    with transaction.atomic(using=lifecycle.alias()):
        if not _is_new(token):
            _finish(token, {})
            return Folded()
        locked = _add_to_rows(by_row)
        for (name, cause), number in sorted(by_cause.items()):
            _add_to_cause(name, cause, number)
        # Its foreign key would wait for a locked row, too.
        kept = _keep([sample for sample in samples if sample["job"] not in locked])
    _finish(token, locked)
    return Folded(duplicates=sum(by_row.values()) - sum(locked.values()), samples=kept)


def _is_new(token: str) -> bool:
    """Note in the tables that this fold is being made; False: it was made already."""
    table = Fold._base_manager.using(lifecycle.alias())
    try:
        with transaction.atomic(using=lifecycle.alias()):
            table.create(token=token, at=DbNow())
    except IntegrityError:
        return False
    _keep_newest(table, KEPT_FOLDS)
    return True


def forget_clients() -> None:
    """Drop the client and what is owed, after a change of settings."""
    wire.close(_client)
    _budget.reset()
    _forget_owed()


def _taken() -> tuple[str | None, dict[str, int], list[dict[str, Any]]]:
    """Return the token and content of the fold that is under way, or of a new one."""
    redis = _client().redis
    with _client().deadline(conf.get().LOCK_TIMEOUT):
        redis.set(_key("fold"), clock.token(), nx=True, ex=TTL)
        token = _text(redis.get(_key("fold")) or b"")
        mine = _key(f"fold:{token}")
        if not redis.exists(mine):
            try:
                redis.rename(_key("duplicates"), mine)
            except ResponseError:  # nothing was counted
                redis.eval(_DELETE_IF, 1, _key("fold"), token)
                return None, {}, []
        found: Any = redis.hgetall(mine)
        texts: Any = redis.lrange(_key("samples"), 0, SAMPLES - 1)
        redis.delete(_key("samples"))
    counted = {_text(k): _text(v) for k, v in found.items()}
    counts = {
        entry: int(number)
        for entry, number in counted.items()
        if _ENTRY.fullmatch(entry) and _NUMBER.fullmatch(number)
    }
    return token, counts, [sample for text in texts if (sample := _sample(text))]


def _finish(token: str, locked: dict[int, int]) -> None:
    redis = _client().redis
    with _client().deadline(conf.get().LOCK_TIMEOUT):
        pipe = redis.pipeline(transaction=True)
        pipe.delete(_key(f"fold:{token}"))
        for pk, number in locked.items():
            pipe.hincrby(_key("duplicates"), f"{pk}:{LATER}:", number)
        if locked:
            pipe.expire(_key("duplicates"), TTL)
        pipe.execute()
        redis.eval(_DELETE_IF, 1, _key("fold"), token)


def _add_to_rows(by_row: Counter[int]) -> dict[int, int]:
    """Add the counts to the rows that nobody has locked, and return the others'."""
    locked: dict[int, int] = {}
    pks = sorted(by_row)
    for start in range(0, len(pks), CHUNK):
        chunk = pks[start : start + CHUNK]
        there = lifecycle.jobs().filter(pk__in=chunk)
        free = set(lifecycle.skip_locked(there.order_by("pk")).values_list("pk", flat=True))
        for pk in sorted(free):
            lifecycle.jobs().filter(pk=pk).update(duplicates=F("duplicates") + by_row[pk])
        busy = set(there.values_list("pk", flat=True)) - free
        locked |= {pk: by_row[pk] for pk in busy}
    return locked


def _add_to_cause(name: str, cause: str, number: int) -> None:
    counts = DuplicateCount._base_manager.using(lifecycle.alias())
    row = counts.filter(name=name, cause=cause)
    if not row.update(count=F("count") + number, last_at=DbNow()):
        now = DbNow()
        counts.bulk_create(
            [DuplicateCount(name=name, cause=cause, count=0, first_at=now, last_at=now)],
            ignore_conflicts=True,
        )
        row.update(count=F("count") + number, last_at=DbNow())


def _sample(text: bytes | str) -> dict[str, Any] | None:
    """Return a sample as ``count_duplicate`` wrote it; what somebody else wrote is dropped."""
    try:
        sample = json.loads(text)
        fits = sample.keys() == _FIELDS and _fits(sample)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    return sample if fits else None


def _fits(sample: dict[str, Any]) -> bool:
    """Tell whether every database can store it."""
    at = datetime.fromisoformat(sample["at"])
    numbers = ((sample["job"], 2**63), (sample["pid"], 2**31))
    return (
        sample["cause"] in Cause.values
        and at.tzinfo is not None
        and 2000 <= at.year < 9000  # noqa: PLR2004 - no zone leads out of the calendar
        and all(type(number) is int and 0 <= number < end for number, end in numbers)
        and all(clip(sample[name], longest) == sample[name] for name, longest in _TEXTS)
    )


def _keep(samples: list[dict[str, Any]]) -> int:
    """Write samples of rows that still exist, oldest first, and keep the table bounded."""
    table = DuplicateSample._base_manager.using(lifecycle.alias())
    wanted = {sample["job"] for sample in samples}
    there = set(lifecycle.jobs().filter(pk__in=wanted).values_list("pk", flat=True))
    rows = [
        DuplicateSample(
            job_id=sample["job"],
            cause=sample["cause"],
            at=datetime.fromisoformat(sample["at"]),
            host=sample["host"],
            pid=sample["pid"],
            request_id=sample["request"],
            detail=sample["detail"],
        )
        for sample in reversed(samples)
        if sample["job"] in there
    ]
    table.bulk_create(rows, batch_size=200)
    _keep_newest(table, SAMPLES)
    return len(rows)


def _keep_newest(table: Any, count: int) -> None:
    first_too_old = table.order_by("-pk").values_list("pk", flat=True)[count : count + 1]
    for pk in list(first_too_old):
        table.filter(pk__lte=pk).delete()


def _key(name: str) -> str:
    return f"{conf.get().PREFIX}:{{ledger}}:{name}"


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


@lru_cache(maxsize=1)
def _client() -> wire.Client:
    source: Any = get_redis_connection(conf.get().lock_home)
    return wire.Client.to(source, timeout=conf.get().PUSH_TIMEOUT)
