"""
A worker's signs of life for who watches over its process.

    HEARTBEAT_FILE   a file whose age a probe looks at (Kubernetes, Docker)
    NOTIFY_SOCKET    systemd's, which it sets itself: READY=1, then WATCHDOG=1 (sd_notify(3))
"""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path

from dedupjobs import clock, conf

EVERY = 1.0  # seconds between two signs

_next = -math.inf


def sign() -> OSError | None:
    """Give a sign, at most one EVERY seconds; return why it could not be given."""
    global _next  # noqa: PLW0603 - of this process
    if clock.monotonic() < _next:
        return None
    _next = clock.monotonic() + EVERY
    try:
        if path := conf.get().HEARTBEAT_FILE:
            Path(path).touch()
        if address := os.environ.get("NOTIFY_SOCKET"):
            _notify(address)
    except OSError as error:
        return error
    return None


def _notify(address: str) -> None:
    name = f"\0{address[1:]}" if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notifying:
        notifying.setblocking(False)
        notifying.sendto(b"READY=1\nWATCHDOG=1", name)
