"""
Many new rows in one INSERT that answers with those it has made: PostgreSQL.

What differs from row to row comes as arrays, so that the statement is the same for any number of
rows; the rest, moments among it, stands in it as in the INSERT of one row.

    INSERT INTO job (…) SELECT given.key_hash, …, 'PENDING', … FROM unnest(…) AS given (…)
    ON CONFLICT DO NOTHING RETURNING …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import connections, transaction

from dedupjobs.clock import DbNow
from dedupjobs.lifecycle import statements
from dedupjobs.lifecycle.statements import (
    TO,
    Elsewhere,
    Slots,
    Statement,
    UntypedSlot,
    compiled,
)
from dedupjobs.models import ProcessedJob

OWN = ("key_hash", "key", "scope", "args", "fingerprint", "dispatch_id")  # texts of each row

Values = Mapping[str, Any]


def serves(alias: str) -> bool:
    """Whether the database can do that."""
    return connections[alias].vendor == "postgresql"


def insert_many(alias: str, rows: Sequence[Values], *, returning: tuple[str, ...]) -> list[Any]:
    """
    Insert rows that differ in OWN only, and return those whose key was free, as instances.

    Of what the database computes, only the columns in ``returning`` are known of them.
    """
    slots: Slots = {f"own.{name}": [row[name] for row in rows] for name in OWN}
    common = {name: value for name, value in rows[0].items() if name not in OWN}
    columns = tuple(statements.shape_of(TO, common, slots))
    wanted = ("key_hash", *returning)

    def build(connection: Any) -> Statement:
        given = statements.with_slots(ProcessedJob, TO, columns)
        given |= {name: Elsewhere(f"given.{name}") for name in OWN}
        single = statements.inserting(
            connection, ProcessedJob, given, wanted, ignore_conflicts=True
        )
        return _poured(single)

    with transaction.mark_for_rollback_on_error(using=alias):
        made = compiled(("pour", columns, wanted), alias, build).rows(alias, slots)
    fixed = {name: value for name, value in common.items() if not isinstance(value, DbNow)}
    fixed = {**statements.defaults(ProcessedJob), **fixed}
    own = {row["key_hash"]: {name: row[name] for name in OWN} for row in rows}
    return [
        statements.instance(ProcessedJob, alias, {**fixed, **own[new["key_hash"]], **new})
        for new in made
    ]


def _poured(single: Statement) -> Statement:
    insert, values, tail = statements.parts_of_insert(single, ") ON CONFLICT")
    arrays = ", ".join("%s::text[]" for _ in OWN)
    sql = (
        f"{insert} SELECT {values} "  # noqa: S608 - made of a compiled statement
        f"FROM unnest({arrays}) AS given ({', '.join(OWN)}) "
        f"ON CONFLICT{tail}"
    )
    texts = tuple(UntypedSlot(f"own.{name}") for name in OWN)
    return Statement(sql, single.params + texts, single.columns, single.converters)
