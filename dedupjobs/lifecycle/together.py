"""
A claim, and an ending, as one statement each, where the database can do that: PostgreSQL.

Statements of a transaction are four waits for the server, these are one. They write the same rows
under the same guards in the same order (attempt before job in an ending), both or neither, so
whoever reads the rows can not tell which way they came. Inside somebody's transaction the steps
go one by one, since one that fails would break it.

    WITH taken AS (UPDATE job … RETURNING …), made AS (INSERT attempt SELECT … FROM taken)
    WITH ended AS (UPDATE attempt …), moved AS (UPDATE job … WHERE EXISTS (… ended))
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from django.db import DataError, connections
from django.db.models.expressions import Expression

from dedupjobs import registry
from dedupjobs.lifecycle import statements
from dedupjobs.lifecycle.statements import TO, WHERE, Slot, Slots, Statement, compiled
from dedupjobs.models import JobAttempt, ProcessedJob

Values = Mapping[str, Any]

allowed = True
"""Off, all goes step by step, as on other databases: for tests that stand between two steps."""

MADE = ("id", "number", "began_at", "queue_delay")

# PostgreSQL has no other way to undo what the same statement has written. The text stands in its
# log when a request came in the moment of an ending; it is then obeyed, step by step.
NOT_BOTH = "dedupjobs: a request waits, so this ending goes step by step"
NO_INTEGER = "22P02"


def serves(alias: str) -> bool:
    """Whether one statement can be a transaction of its own here."""
    connection = connections[alias]
    if connection.vendor != "postgresql" or connection.in_atomic_block:
        return False
    return allowed and bool(connection.settings_dict["AUTOCOMMIT"])


class _Written(Expression):
    """SQL that refers to what another part of the statement has written."""

    def __init__(self, sql: str, *params: Any) -> None:
        super().__init__()
        self.sql, self.params = sql, params

    def as_sql(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, tuple[Any, ...]]:
        return self.sql, self.params


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
    slots["leases"], slots["lease"] = _leases(), registry.Options().lease
    shape = ("claim", asked, tuple(to), written)

    def build(connection: Any) -> Statement:
        found = statements.with_slots(ProcessedJob, WHERE, asked)
        taking = statements.updating(connection, ProcessedJob, found, to, columns)
        given = {
            **statements.with_slots(JobAttempt, "made.", written),
            "job_id": _Written("taken.id"),
            "number": _Written("taken.attempts"),
            "lease_until": _Written(_LEASE, _Text("leases"), _Text("lease")),
            "queue_delay": _Written(_DELAY),
        }
        making = statements.inserting(connection, JobAttempt, given, MADE)
        return _chained(taking, making)

    return compiled(shape, alias, build), slots


class _Text(Slot):
    """A slot that no column gives its type."""

    def __init__(self, name: str) -> None:
        super().__init__(name, None)

    def bind(self, value: Any, connection: Any) -> Any:
        return value


def _leases() -> str:
    """Return the leases of jobs that have not the usual one, in seconds by name, as JSON."""
    usual = registry.Options().lease
    other = {job.name: job.options.lease for job in registry.every() if job.options.lease != usual}
    return json.dumps(other)


def _chained(taking: Statement, making: Statement) -> Statement:
    insert, found, rest = making.sql.partition(" VALUES (")
    values, closed, returning = rest.rpartition(") RETURNING ")
    if not found or not closed:
        raise AssertionError(f"Django writes INSERT otherwise than expected: {making.sql}")
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
        taking.converters
        + tuple((len(taking.columns) + at, how, what) for at, how, what in making.converters),
    )


# ---- an ending


def end(alias: str, attempt: tuple[Values, Values], job: tuple[Values, Values]) -> bool | None:
    """
    End the attempt and move the job, each given as (where, to); False: it is not ours to end.

    None: nothing is written, since the attempt fits and the job does not.
    """
    statement, slots = ending(alias, attempt, job)
    try:
        found = statement.row(alias, slots)
    except DataError as error:
        if getattr(error.__cause__, "sqlstate", None) == NO_INTEGER and NOT_BOTH in str(error):
            return None
        raise
    return bool(found and found["both"])


def ending(
    alias: str, attempt: tuple[Values, Values], job: tuple[Values, Values]
) -> tuple[Statement, Slots]:
    """Return the statement of ``end``, compiled if its shape is new."""
    slots: Slots = {}
    parts = [
        tuple(statements.shape_of(f"{whose}{part}", values, slots))
        for whose, pair in (("ended.", attempt), ("moved.", job))
        for part, values in zip((WHERE, TO), pair, strict=True)
    ]

    def build(connection: Any) -> Statement:
        models = (JobAttempt, JobAttempt, ProcessedJob, ProcessedJob)
        places = ("ended.where.", "ended.to.", "moved.where.", "moved.to.")
        values = [statements.with_slots(*each) for each in zip(models, places, parts, strict=True)]
        ended = statements.updating(connection, JobAttempt, values[0], values[1], ())
        moved = statements.updating(connection, ProcessedJob, values[2], values[3], ())
        sql = (
            f"WITH ended AS ({ended.sql} RETURNING 1), "  # noqa: S608 - compiled statements
            f"moved AS ({moved.sql} AND EXISTS (SELECT 1 FROM ended) RETURNING 1) "
            "SELECT CASE WHEN NOT EXISTS (SELECT 1 FROM ended) THEN 0 "
            "WHEN EXISTS (SELECT 1 FROM moved) THEN 1 "
            f"ELSE ('{NOT_BOTH}' || (SELECT count(*) FROM ended))::integer END"
        )
        return Statement(sql, ended.params + moved.params, ("both",))

    return compiled(("end", *parts), alias, build), slots
