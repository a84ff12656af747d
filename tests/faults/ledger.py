"""
What happened, in a file outside of the system under test: one JSON object a line, fsync'ed.

    calling, committed, doubtful, rolled back, refused     by enqueuers, of their calls
    effect, charge                                         by jobs, of what they did outside
    strike                                                 by whom a fault hits, before it does

``at`` is the wall clock of the machine, which is also that of the databases.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any


def home() -> Path:
    """Return the stage's folder."""
    return Path(os.environ["FAULTS_HOME"])


def write(what: str, **facts: Any) -> None:
    """Append a line; it is on the disk when this returns."""
    line = json.dumps({"what": what, "at": time.time(), "pid": os.getpid(), **facts})
    os.write(_file(), line.encode() + b"\n")  # one write, so that lines of others do not mix in
    os.fsync(_file())


def read() -> list[dict[str, Any]]:
    """Return all lines so far, in their order."""
    path = home() / "ledger"
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def read_from(path: Path, start: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield lines from byte ``start`` on, each with the byte behind it."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            yield start, json.loads(line)


@cache
def _file() -> int:
    return os.open(home() / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
