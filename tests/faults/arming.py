"""
In a stage's process: strike where the stage has armed a probe.

A file ``armed/<role>.<point>`` holds an action; whoever of that role first reaches that point takes
the file, writes the strike into the ledger, and does it to itself:

    kill       SIGKILL to itself
    kill all   SIGKILL to its parent, then to itself
    stop       SIGSTOP to both (the stage wakes them)
    term       SIGTERM to its worker
    term twice the same; the stage sends the second one
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from rq import get_current_job

from dedupjobs import probes, runner
from dedupjobs.worker import HorseHost
from tests.faults import ledger

KILL, KILL_ALL, STOP, TERM, TERM_TWICE = "kill", "kill all", "stop", "term", "term twice"

main_pid = 0
main_role = ""
current: tuple[int, int] | None = None


def install(role: str, *, has_coordinator: bool) -> None:
    """Let this process, and what it forks, be struck; ``role``: of the process itself."""
    global main_pid, main_role, _has_coordinator
    main_pid, main_role, _has_coordinator = os.getpid(), role, has_coordinator
    probes.hook = reach


_has_coordinator = False


def reach(point: str) -> None:
    """Take a strike that waits here for us."""
    role = _role()
    if point == "lock.before":
        _note_job()
    home = ledger.home()
    taken = home / "taken" / f"{role}.{point}.{os.getpid()}"
    try:
        (home / "armed" / f"{role}.{point}").rename(taken)
    except FileNotFoundError:
        return
    strike(taken.read_text(), role, point)


def strike(action: str, role: str, point: str) -> None:
    """Write the strike down, then do it."""
    pk, generation = current or (None, None)
    own = os.getpid() == main_pid
    ledger.write(
        "strike",
        action=action,
        role=role,
        point=point,
        job=pk if role in ("horse", "worker") else None,
        generation=generation,
        main=main_pid,
    )
    if action in (TERM, TERM_TWICE):
        os.kill(main_pid, signal.SIGTERM)
        return
    number = signal.SIGSTOP if action == STOP else signal.SIGKILL
    if role == "horse" and not own and action in (STOP, KILL_ALL):
        os.kill(main_pid, number)
    os.kill(os.getpid(), number)


def _role() -> str:
    if os.getpid() == main_pid:
        return main_role
    if _has_coordinator and not isinstance(runner.host, HorseHost):
        return "coordinator"
    return "horse"


def _note_job() -> None:
    global current  # noqa: PLW0603 - state of this process
    message = get_current_job()
    rows = message.args[0] if message is not None and message.args else None
    try:
        ((pk, generation),) = rows  # of a batch nobody knows here whose turn it is
        current = int(pk), int(generation)
    except (TypeError, ValueError, IndexError, KeyError):
        current = None


def arm(home: Path, role: str, point: str, action: str) -> bool:
    """Let the next of ``role`` at ``point`` be struck; False: it is armed already."""
    path = home / "armed" / f"{role}.{point}"
    if path.exists():
        return False
    new = home / f"new.{role}.{point}"
    new.write_text(action)
    new.rename(path)
    return True
