"""
Waking a worker up: the producer's side of RQ.

RQ is lossy and doubling, and that is fine: a message only says "look at this row". What matters
here is that a broken Redis costs the caller little (``wire.Budget``): a failed push leaves the
row to the coordinator.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import django_rq
from django.conf import settings
from django.db import transaction
from django.utils.module_loading import import_string
from django_rq.connection_utils import get_redis_connection
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from rq import Queue
from rq.job import Job as RqJob
from rq.job import JobStatus
from rq.serializers import DefaultSerializer, JSONSerializer

from dedupjobs import clock, conf, controls, lifecycle, probes, registry, signals, wire
from dedupjobs.exceptions import UnknownQueue
from dedupjobs.models import ProcessedJob

ENTRY = "dedupjobs.runner.run"  # a path: workers import it, producers never do
BATCH_ENTRY = "dedupjobs.batches.run"  # of messages that name several rows
ENTRIES = (ENTRY, BATCH_ENTRY)
MESSAGE_TTL = 60  # seconds that RQ keeps a finished message; 0 would cost more round trips
QUEUED_TTL = 7 * 86_400  # a message that was popped and lost leaves its hash behind; not for ever
FAILURE_TTL = 86_400
PAGE = 100  # messages of one pipeline
HAND = "-"  # before the number of hands, in the RQ id of a message that was handed on
OF = ", of "  # before the PREFIX in a message's description, where it is no usual one
HANDS = 4  # workers of other projects that a message may come to before it is dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One message: the rows it names, as ``(pk, generation)``, and its RQ id."""

    queue: str
    dispatch_id: str
    name: str
    rows: tuple[tuple[int, int], ...]
    again: bool = False  # its row was tried before: no worker may run it together with others

    @classmethod
    def of(cls, row: ProcessedJob, dispatch_id: str | None) -> Delivery:
        """Return the message of one row."""
        return cls.of_all([row], dispatch_id)

    @classmethod
    def of_all(cls, rows: Sequence[ProcessedJob], dispatch_id: str | None) -> Delivery:
        """Return the message of several rows, which are of one job and queue."""
        return cls(
            queue=rows[0].queue,
            dispatch_id=dispatch_id or "",
            name=rows[0].name,
            rows=tuple((row.pk, row.generation) for row in rows),
            again=any(row.attempts >= row.generation for row in rows),
        )

    @property
    def entry(self) -> str:
        """The function that runs it, as a path."""
        return ENTRY if len(self.rows) == 1 else BATCH_ENTRY


def in_batches(rows: Iterable[ProcessedJob]) -> list[list[ProcessedJob]]:
    """
    Return the rows as messages may carry them: BATCH of one job and queue at most.

    A row that was tried before in its present generation goes by itself: if it has brought a
    batch down, it must not bring down the next one.
    """
    groups: dict[tuple[str, ...], list[ProcessedJob]] = defaultdict(list)
    for row in rows:
        shares = registry.options_of(row.name).batch and row.attempts < row.generation
        groups[(row.queue, row.name) if shares else (str(row.pk),)].append(row)
    size = conf.get().BATCH
    return [
        group[start : start + size]
        for group in groups.values()
        for start in range(0, len(group), size)
    ]


def push_on_commit(deliveries: Sequence[Delivery]) -> None:
    """Push after the outermost commit of the rows' own database; never raises."""

    def push_deliveries() -> None:  # a named function: robust hooks are reported by their name
        push(deliveries)

    if deliveries:
        transaction.on_commit(push_deliveries, using=lifecycle.alias(), robust=True)


def push(deliveries: Iterable[Delivery], *, within: float | None = None) -> int:
    """
    Push what Redis takes, return how many rows; the rest is marked unsent, for the coordinator.

    ``within``: the seconds that each page may take, for a caller that has time; None: what is
    left of the process's budget, for one that serves a request.
    """
    by_queue: dict[str, list[Delivery]] = defaultdict(list)
    for delivery in deliveries:
        by_queue[delivery.queue].append(delivery)
    pushed = 0
    for queue, waiting in by_queue.items():
        for start in range(0, len(waiting), PAGE):
            batch = waiting[start : start + PAGE]
            try:
                wired = _producer(queue).wire
                with wired.spending() if within is None else wired.deadline(within):
                    probes.reach("push.before")
                    _enqueue(queue, batch)
                    probes.reach("push.after")
                pushed += sum(len(delivery.rows) for delivery in batch)
            except (RedisError, OSError, UnknownQueue) as error:
                _leave_to_coordinator(queue, waiting[start:], error)
                break
    return pushed


def _leave_to_coordinator(queue: str, unsent: list[Delivery], error: Exception) -> None:
    lifecycle.mark_unsent([delivery.dispatch_id for delivery in unsent])
    rows = sum(len(delivery.rows) for delivery in unsent)
    signals.tell(signals.hand_over_failed, unsent[0].name, queue=queue, count=rows, error=error)


def remove(queue: str, dispatch_id: str) -> bool:
    """Take a message that nobody has popped out of its queue; False: it is not there."""
    try:
        producer = _producer(queue)
        with producer.deadline(conf.get().LOCK_TIMEOUT):
            gone = producer.client.lrem(producer.queue.key, 1, dispatch_id)
            producer.client.delete(f"rq:job:{dispatch_id}")
    except (RedisError, OSError, UnknownQueue):
        return False
    return bool(gone)


def _enqueue(queue: str, batch: list[Delivery]) -> None:
    """Save RQ jobs and push their ids, as ``Queue.enqueue_many`` does with more commands."""
    producer = _producer(queue)
    # No transaction: an id comes last, and the hash of one that was cut off expires.
    pipe = producer.client.pipeline(transaction=False)
    pipe.sadd(Queue.redis_queues_keys, producer.queue.key)
    for delivery in batch:
        job = producer.queue.create_job(
            delivery.entry,
            args=([list(row) for row in delivery.rows],),
            job_id=delivery.dispatch_id,
            timeout=rq_timeout(delivery),
            ttl=QUEUED_TTL,
            result_ttl=MESSAGE_TTL,
            failure_ttl=FAILURE_TTL,
            description=described(delivery.name, len(delivery.rows), again=delivery.again),
        )
        job.enqueued_at = clock.utcnow()
        job.save(pipeline=pipe)
        pipe.expire(job.key, QUEUED_TTL)
        producer.queue.push_job_id(job.id, pipeline=pipe)
    pipe.execute()


def described(name: str, rows: int = 1, *, again: bool = False) -> str:
    """Return how a message describes itself: its job, how many rows, and whose it is."""
    count = f"{rows} rows" if rows > 1 else "1 row"
    again_or_not = ", again" if again and rows == 1 else ""
    return f"{name} ({count}{again_or_not}{_owner_mark(conf.get().PREFIX)})"


def name_in(description: str) -> str:
    """
    Return the job that a message's description names: a hint, since anybody may have written it.
    """
    return description.rpartition(" (")[0]


@lru_cache(maxsize=8)
def _owner_mark(prefix: str) -> str:
    return "" if prefix == conf.Settings().PREFIX else f"{OF}{quote(prefix, safe=':')}"


# ---- messages of other projects, whose workers share a queue with ours


def is_of_others(description: str) -> bool:
    """Return whether a message of dedupjobs says that it is of a project with another PREFIX."""
    _, of, owner = description.rpartition(OF)
    mark = of + owner.removesuffix(")") if of else ""
    return mark != _owner_mark(conf.get().PREFIX)


def id_as_sent(rq_id: str) -> str:
    """Return the RQ id under which a message was sent, through whose hands it may have come."""
    return rq_id.partition(HAND)[0]


def hand_on(message: RqJob) -> bool:
    """
    Give another project's message to the next worker, or drop it once HANDS have had it.

    It goes back to the head of its queue, under an id of its own since RQ ends this one. Merely
    dropped, it would come again after RESEND_AFTER, and workers who take turns might then miss
    each other's messages for ever. Return False if it was dropped: its own coordinator sends again.
    """
    first, _, passed = message.id.partition(HAND)
    hands = int(passed) + 1 if passed.isdecimal() else 1
    if hands > HANDS:
        return False
    copy = RqJob(f"{first}{HAND}{hands}", connection=message.connection)
    try:
        stored: dict[Any, Any] = message.connection.hgetall(message.key)
        pipe = message.connection.pipeline()
        pipe.hset(copy.key, mapping={**stored, "status": JobStatus.QUEUED.value})
        pipe.hdel(copy.key, "started_at", "worker_name", "last_heartbeat")
        pipe.expire(copy.key, QUEUED_TTL)
        pipe.lpush(f"{Queue.redis_queue_namespace_prefix}{message.origin}", copy.id)
        pipe.execute()
    except (RedisError, OSError):
        return False
    return True


def rq_timeout(delivery: Delivery) -> int:
    """
    Return RQ's own time-out for a message in whole seconds, -1 for none.

    Our alarm ends a job; RQ's is the net below it, so it comes later, and later than the grace
    after which a DedupWorker kills the process.
    """
    timeout = controls.known().options_of(delivery.name).timeout
    if timeout is None:
        return -1
    grace = conf.get().TIMEOUT_GRACE
    return math.ceil((timeout + 2 * grace) * len(delivery.rows)) + 1


def queue_names() -> list[str]:
    """Return the names of RQ_QUEUES."""
    given = getattr(settings, "RQ_QUEUES", {})
    return list(given) if isinstance(given, Mapping) else []


def why_unusable(queue: str) -> str:
    """Return why a queue's settings give no connection, or an empty string; connects to nobody."""
    given = settings.RQ_QUEUES[queue]
    try:
        get_redis_connection(given)
    except Exception as error:  # whatever django-rq and redis-py make of them
        kind = type(error).__name__
        # An error about a URL may quote a part of the password in it.
        return kind if "@" in str(given) else f"{kind}: {error}"
    return ""


def check_queue(name: str) -> None:
    """Raise UnknownQueue naming the queues that exist, unless ``name`` is one."""
    if name not in queue_names():
        known = ", ".join(queue_names()) or "none"
        raise UnknownQueue(f"queue {name!r} is not in RQ_QUEUES (there: {known}); add it there")


def reads_json() -> bool:
    """Return whether the project's workers read JSON: exactly those built on DedupWorker."""
    given = getattr(settings, "RQ", {})
    worker = given.get("WORKER_CLASS") if isinstance(given, Mapping) else None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """
    Where one RQ id stands on its queue's server.

    ``place``: from 0, of ``length`` in the queue; None: not among the first TRACED. ``registries``:
    RQ's registries that name it, without those whose time for it is over. ``status``: what its
    hash says; None: there is no hash.
    """

    place: int | None
    length: int
    popped: bool
    started: bool
    registries: tuple[str, ...]
    status: str | None

    @property
    def alive(self) -> bool:
        """Whether a worker has it or will get it."""
        return self.place is not None or self.popped or self.started

    @property
    def leftover(self) -> bool:
        """Whether a registry or list names a message that has no hash."""
        named = self.alive or self.registries
        return bool(named) and self.status is None


TRACED = 10_000  # ids of a queue that are searched for one


def trace(queue: str, dispatch_id: str) -> Trace:
    """Look for one message, at a bounded cost; raises RedisError, UnknownQueue."""
    producer = _producer(queue)
    rq_queue = producer.queue
    with producer.deadline(conf.get().LOCK_TIMEOUT):
        pipe = producer.client.pipeline(transaction=False)
        pipe.lpos(rq_queue.key, dispatch_id, maxlen=TRACED)
        pipe.llen(rq_queue.key)
        pipe.lpos(rq_queue.intermediate_queue_key, dispatch_id, maxlen=TRACED)
        pipe.zrange(rq_queue.started_job_registry.key, 0, TRACED)
        pipe.hget(f"rq:job:{dispatch_id}", "status")
        for name in _REGISTRIES:
            pipe.zscore(f"rq:{name}:{queue}", dispatch_id)
        pipe.time()  # last: a hash that is seen to have ended was named until then at most
        answers = pipe.execute(raise_on_error=False)
    place, length, popped, started, status, *scores, seconds = answers
    return Trace(
        place=place if isinstance(place, int) else None,
        length=length if isinstance(length, int) else 0,
        popped=isinstance(popped, int),
        started=dispatch_id in {_text(i).partition(":")[0] for i in _listed(started)},
        registries=tuple(
            name
            for name, score in zip(_REGISTRIES, scores, strict=True)
            if isinstance(score, float) and not _is_over(name, score, seconds)
        ),
        status=_text(status) if isinstance(status, (bytes, str)) else None,
    )


_REGISTRIES = ("finished", "failed", "deferred", "scheduled", "canceled")
_ENDING = ("finished", "failed")  # a score there is the second in which the entry ends


def _is_over(registry: str, score: float, seconds: Any) -> bool:
    """Whether RQ, which cleans up now and then, has merely not removed an entry yet."""
    return registry in _ENDING and isinstance(seconds, (tuple, list)) and score <= float(seconds[0])


def _listed(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else []


def forget(queue: str, dispatch_id: str) -> None:
    """Remove a message from its queue, and what RQ's registries keep of it; raises RedisError."""
    producer = _producer(queue)
    started = producer.queue.started_job_registry.key
    with producer.deadline(conf.get().LOCK_TIMEOUT):
        executions = producer.client.zrange(started, 0, TRACED)
        pipe = producer.client.pipeline(transaction=False)
        pipe.lrem(producer.queue.key, 0, dispatch_id)
        pipe.lrem(producer.queue.intermediate_queue_key, 0, dispatch_id)
        for execution in _listed(executions):
            if _text(execution).partition(":")[0] == dispatch_id:
                pipe.zrem(started, execution)
        for name in _REGISTRIES:
            pipe.zrem(f"rq:{name}:{queue}", dispatch_id)
        pipe.delete(f"rq:job:{dispatch_id}")
        pipe.execute()


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
    try:
        return wire.address_of(_producer(queue).client)
    except RedisError:  # its settings name none
        return f"none of {queue}"


@dataclass(frozen=True, slots=True)
class Workers:
    """
    The workers that listen to a queue, and the messages that wait for them. ``newest``: seconds
    since one of them gave a sign.
    """

    count: int
    newest: float | None
    messages: int


LOOKED_AT = 100  # workers of a queue that are asked when they gave their last sign


def workers(queue: str) -> Workers:
    """Return who listens to a queue, as RQ's books have it; raises RedisError."""
    producer = _producer(queue)
    with producer.deadline(conf.get().LOCK_TIMEOUT):
        pipe = producer.client.pipeline(transaction=False)
        pipe.scard(f"rq:workers:{queue}")
        pipe.srandmember(f"rq:workers:{queue}", LOOKED_AT)
        pipe.llen(producer.queue.key)
        count, keys, messages = pipe.execute()
        for key in keys:
            pipe.hget(key, "last_heartbeat")
        beats = pipe.execute(raise_on_error=False) if keys else []
    now = clock.utcnow()
    ages = [max((now - at).total_seconds(), 0.0) for at in map(_moment, beats) if at]
    return Workers(count, min(ages, default=None), messages)


def _moment(text: Any) -> datetime | None:
    """Return a moment as RQ writes it, or None for anything else."""
    try:
        return datetime.fromisoformat(_text(text)).astimezone(UTC)
    except (TypeError, ValueError, AttributeError):
        return None


def one_queue_per_server() -> list[str]:
    """Return the first queue of each Redis server."""
    firsts = {server_of(queue): queue for queue in reversed(queue_names())}
    return sorted(firsts.values(), key=queue_names().index)


def server_time(queue: str) -> float:
    """Return the clock of a queue's server, in Unix seconds; raises RedisError."""
    producer = _producer(queue)
    with producer.deadline(conf.get().LOCK_TIMEOUT):
        return wire.time_of(producer.client)


def server_facts(queue: str) -> dict[str, Any]:
    """Return what a queue's server says of itself; raises RedisError."""
    producer = _producer(queue)
    with producer.deadline(conf.get().LOCK_TIMEOUT):
        return dict(producer.client.info())


def memory(queue: str) -> wire.Memory:
    """Return how much memory a queue's server uses; raises RedisError."""
    producer = _producer(queue)
    with producer.deadline(conf.get().LOCK_TIMEOUT):
        return wire.memory_of(producer.client)


def client_of(queue: str) -> wire.Client:
    """Return the client that pushes to a queue."""
    return _producer(queue).wire


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
    # Whoever writes to this Redis may have put anything there; an id that is no text is not ours.
    return value.decode(errors="replace") if isinstance(value, bytes) else value


# ---- the producer's own client


@dataclass(slots=True)
class _Producer:
    """A queue, and the client that pushes to it."""

    queue: Queue
    wire: wire.Client

    @property
    def client(self) -> Redis:
        return self.wire.redis

    def deadline(self, seconds: float) -> AbstractContextManager[None]:
        return self.wire.deadline(seconds)


@lru_cache(maxsize=64)
def _producer(queue: str) -> _Producer:
    check_queue(queue)
    if wrong := why_unusable(queue):
        raise RedisConnectionError(f"RQ_QUEUES[{queue!r}] gives no connection: {wrong}")
    config = settings.RQ_QUEUES[queue]
    own = wire.Client.to(get_redis_connection(config), timeout=conf.get().PUSH_TIMEOUT)
    # Not the queue's own SERIALIZER: a stock `rqworker` reads RQ's default, whatever stands there.
    serializer = JSONSerializer if reads_json() else DefaultSerializer
    rq_queue = django_rq.get_queue(
        queue, connection=own.redis, serializer=serializer, commit_mode="auto"
    )
    return _Producer(queue=rq_queue, wire=own)


def forget_clients() -> None:
    """Drop all clients and the breaker, after a fork or a change of settings."""
    _producer.cache_clear()
    wire.budget.reset()
