"""CPU that a session of PostgreSQL on this machine has had, and how a verdict reads."""

from __future__ import annotations

from pathlib import Path


def backend() -> int:
    """Return the process that serves our connection."""
    from django.db import connection  # noqa: PLC0415 - after the set-up

    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


def cpu_of(pid: int) -> float:
    """Return the seconds of CPU that a process has had, as Linux counts them."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def verdict(holds: bool, words: str) -> str:
    return f"- {'✓' if holds else '✗'} {words}"
