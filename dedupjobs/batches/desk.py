"""Where what many jobs can share waits to be done: writing successes, telling, releasing locks."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from django.db import connections

from dedupjobs import clock, counters, invalidation, lifecycle, locks, runner, signals
from dedupjobs.batches.members import Member, Ran, holds_lock
from dedupjobs.heartbeat import STOP_WAIT, Chorus
from dedupjobs.invalidation import News
from dedupjobs.lifecycle import Claim
from dedupjobs.locks import Grip
from dedupjobs.models import Status
from dedupjobs.runner import CONNECTION_ERRORS
from dedupjobs.signals import LockEvent
from dedupjobs.wire import Cargo

GATHERED = 0.05  # seconds that a success waits to be written, or a lock to be released, at most


def write(ran: Sequence[Ran], begins: Claim | None = None) -> set[int]:
    """Write plain successes together, and alone what did not go with the others."""
    tried = False
    try:
        written = lifecycle.complete_many([one.done for one in ran], begins=begins)
    except CONNECTION_ERRORS as error:
        written, tried = set(), True
        connections[lifecycle.alias()].close()
        claim = ran[0].member.claim
        signals.tell(signals.settle_troubled, claim.name, claim=claim, error=error)
    for one in ran:
        member = one.member
        if member.claim.fence in written:
            one.status = Status.SUCCEEDED
        else:
            one.status = runner.settle_surely(
                member.claim, one.ending, one.note, member.job, tried=tried
            )
    return written


@dataclass(slots=True)
class Desk:
    """
    Where jobs that have been run wait for what many can share: to be written, told, released.

    For GATHERED seconds at most: also while a slow job runs, by a thread of its own.
    """

    chorus: Chorus
    _unwritten: list[Ran] = field(default_factory=list)
    _written: list[Ran] = field(default_factory=list)
    _guard: threading.Condition = field(default_factory=threading.Condition)
    _flushing: threading.Lock = field(default_factory=threading.Lock)
    _due: float = math.inf
    _closed: bool = False
    _join: Callable[[float], None] | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Take what the block brings; at its end all is written and told."""
        try:
            yield
        finally:
            with self._guard:
                self._closed = True
                self._guard.notify_all()
            self._flush()
            if self._join is not None:
                self._join(STOP_WAIT)

    def let_go(self, member: Member) -> None:
        """Release the lock of one that was not run."""
        self.chorus.leave(member.heart)
        if holds_lock(member.grip):
            locks.release(member.claim.job_pk, member.claim.owner)

    def take_unwritten(self, ran: Ran) -> None:
        """Take a success that may wait to be written."""
        self._take(ran, written=False)

    def take_written(self, ran: Ran) -> None:
        """Take what has only to be told, and its lock to be released."""
        self.chorus.leave(ran.member.heart)
        self._take(ran, written=True)

    def _take(self, ran: Ran, *, written: bool) -> None:
        now = clock.monotonic()
        with self._guard:  # a pile that was looked up before may just have been taken away
            (self._written if written else self._unwritten).append(ran)
            if self._due == math.inf:
                self._due = now + GATHERED
                if self._join is None:
                    self._join = clock.start(self._watch, name="dedupjobs-desk")
                self._guard.notify_all()
            is_due = now >= self._due
        if is_due:
            self._flush()

    def _watch(self) -> None:
        try:
            while True:
                with self._guard:
                    while not self._closed and (left := self._due - clock.monotonic()) > 0:
                        self._guard.wait(None if left == math.inf else left)
                    if self._closed:
                        return
                self._flush()
        finally:
            connections.close_all()

    def _flush(self) -> None:
        """Write, tell and release what lies here; the job that runs is no part of it."""
        with self._flushing:
            with self._guard:
                unwritten, self._unwritten = self._unwritten, []
                written, self._written = self._written, []
                self._due = math.inf
            if unwritten:
                write(unwritten)
                for ran in unwritten:
                    self.chorus.leave(ran.member.heart)
            _tell_and_release([*written, *unwritten])


def _tell_and_release(ran: Sequence[Ran]) -> None:
    """Tell how attempts ended; then one pipeline takes the news, the counts and the locks."""
    if not ran:
        return
    with invalidation.gathering() as news:
        for one in ran:
            runner.tell_end(one.member.claim, one.ending, one.status, one.seconds)
    held: list[Ran] = []
    for one in ran:
        if one.status == Status.RETRYING and holds_lock(one.member.grip):
            member = one.member
            runner.free_lock(member.claim, member.grip, one.status, member.heart, News())
        elif holds_lock(one.member.grip):
            held.append(one)
    _release(held, news)


def _release(ran: Sequence[Ran], news: News) -> None:
    cargo: list[Cargo] = [news] if news.travels else []
    if not news.travels:
        news.send()
    if not ran:
        counters.carry(cargo, due=runner.host.pays_when_idle)
        return
    cargo.append(counters.payment(due=runner.host.pays_when_idle))
    grips = locks.release_many(
        [(r.member.claim.job_pk, r.member.claim.owner) for r in ran], cargo=cargo
    )
    for one in ran:
        claim, grip = one.member.claim, grips[one.member.claim.job_pk]
        if grip is Grip.HELD:
            runner.tell_lock(claim.name, claim.job_pk, LockEvent.RELEASED, claim)
        elif grip is Grip.BUSY and not runner.has_successor(claim, one.status):
            one.member.heart.miss_lock()
