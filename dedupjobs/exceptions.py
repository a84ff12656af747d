"""
Everything dedupjobs raises.

* DedupJobsError
  - JobDefinitionError    a @job option is wrong or contradicts another
  - ArgumentError         an argument can not be stored (also a TypeError)
  - KeyValueError         a key has an empty part (also a ValueError)
  - PayloadTooLarge       the stored arguments would exceed MAX_PAYLOAD (also a ValueError)
  - UnknownQueue          no queue of this name in RQ_QUEUES
  - UnknownJob            no job is registered under this name
  - NotMigrated           the tables are missing
  - TransactionLost       the database has rolled a transaction back, because of a deadlock
  - NoResult              the job has ended without one, or it was not kept
    + ResultTimeout       not there yet (also a TimeoutError)
  - StaleVersion          an operator acted on a row that has changed since
  - ControlError          a control makes no sense or contradicts one in force (also a ValueError)
  - JobConflict           on_conflict="raise": the key has an active job
  - PayloadMismatch       the key is held by a call with other arguments
  - LeaseLost             another attempt may own the job; this one must not write
  - NoCurrentAttempt      current_attempt() outside a job
  - StepError             a step that can not be run like this (also a ValueError)
    + StepResultError     its result can not be kept
  - StepInDoubt           nobody knows whether a step has had its effect; holds the job
  - StaleFence            a row of a FencedModel has seen a newer token
  - ForeignPickle         an RQ job of somebody else on a DedupWorker's queue
  - OutsideTests          a helper of dedupjobs.testing where no test runs (also a RuntimeError)
* Wish                    raised by a job to ask for something; control flow, no error
  - Retry                 try again later, counted as a failure
  - Snooze                try again later, not counted
  - Cancel                stop here for good
  - Hold                  an operator asked to hold the job (raised by attempt.check())
* CutOff (BaseException)  ends user code from outside
  - TimeoutReached        the job's time-out
  - ShutdownReached       a deploy or SIGTERM
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dedupjobs.client import Outcome


class DedupJobsError(Exception):
    """Base class; never raised itself."""


class JobDefinitionError(DedupJobsError, TypeError):
    """A @job option is wrong or contradicts another one."""


class ArgumentError(DedupJobsError, TypeError):
    """An argument can not be stored; the message names it and the cure."""


class KeyValueError(DedupJobsError, ValueError):
    """A part of the key is empty, so different work would share one identity."""


class PayloadTooLarge(DedupJobsError, ValueError):
    """The arguments are larger than DEDUPJOBS["MAX_PAYLOAD"]; store them and pass their pk."""


class UnknownQueue(DedupJobsError, LookupError):
    """No queue of this name in RQ_QUEUES."""


class UnknownJob(DedupJobsError, LookupError):
    """No job is registered under this name in this process."""


class NotMigrated(DedupJobsError):
    """The tables are missing; run manage.py migrate dedupjobs."""


class TransactionLost(DedupJobsError):
    """The database has rolled the whole transaction back; what it did has to be repeated."""


class NoResult(DedupJobsError):
    """The job has ended without a result, or its result was not kept; the message says why."""


class ResultTimeout(NoResult, TimeoutError):
    """The result is not there yet."""


class StaleVersion(DedupJobsError):
    """The row has changed since the operator looked at it; look again, then act."""


class ControlError(DedupJobsError, ValueError):
    """A control names nothing that there is, makes no sense or contradicts one in force."""


class LeaseLost(DedupJobsError):
    """The lease of this attempt is gone: another attempt may run, so stop and write nothing."""


class NoCurrentAttempt(DedupJobsError, RuntimeError):
    """current_attempt() was called outside a running job."""


class StepError(DedupJobsError, ValueError):
    """A step can not be run like this; the message names it and the cure."""


class StepResultError(StepError):
    """A step's result can not be kept, so no later attempt could get it back."""


class StepInDoubt(DedupJobsError):
    """
    A step was begun and nobody knows whether it had its effect; uncaught, it holds the job.

    Raised by ``attempt.step()`` for a step that an earlier attempt left so. A step's function may
    raise it, too, where it can not know: "the request was sent, and no answer came".
    """


class StaleFence(DedupJobsError):
    """A row has seen a newer token than this one: another attempt owns the key, write nothing."""


class ForeignPickle(DedupJobsError):
    """An RQ job that is not ours came to a DedupWorker; see DEDUPJOBS["FOREIGN_PICKLE"]."""


class OutsideTests(DedupJobsError, RuntimeError):
    """A helper of dedupjobs.testing was called where no test runs; the message says what to do."""


class JobConflict(DedupJobsError):
    """The key has an active job already; ``outcome`` tells which."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"{outcome.job.name} {outcome.job.key!r}: {outcome.reason}")
        self.outcome = outcome


class PayloadMismatch(DedupJobsError):
    """
    The key is held by a call with other arguments.

    ``differing`` names the arguments, never their values; ``stored`` and ``given`` are the
    sha256 digests of both payloads; ``outcome`` carries the row that holds the key.
    """

    def __init__(
        self, outcome: Outcome, *, differing: tuple[str, ...], stored: str, given: str
    ) -> None:
        names = ", ".join(differing) or "the payload"
        super().__init__(
            f"{outcome.job.name} {outcome.job.key!r} is held by a call with another value of "
            f"{names} (stored {stored[:12]}, given {given[:12]}). Use another key for other "
            "work, or on_mismatch='ignore' if the difference does not matter."
        )
        self.outcome = outcome
        self.differing = differing
        self.stored = stored
        self.given = given


class Wish(Exception):
    """What a running job asks for instead of returning."""


class Retry(Wish):
    """Try again after ``after`` seconds (or by backoff); counts as a failure."""

    def __init__(self, reason: str = "", *, after: float | timedelta | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after = _seconds(after)


class Snooze(Wish):
    """Try again after ``after`` seconds; no failure is counted."""

    def __init__(self, after: float | timedelta, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.after = _seconds(after) or 0.0


class Cancel(Wish):
    """Stop here for good; the key is free again."""

    def __init__(self, reason: str = "", *, requested: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.requested = requested


class Hold(Wish):
    """An operator asked to hold this job; raised by attempt.check()."""


class CutOff(BaseException):
    """Ends user code from outside; no Exception, so that ``except Exception`` lets it pass."""


class TimeoutReached(CutOff):
    """The job ran into its time-out."""


class ShutdownReached(CutOff):
    """The worker is shutting down."""


class GroupUnknown(Exception):
    """No row to lock stands for this group yet; whoever claims makes it and claims again."""


def _seconds(value: float | timedelta | None) -> float | None:
    if value is None:
        return None
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if not 0 <= seconds <= 366 * 86400:
        raise ValueError(f"after={value!r}: give 0 to 366 days, in seconds or as a timedelta")
    return seconds
