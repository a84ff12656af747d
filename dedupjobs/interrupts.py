"""
Ending user code early: the time-out's alarm and SIGTERM, armed only around the user's function.

RQ has one SIGALRM of its own for the same process; its handler and what is left of its timer
are put back afterwards, or its time-out would never fire again.
"""

from __future__ import annotations

import ctypes
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from dedupjobs.exceptions import CutOff, ShutdownReached, TimeoutReached

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
        self.told: Callable[[], None] = _tell_nobody  # that the time-out has changed

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
            left = self.left
            if self._has_alarm and left is None:
                signal.setitimer(signal.ITIMER_REAL, 0)
            elif self._has_alarm and left is not None:
                signal.setitimer(signal.ITIMER_REAL, max(left, 0.001), REPEAT)
        self.told()


def _tell_nobody() -> None:
    """No thread watches this one."""


@contextmanager
def armed(cutter: Cutter) -> Iterator[Cutter]:
    """
    Raise TimeoutReached in the block after its seconds, ShutdownReached on SIGTERM.

    Off the main thread signals can not be used: there a ``Watch`` raises both, if one is kept, and
    else nobody.
    """
    if threading.current_thread() is not threading.main_thread():
        watch = _watched.by
        with watch.armed(cutter) if watch else nullcontext():
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


# ---- in threads


def _due(cutter: Cutter) -> float:
    return math.inf if cutter.left is None else time.monotonic() + cutter.left


@dataclass(slots=True)
class _Shift:
    """What a thread runs. ``due``: when it is to be cut off, by the monotonic clock."""

    cutter: Cutter
    due: float


@dataclass(slots=True)
class Watch:
    """
    Cuts code off that runs in other threads, from the one that waits for them.

    By an asynchronous exception, which a thread sees once it is back from C code: a thread that
    hangs there is left to whoever watches the process.
    """

    _shifts: dict[int, _Shift] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _wakes: float = math.inf

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Let ``armed`` in this thread be kept by this watch."""
        _watched.by = self
        try:
            yield
        finally:
            _watched.by = None

    @contextmanager
    def armed(self, cutter: Cutter) -> Iterator[None]:
        """As ``armed``, in a thread that this watch keeps."""
        me = threading.get_ident()
        if shutting_down.is_set():
            raise ShutdownReached("the worker got SIGTERM before the job's code began")
        try:
            with self._changed:
                cutter.armed = True
                shift = self._shifts[me] = _Shift(cutter, _due(cutter))
                if shift.due < self._wakes:
                    self._changed.notify_all()
            cutter.told = lambda: self._retime(me)
            yield
        except CutOff as raised:
            if not raised.args:  # an asynchronous exception is made without any
                raise type(raised)(_words(raised, cutter.timeout)) from raised
            raise
        finally:
            self._disarm(cutter, me)

    def _retime(self, me: int) -> None:
        with self._changed:
            if (shift := self._shifts.get(me)) is not None:
                shift.due = _due(shift.cutter)
                self._changed.notify_all()

    def _disarm(self, cutter: Cutter, me: int) -> None:
        """Let nothing more be raised here, not even what was raised a moment ago."""
        while cutter.armed or me in self._shifts:
            try:
                with self._changed:
                    cutter.armed = False
                    self._shifts.pop(me, None)
            except CutOff:
                continue
        if cutter.timed_out or cutter.shut_down:
            try:
                _raise_in(me, None)
                time.sleep(0)
            except CutOff:
                pass

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until ``is_over``, which ``notify`` has looked at; cut off what takes too long."""
        with self._changed:
            while not is_over():
                now = time.monotonic()
                for me, shift in self._shifts.items():
                    if now >= shift.due:
                        shift.cutter.timed_out = True
                        shift.due = now + REPEAT
                        _raise_in(me, TimeoutReached)
                self._wakes = min((s.due for s in self._shifts.values()), default=math.inf)
                left = self._wakes - now
                self._changed.wait(None if left == math.inf else max(left, 0))
            self._wakes = math.inf

    def notify(self) -> None:
        """Let ``wait`` look whether it is over."""
        with self._changed:
            self._changed.notify_all()

    def cut_all(self) -> None:
        """Raise ShutdownReached in all code that this watch keeps."""
        with self._changed:
            for me, shift in self._shifts.items():
                shift.cutter.shut_down = True
                _raise_in(me, ShutdownReached)


@dataclass  # without slots, which all threads would share
class _Watched(threading.local):
    by: Watch | None = None


_watched = _Watched()


def _words(raised: CutOff, timeout: float | None) -> str:
    if isinstance(raised, TimeoutReached):
        return f"ran longer than its time-out of {timeout:g} s"
    return "the worker got SIGTERM"


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    error = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
