"""A stage's side of a nursery. There is one per host, and a host's actors are forked from it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any


class Ward:
    """``before``: what stands before the command, such as one that enters a namespace."""

    def __init__(self, env: Mapping[str, str], before: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "tests.faults.nursery"],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._exits: dict[int, int] = {}
        self._pids: list[int] = []
        self._text = b""

    def fork(self, order: dict[str, Any]) -> int:
        """Return the pid of a new actor."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        while not self._pids:
            self._hear(10)
        return self._pids.pop(0)

    def exits(self) -> dict[int, int]:
        """Return the exit status of each actor that has ended since the last call, by its pid."""
        self._hear(0)
        found, self._exits = self._exits, {}
        return found

    def close(self) -> None:
        """Kill all actors."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)

    def _hear(self, seconds: float) -> None:
        out = self.process.stdout
        assert out is not None
        while select.select([out], [], [], seconds)[0]:
            seconds = 0
            heard = os.read(out.fileno(), 65536)
            if not heard:
                raise RuntimeError("the nursery has ended")
            *lines, self._text = (self._text + heard).split(b"\n")
            for facts in map(json.loads, lines):
                if "pid" in facts:
                    self._pids.append(facts["pid"])
                else:
                    self._exits[facts["ended"]] = facts["status"]
