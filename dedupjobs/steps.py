"""
The steps of a run: what one attempt has done, the next one does not do again.

    step ──► succeeded before? ──yes──► its stored result
               │ no
               ├── begun before ──► check(key) ──► Done(result): stored
               │                    no check, in doubt, not to be repeated: StepInDoubt
               ▼
             begin ──► function ──► record           atomic: function and record in one COMMIT

A step is *in doubt* while it is begun, its end is not recorded, and its attempt has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from django.db import DatabaseError, InterfaceError, connections, transaction

from dedupjobs import callables, clock, conf, keys, lifecycle, probes, registry, signals
from dedupjobs.endings import clip
from dedupjobs.exceptions import LeaseLost, StepError, StepInDoubt, StepResultError
from dedupjobs.heartbeat import Heart
from dedupjobs.lifecycle import Claim, Entry
from dedupjobs.models import JobStep, StepState
from dedupjobs.patience import CONNECTION_ERRORS, persist
from dedupjobs.signals import StepEvent

LONGEST_NAME = 100  # characters
KEY_DIGITS = 40  # services take 36 to 255 characters, some in one case only
MESSAGE = 500  # characters of an error that are kept


@dataclass(frozen=True, slots=True)
class Done:
    """A check's answer: the step had its effect, and this is its result."""

    value: Any = None


@dataclass(frozen=True, slots=True)
class NotDone:
    """A check's answer: the step had no effect, and will have none by itself. Run it."""


Check = Callable[[str], Done | NotDone]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of ``attempt.step()``."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    atomic: bool
    check: Check | None
    repeat: bool

    def call(self) -> Any:
        """Call the function."""
        return self.function(*self.args, **self.kwargs)


class Steps:
    """The steps of one attempt; what is recorded of its generation is read at the first one."""

    def __init__(self, claim: Claim, heart: Heart) -> None:
        self._claim = claim
        self._heart = heart
        self._outer: tuple[Any, ...] = ()  # blocks of transaction.atomic() that are not the job's
        self._named: dict[str, str] = {}  # of this run, by how a database may compare them
        self._known: dict[str, JobStep] | None = None
        self._guard = threading.RLock()

    def begin_in_transaction(self) -> None:
        """The job's code starts in somebody's transaction: what is open now, it has not opened."""
        self._outer = tuple(connections[lifecycle.alias()].atomic_blocks)

    def idempotency_key(self, effect: str) -> str:
        """Return what is equal for all attempts of this generation, and differs by effect."""
        claim = self._claim
        parts = [claim.key_hash, claim.job_pk, claim.generation, effect]
        return keys.digest(keys.canonical(parts, "effect"))[:KEY_DIGITS]

    def run(self, step: Step) -> Any:
        """Return the step's result, whichever attempt has made it."""
        probes.reach("step.before")
        self._take(step)
        try:
            return self._run(step)
        except BaseException:
            self._named.pop(_folded(step.name), None)  # it may be called again
            raise

    def _run(self, step: Step) -> Any:
        known = self._recorded().get(_folded(step.name))
        if known is not None:
            if known.state == StepState.SUCCEEDED:
                return self._stored(step, known)
            answer = self._looked_up(step, known)
            if isinstance(answer, Done):
                return self._take_as_done(step, answer)
        return self._atomically(step) if step.atomic else self._by_itself(step)

    # ---- before it

    def _take(self, step: Step) -> None:
        """Refuse what is no step, and take its name for this run."""
        _refuse_bad(step)
        if not step.atomic and self._is_in_transaction():
            raise StepError(
                f"step {step.name!r} stands inside transaction.atomic(), as all of an atomic job "
                "and of a run_now() inside a transaction does: a rollback would undo its record, "
                "not its effect. Give it atomic=True if all that it does is in the jobs' database; "
                "else call it outside of the transaction."
            )
        with self._guard:
            known, folded = self._recorded(), _folded(step.name)
            if (other := self._named.get(folded)) is not None:
                raise StepError(_twice(step.name, other))
            most = conf.get().MAX_STEPS
            if folded not in known and len(known) >= most:
                raise StepError(
                    f"step {step.name!r}: this job has {len(known):,} steps, and "
                    f'DEDUPJOBS["MAX_STEPS"] is {most:,}. Do more in each step, or split the job.'
                )
            self._named[folded] = step.name

    def _is_in_transaction(self) -> bool:
        """Whether a rollback may come that undoes what is written now; a test's own is none."""
        if registry.options_of(self._claim.name).atomic:
            return True
        blocks = connections[lifecycle.alias()].atomic_blocks
        # The innermost of those around the job is the savepoint that its run is in.
        around, own = self._outer[:-1], blocks[len(self._outer) :]
        return not all(getattr(block, "_from_testcase", False) for block in (*around, *own))

    def _recorded(self) -> dict[str, JobStep]:
        with self._guard:
            if self._known is None:
                found = lifecycle.steps_of(self._claim)
                self._known = {_folded(row.name): row for row in found}
            return self._known

    def _looked_up(self, step: Step, known: JobStep) -> Done | NotDone:
        """Return whether a step that was begun before has been done."""
        in_doubt = known.state == StepState.STARTED
        if in_doubt:
            self._tell(step, StepEvent.IN_DOUBT)
        if step.check is not None:
            return self._checked(step, step.check)
        if in_doubt and not step.repeat:
            raise StepInDoubt(self._doubt(step, known))
        return NotDone()

    def _checked(self, step: Step, check: Check) -> Done | NotDone:
        answer = check(self.idempotency_key(step.name))
        if isinstance(answer, (Done, NotDone)):
            return answer
        raise StepError(
            f"step {step.name!r}: its check returned {type(answer).__name__}. Return Done(result) "
            "if the step had its effect, NotDone() if it had none, and raise if you can not know."
        )

    def _doubt(self, step: Step, known: JobStep) -> str:
        why = f" ({known.error})" if known.error else ""
        return clip(
            f"step {step.name!r} is in doubt: attempt {known.attempt} began it, and nobody knows "
            f"whether it had its effect{why}. Look that up; its idempotency key is "
            f"{self.idempotency_key(step.name)}. Then tell it by manage.py dedupjobs_step. In the "
            "code, check= looks it up, and repeat=True says that twice does no harm.",
            2_000,
        )

    def _placed(self, step: Step, error: StepInDoubt) -> str:
        """Return a function's own words with what a person needs to look its effect up."""
        place = f"step {step.name!r}, attempt {self._claim.number}"
        return clip(f"{error} ({place}, key {self.idempotency_key(step.name)})", 2_000)

    # ---- without running it

    def _stored(self, step: Step, known: JobStep) -> Any:
        try:
            value = keys.decode(known.result or "null")
        except Exception as error:
            raise StepResultError(
                f"step {step.name!r}: attempt {known.attempt} has done it, and its stored result "
                f"fits this code no more: {error}. Deploy code that takes it."
            ) from error
        self._tell(step, StepEvent.STORED)
        return value

    def _take_as_done(self, step: Step, answer: Done) -> Any:
        text, value = _encoded(step, answer.value)
        self._enter(step, StepState.SUCCEEDED, result=text)
        self._tell(step, StepEvent.LOOKED_UP)
        return value

    # ---- running it

    def _by_itself(self, step: Step) -> Any:
        """Record that it begins, run it, record its end."""
        self._enter(step, StepState.STARTED)
        probes.reach("step.after_started")
        begun = clock.monotonic()
        try:
            value = step.call()
            probes.reach("step.after_code")
            text, value = _encoded(step, value)
        except (StepInDoubt, StepResultError) as error:
            self._note(step, StepState.STARTED, error)  # it ran; whether to good effect, who knows
            self._tell(step, StepEvent.IN_DOUBT, clock.monotonic() - begun)
            if isinstance(error, StepInDoubt):
                error.args = (self._placed(step, error),)
            raise
        except Exception as error:
            self._note(step, StepState.FAILED, error)
            self._tell(step, StepEvent.FAILED, clock.monotonic() - begun)
            raise
        entry = self._entry(step, StepState.SUCCEEDED, result=text)
        self._write(entry, lambda: lifecycle.end_step(self._claim, entry))
        probes.reach("step.after_recorded")
        self._tell(step, StepEvent.DONE, clock.monotonic() - begun)
        return value

    def _atomically(self, step: Step) -> Any:
        """Commit what it writes together with the record that it is done."""
        begun = clock.monotonic()
        try:
            value = self._committed(step, begun)
        except LeaseLost:
            raise
        except Exception as error:
            self._note_failure(step, error, clock.monotonic() - begun)
            self._tell(step, StepEvent.FAILED, clock.monotonic() - begun)
            raise
        probes.reach("step.after_recorded")
        self._tell(step, StepEvent.DONE, clock.monotonic() - begun)
        return value

    def _committed(self, step: Step, begun: float) -> Any:
        mark = f"dedupjobs_step_{self._claim.fence}_{len(self._named)}"
        entry: Entry | None = None
        try:
            with transaction.atomic(using=lifecycle.alias()):
                lifecycle.mark_transaction(mark)
                value = step.call()
                probes.reach("step.after_code")
                text, value = _encoded(step, value)
                lifecycle.assert_unbroken(mark)
                took = clock.monotonic() - begun
                entry = self._entry(step, StepState.SUCCEEDED, result=text, took=took)
                if not lifecycle.enter_step(self._claim, entry, known=self._knows(step)):
                    raise LeaseLost(self._stale(step.name))
                probes.reach("step.uncommitted")
        except CONNECTION_ERRORS:
            if entry is None or not self._was_committed(entry):
                raise
        self._remember(entry)
        return value

    def _was_committed(self, entry: Entry) -> bool:
        """Read what became of a COMMIT without a reply; in a transaction of others, nothing did."""
        connection = connections[lifecycle.alias()]
        if connection.in_atomic_block:
            return False
        connection.close()
        return persist(
            lambda first: lifecycle.has_entry(self._claim, entry), patience=self._heart.lease
        )

    # ---- what is written

    def _enter(self, step: Step, state: StepState, *, result: str | None = None) -> None:
        entry, known = self._entry(step, state, result=result), self._knows(step)
        self._write(entry, lambda: lifecycle.enter_step(self._claim, entry, known=known))

    def _write(self, entry: Entry, write: Callable[[], bool]) -> None:
        """Write, again on a fresh connection while the database is out of reach."""

        def look_or_write(first: bool) -> bool:
            return (not first and lifecycle.has_entry(self._claim, entry)) or write()

        patience = self._heart.lease
        if not persist(look_or_write, patience=patience, claim=self._claim):
            raise LeaseLost(self._stale(entry.name))
        self._remember(entry)

    def _note(self, step: Step, state: StepState, error: Exception) -> None:
        """Write how it ended, if that can be: what the function has raised must come through."""
        entry = self._entry(step, state, error=_told(error))
        with suppress(DatabaseError, InterfaceError, LeaseLost):
            self._write(entry, lambda: lifecycle.end_step(self._claim, entry))

    def _note_failure(self, step: Step, error: Exception, took: float) -> None:
        """The same of an atomic step, of which nothing is written yet."""
        if connections[lifecycle.alias()].needs_rollback:
            return
        entry = self._entry(step, StepState.FAILED, error=_told(error), took=took)
        known = self._knows(step)
        with suppress(DatabaseError, InterfaceError, LeaseLost):
            self._write(entry, lambda: lifecycle.enter_step(self._claim, entry, known=known))

    def _entry(self, step: Step, state: StepState, **values: Any) -> Entry:
        known = self._recorded().get(_folded(step.name))
        return Entry(name=known.name if known else step.name, state=state, **values)

    def _knows(self, step: Step) -> bool:
        return _folded(step.name) in self._recorded()

    def _remember(self, entry: Entry | None) -> None:
        if entry is not None:
            self._recorded()[_folded(entry.name)] = JobStep(
                name=entry.name,
                state=entry.state,
                attempt=self._claim.number,
                result=entry.result,
                error=entry.error,
            )

    def _stale(self, name: str) -> str:
        claim = self._claim
        return (
            f"step {name!r}: attempt {claim.number} (fence {claim.fence}) has ended or was given "
            "up for lost, so nothing more is recorded of it"
        )

    def _tell(self, step: Step, event: StepEvent, took: float | None = None) -> None:
        facts = {"step": step.name, "event": event, "took": took}
        signals.tell(signals.step_ended, self._claim.name, claim=self._claim, **facts)


def _refuse_bad(step: Step) -> None:
    """Raise StepError for what can be no step, whatever was done before."""
    name = cast(Any, step.name)
    if not isinstance(name, str) or not name.isprintable() or name.strip() != name or not name:
        raise StepError(
            f"{name!r} names no step. Give a text that people can read, such as 'charge card'."
        )
    if len(name) > LONGEST_NAME:
        raise StepError(
            f"step {name[:40] + '…'!r}: its name has {len(name):,} characters, {LONGEST_NAME} fit. "
            "Pass data as arguments."
        )
    if wrong := callables.why_idle(step.function):
        raise StepError(
            f"step {name!r}: {callables.named(step.function)} {wrong}. {_cure(step.function)}"
        )
    if step.check is not None and (wrong := callables.why_idle(step.check)):
        raise StepError(
            f"step {name!r}: its check {callables.named(step.check)} {wrong}. Give check= a "
            "function that takes the idempotency key and returns Done(result) or NotDone()."
        )
    if step.atomic and (step.check is not None or step.repeat):
        raise StepError(
            f"step {name!r}: an atomic step is never in doubt, so check= and repeat= have nothing "
            "to say. Leave them out."
        )
    if step.check is not None and step.repeat:
        raise StepError(f"step {name!r}: check= says whether to repeat it. Leave repeat= out.")


def _cure(function: Any) -> str:
    if not callable(function):
        return "Pass the function and its arguments: attempt.step('charge card', charge, order_id)."
    return "A step waits for a result: wrap what is async in async_to_sync(), and return a value."


def _twice(name: str, other: str) -> str:
    if name == other:
        what = f"step {name!r} is used twice in one run: the second would get the first's result"
    else:
        what = f"steps {other!r} and {name!r} differ in case only, and a database may not tell them"
    return f"{what}. Give each its own name, such as f'{name} {{number}}'."


def _folded(name: str) -> str:
    return name.casefold()  # MySQL compares so


def _encoded(step: Step, value: Any) -> tuple[str, Any]:
    """Return a result as JSON, and as all later attempts will get it."""
    try:
        text = keys.encode_value(value)
        revived = keys.decode(text)
    except Exception as error:
        raise StepResultError(
            f"step {step.name!r}: its result can not be kept: {error}. Return plain values, or "
            "None."
        ) from error
    limit = conf.get().MAX_STEP_RESULT
    if len(text) > limit:
        raise StepResultError(
            f"step {step.name!r}: its result has {len(text):,} bytes as JSON, and "
            f'DEDUPJOBS["MAX_STEP_RESULT"] is {limit:,}. Store it and return its primary key.'
        )
    return text, revived


def _told(error: Exception) -> str:
    kind = type(error)
    try:
        return clip(f"{kind.__module__}.{kind.__qualname__}: {error}", MESSAGE)
    except Exception:
        return clip(f"{kind.__module__}.{kind.__qualname__}", MESSAGE)
