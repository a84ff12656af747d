"""The rows of a batch: how they are claimed, and what became of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dedupjobs import controls, lifecycle, locks, registry, runner, signals
from dedupjobs.endings import Ending, Succeeded
from dedupjobs.heartbeat import Heart
from dedupjobs.lifecycle import Claim, Done, Note, Terms, Wanted
from dedupjobs.locks import Grip, Taken
from dedupjobs.models import Status
from dedupjobs.registry import Job, Options
from dedupjobs.runner import AT_FIRST, CLAIM_PATIENCE, FIRST_LEASE, Rows
from dedupjobs.signals import LockEvent


def may_share(options: Options) -> bool:
    """Whether rows of a job may be claimed with others; a job that may not is run by itself."""
    return bool(options.batch)


@dataclass(slots=True)
class Member:
    """A claimed row of a batch."""

    claim: Claim
    job: Job[..., object]
    heart: Heart
    grip: Grip
    mode: str  # in which way it is run: "each", "group" or "atomic"

    @property
    def options(self) -> Options:
        return controls.known().options_of(self.job.name)

    @property
    def is_asked(self) -> bool:
        """Whether a beat has seen that it is to be cancelled or held."""
        return self.heart.pulse.cancel or self.heart.pulse.hold


@dataclass(slots=True)
class Ran:
    """A job of a batch that has been run. ``status``: None, until its ending is written."""

    member: Member
    ending: Ending
    note: Note
    seconds: float
    status: Status | None = None
    late: bool = False  # it ended well after it had been given up

    @property
    def is_unwritten(self) -> bool:
        """Whether it is a plain success that is still to be written."""
        return self.status is None and isinstance(self.ending, Succeeded)

    @property
    def done(self) -> Done:
        """The success that is to be written."""
        result = self.ending.result if isinstance(self.ending, Succeeded) else ""
        member = self.member
        return Done(
            claim=member.claim, result=result, unique_for=member.job.unique_for, note=self.note
        )


def holds_lock(grip: Grip) -> bool:
    """Whether a lock may be ours, so that it is to be released."""
    return grip not in (Grip.UNREACHABLE, Grip.UNUSED)


def wanted_of(rows: Rows, owner: str) -> list[Wanted]:
    """Return the rows of a message, each under an owner of its own."""
    return [Wanted(pk=pk, generation=g, owner=f"{owner}.{i}") for i, (pk, g) in enumerate(rows)]


def claimed(wanted: Sequence[Wanted], owner: str) -> list[Member]:
    """Take locks and rows, each in one round trip; whatever Redis says, the rows decide."""
    named: dict[int, Wanted] = {}
    for row in wanted:
        named.setdefault(row.pk, row)
    firsts = list(named.values())
    taken = _taken(firsts)
    without = any(one.grip is Grip.UNREACHABLE for one in taken.values())
    known = registry.by_name()
    gate = controls.current().gate()
    terms = {
        name: Terms(lease=job.options.lease, begins=job.options.gathers)
        for name, job in known.items()
        if may_share(job.options)
        and not (gate.queues or name in gate.names)
        and not (without and job.options.needs_lock)
    }
    asked = [
        Wanted(
            pk=row.pk,
            generation=row.generation,
            owner=row.owner,
            lock_wait=taken[row.pk].waited,
        )
        for row in firsts
    ]

    def look_or_claim(first: bool) -> list[Claim]:
        if not first and (found := lifecycle.claimed_by(owner)):
            return found
        return lifecycle.claim_many(asked, terms=terms, place=runner.place_of())

    claims = runner.persist(look_or_claim, patience=CLAIM_PATIENCE)
    grips = _hold_locks(claims, taken)
    return [_member(claim, known[claim.name], grips[claim.job_pk]) for claim in claims]


def _taken(rows: Sequence[Wanted]) -> dict[int, Taken]:
    if not runner.takes_lock():
        return dict.fromkeys((row.pk for row in rows), Taken(Grip.UNUSED))
    return locks.take_many([(row.pk, row.owner) for row in rows], ttl=FIRST_LEASE)


def _member(claim: Claim, job: Job[..., object], grip: Grip) -> Member:
    heart = Heart(
        job_pk=claim.job_pk,
        fence=claim.fence,
        owner=claim.owner,
        name=claim.name,
        lease=job.options.lease,
    )
    mode = "atomic" if job.options.atomic else "group" if job.options.gathers else "each"
    return Member(claim, job, heart, grip, mode)


def _hold_locks(claims: Sequence[Claim], taken: dict[int, Taken]) -> dict[int, Grip]:
    """Take over the locks of others, whose rows we have won, and give all the jobs' own leases."""
    grips = {claim.job_pk: taken[claim.job_pk].grip for claim in claims}
    grips |= _given_up(claims, grips)
    events = {pk: AT_FIRST[grip] for pk, grip in grips.items()}
    by_lease: dict[tuple[bool, float], list[tuple[int, str]]] = {}
    for claim in claims:
        lease, grip = registry.options_of(claim.name).lease, grips[claim.job_pk]
        if grip is Grip.BUSY or (grip is Grip.HELD and lease != FIRST_LEASE):
            held = by_lease.setdefault((grip is Grip.BUSY, lease), [])
            held.append((claim.job_pk, claim.owner))
    for (busy, lease), held in by_lease.items():
        now = (locks.replace_many if busy else locks.extend_many)(held, ttl=lease)
        grips |= now
        for pk, grip in now.items():
            if grip is not Grip.HELD:
                events[pk] = AT_FIRST[grip] if busy or grip is Grip.UNREACHABLE else events[pk]
            elif busy:
                events[pk] = LockEvent.TAKEN_OVER
    for claim in claims:
        pk, generation = claim.job_pk, claim.generation
        signals.tell(signals.delivery_received, "", job_pk=pk, generation=generation)
        runner.tell_lock(claim.name, pk, events[pk], claim)
    return grips


def _given_up(claims: Sequence[Claim], grips: dict[int, Grip]) -> dict[int, Grip]:
    """Give up the locks of jobs that take none, whose message did not say what they are."""
    free = [claim for claim in claims if not registry.options_of(claim.name).takes_lock]
    locks.release_many([(c.job_pk, c.owner) for c in free if grips[c.job_pk] is Grip.HELD])
    return {claim.job_pk: Grip.UNUSED for claim in free}
