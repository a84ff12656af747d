"""
Keeping an attempt's lease alive from a thread, and seeing when it is lost.

The thread sleeps for a sixth of the lease before its first beat, so a short job never opens its
connection. A beat that fails is tried again at the next turn: an expired lease that nobody has
reclaimed is still ours.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.db import DatabaseError, InterfaceError, connections

from dedupjobs import clock, lifecycle, locks, probes, signals
from dedupjobs.lifecycle import Pulse
from dedupjobs.locks import Grip
from dedupjobs.signals import LockEvent

STOP_WAIT = 2.0  # seconds; a beat that hangs longer in SQL is left to its own time-outs


class Heart:
    """
    Beats for one attempt, from the process that runs it or from that process's parent.

    ``lost`` is set once another one has ended the attempt. ``pulse`` is what the last beat saw.
    ``lock_gone``: the Redis lock was gone or another's. ``tells``: what becomes of the lock; of
    two hearts of one attempt one does.
    """

    def __init__(
        self,
        *,
        job_pk: int,
        fence: int,
        owner: str,
        name: str,
        lease: float,
        tells: bool = True,
    ) -> None:
        self.job_pk = job_pk
        self.fence = fence
        self.owner = owner
        self.name = name
        self.lease = lease
        self.lost = threading.Event()
        self.pulse = Pulse()
        self.lock_gone = False
        self._tells = tells
        self.progress: str | None = None
        self._active = clock.monotonic()
        self._stop = threading.Event()
        self._join: Callable[[float], None] | None = None

    def touch(self) -> None:
        """Note that the job is active; written by the next beat."""
        self._active = clock.monotonic()

    def start(self) -> None:
        self._join = clock.start(self._run, name=f"dedupjobs-heart-{self.fence}")

    def stop(self) -> None:
        """End the thread and with it its connection; returns after STOP_WAIT at the latest."""
        self._stop.set()
        if self._join is not None:
            self._join(STOP_WAIT)

    def tick(self) -> Pulse:
        """Beat once, in the calling thread."""
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

    def _renew_lock(self) -> None:
        grip = locks.extend(self.job_pk, self.owner, ttl=self.lease)
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

    def _run(self) -> None:
        try:
            while not clock.wait(self._stop, self.lease / 6):
                try:
                    if self.tick().over:
                        return
                except (DatabaseError, InterfaceError):
                    connections.close_all()
        finally:
            connections.close_all()


@contextmanager
def beating(heart: Heart) -> Iterator[Heart]:
    """Let the heart beat while the block runs."""
    heart.start()
    try:
        yield heart
    finally:
        heart.stop()
