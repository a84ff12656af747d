"""
What a job may leave behind in its process, and the next one must not find.

A process that ends with its job needs none of this. One that goes on puts back what can be put
back, and leaves if there is something that can not.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from django.db import connections

from dedupjobs import clock
from dedupjobs.batches import crew

MOST_DAEMONS = 8  # threads that libraries keep (a reporter of errors, a pool); more are a leak

_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGALRM),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGPIPE),
)


@dataclass(frozen=True, slots=True)
class Slate:
    """The process as it was before its first job."""

    environ: dict[str, str]
    raw_environ: dict[Any, Any]
    folder: str
    umask: int
    mask: set[Any]
    handlers: dict[signal.Signals, Any]
    streams: tuple[Any, Any, Any]

    @classmethod
    def now(cls) -> Slate:
        """Note what this process is like."""
        return cls(
            environ=dict(os.environ),
            raw_environ=dict(_raw_environ()),
            folder=os.getcwd(),
            umask=_umask(),
            mask=signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            handlers={s: signal.getsignal(s) for s in _SIGNALS},
            streams=(sys.stdin, sys.stdout, sys.stderr),
        )

    def wipe(self) -> str:
        """Put back what a job has changed; return what can not be put back, or an empty string."""
        self._put_signals_back()
        self._put_environment_back()
        rest_connections()
        return _left_behind()

    def _put_signals_back(self) -> None:
        if signal.pthread_sigmask(signal.SIG_BLOCK, ()) != self.mask:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        for signum, handler in self.handlers.items():
            if handler is not None and signal.getsignal(signum) is not handler:
                signal.signal(signum, handler)

    def _put_environment_back(self) -> None:
        if _raw_environ() != self.raw_environ:
            os.environ.clear()
            os.environ.update(self.environ)
        if _folder() != self.folder:
            os.chdir(self.folder)
        os.umask(self.umask)
        sys.stdin, sys.stdout, sys.stderr = self.streams


def _raw_environ() -> dict[Any, Any]:
    """Return the variables as they are kept, which need no decoding to be compared."""
    kept: dict[Any, Any] = getattr(os.environ, "_data", None) or dict(os.environ)
    return kept


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _folder() -> str:
    with suppress(FileNotFoundError):  # the job has removed where it was
        return os.getcwd()
    return ""


# ---- what can not be put back


def _left_behind() -> str:
    threads = [
        t
        for t in threading.enumerate()
        if t is not threading.main_thread() and not t.name.startswith(crew.NAME)
    ]
    lasting = [t for t in threads if not t.daemon]
    if lasting:
        return f"the thread {lasting[0].name!r} is still there"
    if len(threads) > MOST_DAEMONS:
        return f"{len(threads)} threads are still there"
    return "a child process is still there" if _has_children() else ""


def _has_children() -> bool:
    with suppress(ChildProcessError):
        if hasattr(os, "waitid"):  # it leaves whose status somebody may still ask for
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        else:
            os.waitpid(-1, os.WNOHANG)
        return True
    return False


# ---- the databases


def rest_connections() -> None:
    """Close what is broken, too old, or in a transaction; the rest is for the next job."""
    for connection in list(connections.all(initialized_only=True)):
        if connection.connection is None:
            continue
        if connection.in_atomic_block or _in_transaction(connection):
            _discard(connection)
        elif not _is_fit(connection):
            connection.close()


def _in_transaction(connection: Any) -> bool:
    """Tell whether the driver knows of an open transaction, also one that Django did not begin."""
    raw = connection.connection
    if not connection.autocommit:
        return True
    if connection.vendor == "postgresql":
        return bool(raw.info.transaction_status)
    if connection.vendor == "sqlite":
        return bool(raw.in_transaction)
    return bool(getattr(raw, "server_status", 0) & 1)  # PyMySQL tells, mysqlclient does not


def _discard(connection: Any) -> None:
    """Close, which rolls back, and forget Django's picture of the transaction with it."""
    with suppress(Exception):
        connection.close()
    del connections[connection.alias]


def _is_fit(connection: Any) -> bool:
    age = connection.settings_dict["CONN_MAX_AGE"]
    if age and connection.close_at is not None and clock.monotonic() >= connection.close_at:
        return False
    if connection.errors_occurred:
        if not connection.is_usable():
            return False
        connection.errors_occurred = False
    return True


# ---- memory


class Memory:
    """How many bytes this process has grown by since this was made."""

    def __init__(self) -> None:
        self._statm = -1
        with suppress(OSError):
            self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._first = self._now()

    def grown(self) -> int:
        return self._now() - self._first

    def _now(self) -> int:
        if self._statm >= 0:
            return int(os.pread(self._statm, 100, 0).split()[1]) * resource.getpagesize()
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
