"""How far a batch has come: whose code has started, what goes back if it ends before all have."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dedupjobs import (
    clock,
    dispatch,
    execution,
    interrupts,
    lifecycle,
    locks,
    runner,
    signals,
    spans,
)
from dedupjobs.batches.desk import Desk
from dedupjobs.batches.members import Member, Ran, holds_lock
from dedupjobs.context import Attempt
from dedupjobs.dispatch import Delivery
from dedupjobs.endings import Ending, Failed, Interrupted
from dedupjobs.heartbeat import Chorus
from dedupjobs.lifecycle import Claim
from dedupjobs.models import Status
from dedupjobs.runner import CLAIM_PATIENCE

PATIENT = 5.0  # seconds after which rows whose turn has not come go back, for any worker to take
PUSH_PATIENCE = 5.0  # seconds that their messages may take


class Course:
    """The claimed rows of a batch, and those of them that have begun and started."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.chorus = Chorus(member.heart for member in members)
        self.desk = Desk(self.chorus)
        self.reraises = False
        self._begun = {m.claim.fence for m in members if m.claim.began}
        self._started: set[int] = set()
        self._running: dict[int, tuple[float, Member]] = {}  # by fence, since when
        self._guard = threading.Lock()
        self._deadline = clock.monotonic() + PATIENT

    @contextmanager
    def open(self) -> Iterator[None]:
        """Keep the leases alive in the block; then what has not started goes back."""
        try:
            with runner.host.beating(self.chorus), self.desk.open():
                yield
        finally:
            runner.host.settled(self.members[-1].claim)
            self._give_back()
        if self.reraises:
            raise KeyboardInterrupt

    @property
    def is_over(self) -> bool:
        """Whether nothing more may start here."""
        if self.reraises or interrupts.shutting_down.is_set():
            return True
        return bool(self._started) and clock.monotonic() > self._deadline

    def renew_if_old(self) -> None:
        """Let no job start under leases of which half is over."""
        if self.chorus.is_old:
            runner.persist(lambda first: self.chorus.tick(), patience=CLAIM_PATIENCE)

    def may_begin(self, member: Member) -> bool:
        """
        Whether it may begin with the ending before it: nothing is likely to come between.

        What must not be repeated blindly begins by itself, once nothing can.
        """
        return not (self.is_over or member.options.on_lost == "hold" or member.is_asked)

    def begins(self, member: Member) -> bool:
        """Write that its code starts; False: it must not, and has been dealt with."""
        claim = member.claim
        if claim.fence in self._begun:
            return True
        if member.is_asked:
            runner.persist(lambda first: lifecycle.unclaim(claim), patience=CLAIM_PATIENCE)
        elif runner.persist(lambda first: _begin(claim), patience=CLAIM_PATIENCE):
            self._begun.add(claim.fence)
            return True
        self.skip(member)
        return False

    def note_begun(self, member: Member) -> None:
        """Note that it was written together with something else that the next one's code starts."""
        self._begun.add(member.claim.fence)

    def skip(self, member: Member) -> None:
        """Another one has ended its attempt before its code began."""
        self._started.add(member.claim.fence)
        self.desk.let_go(member)

    def start(self, member: Member) -> Attempt:
        """Return the attempt that the code is to see; its lease beats with its own activity."""
        claim, heart = member.claim, member.heart
        self._started.add(claim.fence)
        heart.touch()
        self.chorus.present.add(heart)
        with self._guard:
            self._running[claim.fence] = (clock.monotonic(), member)
            self._show()
        signals.tell(signals.attempt_started, claim.name, claim=claim)
        return Attempt(claim, heart)

    def finish(self, ran: Ran) -> None:
        """Take one whose ending is written, or that somebody else has ended."""
        self.reraises |= isinstance(ran.ending, Interrupted) and ran.ending.reraise
        self.leave(ran.member)
        self.desk.take_written(ran)

    def leave(self, member: Member) -> None:
        """Its code has returned; another one may run."""
        with self._guard:
            self._running.pop(member.claim.fence, None)
            if self._running:
                self._show()

    def _show(self) -> None:
        """Show whoever watches this process the job that must end first."""
        since, first = min(self._running.values(), key=_deadline)
        runner.host.claimed(first.claim, first.options, since=since, alone=len(self._running) == 1)

    # ---- what has not started

    def _give_back(self) -> None:
        """Free what was claimed and has not started; nothing is counted."""
        left = [m for m in self.members if m.claim.fence not in self._started]
        if not left:
            return
        unbegun = [m.claim for m in left if m.claim.fence not in self._begun]
        returned = runner.persist(
            lambda first: lifecycle.return_many(unbegun), patience=CLAIM_PATIENCE
        )
        for member in left:
            if member.claim.fence not in returned:
                self._interrupt(member)
        locks.release_many([(m.claim.job_pk, m.claim.owner) for m in left if holds_lock(m.grip)])
        if not interrupts.shutting_down.is_set():
            _send_alone([m.claim for m in left])

    def _interrupt(self, member: Member) -> None:
        """Give one back whose claim counts as its beginning, or of which something is asked."""
        claim = member.claim
        if claim.fence not in self._begun and lifecycle.unclaim(claim):
            return
        ending = Interrupted(reason="its batch was ended before its code began")
        note = execution.note_of(ending, None)
        status = runner.settle_surely(claim, ending, note, member.job)
        runner.tell_end(claim, ending, status, None)


def _deadline(running: tuple[float, Member]) -> float:
    since, member = running
    return since + (math.inf if member.options.timeout is None else member.options.timeout)


def _begin(claim: Claim) -> bool:
    # Nobody else begins our attempts: where it has begun, only the reply was lost.
    return lifecycle.begin(claim) or not lifecycle.look(claim.fence).over


def _send_alone(claims: Sequence[Claim]) -> None:
    """Hand rows over again, each by itself; the coordinator does it where that fails."""
    waiting = lifecycle.jobs().filter(
        pk__in=[claim.job_pk for claim in claims], status=Status.PENDING, dispatched_at=None
    )
    deliveries = []
    for row in waiting.order_by("pk"):
        sent_as = lifecycle.mark_sent(row.pk, row.version, row.dispatch_id)
        if sent_as is not None:
            deliveries.append(Delivery.of(row, sent_as))
    dispatch.push(deliveries, within=PUSH_PATIENCE)


def end_span(span: spans.Consuming | None, ending: Ending, status: Status | None) -> None:
    """Tell a tracer how an attempt has ended, if there is one."""
    if span is not None:
        error = ending.error.type if isinstance(ending, Failed) else ""
        span.ended(runner.outcome_of(ending), status, error)
