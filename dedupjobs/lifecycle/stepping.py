"""
What is written of a step: begun, and how it ended. One statement each, all behind one door.

Each statement locks the attempt that writes and asks that it is open, as an ending does: an
attempt that was given up for lost writes nothing, and one that holds the lock can not be given
up before the commit. 0 rows: the attempt has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db import connections, transaction

from dedupjobs.clock import DbNow
from dedupjobs.lifecycle import prepared
from dedupjobs.lifecycle.rows import Claim, alias, jobs, steps
from dedupjobs.models import JobStep, Status, StepState

# "outcome IS NULL" is written as COALESCE: see ``together``.
OPEN = "FROM dedupjobs_jobattempt WHERE id = %(fence)s AND COALESCE(outcome, '') = '' {lock}"

MAKE = """
INSERT INTO dedupjobs_jobstep
    (job_id, generation, name, state, attempt, fence, result, error, started_at, ended_at)
SELECT
    job_id, generation, %(name)s, %(state)s, number, id, %(result)s, %(error)s, {start}, {end}
{open}"""

# A success stands, whoever asks.
TAKE_OVER = """
UPDATE dedupjobs_jobstep
SET state = %(state)s, attempt = %(number)s, fence = %(fence)s, result = %(result)s,
    error = %(error)s, started_at = {start}, ended_at = {end}
WHERE job_id = %(job)s AND generation = %(generation)s AND name = %(name)s
    AND state <> 'SUCCEEDED' AND EXISTS (SELECT 1 {open})"""

END = """
UPDATE dedupjobs_jobstep
SET state = %(state)s, result = %(result)s, error = %(error)s, ended_at = {end}
WHERE job_id = %(job)s AND generation = %(generation)s AND name = %(name)s
    AND state = 'STARTED' AND EXISTS (SELECT 1 {open})"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """
    What is to stand in a step's row. ``result``: JSON. ``took``: seconds since it began.

    Begun and not ended: STARTED, with an ``error`` where it is known why nobody knows more.
    """

    name: str
    state: StepState
    result: str | None = None
    error: str = ""
    took: float = 0.0


def steps_of(claim: Claim) -> list[JobStep]:
    """Return what is known of the steps of a claim's generation."""
    return list(steps().filter(job_id=claim.job_pk, generation=claim.generation))


def enter_step(claim: Claim, entry: Entry, *, known: bool) -> bool:
    """
    Write that a step has begun, or in one how it ended; False: the attempt has ended.

    ``known``: it has a row, of an attempt before or of one that failed here.
    """
    return _write(TAKE_OVER if known else MAKE, claim, entry)


def end_step(claim: Claim, entry: Entry) -> bool:
    """Write how a step that this attempt has begun ended; False: the attempt has ended."""
    return _write(END, claim, entry)


def has_entry(claim: Claim, entry: Entry) -> bool:
    """Whether this attempt has written this: asked after a COMMIT without a reply."""
    mine = steps().filter(job_id=claim.job_pk, generation=claim.generation, fence=claim.fence)
    return mine.filter(name=entry.name, state=entry.state).exists()


def decide_step(
    pk: int, version: int, name: str, *, result: str | None, words: str
) -> Status | None:
    """
    Write what a person has found out of a step in doubt: done, with a result, or not done.

    Not while an attempt is at work, which may be about to ask. None: there is none to decide.
    """
    seen = jobs().filter(pk=pk, version=version).exclude(status=Status.RUNNING)
    with transaction.atomic(using=alias()):
        row = seen.select_for_update().values("status", "generation").first()
        if row is None:
            return None
        mine = steps().filter(job_id=pk, generation=row["generation"], name=name)
        state = StepState.FAILED if result is None else StepState.SUCCEEDED
        decided = mine.filter(state=StepState.STARTED).update(
            state=state, result=result, error=words, ended_at=DbNow()
        )
    return Status(row["status"]) if decided else None


def _write(sql: str, claim: Claim, entry: Entry) -> bool:
    connection = connections[alias()]
    vendor, now = connection.vendor, DbNow()
    moment, _ = now.as_sql(None, connection)
    lock = "FOR UPDATE" if connection.features.has_select_for_update else ""
    filled = sql.format(
        start=DbNow.shifted(vendor).replace("%s", "%(start)s") if entry.took else moment,
        end=moment if entry.state != StepState.STARTED else "NULL",
        open=OPEN.format(lock=lock),
    )
    words: dict[str, Any] = {
        "job": claim.job_pk,
        "generation": claim.generation,
        "number": claim.number,
        "fence": claim.fence,
        "name": entry.name,
        "state": entry.state.value,
        "result": entry.result,
        "error": entry.error,
        "start": DbNow(-entry.took).shift(vendor),
    }
    with (
        transaction.mark_for_rollback_on_error(using=alias()),
        prepared.cursor(connection) as asking,
    ):
        asking.execute(filled, words)
        return bool(asking.rowcount)
