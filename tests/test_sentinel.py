"""Behind Sentinel: our clients find the primary in time, past what is silent, and once it moved."""

from __future__ import annotations

import itertools
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from django.test import override_settings
from redis.sentinel import Sentinel as Asked

from dedupjobs import cache, invalidation, wire
from dedupjobs.wire import UNREACHABLE
from tests.servers import HOST, Sentinel, Valkey
from tests.waiting import until

Address = tuple[str, int]
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def primary() -> Iterator[Valkey]:
    with Valkey(bundled=True) as server:
        yield server


@pytest.fixture(scope="module")
def sentinel(primary: Valkey) -> Iterator[Sentinel]:
    with Sentinel(primary) as server:
        yield server


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A host that takes connections, and then says nothing."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        found.listen(16)
        found.setblocking(False)
        yield found


@pytest.fixture
def silent(listening: socket.socket) -> Address:
    return listening.getsockname()


def callers(listening: socket.socket) -> int:
    """Hang up on all who have called since the last time, and return how many there were."""
    for found in itertools.count():
        try:
            listening.accept()[0].close()
        except BlockingIOError:
            return found
    raise AssertionError


def source(*sentinels: Address, service: str = "jobs", db: int = 0) -> redis.Redis:
    """Return a client as django-rq makes it of a queue's SENTINELS."""
    asked = Asked(list(sentinels), sentinel_kwargs={}, db=db, socket_timeout=None)
    return asked.master_for(service)


def test_client_finds_the_primary_past_a_sentinel_that_says_nothing(
    sentinel: Sentinel, silent: Address
) -> None:
    client = wire.Client.to(source(silent, (HOST, sentinel.port)), timeout=4)
    with client.deadline(4):
        assert client.redis.ping()


def test_client_remembers_which_sentinel_has_answered(
    sentinel: Sentinel, listening: socket.socket, silent: Address
) -> None:
    client = wire.Client.to(source(silent, (HOST, sentinel.port)), timeout=4)
    with client.deadline(4):
        client.redis.ping()
    assert callers(listening) == 1
    client.redis.connection_pool.disconnect()
    with client.deadline(4):
        client.redis.ping()
    assert callers(listening) == 0


def test_deadline_is_kept_where_all_sentinels_are_silent(silent: Address) -> None:
    client = wire.Client.to(source(silent, silent, silent), timeout=1.5)
    begun = time.monotonic()
    with client.deadline(1.5), pytest.raises(UNREACHABLE):
        client.redis.ping()
    assert time.monotonic() - begun < 4  # 4.5 s, if each had all of it


def test_deadline_is_kept_where_the_primary_hangs(sentinel: Sentinel, primary: Valkey) -> None:
    client = wire.Client.to(source((HOST, sentinel.port)), timeout=30)
    with primary.client() as boss:
        client.redis.ping()
        boss.client_pause(30_000, all=False)
        begun = time.monotonic()
        try:
            with client.deadline(0.5), pytest.raises(UNREACHABLE):
                client.redis.set("a", "b")
        finally:
            boss.client_unpause()
        assert time.monotonic() - begun < 10


class Interrupted(BaseException):
    """As our own time-out is: no error that redis-py knows."""


@contextmanager
def interrupted_once(waits: Callable[[], bool]) -> Iterator[None]:
    """A signal interrupts this thread in the block, once it waits: never before nor after."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    def watch() -> None:
        until(waits)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, interrupt)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        watcher.join()
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("whose", ["own", "a worker's"])
def test_call_that_is_cut_off_leaves_no_answer_to_the_next_one(
    sentinel: Sentinel, primary: Valkey, whose: str
) -> None:
    client = source((HOST, sentinel.port))
    if whose == "own":
        client = wire.own_client(client, timeout=20)
    else:
        wire.mend(client)
    client.client_setname("waiter")
    with primary.client() as boss:

        def waits() -> bool:
            return any(c["name"] == "waiter" and "b" in c["flags"] for c in boss.client_list())

        with interrupted_once(waits):
            client.blpop(["nothing"], timeout=15)
    assert client.echo("mine") == b"mine"


def test_workers_client_asks_past_a_sentinel_that_says_nothing(
    sentinel: Sentinel, silent: Address
) -> None:
    client = source(silent, (HOST, sentinel.port))
    wire.mend(client)
    begun = time.monotonic()
    assert client.ping()
    assert time.monotonic() - begun < wire.ASKED


def test_project_keeps_its_own_time_outs(sentinel: Sentinel) -> None:
    theirs = source((HOST, sentinel.port))
    before = dict(theirs.connection_pool.connection_kwargs)
    own = wire.own_client(theirs, timeout=0.5)
    assert theirs.connection_pool.connection_kwargs == before
    assert own.connection_pool is not theirs.connection_pool
    assert own.ping()


def test_address_tells_services_and_databases_apart(sentinel: Sentinel) -> None:
    place = (HOST, sentinel.port)
    one = wire.address_of(source(place))
    assert one == f"jobs by {HOST}:{sentinel.port}/0"
    assert wire.address_of(source(place, service="other")) != one
    assert wire.address_of(source(place, db=1)) != one
    assert wire.address_of(source(place)) == one


@pytest.mark.large
def test_client_follows_the_primary_after_a_kill(silent: Address) -> None:
    with Valkey(bundled=True) as first:
        second = Valkey("--replicaof", HOST, str(first.port), bundled=True)
        with second, Sentinel(first) as sentinel:
            client = wire.Client.to(source(silent, (HOST, sentinel.port)), timeout=0.5)
            until(lambda: sentinel.replicas() == 1, 30)
            with client.deadline(1):
                client.redis.set("there", "before")
            first.kill()
            until(lambda: _writes(client), 30)
            assert sentinel.primary_port() == second.port
            with second.client() as direct:
                assert direct.get("there") == b"after"


def _writes(client: wire.Client) -> bool:
    try:
        with client.deadline(0.5):
            return bool(client.redis.set("there", "after"))
    except UNREACHABLE:
        return False


@pytest.fixture
def failing_over() -> Iterator[tuple[Valkey, Sentinel]]:
    """A primary with a replica that is ready to take over, behind this process's status cache."""
    with Valkey(bundled=True) as first:
        second = Valkey("--replicaof", HOST, str(first.port), bundled=True)
        with second, Sentinel(first) as sentinel:
            until(lambda: sentinel.replicas() == 1, 30)
            with override_settings(CACHES={"default": watched(sentinel, db=5)}):
                cache.forget_clients()
                yield first, sentinel
            cache.forget_clients()


def watched(sentinel: Sentinel, *, db: int) -> dict[str, object]:
    """Return a cache's settings; ``db``: of its own, since django-redis shares pools by URL."""
    options = {
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "SENTINELS": [(HOST, sentinel.port)],
    }
    backend = "django_redis.cache.RedisCache"
    return {"BACKEND": backend, "LOCATION": f"redis://jobs/{db}", "OPTIONS": options}


@pytest.mark.large
def test_listener_hears_again_after_a_failover(failing_over: tuple[Valkey, Sentinel]) -> None:
    first, sentinel = failing_over
    heard: list[object] = []
    over = threading.Event()

    def hear() -> None:
        for raw in invalidation.messages(over.is_set, poll=0.1):
            heard.append(raw)

    def hears() -> bool:
        """Tell something, and return whether anything has been heard since the last connection."""
        invalidation.announce_controls()
        return heard[-1] is not None

    listener = threading.Thread(target=hear)
    listener.start()
    try:
        until(lambda: heard == [None])
        until(hears, 10, every=0.1)
        first.kill()
        until(invalidation.announce_controls, 30, what="the new primary takes it")
        assert sentinel.primary_port() != first.port
        until(lambda: heard.count(None) > 1, 20, what="the listener has noticed")
        until(hears, 20, every=0.1)
    finally:
        over.set()
        listener.join()


@pytest.mark.large
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", ["primary stopped, back as a second one"])
def test_failover_under_load_loses_and_doubles_nothing(fault: str) -> None:
    command = [sys.executable, "-m", "tests.faults.sentinels", "--only", fault]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "1 fail-overs: 0 violations" in done.stdout
