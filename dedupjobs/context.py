"""What a running job sees of itself: ``current_attempt()``."""

from __future__ import annotations

import contextvars
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

from django.db import connections, transaction

from dedupjobs import clock, conf, keys, lifecycle, probes, registry, spans
from dedupjobs.endings import clip
from dedupjobs.exceptions import Cancel, Hold, LeaseLost, NoCurrentAttempt
from dedupjobs.heartbeat import Heart
from dedupjobs.lifecycle import Claim
from dedupjobs.models import ProcessedJob
from dedupjobs.steps import Check, Step, Steps

R = TypeVar("R")

LOOK_EVERY = 1.0  # seconds between two reads that check() makes by itself

_current: contextvars.ContextVar[Attempt | None] = contextvars.ContextVar(
    "dedupjobs_attempt", default=None
)


class Attempt:
    """The attempt that runs this code."""

    def __init__(self, claim: Claim, heart: Heart) -> None:
        self._claim = claim
        self._heart = heart
        self._looked = clock.monotonic()
        self.completed = False  # whether complete() was called; its COMMIT is another question

    @property
    def number(self) -> int:
        """Which attempt of the key this is, counted over its life, from 1."""
        return self._claim.number

    @property
    def fence(self) -> int:
        """
        A number that grows with every attempt of the key, issued by the database.

        Hand it to a resource that can refuse a smaller one than it has seen.
        """
        return self._claim.fence

    @cached_property
    def job(self) -> ProcessedJob:
        """The job's row, as it was when first asked for."""
        return lifecycle.jobs().get(pk=self._claim.job_pk)

    @cached_property
    def _steps(self) -> Steps:
        return Steps(self._claim, self._heart)

    def idempotency_key(self, effect: str = "") -> str:
        """
        Return a text that is equal for all attempts of one intended execution.

        Hand it to a service that recognises repeated requests, or ask it by this key before
        repeating. ``effect`` tells several effects of one job apart: the name of a step. 40 hex
        digits, of which nobody reads the job's key.
        """
        return self._steps.idempotency_key(effect)

    def step(
        self,
        name: str,
        function: Callable[..., R],
        /,
        *args: Any,
        atomic: bool = False,
        check: Check | None = None,
        repeat: bool = False,
        **kwargs: Any,
    ) -> R:
        """
        Call ``function(*args, **kwargs)`` once, and give its result back to all later attempts.

        ``atomic``: what it writes in the jobs' database and the record that it is done are
        committed together. Otherwise it may be *in doubt*: an earlier attempt has begun it, and
        nobody knows how it ended. Then, and after a failure, ``check`` is called with the step's
        idempotency key and answers ``Done(result)`` or ``NotDone()``; without it, ``repeat`` says
        that it may be called again; and else StepInDoubt is raised, which holds the job.

        StepError: a name that is used twice, empty or too long, a transaction around a step that
        is not atomic, too many steps. StepResultError: the result is too large, or no value that
        a job could have as an argument. LeaseLost: another attempt owns the job.
        """
        self._heart.touch()
        self._stand()
        step = Step(
            name=name,
            function=function,
            args=args,
            kwargs=kwargs,
            atomic=atomic,
            check=check,
            repeat=repeat,
        )
        try:
            return self._steps.run(step)  # type: ignore[no-any-return]
        finally:
            self._heart.touch()

    def trace_headers(self) -> dict[str, str]:
        """
        Return the headers that a request to another service should carry: ``traceparent`` and more.

        Without a tracer they name the call that enqueued the job, if it was traced; else there
        are none.
        """
        origin = self._claim.traceparent
        return spans.headers() or ({"traceparent": origin} if origin else {})

    def check(self) -> None:
        """
        Raise if this attempt should not go on; call it before an effect and in long loops.

        LeaseLost: another attempt may own the job. Cancel, Hold: an operator asked. Cheap: at
        most one read a second.
        """
        self._heart.touch()
        self._look()
        self._stand()

    def _stand(self) -> None:
        """Raise by what is known, without a look."""
        if self._heart.lost.is_set():
            raise LeaseLost(f"attempt {self.number} (fence {self.fence}) was given up for lost")
        if self._heart.pulse.cancel:
            raise Cancel("cancelled on request", requested=True)
        if self._heart.pulse.hold:
            raise Hold("held on request")

    def progress(self, done: float, total: float | None = None, text: str = "") -> None:
        """Say how far the job is; kept in memory and written by the next heartbeat."""
        self._heart.progress = json.dumps([done, total, clip(text, 500)])
        self.check()

    @contextmanager
    def fenced(self) -> Iterator[None]:
        """
        Write only if this attempt is still the one: ``with attempt.fenced(): order.save()``.

        Opens a transaction (or a savepoint) on the jobs' database that locks the own open
        attempt before the block and renews its lease after it, so that no other attempt can
        start before the writes are committed. LeaseLost: it was given up, nothing is written.
        """
        lease = self._heart.lease
        with transaction.atomic(using=lifecycle.alias()):
            if not lifecycle.lock_open(self.fence):
                raise LeaseLost(f"attempt {self.number} (fence {self.fence}) was given up for lost")
            probes.reach("fenced.locked")
            yield
            # An attempt that was completed in the block has been locked by us all along.
            if not self.completed and not lifecycle.renew(self.fence, lease=lease):
                raise LeaseLost(f"attempt {self.number} (fence {self.fence}) has ended")

    def complete(self, result: Any = None) -> None:
        """
        End this job as a success inside the function's own last ``atomic()`` block.

        Its effects and its success then commit together, with the rest of the function outside
        the transaction. LeaseLost: another attempt decided, and the block must roll back.
        """
        if not connections[lifecycle.alias()].in_atomic_block:
            raise RuntimeError("attempt.complete() belongs inside transaction.atomic()")
        claim, job = self._claim, registry.get(self._claim.name)
        if job.options.atomic:
            raise RuntimeError(f"{job.name} is atomic and completes by returning")
        self.completed = True
        text, note = keys.encode_result(result, limit=conf.get().MAX_RESULT)
        ended = lifecycle.complete(
            claim, text, unique_for=job.unique_for, note=lifecycle.Note(reason=note)
        )
        if ended is None:
            raise LeaseLost(f"attempt {self.number} (fence {self.fence}) was given up for lost")

    def _look(self) -> None:
        due = clock.monotonic() - self._looked >= LOOK_EVERY
        if due and not connections[lifecycle.alias()].needs_rollback:
            self._looked = clock.monotonic()
            self._heart.see(lifecycle.look(self._claim.fence))


def current_attempt() -> Attempt:
    """Return the attempt that runs this code, or raise NoCurrentAttempt."""
    attempt = _current.get()
    if attempt is None:
        raise NoCurrentAttempt(
            "current_attempt() works only inside a job that a worker runs; calling the job's "
            "function directly makes no attempt"
        )
    return attempt


@contextmanager
def entered(attempt: Attempt, *, borrowed: bool = False) -> Iterator[None]:
    """Make ``attempt`` the current one for the block; ``borrowed``: in somebody's transaction."""
    if borrowed:
        attempt._steps.begin_in_transaction()
    token = _current.set(attempt)
    try:
        yield
    finally:
        _current.reset(token)
