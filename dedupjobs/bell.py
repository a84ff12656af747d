"""
The relay's bell: after a commit with events somebody pushes to a list that the relay waits at.

    <PREFIX>:{outbox}:bell   list of one, a TTL of a minute

It saves the relay's patience only: without Redis, or with a bell that nobody heard, the relay
looks at the tables every TICK.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from django.db import connections, transaction
from django_redis import get_redis_connection

from dedupjobs import conf, wire
from dedupjobs.wire import UNREACHABLE

TTL = 60  # seconds


def ring_on_commit(alias: str) -> None:
    """Ring after the outermost commit, once for a transaction."""
    connection: Any = connections[alias]
    mine = set(connection.savepoint_ids)
    # One that was noted in an outer or the same savepoint rings whenever this one would.
    if any(call is ring and inside <= mine for inside, call, *_ in connection.run_on_commit):
        return
    transaction.on_commit(ring, using=alias, robust=True)


def ring() -> None:
    """Ring; never raises, and costs no more than the process's budget for Redis."""
    try:
        with _client().spending():
            pipe = _client().redis.pipeline(transaction=False)
            pipe.lpush(_name(), "")
            pipe.ltrim(_name(), 0, 0)
            pipe.expire(_name(), TTL)
            pipe.execute()
    except UNREACHABLE:
        return


def wait(seconds: float) -> bool:
    """Wait until it rings, at most so long; False: it did not. Raises what Redis raises."""
    source: Any = get_redis_connection(conf.get().lock_home)
    return bool(_listener(source, seconds + TTL / 6).blpop([_name()], timeout=seconds))


def _name() -> str:
    return f"{conf.get().PREFIX}:{{outbox}}:bell"


@lru_cache(maxsize=1)
def _client() -> wire.Client:
    source: Any = get_redis_connection(conf.get().lock_home)
    return wire.Client.to(source, timeout=conf.get().PUSH_TIMEOUT)


@lru_cache(maxsize=1)
def _listener(source: Any, timeout: float) -> Any:
    return wire.own_client(source, timeout=timeout)


def forget_clients() -> None:
    """Drop the clients, after a change of settings."""
    wire.close(_client)
    _listener.cache_clear()
