"""What the helpers stand on: they work in tests only, and without Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from django.test import utils
from redis import Connection, ConnectionPool, Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from dedupjobs import bell, cache, counters, dispatch, invalidation, locks, stats, streams, wire
from dedupjobs.exceptions import OutsideTests


def only_in_tests(helper: str) -> None:
    """Raise OutsideTests unless a test runner has prepared this process."""
    if not hasattr(utils._TestState, "saved_data"):
        raise OutsideTests(
            f"{helper} changes how the whole process works, so it is for tests only: no test "
            "runner (manage.py test, pytest-django) has called setup_test_environment() here"
        )


@contextmanager
def without_redis() -> Iterator[None]:
    """Let every Redis call of ours fail at once, whatever the settings say and whoever is there."""
    with (
        mock.patch.object(wire, "own_client", _cut_off),
        mock.patch.object(invalidation, "ensure_listening", _listen_to_nobody),
    ):
        _forget_clients()
        try:
            yield
        finally:
            _forget_clients()


class _NoConnection(Connection):
    def connect(self) -> None:
        raise RedisConnectionError("dedupjobs.testing keeps this test from Redis")


def _cut_off(*_: Any, **__: Any) -> Redis:
    return Redis(connection_pool=ConnectionPool(connection_class=_NoConnection))


def _listen_to_nobody() -> None: ...


def _forget_clients() -> None:
    for door in (dispatch, locks, stats, counters, cache, bell, streams):
        door.forget_clients()
