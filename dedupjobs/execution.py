"""
Calling a job's function, and saying how it ended: one frozen value, decided here and written
elsewhere. Never raises for the job's own errors.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import DatabaseError, transaction

from dedupjobs import clock, conf, controls, fields, interrupts, keys, lifecycle, probes, queries
from dedupjobs.context import Attempt, entered
from dedupjobs.endings import (
    MESSAGE_LIMIT,
    Ending,
    Error,
    Failed,
    Interrupted,
    Lapsed,
    Parked,
    Snoozed,
    Stopped,
    Succeeded,
    clip,
)
from dedupjobs.exceptions import (
    Cancel,
    CutOff,
    Hold,
    LeaseLost,
    Retry,
    ShutdownReached,
    Snooze,
    StepInDoubt,
    TimeoutReached,
)
from dedupjobs.heartbeat import Heart
from dedupjobs.lifecycle import Claim, Note
from dedupjobs.registry import Job, Options

_NOTHING: Any = object()


def execute(
    job: Job[..., Any], claim: Claim, attempt: Attempt, heart: Heart, *, borrowed: bool
) -> tuple[Ending, Note]:
    """Call the function and say how it ended; never raises for the job's own errors."""
    bound = _bound(job, claim)
    if isinstance(bound, Parked):
        return bound, Note(reason=bound.reason)
    returned = _NOTHING
    pid, begun = os.getpid(), clock.monotonic()
    ending: Ending
    cutter = interrupts.Cutter(controls.known().options_of(job.name).timeout)
    probes.reach("user_code.before")
    try:
        with (
            _savepoint(borrowed),
            entered(attempt, borrowed=borrowed),
            fields.given(claim),
            queries.ended_with(cutter),
            interrupts.armed(cutter),
            heart.timing(cutter),
        ):
            value: Any = job.func(*bound.args, **bound.kwargs)
            # Not in two steps: a coroutine that was made and failed has returned nothing.
            returned = asyncio.run(value) if inspect.iscoroutine(value) else value
    except BaseException as raised:
        _leave_if_forked(pid, 1)
        if isinstance(raised, CutOff) and not borrowed:
            queries.drop_connections()
        # A signal between the function's return and the end of the block changes nothing.
        ending = (
            ending_of(raised, job.options, heart) if returned is _NOTHING else _success(returned)
        )
    else:
        _leave_if_forked(pid, 0)
        ending = _success(returned)
        if cutter.timed_out and job.options.atomic:
            ending = ending_of(TimeoutReached("swallowed by the job"), job.options, heart)
    probes.reach("user_code.after")
    return ending, note_of(ending, clock.monotonic() - begun)


@contextmanager
def _savepoint(borrowed: bool) -> Iterator[None]:
    """Keep a borrowed transaction usable: PostgreSQL takes nothing more after a refused query."""
    if not borrowed:
        yield
        return
    raised: BaseException | None = None
    with transaction.atomic(using=lifecycle.alias()):
        try:
            yield
        except DatabaseError:
            raise
        except BaseException as other:
            raised = other  # what the function wrote before stays, as it would elsewhere
    if raised is not None:
        raise raised


def _bound(job: Job[..., Any], claim: Claim) -> inspect.BoundArguments | Parked:
    try:
        return job.bound(claim.args)
    except (Exception, SystemExit, GeneratorExit) as error:  # reviving values runs the job's types
        what = f"{type(error).__name__}: {error}"
        reason = f"the stored arguments no longer fit: {what}. Deploy code that takes them, retry"
        return Parked(reason=clip(reason, MESSAGE_LIMIT))


def _leave_if_forked(pid: int, status: int) -> None:
    # A child that the job has forked must not settle its parent's attempt.
    if os.getpid() != pid:
        os._exit(status)


def _success(returned: Any) -> Succeeded:
    text, note = keys.encode_result(returned, limit=conf.get().MAX_RESULT)
    return Succeeded(result=text, note=note)


def ending_of(  # noqa: C901, PLR0911 - a table
    raised: BaseException, options: Options, heart: Heart
) -> Ending:
    match raised:
        case Retry():
            return Failed(error=_error(raised), after=raised.after)
        case Snooze():
            return Snoozed(after=raised.after, reason=raised.reason)
        case Cancel():
            return Stopped(
                reason=raised.reason or "cancelled by the job", requested=raised.requested
            )
        case Hold() | StepInDoubt():
            return Parked(reason=str(raised))
        case LeaseLost() if heart.lost.is_set():
            return Lapsed()
        case TimeoutReached():
            final = issubclass(TimeoutError, options.give_up_on or ())
            return Failed(error=_error(raised), final=final, timed_out=True)
        case ShutdownReached():
            return Interrupted(reason=str(raised))
        case KeyboardInterrupt():
            return Interrupted(reason="KeyboardInterrupt", reraise=True)
        case Exception():
            wanted = isinstance(raised, options.retry_on)
            final = isinstance(raised, options.give_up_on) or not wanted
            return Failed(error=_error(raised), final=final)
    return Failed(error=_error(raised))  # SystemExit and the like: no success, whatever its code


def _error(raised: BaseException) -> Error:
    return Error.of(raised, limit=conf.get().MAX_TRACEBACK)


def note_of(ending: Ending, run_time: float | None) -> Note:
    error = ending.error if isinstance(ending, Failed) else None
    reason = ending.note if isinstance(ending, Succeeded) else getattr(ending, "reason", "")
    return Note(error=error, reason=reason, run_time=run_time)
