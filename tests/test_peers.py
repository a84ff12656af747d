"""What docs/comparison.md says of RQ alone, run against the RQ that is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import Redis
from rq import Queue, SimpleWorker
from rq.exceptions import DuplicateJobError
from rq.job import Job as RqJob

from tests.servers import Valkey

ERA = 365 * 86_400


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    with Valkey() as one:
        yield one


@pytest.fixture
def client(server: Valkey) -> Iterator[Redis]:
    with server.client() as one:
        one.flushall()
        yield one


def fine() -> str:
    return "done"


def wrong() -> None:
    raise ValueError("no")


def run(queue: Queue) -> None:
    SimpleWorker([queue], connection=queue.connection).work(burst=True, logging_level="ERROR")


@pytest.mark.parametrize(("function", "taken_for"), [(fine, 500), (wrong, ERA)])
def test_unique_id_stays_taken_for_as_long_as_redis_keeps_the_hash(
    client: Redis, function: object, taken_for: int
) -> None:
    queue = Queue("default", connection=client)
    queue.enqueue(function, job_id="order-7", unique=True)  # type: ignore[arg-type]
    run(queue)
    assert taken_for - 60 < client.ttl("rq:job:order-7") <= taken_for
    with pytest.raises(DuplicateJobError):
        queue.enqueue(function, job_id="order-7", unique=True)  # type: ignore[arg-type]


def test_unique_id_is_free_again_once_redis_has_lost_the_hash(client: Redis) -> None:
    queue = Queue("default", connection=client)
    queue.enqueue(fine, job_id="order-7", unique=True)
    run(queue)
    client.flushall()
    assert queue.enqueue(fine, job_id="order-7", unique=True).id == "order-7"


def test_job_popped_from_two_queues_by_a_worker_that_dies_is_in_no_list(client: Redis) -> None:
    queues = [Queue(name, connection=client) for name in ("high", "default")]
    queues[1].enqueue(fine, job_id="order-7")
    assert Queue.dequeue_any(queues, timeout=1, connection=client) is not None  # and it dies here
    lists = [*client.scan_iter("rq:queue:*"), *client.scan_iter("rq:wip:*")]
    assert lists == []
    assert RqJob.fetch("order-7", connection=client).get_status() == "queued"
    assert client.ttl("rq:job:order-7") == -1
