"""
Ending user code early: the time-out's alarm and SIGTERM, armed only around the user's function.

RQ has one SIGALRM of its own for the same process; its handler and what is left of its timer
are put back afterwards, or its time-out would never fire again.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dedupjobs.exceptions import ShutdownReached, TimeoutReached

Handler = Callable[[int, FrameType | None], Any] | int | None
REPEAT = 5.0  # seconds; code that swallows the first alarm gets another one

shutting_down = threading.Event()
"""Set once a SIGTERM reached a process that only runs jobs: it claims nothing more."""


def note_shutdown(signum: int, frame: FrameType | None) -> None:
    """Remember a SIGTERM that comes between two functions; the handler of our work horses."""
    shutting_down.set()


class Cutter:
    """Says which cut-offs were raised, also if user code swallowed them."""

    def __init__(self, timeout: float | None) -> None:
        self.timed_out = False
        self.shut_down = False
        self.armed = False
        self.timeout = timeout
        self.begun = time.monotonic()
        self._guard = threading.Lock()
        self._has_alarm = False

    @property
    def left(self) -> float | None:
        """Seconds until the time-out, which may be over; None: there is no end."""
        return None if self.timeout is None else self.begun + self.timeout - time.monotonic()

    def set_alarm(self) -> tuple[float, float]:
        """Let the alarm come; returns whose alarm stood there before, as ``setitimer`` does."""
        with self._guard:
            self._has_alarm = True
            self.begun = time.monotonic()
            return signal.setitimer(signal.ITIMER_REAL, self.timeout or 0, REPEAT)

    def stop_alarm(self) -> None:
        """From now on ``retime`` changes nothing: the timer is another's again."""
        with self._guard:
            self._has_alarm = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def retime(self, timeout: float | None) -> None:
        """Change the time-out in mid-run, from any thread; counted from the beginning."""
        with self._guard:
            self.timeout = timeout
            if not self._has_alarm:
                return
            left = self.left
            if left is None:
                signal.setitimer(signal.ITIMER_REAL, 0)
            else:
                signal.setitimer(signal.ITIMER_REAL, max(left, 0.001), REPEAT)


@contextmanager
def armed(cutter: Cutter) -> Iterator[Cutter]:
    """
    Raise TimeoutReached in the block after its seconds, ShutdownReached on SIGTERM.

    Off the main thread signals can not be used, and the block runs without either.
    """
    if threading.current_thread() is not threading.main_thread():
        yield cutter
        return
    with _on_term(cutter), _alarm(cutter):
        cutter.armed = True
        try:
            if shutting_down.is_set():
                raise ShutdownReached("the worker got SIGTERM before the job's code began")
            yield cutter
        finally:
            # Signals that come during the clean-up below must not raise out of it.
            cutter.armed = False


@contextmanager
def _alarm(cutter: Cutter) -> Iterator[None]:
    def ring(signum: int, frame: FrameType | None) -> None:
        if cutter.armed:
            cutter.timed_out = True
            raise TimeoutReached(f"ran longer than its time-out of {cutter.timeout or 0:g} s")

    if cutter.timeout is None:
        yield
        return
    handler = signal.signal(signal.SIGALRM, ring)
    left, interval = cutter.set_alarm()
    try:
        yield
    finally:
        cutter.stop_alarm()
        signal.signal(signal.SIGALRM, handler)
        if left:
            passed = time.monotonic() - cutter.begun
            signal.setitimer(signal.ITIMER_REAL, max(left - passed, 0.001), interval)


@contextmanager
def _on_term(cutter: Cutter) -> Iterator[None]:
    """
    Turn SIGTERM into ShutdownReached where it would kill the process at once.

    A handler that is there already (RQ's warm shutdown) goes first; only what it answers with
    SystemExit, a cold shutdown, cuts the function off.
    """
    previous: Handler = signal.getsignal(signal.SIGTERM)

    def term(signum: int, frame: FrameType | None) -> None:
        nonlocal previous
        if callable(previous) and previous is not note_shutdown:
            try:
                previous(signum, frame)
                replaced = signal.signal(signal.SIGTERM, term)
                previous = previous if replaced is term else replaced
                return
            except SystemExit:
                pass
        shutting_down.set()
        cutter.shut_down = True
        if cutter.armed:
            raise ShutdownReached("the worker got SIGTERM")

    if previous is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGTERM, term)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is term:
            signal.signal(signal.SIGTERM, previous)
