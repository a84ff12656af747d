"""Processes that tests start, such as RQ workers; none survives its test."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

from tests.waiting import until


class Spawned:
    """A process in a session of its own, which is how its orphans are found."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.title = " ".join(command)
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - stop() closes it
        self.process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self.process.pid

    @property
    def output(self) -> str:
        """What the process and its children have printed so far."""
        size = os.fstat(self._file.fileno()).st_size
        return os.pread(self._file.fileno(), size, 0).decode(errors="replace")

    def wait_for_output(self, text: str, seconds: float = 20) -> None:
        """Wait until the process has printed `text`; fail at once if it ends before."""
        until(lambda: text in self.output or not self.is_alive(), seconds, what=f"prints {text!r}")
        assert text in self.output, f"ended without printing {text!r}:\n{self.output}"

    def is_alive(self) -> bool:
        """Tell whether the process itself, not its children, is running."""
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        self.process.send_signal(number)

    def wait(self, seconds: float = 20) -> int:
        """Return the exit status."""
        return self.process.wait(seconds)

    def children(self) -> list[int]:
        """Return the pids of all others of the session, orphans and RQ's horses among them."""
        return [pid for pid in psutil.pids() if pid != self.pid and _session(pid) == self.pid]

    def stop(self, seconds: float = 5) -> None:
        """Ask the process to end, then kill it and whatever it has left behind."""
        self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.kill_children()
        self._file.close()

    def kill_children(self) -> None:
        """Kill all others of the session, and see them gone."""
        until(self._no_children, what=f"the children of {self.title} are gone")

    def _no_children(self) -> bool:
        children = self.children()
        for pid in children:
            _kill(pid)
        return not children


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
