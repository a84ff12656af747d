"""
A call on a new key, a claim, and a success, as one statement each, where the database can do that:
PostgreSQL.

Statements of a transaction are four waits for the server, these are one. They write the same rows
under the same guards in the same order (attempt before job in an ending), both or neither, so
whoever reads the rows can not tell which way they came. What does not fit goes step by step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction

from dedupjobs import registry
from dedupjobs.clock import DbNow
from dedupjobs.lifecycle import prepared, rows, statements
from dedupjobs.lifecycle.rows import Claim
from dedupjobs.lifecycle.statements import (
    TO,
    WHERE,
    Elsewhere,
    Select,
    Slots,
    Statement,
    UntypedSlot,
    compiled,
)
from dedupjobs.models import JobAttempt, ProcessedJob
from dedupjobs.registry import FOREVER

if TYPE_CHECKING:
    from dedupjobs.lifecycle.settling import Note

Values = Mapping[str, Any]

allowed = True
"""Off, all goes step by step, as on other databases: for tests that stand between two steps."""

MADE = ("id", "number", "began_at", "queue_delay")


def serves(alias: str) -> bool:
    """Whether one statement can do what elsewhere takes several."""
    return allowed and connections[alias].vendor == "postgresql"


def serves_alone(alias: str) -> bool:
    """Whether such a statement is a transaction of its own."""
    connection = connections[alias]
    if not serves(alias) or connection.in_atomic_block:
        return False
    return bool(connection.settings_dict["AUTOCOMMIT"])


# ---- claim

_DELAY = """GREATEST(EXTRACT(EPOCH FROM
taken.started_at - GREATEST(taken.run_after, taken.enqueued_at)), 0)::double precision"""
_LEASE = """clock_timestamp() + interval '1 second'
* COALESCE((%s::jsonb ->> taken.name)::double precision, %s)"""


def claim(
    alias: str, where: Values, to: Values, columns: tuple[str, ...], attempt: Values
) -> tuple[Any, Any] | None:
    """
    Change the job that fits and make its attempt; return (job, attempt) as far as they are known.

    ``attempt``: the columns of the new row that the job does not give.
    """
    statement, slots = claiming(alias, where, to, columns, attempt)
    values = statement.row(alias, slots)
    if values is None:
        return None
    made = {name: values.pop(f"made.{name}") for name in MADE}
    row = SimpleNamespace(**values, pk=values["id"])
    return row, SimpleNamespace(**{"group_hash": "", **attempt, **made}, pk=made["id"])


def claiming(
    alias: str, where: Values, to: Values, columns: tuple[str, ...], attempt: Values
) -> tuple[Statement, Slots]:
    """Return the statement of ``claim``, compiled if its shape is new."""
    slots: Slots = {}
    asked = tuple(statements.shape_of(WHERE, where, slots))
    written = tuple(statements.shape_of("made.", attempt, slots))
    slots["leases"], slots["lease"] = json.dumps(registry.leases()), registry.USUAL_LEASE
    shape = ("claim", asked, tuple(to), written)

    def build(connection: Any) -> Statement:
        found = statements.with_slots(ProcessedJob, WHERE, asked)
        taking = statements.updating(connection, ProcessedJob, found, to, columns)
        given = {
            **statements.with_slots(JobAttempt, "made.", written),
            "job_id": Elsewhere("taken.id"),
            "number": Elsewhere("taken.attempts"),
            "lease_until": Elsewhere(_LEASE, UntypedSlot("leases"), UntypedSlot("lease")),
            "queue_delay": Elsewhere(_DELAY),
        }
        making = statements.inserting(connection, JobAttempt, given, MADE)
        return _chained(taking, making)

    return compiled(shape, alias, build), slots


def _chained(taking: Statement, making: Statement) -> Statement:
    insert, values, returning = statements.parts_of_insert(making, ") RETURNING ")
    names = [f"taken.{name}" for name in taking.columns] + [f"made.{name}" for name in MADE]
    sql = (
        f"WITH taken AS ({taking.sql}), "  # noqa: S608 - made of compiled statements
        f"made AS ({insert} SELECT {values} FROM taken RETURNING {returning}) "
        f"SELECT {', '.join(names)} FROM taken, made"
    )
    return Statement(
        sql,
        taking.params + making.params,
        taking.columns + tuple(f"made.{name}" for name in MADE),
        taking.converters + _moved(making.converters, len(taking.columns)),
    )


def _moved(converters: Any, by: int) -> Any:
    return tuple((at + by, how, what) for at, how, what in converters)


# ---- a call


def find_or_make(
    alias: str, find: Select, values: Values, *, returning: tuple[str, ...]
) -> tuple[Any, Any]:
    """
    Return the row that ``find`` selects by ``key_hash``, or else insert one; as (found, made).

    Neither: somebody else's row came first, and was not there yet when this began.
    """
    slots: Slots = {"key_hash": values["key_hash"]}
    columns = tuple(statements.shape_of(TO, values, slots))

    def build(connection: Any) -> Statement:
        given = statements.with_slots(ProcessedJob, TO, columns)
        making = statements.inserting(
            connection, ProcessedJob, given, returning, ignore_conflicts=True
        )
        return _either(find.compile(connection), making)

    statement = compiled(("find or make", find.name, columns, returning), alias, build)
    with transaction.mark_for_rollback_on_error(using=alias):
        answer = statement.row(alias, slots) or {}
    if answer["found.id"] is not None:
        return statements.instance(ProcessedJob, alias, _part(answer, "found.")), None
    if answer["made.id"] is not None:
        return None, statements.inserted(ProcessedJob, alias, values, _part(answer, "made."))
    return None, None


def _part(answer: Values, prefix: str) -> Values:
    return {name[len(prefix) :]: v for name, v in answer.items() if name.startswith(prefix)}


def _either(finding: Statement, making: Statement) -> Statement:
    insert, values, conflict = statements.parts_of_insert(making, ") ON CONFLICT")
    there = [f"f{number}" for number in range(len(finding.columns))]
    new = [f"m{number}" for number in range(len(making.columns))]
    sql = (
        f"WITH found ({', '.join(there)}) AS MATERIALIZED ({finding.sql}), "  # noqa: S608 - compiled
        f"made ({', '.join(new)}) AS ({insert} SELECT {values} "
        f"WHERE NOT EXISTS (SELECT 1 FROM found) ON CONFLICT{conflict}) "
        f"SELECT {', '.join(there + new)} "
        "FROM (SELECT 1) AS one LEFT JOIN found ON true LEFT JOIN made ON true"
    )
    names = [f"found.{name}" for name in finding.columns]
    names += [f"made.{name}" for name in making.columns]
    return Statement(
        sql,
        finding.params + making.params,
        tuple(names),
        finding.converters + _moved(making.converters, len(there)),
    )


# ---- a success

# "outcome IS NULL" is written as COALESCE: the planner takes few attempts to be open, and would
# read all that were since the last VACUUM from the index on outcome.

# Writes a success if its attempt is open, its job still its own, and no rerun waits: locks the
# attempt first, then the job. ``next``: an attempt that begins in the same transaction; 0: none.
COMPLETE = """
WITH open AS MATERIALIZED (
    SELECT id FROM dedupjobs_jobattempt
    WHERE id = %(fence)s AND COALESCE(outcome, '') = '' FOR UPDATE
), mine AS MATERIALIZED (
    SELECT id FROM dedupjobs_processedjob
    WHERE id = %(pk)s AND status = 'RUNNING' AND attempts = %(number)s AND rerun_args IS NULL
        AND EXISTS (SELECT 1 FROM open)
    FOR UPDATE
), moved AS (
    UPDATE dedupjobs_processedjob
    SET status = 'SUCCEEDED', version = version + 1, result = %(result)s, error = '',
        error_class = '',
        finished_at = clock_timestamp(),
        unique_until = clock_timestamp() + %(holds)s::float8 * interval '1 second',
        cancel_requested = false, hold_requested = false
    WHERE id = %(pk)s AND status = 'RUNNING' AND attempts = %(number)s AND rerun_args IS NULL
        AND EXISTS (SELECT 1 FROM mine)
), ended AS (
    UPDATE dedupjobs_jobattempt
    SET outcome = 'SUCCEEDED', ended_at = clock_timestamp(), reason = %(reason)s,
        run_time = %(run_time)s, error_class = '', error_message = '', traceback = ''
    WHERE id = %(fence)s AND COALESCE(outcome, '') = '' AND EXISTS (SELECT 1 FROM mine)
    RETURNING id
), begun AS (
    UPDATE dedupjobs_jobattempt SET began_at = clock_timestamp()
    WHERE id = %(next)s AND COALESCE(outcome, '') = '' AND began_at IS NULL
    RETURNING id
)
SELECT id FROM ended UNION ALL SELECT id FROM begun
"""


def complete(
    claim: Claim,
    result: str,
    *,
    unique_for: timedelta | None,
    note: Note,
    begins: Claim | None = None,
) -> set[int]:
    """
    Write a success, and that another attempt begins; return the fences of what was written.

    A success that is missing was lost, or a rerun waits for its end: the steps tell.
    """
    words = {
        "fence": claim.fence,
        "pk": claim.job_pk,
        "number": claim.number,
        "result": result,
        "holds": holds(unique_for),
        "reason": note.reason,
        "run_time": note.run_time,
        "next": begins.fence if begins else 0,
    }
    return {fence for (fence,) in ask(COMPLETE, words)}


def holds(unique_for: timedelta | None) -> float | None:
    """Return the seconds for which a success holds its key; None: for ever."""
    if unique_for is FOREVER:
        return None
    return unique_for.total_seconds() if unique_for else 0.0


def ask(sql: str, words: Values) -> list[Any]:
    """Execute a statement with named parameters and return the rows of its answer."""
    connection = connections[rows.alias()]
    # The present is DbNow's alone to say: ``testing.frozen_clock`` stops it there.
    sql = sql.replace("clock_timestamp()", DbNow.PRESENT["postgresql"])
    with (
        transaction.mark_for_rollback_on_error(using=rows.alias()),
        prepared.cursor(connection) as cursor,
    ):
        cursor.execute(sql, words)
        return list(cursor.fetchall())
