"""The three ways in which the jobs of a batch are run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from django.db import connections

from dedupjobs import clock, conf, execution, lifecycle, runner, spans
from dedupjobs.batches import crew
from dedupjobs.batches.course import Course, end_span
from dedupjobs.batches.desk import write
from dedupjobs.batches.members import Member, Ran
from dedupjobs.batches.shared import Shared
from dedupjobs.endings import Lapsed, Succeeded
from dedupjobs.lifecycle import Apart
from dedupjobs.models import Status


def run(members: Sequence[Member]) -> None:
    """Run claimed rows, each in the way of its job."""
    course = Course(members)
    line = Line([member for member in members if member.mode != "atomic"])
    threads = min(conf.get().THREADS, len(line))
    with course.open():
        if threads > 1:
            crew.run(lambda: _one_after_the_other(course, line), threads)
        else:
            _one_after_the_other(course, line)
        _atomically(course, [member for member in members if member.mode == "atomic"])


class Line:
    """Those whose turn is to come; any thread may take the next one."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = deque(members)

    def __len__(self) -> int:
        return len(self._members)

    def next(self) -> Member | None:
        """Return the next one, or None."""
        try:
            return self._members.popleft()
        except IndexError:
            return None


def _one_after_the_other(course: Course, line: Line) -> None:
    """Write each ending before the next job starts here, or let those of a group be gathered."""
    member = line.next()
    while member is not None and not course.is_over:
        course.renew_if_old()
        if not course.begins(member):
            member = line.next()
            continue
        ran = _call(course, member)
        member = line.next()
        if not ran.is_unwritten:
            course.finish(ran)
        elif ran.member.mode == "group":
            course.leave(ran.member)
            course.desk.take_unwritten(ran)
        else:
            begins = member if member and course.may_begin(member) else None
            written = write([ran], begins.claim if begins else None)
            if begins and begins.claim.fence in written:
                course.note_begun(begins)
            course.finish(ran)


def _call(course: Course, member: Member) -> Ran:
    """Call the function, and settle whatever is no plain success."""
    attempt = course.start(member)
    claim, heart, job = member.claim, member.heart, member.job
    begun = clock.monotonic()
    with spans.consuming(claim) as span:
        ending, note = execution.execute(job, claim, attempt, heart, borrowed=False)
        status: Status | None = None
        if attempt.completed or not isinstance(ending, Succeeded):
            claim = lifecycle.began(claim)
            ending, status = runner.conclude(attempt, claim, ending, note, job, heart)
            if status is None and isinstance(ending, Succeeded):
                ending = Lapsed()
        end_span(span, ending, status)
    return Ran(member, ending, note, clock.monotonic() - begun, status)


def _atomically(course: Course, members: Sequence[Member]) -> None:
    """Let atomic jobs share transactions."""
    if connections[lifecycle.alias()].vendor == "sqlite":
        _alone(course, members)
        return
    apart = Apart(durable=any(member.options.on_lost == "hold" for member in members))
    try:
        while members and not course.is_over:
            course.renew_if_old()
            members = members[Shared(course, members, apart).run() :]
    finally:
        apart.close()


def _alone(course: Course, members: Sequence[Member]) -> None:
    """Run each atomic job in a transaction of its own."""
    for member in members:
        if course.is_over:
            return
        course.renew_if_old()
        if not course.begins(member):
            continue
        course.start(member)
        begun = clock.monotonic()
        with spans.consuming(member.claim) as span:
            claim = lifecycle.began(member.claim)
            ending, status = runner.perform(claim, member.heart, borrowed=False)
            end_span(span, ending, status)
        course.finish(Ran(member, ending, lifecycle.NO_NOTE, clock.monotonic() - begun, status))
