"""claim, begin, beat: how an attempt starts, and how it stays alive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import F, Q

from dedupjobs import probes, registry
from dedupjobs.clock import DbNow
from dedupjobs.lifecycle import together
from dedupjobs.lifecycle.rows import (
    NEXT_VERSION,
    UNASKED,
    Claim,
    alias,
    attempts,
    job,
    skip_locked,
)
from dedupjobs.lifecycle.statements import can_return_updated, insert, insertion
from dedupjobs.models import (
    WAITING,
    AttemptOutcome,
    JobAttempt,
    Status,
)

TAKEN: dict[str, Any] = {
    "status": Status.RUNNING,
    "attempts": F("attempts") + 1,
    "version": NEXT_VERSION,
    "started_at": DbNow(),
}
MADE = ("id", "began_at")
OF_A_CLAIM = (
    "id",
    "key_hash",
    "key",
    "scope",
    "name",
    "queue",
    "version",
    "attempts",
    "failures",
    "max_attempts",
    "traceparent",
    "args",
    "run_after",
    "enqueued_at",
    "started_at",
    "dispatch_id",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an attempt runs, for people who look for it. ``lock_wait``: seconds before it."""

    host: str = ""
    pid: int | None = None
    rq_id: str = ""
    lock_wait: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a claim is granted: a lease in seconds. ``group_hash``: the group it counts in."""

    lease: float
    group_hash: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """
    Why a row that could be taken may not run yet. ``mark``: what it is set aside under.

    ``sent_as``: the RQ id of its last hand-over, as the claim has read it.
    """

    mark: str
    words: str
    name: str
    sent_as: str | None


class Refused(Exception):
    """The claim was undone: the row waits as before, and no attempt was made."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.words)
        self.refusal = refusal


def _by_its_options(row: Any) -> Grant:
    return Grant(lease=registry.options_of(row.name).lease)


@dataclass(frozen=True, slots=True)
class Gate:
    """
    Who may start, and on which terms. ``admit`` is asked inside the claim's transaction, which
    holds the row, and may raise Refused. It has nothing to say about any row but those of the
    jobs ``names`` and the ``queues``.
    """

    admit: Callable[[Any], Grant] = _by_its_options
    names: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()

    def passed_by(self) -> dict[str, Any]:
        """Return what must hold of a job that need not be asked about."""
        pairs = {"~name__in": self.names, "~queue__in": self.queues}
        return {lookup: values for lookup, values in pairs.items() if values}


OPEN = Gate()


def claim(
    pk: int,
    generation: int,
    *,
    owner: str,
    place: Place,
    begins: bool = True,
    gate: Gate = OPEN,
) -> Claim | None:
    """
    Take a waiting, due job for a new attempt, or return None if there is nothing to take.

    Never from RUNNING: a dead owner's job comes back through reclaim. The arguments are read
    after the UPDATE, which holds the row, so they are those of this generation. ``begins``: user
    code starts at once, so ``began_at`` is written here and spares a statement. ``gate``: what
    it raises rolls all of it back: no attempt, no failure.
    """
    probes.reach("claim.before")
    where, begun = _waiting(pk, generation), _begun(generation, owner, place, begins=begins)
    if together.serves_alone(alias()):
        passed_by = gate.passed_by()
        won = together.claim(alias(), {**where, **passed_by}, TAKEN, OF_A_CLAIM, begun)
        if won is None and passed_by:
            won = _claim_step_by_step(where, begun, gate)
    else:
        won = _claim_step_by_step(where, begun, gate)
    if won is None:
        return None
    row, attempt = won
    probes.reach("claim.committed")
    return claim_of(attempt, row)


def get_ready() -> None:
    """Compile what a claim needs; asks the database nothing."""
    where, begun = _waiting(0, 0), _begun(0, "", Place(), begins=True)
    if together.serves_alone(alias()):
        together.claiming(alias(), where, TAKEN, OF_A_CLAIM, begun)
    else:
        job(**where).statement(TAKEN, OF_A_CLAIM if can_return_updated(alias()) else ())
        given = {**begun, **_of_the_job(0, 0, 1.0, 0.0)}
        insertion(JobAttempt, alias(), returning=MADE, values=given)


def _waiting(pk: int, generation: int) -> dict[str, Any]:
    """Return what must hold of a job that is claimed."""
    return {
        "pk": pk,
        "status__in": WAITING,
        "generation": generation,
        "run_after__lte": DbNow(),
        **UNASKED,
    }


def _begun(generation: int, owner: str, place: Place, *, begins: bool) -> dict[str, Any]:
    """Return the columns of a new attempt that its job does not give."""
    return {
        "generation": generation,
        "owner": owner,
        "beat_at": DbNow(),
        "claimed_at": DbNow(),
        "began_at": DbNow() if begins else None,
        "lock_wait": place.lock_wait,
        "host": place.host[:200],
        "pid": place.pid,
        "rq_id": place.rq_id[:200],
    }


def _of_the_job(pk: int, number: int, lease: float, delay: float | None) -> dict[str, Any]:
    """Return the columns of a new attempt that its job gives."""
    return {"job_id": pk, "number": number, "lease_until": DbNow(lease), "queue_delay": delay}


def _claim_step_by_step(
    where: dict[str, Any], begun: dict[str, Any], gate: Gate
) -> tuple[Any, Any] | None:
    with transaction.atomic(using=alias()):
        row = job(**where).update_and_read(OF_A_CLAIM, **TAKEN)
        if row is None:
            return None
        probes.reach("claim.row_won")
        grant = gate.admit(row)
        delay = _seconds_between(max(row.run_after, row.enqueued_at), row.started_at)
        given = {**begun, **_of_the_job(row.pk, row.attempts, grant.lease, delay)}
        if grant.group_hash:
            given["group_hash"] = grant.group_hash
        attempt = insert(JobAttempt, alias(), returning=MADE, **given)
        probes.reach("claim.uncommitted")
    return row, attempt


def claimed_by(owner: str) -> list[Claim]:
    """
    Return the open attempts of one delivery: after a claim's COMMIT without a reply, or when
    its process is gone. ``owner`` stands before an optional ``.number`` of the row in a batch.
    """
    mine = Q(owner=owner) | Q(owner__startswith=f"{owner}.")
    open_ones = attempts().filter(mine, outcome=None).select_related("job").order_by("pk")
    return [claim_of(attempt, attempt.job) for attempt in open_ones]


def claim_of(attempt: Any, row: Any) -> Claim:
    """Return the claim that an attempt and its job are, from all that has their columns."""
    return Claim(
        job_pk=row.pk,
        fence=attempt.pk,
        number=attempt.number,
        generation=attempt.generation,
        owner=attempt.owner,
        name=row.name,
        key=row.key,
        key_hash=row.key_hash,
        scope=row.scope,
        queue=row.queue,
        args=row.args,
        version=row.version,
        failures=row.failures,
        max_attempts=row.max_attempts,
        began=attempt.began_at is not None,
        queue_delay=attempt.queue_delay,
        lock_wait=attempt.lock_wait,
        traceparent=row.traceparent,
        host=attempt.host,
        rq_id=attempt.rq_id,
        group_hash=attempt.group_hash,
    )


def _seconds_between(earlier: datetime, later: datetime | None) -> float | None:
    return None if later is None else max((later - earlier).total_seconds(), 0.0)


def begin(claim: Claim) -> bool:
    """Write that user code starts; False: the attempt has ended, so it must not start."""
    probes.reach("begin.before")
    unbegun = attempts().filter(pk=claim.fence, outcome=None, began_at=None)
    return bool(unbegun.update(began_at=DbNow()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What a beat found. ``lost``: another one ended this attempt. ``over``: it has ended."""

    lost: bool = False
    over: bool = False
    cancel: bool = False
    hold: bool = False


def beat(fence: int, *, lease: float, progress: str | None = None, active: float = 0) -> Pulse:
    """
    Renew an open attempt's lease, also an expired one that nobody has reclaimed.

    ``active``: seconds since the job last showed activity. A row that is locked is skipped, not
    waited for: it is our own settle or batch, and the beat's connection must stay free.
    """
    probes.reach("beat.before")
    changes: dict[str, Any] = {"lease_until": DbNow(lease), "beat_at": DbNow()}
    changes["active_at"] = DbNow(-active)
    if progress is not None:
        changes["progress"] = progress
    with transaction.atomic(using=alias()):
        free = skip_locked(attempts().filter(pk=fence, outcome=None)).values_list("pk", flat=True)
        if free:
            attempts().filter(pk=fence, outcome=None).update(**changes)
    return look(fence)


def lock_open(fence: int) -> bool:
    """Lock an attempt until the end of the caller's transaction; False: it has ended."""
    return bool(attempts().select_for_update().filter(pk=fence, outcome=None).values_list("pk"))


def renew(fence: int, *, lease: float) -> bool:
    """Renew the lease inside the caller's transaction, whose lock keeps the beats out."""
    mine = attempts().filter(pk=fence, outcome=None)
    return bool(mine.update(lease_until=DbNow(lease), beat_at=DbNow()))


def look(fence: int) -> Pulse:
    """Read an attempt's state and what is asked of its job; changes nothing."""
    found = attempts().filter(pk=fence)
    row = found.values_list("outcome", "job__cancel_requested", "job__hold_requested").first()
    if row is None:  # not visible yet to this connection: no proof of anything
        return Pulse()
    return pulse_of(*row)


def pulse_of(outcome: str | None, cancel: bool, hold: bool) -> Pulse:
    """Return what an attempt's outcome, and what is asked of its job, mean to who runs it."""
    lost = outcome in (AttemptOutcome.LOST, AttemptOutcome.RETURNED)
    return Pulse(lost=lost, over=outcome is not None, cancel=cancel, hold=hold)
