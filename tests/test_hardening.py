"""Both ends of a worker's database connection notice a host that is gone, within seconds."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from django.db import connection

from dedupjobs import hardening
from tests import live, sessions
from tests.live import Spawn
from tests.sessions import needs_server
from tests.waiting import until

TCP = Path("/proc/net/tcp")
KEEPALIVE = "02"  # the timer that runs, as /proc/net/tcp has it
TICKS = 100  # of that table, per second

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(not TCP.exists(), reason="only Linux tells the timers of sockets"),
]
on_postgresql = pytest.mark.skipif(
    connection.vendor != "postgresql", reason="only PostgreSQL tells the ports of its clients"
)


@pytest.fixture
def hardened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process's connections are a worker's, and one is open."""
    monkeypatch.setattr(hardening, "_hardened", threading.Event())
    connection.close()
    hardening.harden_connections()
    connection.ensure_connection()
    yield
    connection.close()


def socket_of(raw: object) -> socket.socket:
    """Return another handle of the socket below a driver's connection."""
    below = raw if hasattr(raw, "fileno") else raw._sock  # type: ignore[attr-defined]
    return socket.socket(fileno=os.dup(below.fileno()))


def timers(port: int) -> list[float]:
    """Return the seconds until each end of a loopback connection asks whether the other lives."""
    found = []
    # Connections to other servers may start from the same port.
    ends = {f"{port:04X}", f"{int(connection.settings_dict['PORT']):04X}"}
    for line in TCP.read_text().splitlines()[1:]:
        _, here, there, _, _, timer, *_ = line.split()
        kind, _, left = timer.partition(":")
        if {here[-4:], there[-4:]} == ends and kind == KEEPALIVE:
            found.append(int(left, 16) / TICKS)
    return found


@needs_server
def test_workers_end_of_a_connection_gives_a_vanished_server_up(hardened: None) -> None:
    with closing(socket_of(connection.connection)) as twin:
        assert twin.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
        unacknowledged = twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert unacknowledged == hardening.VANISHED * 1000


@on_postgresql
def test_servers_end_of_a_connection_gives_a_vanished_worker_up(hardened: None) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SHOW tcp_user_timeout")
        assert cursor.fetchone() == (str(hardening.VANISHED * 1000),)
        cursor.execute("SELECT inet_client_port()")
        (port,) = cursor.fetchone()

    def both_ask() -> bool:
        left = timers(port)
        return len(left) == 2 and max(left) <= 10

    until(both_ask, what="nothing is unacknowledged, and both ends ask within 10 s")


@needs_server
def test_projects_own_choice_of_time_outs_stands(
    hardened: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**connection.settings_dict["OPTIONS"], "keepalives_idle": 60}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    with closing(socket_of(connection.connection)) as twin:
        twin.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        hardening._harden(connection)
        assert twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


@on_postgresql
def test_coordinator_by_itself_hardens_its_connections(spawn: Spawn) -> None:
    before = set(sessions.others())
    live.start_coordinator(spawn)

    def asks() -> bool:
        ends = [left for port in _ports(but=before) for left in timers(port)]
        return bool(ends) and max(ends) <= 10

    until(asks, what="the coordinator has a session whose ends ask within 10 s")


def _ports(*, but: set[int]) -> list[int]:
    query = "SELECT client_port FROM pg_stat_activity WHERE pid = ANY(%s)"
    with connection.cursor() as cursor:
        cursor.execute(query, [list(set(sessions.others()) - but)])
        return [port for (port,) in cursor.fetchall()]
