"""
The Redis lock in front of a row: a cheap first filter, and a live display of who is at work.

It may vanish, outlive its owner or be stolen, and nothing breaks: the row decides. So every
answer here is advice, and an unreachable Redis only means that the row is asked at once.

    key      <KEY_PREFIX>:<VERSION>:<PREFIX>:lock:{<row pk>}     (as cache.lock makes it)
    value    <row pk>:<owner>
    TTL      the lease, renewed by the beats; after a failure, the delay of the retry
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from django.core.cache import caches
from django_redis import get_redis_connection
from redis import Redis
from redis.exceptions import LockError
from redis.lock import Lock

from dedupjobs import conf, probes, seal, wire
from dedupjobs.wire import UNREACHABLE


class Grip(Enum):
    """What became of a try to take or renew a lock."""

    HELD = "held"
    BUSY = "busy"
    UNREACHABLE = "unreachable"
    UNUSED = "unused"  # nobody asked for it


def acquire(pk: int, owner: str, *, ttl: float) -> Grip:
    """
    Try once to take the lock for ``ttl`` seconds.

    After a refusal the value is compared with our own token, since a SET whose reply was lost
    may have taken it for us.
    """
    probes.reach("lock.before")

    def take() -> Grip:
        lock = _lock(pk, ttl)
        token = _token(pk, owner)
        if lock.acquire(blocking=False, token=token) or _value(lock) == token:
            return Grip.HELD
        return Grip.BUSY

    grip = _advice(take)
    probes.reach("lock.after")
    return grip


def replace(pk: int, owner: str, *, ttl: float) -> Grip:
    """Take the lock from whoever has it: the row is won, so any other holder is a leftover."""

    def take() -> Grip:
        lock = _lock(pk, ttl)
        _client().set(lock.name, _token(pk, owner), px=_milliseconds(ttl))
        return Grip.HELD

    return _advice(take)


def extend(pk: int, owner: str, *, ttl: float) -> Grip:
    """Let our own lock live ``ttl`` seconds from now; BUSY: it is gone or somebody else's."""

    def renew() -> Grip:
        try:
            _mine(pk, owner, ttl).extend(max(ttl, 0.001), replace_ttl=True)
        except LockError:
            return Grip.BUSY
        return Grip.HELD

    return _advice(renew)


def release(pk: int, owner: str) -> Grip:
    """Give our own lock up; another's is left alone (compare and delete, in one script)."""

    probes.reach("release.before")

    def give() -> Grip:
        try:
            _mine(pk, owner, 1).release()
        except LockError:
            return Grip.BUSY
        return Grip.HELD

    return _advice(give)


def clear(pk: int) -> None:
    """Delete the lock, whoever has it: its row was cancelled."""

    def delete() -> Grip:
        _client().delete(_lock(pk, 1).name)
        return Grip.HELD

    _advice(delete)


def lead(owner: str, *, ttl: float) -> Grip:
    """Take or renew the coordinators' leader lease; it only saves double work."""

    def take() -> Grip:
        lock = _leader(ttl)
        lock.local.token = owner.encode()
        if lock.acquire(blocking=False, token=owner):
            return Grip.HELD
        lock.local.token = owner.encode()
        try:
            lock.extend(ttl, replace_ttl=True)
        except LockError:
            return Grip.BUSY
        return Grip.HELD

    return _advice(take)


def resign(owner: str) -> None:
    """Give the leader lease up, so that the next coordinator need not wait for its end."""

    def give() -> Grip:
        lock = _leader(1)
        lock.local.token = owner.encode()
        with suppress(LockError):
            lock.release()
        return Grip.HELD

    _advice(give)


def holder(pk: int) -> str | None:
    """Return the owner in the lock's value, or None if it is free; raises what Redis raises."""
    value = _value(_lock(pk, 1))
    return value.partition(":")[2] if value else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A lock as it stands in Redis. ``ttl``: seconds; None: it never ends."""

    owner: str
    ttl: float | None


def seen(pks: Sequence[int]) -> dict[int, Seen]:
    """Return the locks of these rows that somebody has, in one trip; raises what Redis raises."""
    if not pks:
        return {}
    pipe = _client().pipeline(transaction=False)
    for pk in pks:
        name = _lock(pk, 1).name
        pipe.get(name)
        pipe.pttl(name)
    answers: Any = pipe.execute(raise_on_error=False)
    found = {}
    for pk, value, left in zip(pks, answers[::2], answers[1::2], strict=True):
        if isinstance(value, Exception):  # something that is no text stands there
            found[pk] = Seen(owner=str(value), ttl=_ttl(left))
        elif value is not None:
            owner = _text(value).removeprefix(f"{pk}:")
            found[pk] = Seen(owner=owner, ttl=_ttl(left))
    return found


def _ttl(left: Any) -> float | None:
    return left / 1000 if isinstance(left, int) and left >= 0 else None


def forget_clients() -> None:
    """Drop the client, after a change of settings."""
    wire.close(_client)


def _advice(ask: Callable[[], Grip]) -> Grip:
    try:
        return ask()
    except UNREACHABLE:
        return Grip.UNREACHABLE


def _lock(pk: int, ttl: float) -> Lock:
    return _named(f"lock:{{{pk}}}", ttl)


def _leader(ttl: float) -> Lock:
    """The lease of this project: another one under the same PREFIX must not keep it from acting."""
    return _named(f"leader:{seal.sign('leader', '')[:8]}", ttl)


def _named(name: str, ttl: float) -> Lock:
    conf_now = conf.get()
    cache: Any = caches[conf_now.LOCK_CACHE]
    lock: Lock = cache.lock(
        f"{conf_now.PREFIX}:{name}",
        timeout=_milliseconds(ttl) / 1000,
        blocking=False,
        client=_client(),
        thread_local=False,
    )
    return lock


def _mine(pk: int, owner: str, ttl: float) -> Lock:
    """The lock as its holder sees it, from any thread or process that knows the token."""
    lock = _lock(pk, ttl)
    lock.local.token = _token(pk, owner).encode()
    return lock


def _token(pk: int, owner: str) -> str:
    return f"{pk}:{owner}"


def _value(lock: Lock) -> str | None:
    value: Any = _client().get(lock.name)
    return None if value is None else _text(value)


def _text(value: Any) -> str:
    # Whatever else stands there is not our token.
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _milliseconds(seconds: float) -> int:
    # SET PX refuses 0, and a lock without an end would outlive its owner.
    return max(int(seconds * 1000), 1)


@lru_cache(maxsize=1)
def _client() -> Redis:
    source: Any = get_redis_connection(conf.get().LOCK_CACHE)
    return wire.own_client(source, timeout=conf.get().LOCK_TIMEOUT)
