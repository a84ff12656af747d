"""
Redis clients of our own: short time-outs, one deadline for a whole call, no retries.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import TimeoutError as RedisTimeout
from redis.retry import Retry

from dedupjobs import clock


@dataclass(slots=True)
class Deadline(threading.local):
    """When this thread's Redis calls must be over, by the monotonic clock; None: no limit."""

    at: float | None = None

    def left(self) -> float | None:
        if self.at is None:
            return None
        left = self.at - clock.monotonic()
        if left <= 0:
            raise RedisTimeout("the time that a push may take is over")
        return left


class DeadlineConnection:
    """
    Mixed into redis-py's connection class: one deadline for connect, handshake and replies.

    A socket time-out alone bounds each single wait, and a first push has half a dozen of them.
    """

    deadline: Deadline

    def _limit(self: Any) -> None:
        left = self.deadline.left()
        if left is not None:
            self.socket_connect_timeout = left
            if self._sock:
                self._sock.settimeout(left)

    def _connect(self: Any) -> Any:
        self._limit()
        sock = super()._connect()  # type: ignore[misc]
        sock.settimeout(self.deadline.left() or self.socket_timeout)
        return sock

    def send_packed_command(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._limit()
        return super().send_packed_command(*args, **kwargs)  # type: ignore[misc]

    def read_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._limit()
        return super().read_response(*args, **kwargs)  # type: ignore[misc]


def own_client(source: Redis, *, timeout: float, deadline: Deadline | None = None) -> Redis:
    """
    Return a client to the same server as ``source`` with its own pool and no retries.

    redis-py repeats a command whose reply was lost, which doubles a push and makes a lock look
    taken; and a pool shared with an RQ worker has time-outs of minutes.
    """
    pool = source.connection_pool
    kwargs = {
        **pool.connection_kwargs,
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
        "retry_on_error": [],
    }
    kind: Any = pool.connection_class
    if hasattr(pool, "sentinel_manager"):  # it finds its server by itself; only limit the waits
        pool.connection_kwargs.update(kwargs)
        return source
    if deadline is not None:
        kind = type("DeadlineConnection", (DeadlineConnection, kind), {"deadline": deadline})
    return Redis(connection_pool=type(pool)(connection_class=kind, **kwargs))
