"""
Waking a worker up: the producer's side of RQ.

RQ is lossy and doubling, and that is fine: a message only says "look at this row". What matters
here is that a broken Redis costs the caller little. All pushes of a process share a time budget
of PUSH_TIMEOUT per second; an error or a spent budget opens a circuit breaker for a second, in
which pushes fail at once. A failed push leaves the row to the coordinator.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import django_rq
from django.conf import settings
from django.db import transaction
from django.utils.module_loading import import_string
from django_rq.connection_utils import get_redis_connection
from redis import Redis
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout
from rq import Queue
from rq.serializers import DefaultSerializer, JSONSerializer

from dedupjobs import clock, conf, lifecycle, probes, registry, signals, wire
from dedupjobs.exceptions import UnknownQueue

ENTRY = "dedupjobs.runner.run"  # a path: workers import it, producers never do
MESSAGE_TTL = 60  # seconds that RQ keeps a finished message; 0 would cost more round trips
QUEUED_TTL = 7 * 86_400  # a message that was popped and lost leaves its hash behind; not for ever
FAILURE_TTL = 86_400
FREE = 0.010  # pushes faster than this cost the budget nothing
WINDOW = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One message: the rows it names, as ``(pk, generation)``, and its RQ id."""

    queue: str
    dispatch_id: str
    name: str
    rows: tuple[tuple[int, int], ...]


def push_on_commit(delivery: Delivery) -> None:
    """Push after the outermost commit of the rows' own database; never raises."""

    def push_delivery() -> None:  # a named function: robust hooks are reported by their name
        push([delivery])

    transaction.on_commit(push_delivery, using=lifecycle.alias(), robust=True)


def push(deliveries: Iterable[Delivery]) -> int:
    """Push what Redis takes within the budget, return how many; the rest is marked unsent."""
    by_queue: dict[str, list[Delivery]] = defaultdict(list)
    for delivery in deliveries:
        by_queue[delivery.queue].append(delivery)
    pushed = 0
    for queue, batch in by_queue.items():
        try:
            with _producer(queue).spending():
                probes.reach("push.before")
                _enqueue(queue, batch)
                probes.reach("push.after")
            pushed += len(batch)
        except (RedisError, OSError, UnknownQueue) as error:
            lifecycle.mark_unsent([d.dispatch_id for d in batch])
            signals.tell(
                signals.hand_over_failed, batch[0].name, queue=queue, count=len(batch), error=error
            )
    return pushed


def _enqueue(queue: str, batch: list[Delivery]) -> None:
    _producer(queue).queue.enqueue_many(
        Queue.prepare_data(
            ENTRY,
            args=([list(row) for row in delivery.rows],),
            job_id=delivery.dispatch_id,
            timeout=rq_timeout(delivery),
            ttl=QUEUED_TTL,
            result_ttl=MESSAGE_TTL,
            failure_ttl=FAILURE_TTL,
            description=f"{delivery.name} ({len(delivery.rows)} row)",
        )
        for delivery in batch
    )


def rq_timeout(delivery: Delivery) -> int:
    """
    Return RQ's own time-out for a message in whole seconds, -1 for none.

    Our alarm ends a job; RQ's is the net below it, so it comes later, and later than the grace
    after which a DedupWorker kills the process.
    """
    timeout = registry.options_of(delivery.name).timeout
    if timeout is None:
        return -1
    grace = conf.get().TIMEOUT_GRACE
    return math.ceil((timeout + 2 * grace) * len(delivery.rows)) + 1


def queue_names() -> list[str]:
    """Return the names of RQ_QUEUES."""
    return list(getattr(settings, "RQ_QUEUES", {}))


def check_queue(name: str) -> None:
    """Raise UnknownQueue naming the queues that exist, unless ``name`` is one."""
    if name not in queue_names():
        known = ", ".join(queue_names()) or "none"
        raise UnknownQueue(f"queue {name!r} is not in RQ_QUEUES (there: {known}); add it there")


def reads_json() -> bool:
    """Return whether the project's workers read JSON: exactly those built on DedupWorker."""
    worker = getattr(settings, "RQ", {}).get("WORKER_CLASS")
    found = import_string(worker) if isinstance(worker, str) else worker
    return bool(getattr(found, "reads_json", False))


# ---- what a queue's server still knows


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """
    What a queue's server knows of ours at one moment, as RQ ids.

    ``head``: those popped next, in order. ``popped``: in the intermediate list, so in a worker's
    hands or lost by it. ``started``: in an execution that RQ believes alive.
    """

    head: tuple[str, ...]
    popped: frozenset[str]
    started: frozenset[str]


def view(queue: str, *, count: int) -> QueueView:
    """Read a queue's head, ``count`` ids of it, and what its workers hold; raises RedisError."""
    producer = _producer(queue)
    with producer.deadline(conf.get().LOCK_TIMEOUT):
        seconds: Any = producer.client.time()
        pipe = producer.client.pipeline(transaction=False)
        pipe.lrange(producer.queue.key, 0, count - 1)
        pipe.lrange(producer.queue.intermediate_queue_key, 0, -1)
        pipe.zrangebyscore(producer.queue.started_job_registry.key, seconds[0], "+inf")
        head, popped, started = pipe.execute()
    return QueueView(
        head=tuple(_text(i) for i in head),
        popped=frozenset(_text(i) for i in popped),
        started=frozenset(_text(i).partition(":")[0] for i in started),
    )


def in_queue(queue: str, dispatch_id: str, *, within: int) -> bool:
    """Return whether the id stands among the first ``within`` of the queue; raises RedisError."""
    producer = _producer(queue)
    with producer.deadline(conf.get().LOCK_TIMEOUT):
        found = producer.client.lpos(producer.queue.key, dispatch_id, maxlen=within)
    return found is not None


def reachable_queues() -> list[str]:
    """Return the queues whose Redis answers within LOCK_TIMEOUT."""
    answers: dict[str, bool] = {}
    return [queue for queue in queue_names() if _answers(queue, answers)]


def _answers(queue: str, answers: dict[str, bool]) -> bool:
    server = server_of(queue)
    if server not in answers:
        try:
            with _producer(queue).deadline(conf.get().LOCK_TIMEOUT):
                answers[server] = bool(_producer(queue).client.ping())
        except (RedisError, OSError):
            answers[server] = False
    return answers[server]


def server_of(queue: str) -> str:
    """Return a text that is equal for two queues on the same Redis server and database."""
    kwargs = _producer(queue).client.connection_pool.connection_kwargs
    return ":".join(str(kwargs.get(k, "")) for k in ("host", "port", "path", "db"))


def touch_epoch(queue: str, *, ttl: int) -> bool:
    """
    Renew the key that proves that the queue's server was not wiped; False if it is missing.

    ``ttl``: seconds it lives without a coordinator.
    """
    producer = _producer(queue)
    with producer.deadline(conf.get().LOCK_TIMEOUT):
        return bool(producer.client.expire(_epoch_key(), ttl))


def set_epoch(queue: str, *, ttl: int) -> None:
    """Set that key: all that was lost with the server has been sent again."""
    producer = _producer(queue)
    with producer.deadline(conf.get().LOCK_TIMEOUT):
        producer.client.set(_epoch_key(), clock.utcnow().isoformat(), ex=ttl)


def _epoch_key() -> str:
    return f"{conf.get().PREFIX}:epoch"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


# ---- the producer's own client and its budget


@dataclass(slots=True)
class _Producer:
    """One queue's client, and the budget it shares with the other queues of its process."""

    client: Redis
    queue: Queue
    limit: wire.Deadline
    budget: _Budget

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        self.limit.at = clock.monotonic() + seconds
        try:
            yield
        finally:
            self.limit.at = None

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Run the block within what is left of the budget; an error opens the breaker."""
        left = self.budget.left()  # a refusal must not open the breaker for another second
        begun = clock.monotonic()
        try:
            with self.deadline(left):
                yield
        except (RedisError, OSError):
            self.budget.open()
            raise
        finally:
            self.budget.spend(clock.monotonic() - begun)


@dataclass(slots=True)
class _Budget:
    """PUSH_TIMEOUT of waiting per second, and a breaker that is open after an error."""

    spent: float = 0.0
    since: float = -math.inf
    closed_until: float = -math.inf
    guard: threading.Lock = field(default_factory=threading.Lock)

    def left(self) -> float:
        """Return the seconds that a push may take; RedisTimeout while the breaker is open."""
        with self.guard:
            now = clock.monotonic()
            if now - self.since >= WINDOW:
                self.since, self.spent = now, 0.0
            left = conf.get().PUSH_TIMEOUT - self.spent
            if now < self.closed_until or left <= 0:
                raise RedisTimeout("Redis was unreachable or slow within the last second")
            return left

    def spend(self, seconds: float) -> None:
        with self.guard:
            if seconds > FREE:
                self.spent += seconds

    def open(self) -> None:
        with self.guard:
            self.closed_until = max(self.closed_until, clock.monotonic() + WINDOW)


_budget = _Budget()


@lru_cache(maxsize=64)
def _producer(queue: str) -> _Producer:
    check_queue(queue)
    limit = wire.Deadline()
    config = settings.RQ_QUEUES[queue]
    source = get_redis_connection(config)
    client = wire.own_client(source, timeout=conf.get().PUSH_TIMEOUT, deadline=limit)
    # Not the queue's own SERIALIZER: a stock `rqworker` reads RQ's default, whatever stands there.
    serializer = JSONSerializer if reads_json() else DefaultSerializer
    rq_queue = django_rq.get_queue(
        queue, connection=client, serializer=serializer, commit_mode="auto"
    )
    return _Producer(client=client, queue=rq_queue, limit=limit, budget=_budget)


def forget_clients() -> None:
    """Drop all clients and the breaker, after a fork or a change of settings."""
    _producer.cache_clear()
    _budget.__init__()  # type: ignore[misc]
