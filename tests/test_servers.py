"""The suite's own tools work: servers, proxy, polling, spawned processes."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
import redis
from django.db import connection

from tests.app.models import Ledger
from tests.processes import Spawned
from tests.proxy import CHUNK, Proxy
from tests.servers import HOST, PostgreSQL, Valkey
from tests.waiting import until


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


@pytest.fixture
def proxy(valkey: Valkey) -> Iterator[Proxy]:
    with Proxy(valkey.port) as proxy:
        yield proxy


@pytest.fixture
def client(valkey: Valkey, proxy: Proxy) -> Iterator[redis.Redis]:
    """A client that goes through the proxy, asks once and waits for three seconds."""
    with valkey.client() as direct:
        direct.flushall()
    with redis.Redis.from_url(
        f"redis://127.0.0.1:{proxy.port}", socket_timeout=3, socket_connect_timeout=3
    ) as client:
        yield client


def test_valkey_killed_and_restarted_answers_on_the_same_port_without_its_data() -> None:
    with Valkey() as server, server.client(255) as client:
        client.set("a", 1)
        port = server.port
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        server.restart()
        assert server.port == port
        assert client.get("a") is None


def test_valkey_left_ends_its_process_and_removes_its_data() -> None:
    with Valkey() as server:
        assert server.process is not None
        pid = server.process.pid
    assert not psutil.pid_exists(pid)
    assert not server.home.exists()


def test_valkey_with_a_wrong_argument_says_why_it_did_not_start() -> None:
    with pytest.raises(Exception, match="nonsense"), Valkey("--nonsense", "1"):
        pass


def test_postgresql_serves_over_tcp_and_ends_although_a_client_stays() -> None:
    with PostgreSQL() as server:
        assert server.process is not None
        pid = server.process.pid
        client = server.connect()
        client.execute("CREATE DATABASE other")
        with server.connect("other") as other:
            assert other.execute("SHOW max_connections").fetchone() == ("200",)
    with pytest.raises(psycopg.OperationalError):
        client.execute("SELECT 1")
    client.close()
    assert not psutil.pid_exists(pid)


def test_proxy_reset_is_seen_as_such_by_the_client(proxy: Proxy) -> None:
    with socket.create_connection((HOST, proxy.port)) as sock:
        sock.sendall(b"PING\r\n")
        assert sock.recv(100) == b"+PONG\r\n"
        proxy.reset()
        sock.settimeout(10)
        with pytest.raises(ConnectionResetError):
            sock.recv(100)


def test_proxy_slices_replies(client: redis.Redis, proxy: Proxy) -> None:
    client.set("a", "x" * 1000)
    proxy.slice(3)
    assert client.get("a") == b"x" * 1000
    with socket.create_connection((HOST, proxy.port)) as sock:
        sock.settimeout(10)

        def pieces() -> list[bytes]:
            found: list[bytes] = []
            sock.sendall(b"GET a\r\n")
            while not b"".join(found).endswith(b"x\r\n"):
                found.append(sock.recv(CHUNK))
            return found

        until(lambda: len(pieces()) > 1, 30, what="slices that a busy machine has not joined")


def test_proxy_cuts_before_a_request_arrives(client: redis.Redis, proxy: Proxy) -> None:
    client.set("a", "old")
    proxy.cut_before(b"new")
    with pytest.raises(redis.ConnectionError):
        client.set("a", "new")
    assert proxy.swallowed.is_set()
    assert client.get("a") == b"old"


def test_proxy_passes_requests_and_replies(client: redis.Redis) -> None:
    client.set("a", "x" * 1_000_000)
    assert client.strlen("a") == 1_000_000


def test_proxy_refuses_then_passes_on_the_same_port(proxy: Proxy, client: redis.Redis) -> None:
    proxy.refuse()
    with pytest.raises(redis.ConnectionError, match="refused"):
        client.ping()
    proxy.pass_through()
    assert client.ping()


def test_proxy_refusing_leaves_open_connections_until_they_are_cut(
    proxy: Proxy, client: redis.Redis
) -> None:
    client.ping()
    proxy.refuse()
    assert client.ping()
    proxy.cut()
    with pytest.raises(redis.ConnectionError):
        client.ping()


def test_proxy_as_black_hole_takes_requests_and_never_answers(
    proxy: Proxy, client: redis.Redis, valkey: Valkey
) -> None:
    proxy.black_hole()
    with pytest.raises(redis.TimeoutError):
        client.incr("a")
    proxy.pass_through()
    assert client.incr("a") == 1


def test_proxy_delays_replies(proxy: Proxy, client: redis.Redis) -> None:
    client.ping()
    proxy.delay(0.1)
    start = time.monotonic()
    client.ping()
    assert time.monotonic() - start >= 0.1
    proxy.delay(30)
    with pytest.raises(redis.TimeoutError):
        client.ping()


def test_proxy_swallows_one_reply_after_the_server_has_acted(
    proxy: Proxy, client: redis.Redis, valkey: Valkey
) -> None:
    proxy.swallow_reply_to(b"marked")
    assert client.incr("other") == 1
    with pytest.raises(redis.ConnectionError):
        client.incr("marked")
    assert proxy.swallowed.is_set()
    assert client.incr("marked") == 2


def test_proxy_closed_leaves_no_thread(valkey: Valkey) -> None:
    before = threading.active_count()
    with Proxy(valkey.port) as proxy:
        clients = [redis.Redis(port=proxy.port) for _ in range(3)]
        assert all(client.ping() for client in clients)
    assert threading.active_count() == before
    for client in clients:
        client.close()


def test_until_returns_the_answer_or_names_what_it_waited_for() -> None:
    answers = iter([0, None, "yes"])
    assert until(lambda: next(answers)) == "yes"
    with pytest.raises(AssertionError, match="pigs fly"):
        until(lambda: 0, seconds=0, what="pigs fly")


def test_spawned_process_reaches_the_test_database(
    spawn: Callable[..., Spawned],
) -> None:
    Ledger.objects.create(tag="from the test")
    code = (
        "from tests.app.models import Ledger; row = Ledger.objects.get();"
        "Ledger.objects.create(tag=f'seen {row.tag}')"
    )
    process = spawn("shell", "--no-imports", "-c", code)
    assert process.wait(60) == 0, process.output
    assert Ledger.objects.filter(tag="seen from the test").exists()
    assert connection.vendor in {"sqlite", "postgresql", "mysql"}


def test_spawned_process_stopped_takes_its_orphans_along(tmp_path: Path) -> None:
    # The child leaves the process group, as RQ's horses do.
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n    os.setpgrp()\n"
        "print('up', flush=True)\n"
        "time.sleep(60)"
    )
    process = Spawned((sys.executable, "-c", code), {})
    until(lambda: process.output.count("up") == 2)
    (orphan,) = process.children()
    process.signal(signal.SIGKILL)
    process.wait()
    assert psutil.pid_exists(orphan)
    process.stop()
    assert not psutil.pid_exists(orphan)
