"""Filling PostgreSQL with millions of rows: what slows it down is made again afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TABLES = ("dedupjobs_processedjob", "dedupjobs_jobattempt")

# How constraints, then the other indexes, are dropped, and made.
EXTRAS = """
SELECT format('ALTER TABLE %%s DROP CONSTRAINT %%I', conrelid::regclass, conname),
       format('ALTER TABLE %%s ADD CONSTRAINT %%I %%s', conrelid::regclass, conname,
              pg_get_constraintdef(oid))
FROM pg_constraint WHERE conrelid::regclass::text = ANY (%(tables)s) AND contype IN ('f', 'u')
UNION ALL
SELECT format('DROP INDEX %%I', indexname), indexdef
FROM pg_indexes WHERE tablename = ANY (%(tables)s) AND indexname NOT LIKE '%%pkey'
    AND indexname NOT IN (SELECT conname FROM pg_constraint)
"""
HELD = """
SELECT (SELECT count(*) FROM dedupjobs_processedjob), (SELECT count(*) FROM dedupjobs_jobattempt),
    pg_database_size(current_database())
"""


@contextmanager
def bare() -> Iterator[tuple[Any, dict[str, float]]]:
    """Yield a cursor on tables without indexes, and a dict that has what they hold in the end."""
    from django.db import connection  # noqa: PLC0415 - after the set-up

    begun = time.perf_counter()
    figures: dict[str, float] = {}
    with connection.cursor() as cursor:
        cursor.execute(EXTRAS, {"tables": list(TABLES)})
        extras = cursor.fetchall()
        for drop, _ in extras:
            cursor.execute(drop)
        yield cursor, figures
        cursor.execute("SET maintenance_work_mem = '512MB'")
        for _, make in sorted(extras, key=lambda extra: "FOREIGN" in extra[1]):
            cursor.execute(make)
        cursor.execute("VACUUM ANALYZE")
        cursor.execute("CHECKPOINT")
        cursor.execute(HELD)
        jobs, attempts, size = cursor.fetchone()
    figures |= {
        "jobs": jobs,
        "attempts": attempts,
        "gigabytes": size / 1e9,
        "seconds": time.perf_counter() - begun,
    }
