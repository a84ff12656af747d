"""What the helpers stand on: they work in tests only, and without Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from django.test import utils
from redis import Connection, ConnectionPool, Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from dedupjobs import (
    bell,
    cache,
    counters,
    dispatch,
    invalidation,
    locks,
    registry,
    stats,
    streams,
    wire,
)
from dedupjobs.exceptions import OutsideTests
from dedupjobs.locks import Grip, Taken
from dedupjobs.registry import Job, Variant


def only_in_tests(helper: str) -> None:
    """Raise OutsideTests unless a test runner has prepared this process."""
    if not hasattr(utils._TestState, "saved_data"):
        raise OutsideTests(
            f"{helper} changes how the whole process works, so it is for tests only: no test "
            "runner (manage.py test, pytest-django) has called setup_test_environment() here"
        )


def variant_of(given: Any, helper: str) -> Variant:
    """Return the job that a helper was given, be it a job, a variant or a task of our backend."""
    if isinstance(given, Variant):
        return given
    found = given if isinstance(given, Job) else _job_of_task(given)
    if found is None:
        raise TypeError(
            f"{helper} was given {given!r}. Give the job itself, what @job has made of the "
            "function, or a task of a DedupBackend"
        )
    return Variant(job=found, key=getattr(given, "call_key", None))


def _job_of_task(given: Any) -> Job[..., Any] | None:
    """Return the job that the backend has made of a task, which it knows by both of these."""
    wanted = getattr(given, "func", None), getattr(given, "backend", None)
    for job in registry.every():
        task = getattr(job.func, "task", None)
        if task is not None and (task.func, task.backend) == wanted:
            return job
    return None


@contextmanager
def without_redis(*, missed: bool = False) -> Iterator[None]:
    """
    Let every Redis call of ours fail at once, whatever the settings say and whoever is there.

    ``missed``: on_redis_error is obeyed, also in the blocks around it and inside; else nobody takes
    a lock, and nobody misses one.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(wire, "own_client", _cut_off))
        stack.enter_context(mock.patch.object(invalidation, "ensure_listening", _listen_to_nobody))
        if missed:
            _losses.append(True)
            stack.callback(_losses.pop)
        else:
            stack.enter_context(mock.patch.object(locks, "take", _if_lost(locks.take, _take_none)))
            asked = _if_lost(locks.why_unreachable, str)
            stack.enter_context(mock.patch.object(locks, "why_unreachable", asked))
        _forget_clients()
        try:
            yield
        finally:
            _forget_clients()


_losses: list[bool] = []  # one for each open block in which locks are missed


def locks_are_missed() -> bool:
    """Whether a block is open in which Redis is lost."""
    return bool(_losses)


def _if_lost(ask: Callable[..., Any], else_: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*args: Any, **kwargs: Any) -> Any:
        return (ask if _losses else else_)(*args, **kwargs)

    return asked


class _NoConnection(Connection):
    def connect(self) -> None:
        raise RedisConnectionError("dedupjobs.testing keeps this test from Redis")


def _cut_off(*_: Any, **__: Any) -> Redis:
    return Redis(connection_pool=ConnectionPool(connection_class=_NoConnection))


def _listen_to_nobody() -> None: ...


def _take_none(*_: Any, **__: Any) -> Taken:
    return Taken(Grip.UNUSED)


def _forget_clients() -> None:
    for door in (dispatch, locks, stats, counters, cache, bell, streams):
        door.forget_clients()
