"""
Fork actors from a process that has Django loaded, so that a dead worker costs no second to replace.

    stdin    {"argv": ["rqworker", "default"], "role": "worker", "rq": "rq.Worker", "log": path}
    stdout   {"pid": 7}  in the order of the questions, and  {"ended": 7, "status": 9}

Each actor runs ``manage.py <argv>`` in a session of its own. When stdin closes, all are killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

import psutil


def main() -> None:
    _load()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    text = b""
    while True:
        ready = select.select([sys.stdin.fileno(), reading], [], [])[0]
        if reading in ready:
            os.read(reading, 4096)
        if sys.stdin.fileno() in ready:
            heard = os.read(sys.stdin.fileno(), 65536)
            if not heard:
                break
            *lines, text = (text + heard).split(b"\n")
            for line in lines:
                _say(pid=_fork(json.loads(line)))
        _reap()
    _kill_all()


def _load() -> None:
    import django

    django.setup()
    import django.db.models.sql.compiler

    import tests.faults.arming
    import tests.faults.enqueuer  # noqa: F401


def _fork(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        _become(order)
    return pid


def _become(order: dict[str, Any]) -> NoReturn:
    status = 1
    try:
        _leave_the_nursery(order["log"])
        status = _act(order)
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _leave_the_nursery(path: str) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(old, new)


def _act(order: dict[str, Any]) -> int:
    from django.conf import settings
    from django.core.management import execute_from_command_line

    from tests.faults import arming, enqueuer

    settings.RQ = {"WORKER_CLASS": order["rq"]}
    arming.install(order["role"], has_coordinator="dedupjobs" in order["rq"])
    if order["role"] == "enqueuer":
        enqueuer.main(*order["argv"])
    else:
        execute_from_command_line(["manage.py", *order["argv"]])
    return 0


def _reap() -> None:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            _say(ended=pid, status=os.waitstatus_to_exitcode(status))


def _say(**facts: Any) -> None:
    os.write(1, json.dumps(facts).encode() + b"\n")


def _kill_all() -> None:
    """Kill every process that has our stage's folder in its environment, but for us."""
    home = os.environ["FAULTS_HOME"]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("FAULTS_ACTOR") == home:
                process.kill()


if __name__ == "__main__":
    main()
