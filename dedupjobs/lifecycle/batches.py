"""
The arrows of a batch: claim, beat, return and complete many rows with few statements.

Each row is guarded as it would be alone: what a statement here does not move, because somebody
else had decided or holds it, is left for the single arrow, which says why. On PostgreSQL a batch
is one statement, whose SQL stands here; elsewhere a transaction of the single arrows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby
from typing import Any

from django.db import connections, transaction

from dedupjobs import probes
from dedupjobs.clock import DbNow
from dedupjobs.lifecycle import prepared, together
from dedupjobs.lifecycle.claims import (
    OF_A_CLAIM,
    TAKEN,
    Place,
    Pulse,
    claim_of,
    pulse_of,
)
from dedupjobs.lifecycle.leaving import Leaving, take_up
from dedupjobs.lifecycle.rows import NEXT_VERSION, UNASKED, UNSENT, Claim, alias, attempts, jobs
from dedupjobs.lifecycle.rows import skip_locked as free_ones
from dedupjobs.lifecycle.settling import Note, complete, success_of
from dedupjobs.lifecycle.together import ask, holds
from dedupjobs.models import WAITING, AttemptOutcome, JobAttempt, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On which a job's rows may be claimed together. ``begins``: claimed counts as begun."""

    lease: float
    begins: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A success that is to be written. ``unique_for``: how long it holds the key."""

    claim: Claim
    result: str
    unique_for: timedelta | None
    note: Note


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A row of a delivery. ``lock_wait``: seconds since the first one that met its lock busy."""

    pk: int
    generation: int
    owner: str
    lock_wait: float | None = None


# ---- claim

# Locks what is free and due, as it is by then, takes it, and makes the attempts, whose ids are the
# fences.
# wanted: pks, generations, owners, waits; terms: names of jobs, their leases, whether claimed is
# begun.
CLAIM = """
WITH wanted AS (
    SELECT * FROM unnest(
        %(pks)s::bigint[], %(generations)s::int[], %(owners)s::text[], %(waits)s::float8[]
    ) AS wanted (pk, generation, owner, lock_wait)
), terms AS (
    SELECT * FROM unnest(%(names)s::text[], %(leases)s::float8[], %(begin)s::bool[])
        AS terms (name, lease, begins)
), free AS (
    SELECT id FROM dedupjobs_processedjob
    WHERE id = ANY(%(pks)s::bigint[]) AND COALESCE(status, '') IN ('PENDING', 'RETRYING')
        AND run_after <= clock_timestamp() AND NOT cancel_requested AND NOT hold_requested
    ORDER BY id FOR UPDATE SKIP LOCKED
), won AS (
    UPDATE dedupjobs_processedjob AS job
    SET status = 'RUNNING', attempts = job.attempts + 1, version = job.version + 1,
        started_at = clock_timestamp()
    FROM wanted, terms, free
    WHERE job.id = free.id AND job.id = wanted.pk AND job.generation = wanted.generation
        AND job.name = terms.name
    RETURNING job.*, wanted.owner, wanted.lock_wait, terms.lease, terms.begins
), made AS (
    INSERT INTO dedupjobs_jobattempt (
        job_id, number, generation, owner, lease_until, beat_at, claimed_at, began_at,
        queue_delay, lock_wait, host, pid, rq_id, group_hash,
        progress, late_ending, error_class, error_message, traceback, reason
    )
    SELECT id, attempts, generation, owner,
        clock_timestamp() + lease * interval '1 second', clock_timestamp(), clock_timestamp(),
        CASE WHEN begins THEN clock_timestamp() END,
        GREATEST(EXTRACT(EPOCH FROM started_at - GREATEST(run_after, enqueued_at)), 0),
        lock_wait, %(host)s, %(pid)s, %(rq_id)s, '', '', '', '', '', '', ''
    FROM won ORDER BY id
    RETURNING id, job_id, queue_delay
)
SELECT won.id, made.id, won.attempts, won.generation, won.owner, won.name, won.key, won.key_hash,
    won.scope, won.queue, won.args, won.version, won.failures, won.max_attempts, won.begins,
    made.queue_delay, won.lock_wait, won.traceparent
FROM won JOIN made ON made.job_id = won.id
"""
CLAIMED = (
    *("job_pk", "fence", "number", "generation", "owner", "name", "key", "key_hash"),
    *("scope", "queue", "args", "version", "failures", "max_attempts", "began"),
    *("queue_delay", "lock_wait", "traceparent"),
)


def claim_many(rows: Sequence[Wanted], *, terms: Mapping[str, Terms], place: Place) -> list[Claim]:
    """
    Take those of the rows that are waiting, due and free, in the order of ``rows``.

    Each under an owner of its own, which begins as its delivery's. ``terms``: by the names of jobs
    whose rows may be claimed together; others, and rows that somebody has locked, stay as they are.
    """
    probes.reach("claim.before")
    if connections[alias()].vendor == "postgresql":
        claims = _claim_at_once(rows, terms, place)
    else:
        with transaction.atomic(using=alias()):
            claims = _claim_in_steps(rows, terms, place)
            probes.reach("claim.uncommitted")
    probes.reach("claim.committed")
    order = {row.pk: index for index, row in enumerate(rows)}
    return sorted(claims, key=lambda claim: order[claim.job_pk])


def _claim_at_once(rows: Sequence[Wanted], terms: Mapping[str, Terms], place: Place) -> list[Claim]:
    words: dict[str, Any] = {
        "pks": [row.pk for row in rows],
        "generations": [row.generation for row in rows],
        "owners": [row.owner for row in rows],
        "waits": [row.lock_wait for row in rows],
        "names": list(terms),
        "leases": [of_job.lease for of_job in terms.values()],
        "begin": [of_job.begins for of_job in terms.values()],
        "host": place.host[:200],
        "pid": place.pid,
        "rq_id": place.rq_id[:200],
    }
    where = {"host": words["host"], "rq_id": words["rq_id"]}
    return [
        Claim(**dict(zip(CLAIMED, values, strict=True)), **where) for values in ask(CLAIM, words)
    ]


def _claim_in_steps(
    rows: Sequence[Wanted], terms: Mapping[str, Terms], place: Place
) -> list[Claim]:
    wanted = {row.pk: row for row in rows}
    due = jobs().filter(
        pk__in=wanted,
        status__in=WAITING,
        run_after__lte=DbNow(),
        name__in=list(terms),
        **UNASKED,
    )
    free = [
        pk
        for pk, generation in free_ones(due.order_by("pk")).values_list("pk", "generation")
        if generation == wanted[pk].generation
    ]
    won = due.filter(pk__in=free).update(**TAKEN)
    if won < len(free):  # no lock has kept others out: one by one, then
        transaction.set_rollback(True, using=alias())
        return []
    probes.reach("claim.row_won")
    found = list(jobs().filter(pk__in=free).only(*OF_A_CLAIM, "generation").order_by("pk"))
    made = [_attempt(row, wanted[row.pk], terms[row.name], place) for row in found]
    attempts().bulk_create(made)
    owners = [attempt.owner for attempt in made]
    stored = {attempt.owner: attempt for attempt in attempts().filter(owner__in=owners)}
    return [claim_of(stored[owner], row) for owner, row in zip(owners, found, strict=True)]


def _attempt(row: Any, wanted: Wanted, terms: Terms, place: Place) -> JobAttempt:
    return JobAttempt(
        job_id=row.pk,
        number=row.attempts,
        generation=row.generation,
        owner=wanted.owner,
        lease_until=DbNow(terms.lease),
        beat_at=DbNow(),
        claimed_at=DbNow(),
        began_at=DbNow() if terms.begins else None,
        queue_delay=_queue_delay(row),
        lock_wait=wanted.lock_wait,
        host=place.host[:200],
        pid=place.pid,
        rq_id=place.rq_id[:200],
    )


def _queue_delay(row: Any) -> float:
    return max(float((row.started_at - max(row.run_after, row.enqueued_at)).total_seconds()), 0.0)


# ---- beat


def beat_many(leases: Mapping[int, float]) -> dict[int, Pulse]:
    """
    Renew the open attempts among these fences, and return what each one's beat saw.

    ``leases``: seconds by fence. Locked rows are skipped, not waited for, as by a single beat.
    """
    probes.reach("beat.before")
    for lease, group in groupby(sorted(leases, key=leases.__getitem__), leases.__getitem__):
        fences = list(group)
        with transaction.atomic(using=alias()):
            open_ones = attempts().filter(pk__in=fences, outcome=None)
            free = list(free_ones(open_ones.order_by("pk")).values_list("pk", flat=True))
            attempts().filter(pk__in=free, outcome=None).update(
                lease_until=DbNow(lease), beat_at=DbNow(), active_at=DbNow()
            )
    found = attempts().filter(pk__in=list(leases))
    columns = ("pk", "outcome", "job__cancel_requested", "job__hold_requested")
    seen = {pk: pulse_of(*asked) for pk, *asked in found.values_list(*columns)}
    return {fence: seen.get(fence, Pulse()) for fence in leases}


def beat_kin(owner: str, *, but: int, lease: float) -> None:
    """Renew the other open attempts of a batch, by the owner of its delivery."""
    kin = attempts().filter(owner__startswith=f"{owner}.", outcome=None).exclude(pk=but)
    with transaction.atomic(using=alias()):
        free = list(free_ones(kin.order_by("pk")).values_list("pk", flat=True))
        attempts().filter(pk__in=free, outcome=None).update(
            lease_until=DbNow(lease), beat_at=DbNow()
        )


# ---- complete

# What follows writes "outcome IS NULL" as COALESCE: the planner takes few attempts to be open, and
# would read all that were since the last VACUUM from the index on outcome.

# As together.COMPLETE for many, each in the order of their keys.
COMPLETE = """
WITH given AS (
    SELECT * FROM unnest(
        %(fences)s::bigint[], %(pks)s::bigint[], %(numbers)s::int[], %(results)s::text[],
        %(holds)s::float8[], %(reasons)s::text[], %(run_times)s::float8[]
    ) AS given (fence, pk, number, result, holds, reason, run_time)
), open AS (
    SELECT id FROM dedupjobs_jobattempt
    WHERE id = ANY(%(fences)s::bigint[]) AND COALESCE(outcome, '') = '' ORDER BY id FOR UPDATE
), mine AS (
    SELECT job.id, given.* FROM dedupjobs_processedjob AS job, given
    WHERE job.id = given.pk AND given.fence IN (SELECT id FROM open)
        AND job.status = 'RUNNING' AND job.attempts = given.number AND job.rerun_args IS NULL
    ORDER BY job.id FOR UPDATE OF job
), moved AS (
    UPDATE dedupjobs_processedjob AS job
    SET status = 'SUCCEEDED', version = job.version + 1, result = mine.result, error = '',
        error_class = '',
        finished_at = clock_timestamp(),
        unique_until = clock_timestamp() + mine.holds * interval '1 second',
        cancel_requested = false, hold_requested = false
    FROM mine
    WHERE job.id = mine.pk AND job.status = 'RUNNING'
        AND job.attempts = mine.number AND job.rerun_args IS NULL
)
UPDATE dedupjobs_jobattempt AS attempt
SET outcome = 'SUCCEEDED', ended_at = clock_timestamp(), reason = mine.reason,
    run_time = mine.run_time, error_class = '', error_message = '', traceback = ''
FROM mine
WHERE attempt.id = mine.fence AND COALESCE(attempt.outcome, '') = ''
RETURNING attempt.id
"""


def complete_many(done: Sequence[Done], *, begins: Claim | None = None) -> set[int]:
    """
    RUNNING → SUCCEEDED for all that are still theirs, in one transaction; after a single one the
    next may begin in it, too.

    Returns the fences of what was written: of the successes, and of ``begins``. A success that is
    missing was lost, or a rerun waits for its end: ``complete`` alone tells, and takes that up.
    """
    probes.reach("settle.before")
    if connections[alias()].vendor == "postgresql":
        written = _complete_at_once(done, begins)
    else:
        written = _complete_in_steps(done, begins)
    probes.reach("settle.committed")
    return written


def _complete_at_once(done: Sequence[Done], begins: Claim | None) -> set[int]:
    if len(done) > 1 and begins is None:
        return {fence for (fence,) in ask(COMPLETE, _words(done))}
    (one,) = done
    return together.complete(
        one.claim, one.result, unique_for=one.unique_for, note=one.note, begins=begins
    )


def _words(done: Sequence[Done]) -> dict[str, Any]:
    return {
        "fences": [d.claim.fence for d in done],
        "pks": [d.claim.job_pk for d in done],
        "numbers": [d.claim.number for d in done],
        "results": [d.result for d in done],
        "holds": [holds(d.unique_for) for d in done],
        "reasons": [d.note.reason for d in done],
        "run_times": [d.note.run_time for d in done],
    }


def _complete_in_steps(done: Sequence[Done], begins: Claim | None) -> set[int]:
    written = set()
    with transaction.atomic(using=alias()):
        for one in sorted(done, key=lambda one: one.claim.job_pk):
            if complete(one.claim, one.result, unique_for=one.unique_for, note=one.note):
                written.add(one.claim.fence)
        if begins and _begin([begins.fence]):
            written.add(begins.fence)
        probes.reach("settle.uncommitted")
    return written


def _begin(fences: Iterable[int]) -> int:
    unbegun = attempts().filter(pk__in=list(fences), outcome=None, began_at=None)
    return unbegun.update(began_at=DbNow())


# ---- complete within one transaction

END = """
UPDATE dedupjobs_jobattempt
SET outcome = 'SUCCEEDED', ended_at = {now}, reason = %s, run_time = %s,
    error_class = '', error_message = '', traceback = ''
WHERE id = %s AND COALESCE(outcome, '') = ''
"""

# The second half of COMPLETE, for attempts that have ended earlier in the same transaction.
MOVE = """
WITH given AS (
    SELECT * FROM unnest(
        %(pks)s::bigint[], %(numbers)s::int[], %(results)s::text[], %(holds)s::float8[]
    ) AS given (pk, number, result, holds)
), mine AS (
    SELECT job.id FROM dedupjobs_processedjob AS job, given
    WHERE job.id = given.pk AND job.id = ANY(%(pks)s::bigint[])
        AND COALESCE(job.status, '') = 'RUNNING' AND job.attempts = given.number
        AND job.rerun_args IS NULL
    ORDER BY job.id FOR UPDATE OF job
)
UPDATE dedupjobs_processedjob AS job
SET status = 'SUCCEEDED', version = job.version + 1, result = given.result, error = '',
    error_class = '',
    finished_at = clock_timestamp(),
    unique_until = clock_timestamp() + given.holds * interval '1 second',
    cancel_requested = false, hold_requested = false
FROM given, mine
WHERE job.id = given.pk AND job.id = mine.id AND job.status = 'RUNNING'
    AND job.attempts = given.number AND job.rerun_args IS NULL
RETURNING job.id
"""


def end_attempt(claim: Claim, note: Note) -> bool:
    """
    End an attempt as a success in the caller's savepoint; False: it has ended, undo its work.

    ``move_jobs`` must follow in the same transaction.
    """
    probes.reach("settle.before")
    now, _ = DbNow().as_sql(None, connections[alias()])
    with prepared.cursor(connections[alias()]) as cursor:
        cursor.execute(END.format(now=now), [note.reason, note.run_time, claim.fence])
        return bool(cursor.rowcount)


def move_jobs(done: Sequence[Done]) -> dict[int, Status]:
    """
    RUNNING → SUCCEEDED, or PENDING where a rerun waits, by fence, for attempts that have ended.

    In the order of the jobs' keys, at the end of the transaction that has ended the attempts. A
    fence that is missing is not ours any more: roll all of it back.
    """
    probes.reach("settle.between")
    in_order = sorted(done, key=lambda one: one.claim.job_pk)
    if connections[alias()].vendor == "postgresql":
        moved = {pk for (pk,) in ask(MOVE, _words(in_order))}
    else:
        moved = {one.claim.job_pk for one in in_order if _success(one).by_itself()}
    found = {}
    for one in in_order:
        status = Status.SUCCEEDED if one.claim.job_pk in moved else take_up(one.claim)
        if status is not None:
            found[one.claim.fence] = status
    probes.reach("settle.uncommitted")
    return found


def _success(one: Done) -> Leaving:
    return success_of(one.claim, one.result, one.unique_for)


class Apart:
    """
    A connection of its own, for what must be committed while the thread's transaction is open.

    ``durable``: false, a commit need not outlive a crash of the server, which ends the open
    transaction as well.
    """

    def __init__(self, *, durable: bool) -> None:
        self._connection: Any = None
        self._durable = durable

    def begin(self, claim: Claim) -> bool:
        """As ``begin``, but of an attempt that has begun already, too."""
        probes.reach("begin.before")
        now, _ = DbNow().as_sql(None, self._opened())
        with prepared.cursor(self._opened()) as cursor:
            cursor.execute(BEGIN.format(now=now), [claim.fence])
            return bool(cursor.rowcount)

    def _opened(self) -> Any:
        if self._connection is None:
            self._connection = connections[alias()].copy()
            if self._connection.vendor == "postgresql" and not self._durable:
                with self._connection.cursor() as cursor:
                    cursor.execute("SET synchronous_commit TO off")
        return self._connection

    def close(self) -> None:
        """Close the connection, if it was opened."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


BEGIN = """
UPDATE dedupjobs_jobattempt SET began_at = COALESCE(began_at, {now})
WHERE id = %s AND COALESCE(outcome, '') = ''
"""


# ---- return


def return_many(claims: Sequence[Claim]) -> set[int]:
    """
    RUNNING → PENDING for what was claimed and never begun; nothing is counted.

    Returns the fences that were returned. A row of which something is asked is left to
    ``unclaim``, which obeys.
    """
    with transaction.atomic(using=alias()):
        fences = {claim.fence: claim for claim in claims}
        mine = attempts().filter(pk__in=fences, outcome=None, began_at=None).order_by("pk")
        unbegun = list(mine.select_for_update().values_list("pk", flat=True))
        rows = jobs().filter(
            pk__in=[fences[f].job_pk for f in unbegun], status=Status.RUNNING, **UNASKED
        )
        numbers = dict(rows.order_by("pk").select_for_update().values_list("pk", "attempts"))
        free = [f for f in unbegun if numbers.get(fences[f].job_pk) == fences[f].number]
        attempts().filter(pk__in=free, outcome=None, began_at=None).update(
            outcome=AttemptOutcome.RETURNED, ended_at=DbNow()
        )
        rows.filter(pk__in=[fences[f].job_pk for f in free]).update(
            status=Status.PENDING, version=NEXT_VERSION, run_after=DbNow(), **UNSENT
        )
    return set(free)


def began(claim: Claim) -> Claim:
    """Return the claim of an attempt whose user code has begun meanwhile."""
    return replace(claim, began=True)
