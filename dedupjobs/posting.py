"""
A POST to a web hook: one deadline for all of it, no redirects, nothing of the answer is kept.

A redirect is not followed: whoever answers may not choose whom this machine calls next. The
system's certificates are checked, and no proxy of the environment is asked.
"""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from dedupjobs import clock


class NotReached(OSError):
    """Nobody listens there, so nothing was sent."""


class Refused(Exception):
    """The other side has answered something else than 2xx."""


def post(url: str, text: str, headers: Mapping[str, str], *, timeout: float) -> None:
    """
    POST JSON; raises NotReached, Refused, or what http.client raises.

    ``timeout`` (seconds) bounds the whole: a socket's own would begin anew with every byte.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    over = threading.Event()
    try:
        _connect(connection)
        join = clock.start(
            lambda: _cut_off(connection.sock, over, timeout), name="dedupjobs-webhook-limit"
        )
        try:
            sent = {"Content-Type": "application/json", "User-Agent": "dedupjobs", **headers}
            connection.request("POST", path, text.encode(), sent)
            status = connection.getresponse().status
        finally:
            over.set()
            join(timeout)
    finally:
        connection.close()
    if status // 100 != 2:  # noqa: PLR2004
        raise Refused(f"it answered {status}")


def _connect(connection: http.client.HTTPConnection) -> None:
    try:
        connection.connect()
    except OSError as error:
        raise NotReached(str(error)) from error


def _cut_off(sock: Any, over: threading.Event, timeout: float) -> None:
    if not clock.wait(over, timeout):
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
