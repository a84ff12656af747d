"""
Redis clients of our own: short time-outs, one deadline for a whole call, no retries, one budget.

What a request may lose to a broken Redis is bounded for the whole process: all its calls share
PUSH_TIMEOUT of waiting per second, and an error or a spent budget opens a circuit breaker for a
second, in which calls fail at once.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection

from dedupjobs import clock, conf

UNREACHABLE = (RedisError, OSError, NotImplementedError, AttributeError)
"""What a Redis that is away raises, and a cache that is none; a check names the latter."""

FREE = 0.010  # seconds; faster calls cost the budget nothing
NEAR = 0.005  # seconds by which a deadline may be missed
ASKED = 3.0  # seconds in which a worker asks all its sentinels
WINDOW = 1.0  # seconds that a budget and an open breaker last


class Cargo(Protocol):
    """Commands that travel in a pipeline which somebody else sends anyway."""

    def load(self, pipe: Any) -> None:
        """Add the commands to the pipeline."""

    def left_behind(self, error: BaseException) -> None:
        """The pipeline has failed, or the server has refused one of these commands."""


@dataclass(slots=True)
class Load:
    """Several cargoes as one pipeline carries them."""

    cargoes: Sequence[Cargo]
    ends: list[int] = field(default_factory=list)

    def load(self, pipe: Any) -> None:
        """Add all commands to the pipeline."""
        self.ends = [len(pipe)]
        for cargo in self.cargoes:
            cargo.load(pipe)
            self.ends.append(len(pipe))

    def arrived(self, answers: list[Any]) -> None:
        """Tell each cargo of which a command was refused; ``answers`` of the whole pipeline."""
        for cargo, begin, end in zip(self.cargoes, self.ends, self.ends[1:], strict=False):
            refused = [a for a in answers[begin:end] if isinstance(a, Exception)]
            if refused:
                cargo.left_behind(refused[0])

    def left_behind(self, error: BaseException) -> None:
        """Nothing has arrived, or nobody knows."""
        for cargo in self.cargoes:
            cargo.left_behind(error)


class NotSent(RedisTimeout):
    """The time was over before a command was sent, so the server has not carried it out."""


@dataclass  # without slots, which all threads would share
class Deadline(threading.local):
    """When this thread's Redis calls must be over, by the monotonic clock; None: no limit."""

    at: float | None = None

    def left(self, over: type[RedisTimeout] = RedisTimeout) -> float | None:
        """Return the seconds that are left; None: no limit. Raises ``over`` once it has passed."""
        if self.at is None:
            return None
        left = self.at - clock.monotonic()
        if left <= 0:
            raise over("the time that a push may take is over")
        return left


class DeadlineConnection:
    """
    Mixed into redis-py's connection class: one deadline for connect, handshake and replies.

    A socket time-out alone bounds each single wait, and a first push has half a dozen of them.
    ``parts``: of what is left, one wait may take this part, since others can answer as well.
    """

    deadline: Deadline
    parts: int = 1

    def _limit(self: Any, over: type[RedisTimeout] = RedisTimeout) -> None:
        left = self.deadline.left(over)
        if left is not None:
            left /= self.parts
            self.socket_connect_timeout = left
            if self._sock and not _is_near(self._sock.gettimeout(), left):
                self._sock.settimeout(left)

    def _connect(self: Any) -> Any:
        self._limit()
        sock = super()._connect()  # type: ignore[misc]
        try:
            sock.settimeout(self.deadline.left() or self.socket_timeout)
        except RedisTimeout:
            sock.close()
            raise
        return sock

    def connect_check_health(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().connect_check_health(*args, **kwargs)  # type: ignore[misc]
        except NotSent:
            raise
        except RedisTimeout as error:  # also of the handshake, which comes before any command
            raise NotSent(str(error)) from error

    def send_packed_command(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._limit(NotSent)
        return super().send_packed_command(*args, **kwargs)  # type: ignore[misc]

    def read_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._limit()
        return super().read_response(*args, **kwargs)  # type: ignore[misc]


class TidyConnection:
    """
    Mixed in behind Sentinel: a call that is cut off closes its connection, as everywhere else.

    redis-py (8.1) leaves it open there, so the next call would read what this one had asked for:
    after a time-out of a job, or after the SIGTERM that ends a worker's wait for a message.
    """

    def read_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("disconnect_on_error", True)
        return super().read_response(*args, **kwargs)  # type: ignore[misc]


def _tidy(kind: Any) -> Any:
    if not issubclass(kind, SentinelManagedConnection) or issubclass(kind, TidyConnection):
        return kind
    return type("TidyConnection", (TidyConnection, kind), {})


def _is_near(one: float | None, other: float) -> bool:
    """Whether a time-out need not be set again, which costs a system call per command."""
    return one is not None and abs(one - other) < NEAR


def own_client(
    source: Redis, *, timeout: float, deadline: Deadline | None = None, parts: int = 1
) -> Redis:
    """
    Return a client to the same server as ``source`` with its own pool and no retries.

    redis-py repeats a command whose reply was lost, which doubles a push and makes a lock look
    taken; and a pool shared with an RQ worker has time-outs of minutes. Behind Sentinel the same
    goes for the questions who the primary is: ``parts`` sentinels share the time.
    """
    pool = source.connection_pool
    kwargs = {
        **pool.connection_kwargs,
        "socket_timeout": timeout / parts,
        "socket_connect_timeout": timeout / parts,
        "retry": Retry(NoBackoff(), 0),
        "driver_info": None,  # two round trips and a look into package metadata, per connection
        "retry_on_timeout": False,
        "retry_on_error": [],
    }
    kind = _tidy(pool.connection_class)
    if deadline is not None:
        limits = {"deadline": deadline, "parts": parts}
        kind = type("DeadlineConnection", (DeadlineConnection, kind), limits)
    if isinstance(pool, SentinelConnectionPool):
        del kwargs["connection_pool"]  # the new one puts itself there
        kwargs |= {"is_master": pool.is_master, "check_connection": pool.check_connection}
        sentinels = _own_sentinels(pool.sentinel_manager, timeout, deadline)
        found = type(pool)(pool.service_name, sentinels, connection_class=kind, **kwargs)
        return Redis(connection_pool=found)
    return Redis(connection_pool=type(pool)(connection_class=kind, **kwargs))


def _own_sentinels(found: Sentinel, timeout: float, deadline: Deadline | None) -> Sentinel:
    """Return who is asked for the primary: one that is away leaves time for the others."""
    own = copy.copy(found)
    parts = len(found.sentinels)
    own.sentinels = [
        own_client(one, timeout=timeout, deadline=deadline, parts=parts) for one in found.sentinels
    ]
    return own


def mend(client: Redis) -> None:
    """Let a worker's own client, behind Sentinel, stay in step and ask sentinels briefly."""
    pool = client.connection_pool
    if isinstance(pool, SentinelConnectionPool):
        pool.connection_class = _tidy(pool.connection_class)
        pool.sentinel_manager = _own_sentinels(pool.sentinel_manager, ASKED, None)
        pool.proxy.sentinel_manager = pool.sentinel_manager
        pool.disconnect()


def address_of(client: Redis) -> str:
    """Return where a client's server stands; equal for two clients of the same database."""
    pool = client.connection_pool
    known = pool.connection_kwargs
    if isinstance(pool, SentinelConnectionPool):
        manager: Sentinel = pool.sentinel_manager
        watchers = sorted(_host_of(one.connection_pool) for one in manager.sentinels)
        place = f"{pool.service_name} by {','.join(watchers)}"
    else:
        place = known.get("path") or _host_of(pool)
    return f"{place}/{known.get('db') or 0}"


def _host_of(pool: Any) -> str:
    return f"{pool.connection_kwargs.get('host', '')}:{pool.connection_kwargs.get('port', '')}"


def close(made: Any) -> None:
    """
    Close and forget the client that a cached function has made; not after a fork.

    Left to the garbage collector, its sockets may go before it can close them.
    """
    if made.cache_info().currsize:
        client = made()
        _disconnect(getattr(client, "redis", client).connection_pool)
    made.cache_clear()


def _disconnect(pool: Any) -> None:
    pool.disconnect()
    if isinstance(pool, SentinelConnectionPool):
        for sentinel in pool.sentinel_manager.sentinels:
            sentinel.connection_pool.disconnect()


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a server uses, and may use; 0: it has no limit."""

    used: int
    limit: int


def memory_of(client: Redis) -> Memory:
    """Ask a server how much memory it uses; raises what Redis raises."""
    facts: Any = client.info("memory")
    return memory_in(facts)


def memory_in(facts: Mapping[str, Any]) -> Memory:
    """Return what a server's INFO says of its memory."""
    return Memory(int(facts["used_memory"]), int(facts.get("maxmemory", 0)))


def time_of(client: Redis) -> float:
    """Return a server's clock in Unix seconds; raises what Redis raises."""
    answer: Any = client.time()
    return float(answer[0] + answer[1] / 1_000_000)


class BudgetSpent(NotSent):
    """The breaker is open, or the budget of this second is spent."""


@dataclass(slots=True)
class Budget:
    """PUSH_TIMEOUT of waiting per second, and a breaker that is open after an error."""

    spent: float = 0.0
    since: float = -math.inf
    open_until: float = -math.inf
    guard: threading.Lock = field(default_factory=threading.Lock)

    def left(self) -> float:
        """Return the seconds that a call may take; BudgetSpent while the breaker is open."""
        with self.guard:
            now = clock.monotonic()
            if now - self.since >= WINDOW:
                self.since, self.spent = now, 0.0
            left = conf.get().PUSH_TIMEOUT - self.spent
            if now < self.open_until or left <= 0:
                raise BudgetSpent("Redis was unreachable or slow within the last second")
            return left

    def spend(self, seconds: float) -> None:
        """Count a call that took longer than a healthy server needs."""
        if seconds > FREE:
            with self.guard:
                self.spent += seconds

    def trip(self) -> None:
        """Open the breaker."""
        with self.guard:
            self.open_until = max(self.open_until, clock.monotonic() + WINDOW)

    def reset(self) -> None:
        """Forget what was spent, after a fork or a change of settings."""
        with self.guard:
            self.spent, self.since, self.open_until = 0.0, -math.inf, -math.inf


budget = Budget()


@dataclass(frozen=True, slots=True)
class Client:
    """A client whose calls can be given one deadline, or what is left of the budget."""

    redis: Redis
    limit: Deadline

    @classmethod
    def to(cls, source: Redis, *, timeout: float) -> Client:
        """Return a client to the server of ``source``."""
        limit = Deadline()
        return cls(own_client(source, timeout=timeout, deadline=limit), limit)

    def get(self, key: str) -> Any:
        """
        Return the value of a key as redis-py's ``get`` does, for two thirds of its cost.

        What is left out serves retries and redis-py's own metrics. A call that is cut off in the
        middle closes its connection: the next one must not read its reply.
        """
        name = key.encode()
        command = b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)  # as RESP has it
        pool: Any = self.redis.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_packed_command([command])
            return connection.read_response()
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """Give all Redis calls of the block, together, ``seconds``."""
        self.limit.at = clock.monotonic() + seconds
        try:
            yield
        finally:
            self.limit.at = None

    @contextmanager
    def spending(self, budget: Budget = budget) -> Iterator[None]:
        """Run the block within what is left of the budget; an error opens the breaker."""
        left = budget.left()  # a refusal must not open the breaker for another second
        begun = clock.monotonic()
        self.limit.at = begun + left
        try:
            yield
        except (RedisError, OSError):
            budget.trip()
            raise
        finally:
            self.limit.at = None
            budget.spend(clock.monotonic() - begun)
