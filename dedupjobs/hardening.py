"""
What a worker's database connections are set to, so that neither side waits for a vanished one.

By default PostgreSQL keeps an idle transaction for ever and notices a vanished peer after two
hours; until then the rows that it had locked can not be reclaimed. And a client waits as long for
the answer of a server whose host is gone; with a request on its way, for a quarter of an hour.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import Any

from django.db import InterfaceError, OperationalError, connections
from django.db.backends.signals import connection_created

from dedupjobs import conf, registry

_POSTGRESQL = """
SELECT set_config('idle_in_transaction_session_timeout', %s, false),
       set_config('tcp_keepalives_idle', '10', false),
       set_config('tcp_keepalives_interval', '5', false),
       set_config('tcp_keepalives_count', '3', false),
       set_config('tcp_user_timeout', '25s', false)
"""
_MARIADB = "SET SESSION idle_transaction_timeout = %s"

VANISHED = 25  # seconds of silence after which a peer's host is taken for gone
_OWN_END = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": VANISHED * 1000,  # also for what was sent and is not acknowledged
}
_THEIRS = ("keepalives", "keepalives_idle", "tcp_user_timeout")  # libpq's, where a project has some

_hardened = threading.Event()


def harden_connections() -> None:
    """Set this process's open and future connections; to be called once per worker process."""
    if _hardened.is_set():
        return
    _hardened.set()
    connection_created.connect(_on_created, dispatch_uid="dedupjobs.hardening")
    for connection in connections.all(initialized_only=True):
        if connection.connection is not None and not connection.in_atomic_block:
            try:
                _harden(connection)
            except (OperationalError, InterfaceError):  # dead: the next one is set as it opens
                connection.close()


def idle_limit() -> int:
    """Return the seconds a transaction may idle: the longest time-out of all jobs and the grace.

    0, no limit, if one of the jobs may run without end.
    """
    timeouts = [job.options.timeout for job in registry.every()]
    if not timeouts or None in timeouts:
        return 0
    return int(max(t for t in timeouts if t is not None) + conf.get().TIMEOUT_GRACE) + 1


def _on_created(connection: Any, **_: Any) -> None:
    _harden(connection)


def _harden(connection: Any) -> None:
    if not any(option in connection.settings_dict["OPTIONS"] for option in _THEIRS):
        _mind_own_end(connection.connection)
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(_POSTGRESQL, [f"{idle_limit()}s"])
    elif connection.vendor == "mysql" and connection.mysql_is_mariadb:
        with connection.cursor() as cursor:
            cursor.execute(_MARIADB, [idle_limit()])


def _mind_own_end(raw: Any) -> None:
    """Let this side notice that the server's host is gone, if its driver shows a socket."""
    fileno = getattr(raw, "fileno", None) or getattr(getattr(raw, "_sock", None), "fileno", None)
    if fileno is None:
        return
    with suppress(OSError), socket.socket(fileno=os.dup(fileno())) as twin:
        if twin.family not in (socket.AF_INET, socket.AF_INET6):
            return
        twin.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OWN_END.items():
            if hasattr(socket, name):  # not every system has each
                twin.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
