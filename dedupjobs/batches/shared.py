"""One transaction of several atomic jobs."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import connections, transaction

from dedupjobs import clock, execution, lifecycle, probes, runner, signals, spans
from dedupjobs.batches.course import Course, end_span
from dedupjobs.batches.desk import GATHERED
from dedupjobs.batches.members import Member, Ran
from dedupjobs.context import Attempt
from dedupjobs.endings import Ending, Failed, Interrupted, Lapsed, Succeeded
from dedupjobs.lifecycle import Apart
from dedupjobs.models import AttemptOutcome, Status
from dedupjobs.runner import CONNECTION_ERRORS


class _UndoError(Exception):
    """Roll a savepoint back."""


class _BreakError(Exception):
    """Roll the shared transaction back."""


class Shared:
    """
    One transaction of several atomic jobs, a savepoint each.

    A job that fails or is stale rolls back alone, and is settled after the COMMIT. A time-out, a
    deadlock or a lost connection ends the transaction: those that had returned by then are
    innocent, interrupted and uncounted. It is committed once it is GATHERED seconds old.
    """

    def __init__(self, course: Course, members: Sequence[Member], apart: Apart) -> None:
        self._course = course
        self._members = members
        self._apart = apart
        self._returned: list[Ran] = []  # in savepoints that were released
        self._others: list[Ran] = []  # whose savepoints were rolled back
        self._taken = 0

    def run(self) -> int:
        """Return how many members have been dealt with."""
        mark = f"dedupjobs_{self._members[0].claim.fence}"
        try:
            with transaction.atomic(using=lifecycle.alias()):
                lifecycle.mark_transaction(mark)
                self._run_until(clock.monotonic() + GATHERED)
                lifecycle.assert_unbroken(mark)
                self._move_jobs()
            probes.reach("settle.committed")
        except _BreakError:
            self._interrupt_innocents(doubtful=False)
        except Exception as error:
            claim = self._members[0].claim
            signals.tell(signals.settle_troubled, claim.name, claim=claim, error=error)
            if isinstance(error, CONNECTION_ERRORS):
                connections[lifecycle.alias()].close()
            self._interrupt_innocents(doubtful=True)
        self._settle_others()
        return self._taken

    def _run_until(self, deadline: float) -> None:
        course = self._course
        for member in self._members:
            if self._taken and (clock.monotonic() > deadline or course.chorus.is_old):
                return
            if course.is_over:
                return
            self._taken += 1
            if self._apart.begin(member.claim):
                self._run_one(member)
            else:
                course.skip(member)

    def _run_one(self, member: Member) -> None:
        attempt = self._course.start(member)
        begun = clock.monotonic()
        with spans.consuming(member.claim) as span:
            ran = self._call(member, attempt)
            end_span(span, ran.ending, None)
        ran.seconds = clock.monotonic() - begun
        self._course.leave(member)
        (self._returned if isinstance(ran.ending, Succeeded) else self._others).append(ran)
        if _breaks(ran.ending):
            raise _BreakError

    def _call(self, member: Member, attempt: Attempt) -> Ran:
        """Call the function and end its attempt in a savepoint."""
        ran = Ran(member, Interrupted(reason="not run"), lifecycle.NO_NOTE, 0.0)
        try:
            with transaction.atomic(using=lifecycle.alias()):
                ran.ending, ran.note = execution.execute(
                    member.job, member.claim, attempt, member.heart, borrowed=False
                )
                if not isinstance(ran.ending, Succeeded):
                    raise _UndoError
                if not lifecycle.end_attempt(member.claim, ran.note):
                    ran.ending, ran.late = Lapsed(), True
                    raise _UndoError
        except _UndoError:
            pass
        except CONNECTION_ERRORS as error:
            ran.ending = Interrupted(reason=f"its ending was not written: {error}"[:500])
        except Exception as error:  # what it wrote was refused at the savepoint's end
            ran.ending = execution.ending_of(error, member.options, member.heart)
            ran.note = execution.note_of(ran.ending, None)
        return ran

    def _move_jobs(self) -> None:
        if not self._returned:
            return
        moved = lifecycle.move_jobs([ran.done for ran in self._returned])
        if len(moved) < len(self._returned):
            raise _BreakError
        for ran in self._returned:
            ran.status = moved[ran.member.claim.fence]

    def _interrupt_innocents(self, *, doubtful: bool) -> None:
        for ran in self._returned:
            claim = ran.member.claim
            if doubtful and self._was_committed(ran):
                continue
            ran.ending = Interrupted(reason="the transaction of its batch was rolled back")
            ran.note = execution.note_of(ran.ending, ran.note.run_time)
            claim = lifecycle.began(claim)
            ran.status = runner.settle_surely(claim, ran.ending, ran.note, ran.member.job)

    def _was_committed(self, ran: Ran) -> bool:
        claim = ran.member.claim
        outcome = runner.persist(
            lambda first: lifecycle.outcome_of(claim.fence), patience=ran.member.heart.lease
        )
        if outcome != AttemptOutcome.SUCCEEDED:
            return False
        ran.status = Status(lifecycle.jobs().values_list("status", flat=True).get(pk=claim.job_pk))
        return True

    def _settle_others(self) -> None:
        for ran in self._others:
            member = ran.member
            if not isinstance(ran.ending, Lapsed):
                claim = lifecycle.began(member.claim)
                ran.status = runner.settle_surely(claim, ran.ending, ran.note, member.job)
            elif ran.late:
                lifecycle.note_late(member.claim.fence, AttemptOutcome.SUCCEEDED)
        for ran in [*self._returned, *self._others]:
            self._course.finish(ran)


def _breaks(ending: Ending) -> bool:
    """Whether a job's ending has broken, or may have, the transaction that it ran in."""
    if isinstance(ending, Interrupted):
        return True
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in CONNECTION_ERRORS}
    return isinstance(ending, Failed) and (ending.timed_out or ending.error.type in names)
