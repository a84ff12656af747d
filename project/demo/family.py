"""
Who is whose child, as the operating system sees it: work horses are the workers' children,
not ours.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path


def parents() -> dict[int, int]:
    """Return pid → parent's pid of all processes, by /proc or, where there is none, by ps."""
    found = {}
    if Path("/proc/self/stat").exists():
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and (parent := _parent_by_proc(entry.name)) is not None:
                found[int(entry.name)] = parent
        return found
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=", "-o", "ppid="], capture_output=True, text=True, check=True
    )
    pairs = (line.split() for line in listed.stdout.splitlines())
    return {int(pid): int(parent) for pid, parent in pairs}


def parent_of(pid: int) -> int:
    """Return the parent's pid; 0 if the process has ended."""
    return parents().get(pid, 0)


def kill_with_children(pid: int) -> None:
    """kill -9: the process first, so that it can not start another child, then its children."""
    children = [child for child, parent in parents().items() if parent == pid]
    for one in (pid, *children):
        try:
            os.kill(one, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _parent_by_proc(pid: str) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # "pid (name) state ppid ...", where the name may hold anything, brackets too.
    return int(stat.rpartition(")")[2].split()[1])
