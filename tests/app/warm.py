"""Specimen jobs for a process that runs one after the other: what they leave, what they find."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any

from django.utils import translation

from dedupjobs import FOREVER, job, prefork
from dedupjobs.lifecycle import statements
from tests.app.jobs import note

KEPT: list[Any] = []


@job(key="soil:{tag}", unique_for=FOREVER)
def soil(*, tag: str, how: str) -> None:
    """Change this process, or leave something behind in it."""
    SOILING[how]()
    note(tag, how)


@job(key="look:{tag}", unique_for=FOREVER)
def look(*, tag: str) -> dict[str, Any]:
    """Return what this process is like."""
    umask = os.umask(0)
    os.umask(umask)
    return {
        "environ": os.environ.get("SOILED"),
        "folder": os.getcwd(),
        "umask": umask,
        "handler": str(signal.getsignal(signal.SIGUSR1)),
        "masked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "stdout": sys.stdout is KEPT[0] if KEPT else False,
        "language": translation.get_language(),
        "parent": os.getppid(),
    }


@job(key="readiness:{tag}", unique_for=FOREVER)
def readiness(*, tag: str) -> dict[str, Any]:
    """Return what this process did not have to do for its first run."""
    return {
        "pid": os.getpid(),
        "compiled": len(statements._compiled),
        "frozen": gc.get_freeze_count(),
        "ready": prefork._is_ready,
    }


def _stdout() -> None:
    KEPT.append(open(os.devnull, "w"))  # noqa: SIM115 - left open on purpose
    sys.stdout = KEPT[0]


def _removed_folder() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)


def _sleeper(daemon: bool) -> None:
    threading.Thread(target=threading.Event().wait, daemon=daemon).start()


def _child() -> None:
    KEPT.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3)"]))


SOILING: dict[str, Any] = {
    "environ": lambda: os.environ.update(SOILED="yes"),
    "folder": lambda: os.chdir("/"),
    "removed folder": _removed_folder,
    "umask": lambda: os.umask(0o777),
    "handler": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "mask": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
    "stdout": _stdout,
    "language": lambda: translation.activate("id"),
    "thread": lambda: _sleeper(daemon=False),
    "daemon thread": lambda: _sleeper(daemon=True),
    "many daemon threads": lambda: [_sleeper(daemon=True) for _ in range(20)],
    "child": _child,
    "memory": lambda: KEPT.append(bytearray(os.urandom(1)) * 50_000_000),
}


def foreign(tag: str) -> int:
    """Do what somebody else's RQ job does."""
    note(tag, f"foreign {os.getpid()}")
    return os.getpid()


def on_success(message: Any, *_: Any) -> None:
    note(message.id, "called back")


def on_exception(message: Any, kind: type[BaseException], *_: Any) -> None:
    """Handle what RQ calls an exception of a job."""
    note("handler", f"{message.origin} {kind.__name__}")
