"""
Keeping an attempt's lease alive from a thread, and seeing when it is lost.

The thread sleeps for a sixth of the lease before its first beat, so a short job never opens its
connection. A beat that fails is tried again at the next turn: an expired lease that nobody has
reclaimed is still ours.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

from django.db import DatabaseError, InterfaceError, connections

from dedupjobs import clock, controls, lifecycle, locks, probes, signals
from dedupjobs.interrupts import Cutter
from dedupjobs.lifecycle import Pulse
from dedupjobs.locks import Grip
from dedupjobs.signals import LockEvent

B = TypeVar("B", bound="Beater")
"""What keeps leases alive: a heart, or the chorus of a batch."""

STOP_WAIT = 2.0  # seconds; a beat that hangs longer in SQL is left to its own time-outs


class Beater:
    """What beats for leases: ``tick`` is one beat, ``over`` of its pulse the last one."""

    lease: float
    title: str

    def __init__(self) -> None:
        self._stop: threading.Event | None = None  # until it starts; making one takes a while
        self._join: Callable[[float], None] | None = None

    def tick(self) -> Pulse:
        """Beat once, in the calling thread."""
        raise NotImplementedError

    def start(self) -> None:
        self._stop = threading.Event()
        self._join = clock.start(self._run, name=f"dedupjobs-heart-{self.title}")

    def stop(self) -> None:
        """End the thread and with it its connection; returns after STOP_WAIT at the latest."""
        if self._stop is not None:
            self._stop.set()
        if self._join is not None:
            self._join(STOP_WAIT)

    def _run(self) -> None:
        stop = cast(threading.Event, self._stop)
        try:
            while not clock.wait(stop, self.lease / 6):
                try:
                    if self.tick().over:
                        return
                except (DatabaseError, InterfaceError):
                    connections.close_all()
        finally:
            connections.close_all()


class Heart(Beater):
    """
    Beats for one attempt, from the process that runs it or from that process's parent.

    ``lost`` is set once another one has ended the attempt. ``pulse`` is what the last beat saw.
    ``lock_gone``: the Redis lock was gone or another's. ``tells``: what becomes of the lock; of
    two hearts of one attempt one does. ``kin``: the owner of a batch, for whose other attempts
    it beats, too.
    """

    def __init__(  # noqa: PLR0913 - facts of an attempt
        self,
        *,
        job_pk: int,
        fence: int,
        owner: str,
        name: str,
        lease: float,
        tells: bool = True,
        kin: str = "",
    ) -> None:
        super().__init__()
        self.title = str(fence)
        self.job_pk = job_pk
        self.fence = fence
        self.owner = owner
        self.name = name
        self.lease = lease
        self.lost = threading.Event()
        self.pulse = Pulse()
        self.lock_gone = False
        self._tells = tells
        self._kin = kin
        self.progress: str | None = None
        self._cutter: Cutter | None = None
        self._set = controls.known().options_of(name)
        self._active = clock.monotonic()

    def touch(self) -> None:
        """Note that the job is active; written by the next beat."""
        self._active = clock.monotonic()

    @contextmanager
    def timing(self, cutter: Cutter) -> Iterator[None]:
        """Let the beats change the time-out of the function that runs in the block."""
        self._cutter = cutter
        try:
            yield
        finally:
            self._cutter = None

    def tick(self) -> Pulse:
        """Beat once, in the calling thread."""
        controls.current(at_most=0.0)
        self.take_over_what_is_set()
        if self._kin:
            lifecycle.beat_kin(self._kin, but=self.fence, lease=self.lease)
        pulse = lifecycle.beat(
            self.fence,
            lease=self.lease,
            progress=self.progress,
            active=clock.monotonic() - self._active,
        )
        self.see(pulse)
        if not pulse.over:
            self._renew_lock()
        probes.reach("beat.done")
        return pulse

    def take_over_what_is_set(self) -> None:
        """Let a lease or time-out that a person has just set reach the attempt while it runs."""
        now = controls.known().options_of(self.name)
        if now.lease != self._set.lease:
            self.lease = now.lease
        if now.timeout != self._set.timeout and (cutter := self._cutter) is not None:
            cutter.retime(now.timeout)
        self._set = now

    @property
    def has_lock(self) -> bool:
        """Whether its job takes locks, so that there may be one to renew."""
        return self._set.takes_lock

    def _renew_lock(self) -> None:
        if not self.has_lock:
            return
        self.tell_lock(locks.extend(self.job_pk, self.owner, ttl=self.lease))

    def tell_lock(self, grip: Grip) -> None:
        """Tell what became of the lock when it was to be renewed."""
        if not self._tells:
            return
        if grip is Grip.BUSY:
            self.miss_lock()
        else:
            event = LockEvent.RENEWED if grip is Grip.HELD else LockEvent.UNREACHABLE
            signals.tell(signals.lock_moved, self.name, job_pk=self.job_pk, event=event, claim=None)

    def miss_lock(self) -> None:
        """Tell, once, that the lock is gone or another's although the attempt has not ended."""
        if not self.lock_gone:
            self.lock_gone = True
            facts = {"job_pk": self.job_pk, "event": LockEvent.EXPIRED, "claim": None}
            signals.tell(signals.lock_moved, self.name, **facts)

    def see(self, pulse: Pulse) -> None:
        """Take in what a beat or a look found."""
        self.pulse = pulse
        if pulse.lost and not self.lost.is_set():
            self.lost.set()
            signals.tell(signals.lease_lost, self.name, fence=self.fence, detail="ended by another")


class Chorus(Beater):
    """
    The hearts of a batch: one beat renews the leases of all that have not left.

    ``present``: those whose jobs run; each beats with its own activity and progress.
    """

    def __init__(self, hearts: Iterable[Heart]) -> None:
        super().__init__()
        self._hearts = {heart.fence: heart for heart in hearts}
        self.lease = min(heart.lease for heart in self._hearts.values())
        self.title = f"batch-{min(self._hearts)}"
        self.present: set[Heart] = set()
        self._renewed = clock.monotonic()

    @property
    def is_old(self) -> bool:
        """Whether half of the shortest lease is over since the last beat began."""
        return clock.monotonic() - self._renewed > self.lease / 2

    def leave(self, heart: Heart) -> None:
        """Beat for this one no more: its attempt is about to end."""
        self._hearts.pop(heart.fence, None)
        self.present.discard(heart)

    def tick(self) -> Pulse:
        """Beat once for all, in the calling thread; over once nobody is left."""
        begun, present = clock.monotonic(), set(self.present)
        controls.current(at_most=0.0)
        for heart in list(self._hearts.values()):
            heart.take_over_what_is_set()
            self.lease = min(self.lease, heart.lease)
        for heart in present:
            heart.tick()
        others = {f: h for f, h in list(self._hearts.items()) if h not in present}
        if others:
            self._beat(others)
        self._renewed = begun
        return Pulse(over=not self._hearts)

    def _beat(self, hearts: dict[int, Heart]) -> None:
        pulses = lifecycle.beat_many({f: h.lease for f, h in hearts.items()})
        alive = []
        for fence, pulse in pulses.items():
            hearts[fence].see(pulse)
            if not pulse.over:
                alive.append(hearts[fence])
        locked = [heart for heart in alive if heart.has_lock]
        held = [(heart.job_pk, heart.owner) for heart in locked]
        grips = locks.extend_many(held, ttl=self.lease)
        for heart in locked:
            if heart.fence in self._hearts:  # else its lock was released meanwhile
                heart.tell_lock(grips[heart.job_pk])
        probes.reach("beat.done")


class Pacemaker:
    """
    Beats for one heart after the other from one thread, which short jobs never wake.

    For a process that runs many jobs: starting and ending a thread for each costs two switches
    between threads, which take longer than the rest of a short job's bookkeeping.
    """

    def __init__(self, *, when_idle: Callable[[], None] | None = None) -> None:
        """``when_idle`` is called once no heart has beaten for a while; it must not raise."""
        self._when_idle = when_idle
        self._changed = threading.Condition()
        self._heart: Beater | None = None
        self._due = math.inf
        self._wakes = -math.inf  # when the thread looks again, by itself; not yet started
        self._beating: Beater | None = None

    @contextmanager
    def beating(self, heart: B) -> Iterator[B]:
        """Let the heart beat while the block runs."""
        with self._changed:
            self._heart, self._due = heart, clock.monotonic() + heart.lease / 6
            if self._wakes == -math.inf:
                clock.start(self._run, name="dedupjobs-pacemaker")
                self._wakes = self._due
            elif self._due < self._wakes:
                self._changed.notify()
        try:
            yield heart
        finally:
            with self._changed:
                self._heart, self._due = None, math.inf
                self._changed.wait_for(lambda: self._beating is not heart, STOP_WAIT)

    def _run(self) -> None:
        try:
            while True:
                self._beat(self._next())
        finally:  # by an error of ours, which is told as that of any thread
            connections.close_all()
            with self._changed:
                self._beating, self._wakes = None, -math.inf
                self._changed.notify_all()

    def _beat(self, heart: Beater) -> None:
        over = False
        try:
            over = heart.tick().over
        except (DatabaseError, InterfaceError):
            connections.close_all()
        with self._changed:
            self._beating = None
            if self._heart is heart:
                self._due = math.inf if over else clock.monotonic() + heart.lease / 6
            self._changed.notify_all()

    def _next(self) -> Beater:
        """Return the heart whose beat is due, once there is one."""
        with self._changed:
            while (left := self._due - clock.monotonic()) > 0:
                if self._due == math.inf:
                    connections.close_all()  # nobody needs it, and nobody may for long
                    if self._when_idle:
                        self._when_idle()
                self._wakes = self._due
                self._changed.wait(None if left == math.inf else left)
            self._beating = cast(Beater, self._heart)
            return self._beating


@contextmanager
def beating(heart: B) -> Iterator[B]:
    """Let the heart beat while the block runs."""
    heart.start()
    try:
        yield heart
    finally:
        heart.stop()
