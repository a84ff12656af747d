"""
The endings of a run: complete, fail, give_up, snooze, interrupt, unclaim, stop, park.

Each ends the attempt first and moves the job then, through ``_settle``, the one door.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import F

from dedupjobs import probes
from dedupjobs.clock import DbNow
from dedupjobs.endings import Error
from dedupjobs.lifecycle import together
from dedupjobs.lifecycle.leaving import Leaving, cancelled, die, leave, obey, take_up
from dedupjobs.lifecycle.rows import NOBODY, UNASKED, UNSENT, Claim, alias, attempt, attempts, job
from dedupjobs.models import (
    AttemptOutcome,
    Status,
)
from dedupjobs.registry import FOREVER

NEXT_FAILURE = F("failures") + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What is written on the attempt besides its outcome."""

    error: Error | None = None
    reason: str = ""
    run_time: float | None = None


NO_NOTE = Note()


def complete(
    claim: Claim, result: str, *, unique_for: timedelta | None, note: Note = NO_NOTE
) -> Status | None:
    """RUNNING → SUCCEEDED, or PENDING if a rerun waits. The success holds the key from now."""
    if together.serves_alone(alias()):
        probes.reach("settle.before")
        if together.complete(claim, result, unique_for=unique_for, note=note):
            probes.reach("settle.committed")
            return Status.SUCCEEDED
    succeed = success_of(claim, result, unique_for)

    def move() -> Status | None:
        return succeed.by_itself() or take_up(claim)

    return _settle(claim, AttemptOutcome.SUCCEEDED, note, move)


def success_of(claim: Claim, result: str, unique_for: timedelta | None) -> Leaving:
    """Return how a job leaves by its success, unless a rerun waits."""
    until = DbNow(unique_for or 0) if unique_for is not FOREVER else None
    sets = {
        "result": result,
        "error": "",
        "error_class": "",
        "finished_at": DbNow(),
        "unique_until": until,
        **UNASKED,
    }
    return Leaving(claim, Status.SUCCEEDED, sets=sets, guards={"rerun_args": None})


def get_ready() -> None:
    """Compile what a success needs; asks the database nothing."""
    if together.serves_alone(alias()):
        return  # its SQL stands there
    attempt(**_open(0)).statement(_ended(AttemptOutcome.SUCCEEDED, Note(run_time=0.0)))
    for unique_for in (FOREVER, timedelta(1)):
        success = success_of(NOBODY, "", unique_for)
        job(**success.where).statement(success.to)


def fail(claim: Claim, *, after: float, note: Note, timed_out: bool = False) -> Status | None:
    """RUNNING → RETRYING in ``after`` seconds; a waiting request is obeyed instead."""
    outcome = AttemptOutcome.TIMED_OUT if timed_out else AttemptOutcome.FAILED
    counted = _failure(note)

    def move() -> Status | None:
        sets = {"run_after": DbNow(after), **UNSENT, **counted}
        return leave(claim, Status.RETRYING, **UNASKED, sets=sets) or obey(claim, counted)

    return _settle(claim, outcome, note, move)


def give_up(claim: Claim, *, on_dead: str, note: Note, timed_out: bool = False) -> Status | None:
    """RUNNING → DEAD: the budget is used or the error is final. A waiting rerun is taken up."""
    outcome = AttemptOutcome.TIMED_OUT if timed_out else AttemptOutcome.FAILED
    sets = {**_failure(note), **UNASKED}
    return _settle(claim, outcome, note, lambda: die(claim, on_dead, sets))


def _failure(note: Note) -> dict[str, Any]:
    """Return what a counted failure writes on the row."""
    error_class = note.error.type if note.error else ""
    return {"failures": NEXT_FAILURE, "error": _headline(note), "error_class": error_class}


def snooze(claim: Claim, *, after: float, note: Note = NO_NOTE) -> Status | None:
    """RUNNING → RETRYING in ``after`` seconds; no failure is counted."""

    def move() -> Status | None:
        sets = {"run_after": DbNow(after), **UNSENT}
        return leave(claim, Status.RETRYING, **UNASKED, sets=sets) or obey(claim)

    return _settle(claim, AttemptOutcome.SNOOZED, note, move)


def interrupt(claim: Claim, *, on_lost: str, note: Note = NO_NOTE) -> Status | None:
    """RUNNING → PENDING, or HELD by ``on_lost`` once user code has begun. Not counted."""

    def move() -> Status | None:
        if on_lost == "hold" and claim.began:
            return leave(claim, Status.HELD, sets={"error": note.reason, **UNSENT})
        sets = {"run_after": DbNow(), **UNSENT}
        return leave(claim, Status.PENDING, **UNASKED, sets=sets) or obey(claim)

    return _settle(claim, AttemptOutcome.INTERRUPTED, note, move)


def unclaim(claim: Claim, note: Note = NO_NOTE) -> Status | None:
    """RUNNING → PENDING: claimed, but user code never began. Nothing is counted."""

    def move() -> Status | None:
        sets = {"run_after": DbNow(), **UNSENT}
        return leave(claim, Status.PENDING, **UNASKED, sets=sets) or obey(claim)

    return _settle(claim, AttemptOutcome.RETURNED, note, move, began_at=None)


def stop(claim: Claim, *, requested: bool, note: Note = NO_NOTE) -> Status | None:
    """
    RUNNING → CANCELLED. By the job's own ``Cancel`` a waiting rerun is taken up; by an
    operator's request it is dropped, and the row's error says so.
    """

    def move() -> Status | None:
        if requested:
            return cancelled(claim, {})
        sets = {"error": note.reason, "finished_at": DbNow(), **UNASKED}
        return leave(claim, Status.CANCELLED, rerun_args=None, sets=sets) or take_up(claim)

    return _settle(claim, AttemptOutcome.CANCELLED, note, move)


def park(claim: Claim, reason: str, note: Note = NO_NOTE) -> Status | None:
    """RUNNING → HELD: a person is needed; costs no failure."""
    sets = {"error": reason, **UNSENT, **UNASKED}
    return _settle(claim, AttemptOutcome.HELD, note, lambda: leave(claim, Status.HELD, sets=sets))


def outcome_of(fence: int) -> str | None:
    """
    Return an attempt's outcome by a locking read: what became of a COMMIT without a reply.

    The lock waits for a transaction of ours that the server has not given up yet.
    """
    with transaction.atomic(using=alias()):
        found = attempts().select_for_update().filter(pk=fence).first()
        return found.outcome if found else None


def note_late(fence: int, ending: AttemptOutcome) -> None:
    """Remember what an attempt did after it was given up; its outcome stands."""
    attempts().filter(pk=fence, late_ending="").exclude(outcome=None).update(late_ending=ending)


class _NotMineError(Exception):
    """Somebody else decided: roll back what this ending has written."""


def _settle(
    claim: Claim,
    outcome: AttemptOutcome,
    note: Note,
    move: Callable[[], Status | None],
    **guards: Any,
) -> Status | None:
    """End the attempt, then move the job; both or neither."""
    probes.reach("settle.before")
    try:
        with transaction.atomic(using=alias()):
            mine = attempt(**_open(claim.fence), **guards)
            if not mine.update(**_ended(outcome, note)):
                raise _NotMineError
            probes.reach("settle.between")
            status = move()
            if status is None:
                raise _NotMineError
            probes.reach("settle.uncommitted")
    except _NotMineError:
        return None
    probes.reach("settle.committed")
    return status


def _open(fence: int) -> dict[str, Any]:
    return {"pk": fence, "outcome": None}


def _ended(outcome: AttemptOutcome, note: Note) -> dict[str, Any]:
    error = note.error
    return {
        "outcome": outcome,
        "ended_at": DbNow(),
        "reason": note.reason,
        "run_time": note.run_time,
        "error_class": error.type if error else "",
        "error_message": error.message if error else "",
        "traceback": error.traceback if error else "",
    }


def _headline(note: Note) -> str:
    return f"{note.error.type}: {note.error.message}" if note.error else note.reason
