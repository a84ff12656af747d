"""The tables, always from the database that decides, and the right to change a row."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import OperationalError, connections, router
from django.db.models import F, QuerySet

from dedupjobs import clock
from dedupjobs.clock import DbNow
from dedupjobs.exceptions import TransactionLost
from dedupjobs.lifecycle.statements import Rows
from dedupjobs.models import (
    JobAttempt,
    JobStep,
    ProcessedJob,
)

LOCK_WAITS = {"55P03", "1205"}  # as PostgreSQL and MySQL number a wait that was cut off
NO_SAVEPOINT = "1305"
MOST_NAMES = 10_000

NEXT_VERSION, NEXT_GENERATION = F("version") + 1, F("generation") + 1  # made once: it costs

UNASKED: dict[str, Any] = {"cancel_requested": False, "hold_requested": False}
UNSENT: dict[str, Any] = {"dispatch_id": None, "dispatched_at": None}
NO_RERUN: dict[str, Any] = {
    "rerun_args": None,
    "rerun_fingerprint": None,
    "rerun_name": None,
    "rerun_queue": None,
}
FRESH: dict[str, Any] = {**UNASKED, "failures": 0, "lost_count": 0, "error_class": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """
    A committed change of a job, for those who remember how it was. ``version``: it is at least
    this. ``event``: the status the job has now. ``args``: JSON, those of the run it is about.
    """

    job_pk: int
    key_hash: str
    name: str
    scope: str
    version: int
    event: str
    args: str

    @classmethod
    def of(cls, row: ProcessedJob, event: str, *, version: int | None = None) -> Change:
        """Return the change of a row; ``version`` where it is newer than the row we have."""
        return cls(
            job_pk=row.pk,
            key_hash=row.key_hash,
            name=row.name,
            scope=row.scope,
            version=row.version if version is None else version,
            event=event,
            args=row.args,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """
    The right to run one attempt. ``fence`` (the attempt's primary key) grows per key;
    ``failures`` and ``version`` as of the claim; until this attempt ends the first can not
    change, and the second grows by requests and reruns only.
    """

    job_pk: int
    fence: int
    number: int
    generation: int
    owner: str
    name: str
    key: str
    key_hash: str
    scope: str
    queue: str
    args: str
    version: int
    failures: int
    max_attempts: int | None
    began: bool
    queue_delay: float | None
    lock_wait: float | None = None
    traceparent: str = ""
    host: str = ""
    rq_id: str = ""
    group_hash: str = ""

    def change(self, event: str) -> Change:
        """Return the change that this attempt's ending is."""
        return Change(
            job_pk=self.job_pk,
            key_hash=self.key_hash,
            name=self.name,
            scope=self.scope,
            version=self.version + 1,
            event=event,
            args=self.args,
        )


NOBODY = Claim(
    job_pk=0,
    fence=0,
    number=0,
    generation=0,
    owner="",
    name="",
    key="",
    key_hash="",
    scope="",
    queue="",
    args="",
    version=0,
    failures=0,
    max_attempts=None,
    began=True,
    queue_delay=None,
)
"""A claim of no row, for statements that are compiled and not executed."""


def alias() -> str:
    """Return the database that every read which decides, and every write, goes to."""
    return router.db_for_write(ProcessedJob)


def jobs() -> QuerySet[ProcessedJob]:
    """Return all jobs, from the database that decides."""
    return ProcessedJob._base_manager.using(alias())


def attempts() -> QuerySet[JobAttempt]:
    """Return all attempts, from the database that decides."""
    return JobAttempt._base_manager.using(alias())


def steps() -> QuerySet[JobStep]:
    """Return all steps, from the database that decides."""
    return JobStep._base_manager.using(alias())


def job(**where: Any) -> Rows:
    """Return the job that fits, to be changed."""
    return Rows(ProcessedJob, alias(), where)


def attempt(**where: Any) -> Rows:
    """Return the attempt that fits, to be changed."""
    return Rows(JobAttempt, alias(), where)


def names() -> list[str]:
    """Return the names of all jobs that have rows."""
    return values_of("name", most=MOST_NAMES)


def values_of(column: str, *, most: int) -> list[str]:
    """
    Return the different values of an indexed column of jobs, sorted, ``most`` of them.

    Hops through the index from value to value, where DISTINCT would read all of it.
    """
    connection = connections[alias()]
    table, name = map(connection.ops.quote_name, (ProcessedJob._meta.db_table, column))
    sql = f"""
        WITH RECURSIVE hop (value, number) AS (
            SELECT MIN({name}), 1 FROM {table}
            UNION ALL
            SELECT (SELECT MIN({name}) FROM {table} WHERE {name} > hop.value), hop.number + 1
            FROM hop WHERE hop.value IS NOT NULL AND hop.number < %s
        )
        SELECT value FROM hop WHERE value IS NOT NULL"""  # noqa: S608 - quoted names of columns
    with connection.cursor() as cursor:
        cursor.execute(sql, [most])
        return [str(value) for (value,) in cursor.fetchall()]


def codes(error: Exception) -> set[str]:
    """Return the numbers that a database gives an error: SQLSTATE, or MySQL's own."""
    cause = error.__cause__ or error
    found = (getattr(cause, "sqlstate", None), *cause.args[:1])
    return {str(code) for code in found}


def waited_in_vain(error: Exception) -> bool:
    """Whether the database answered, but gave up waiting for somebody else's lock."""
    return bool(codes(error) & LOCK_WAITS)


def mark_transaction(name: str) -> None:
    """Leave a mark in the open transaction, for ``assert_unbroken``."""
    if connections[alias()].vendor == "mysql":
        _execute(f"SAVEPOINT {name}")


def assert_unbroken(name: str) -> None:
    """
    Raise TransactionLost if the transaction is not the one that was marked.

    MySQL answers a deadlock by rolling all of it back, and takes what follows as a new one:
    a caller that swallowed the error would commit half of his work. PostgreSQL refuses to go on.
    """
    if connections[alias()].vendor != "mysql":
        return
    try:
        _execute(f"RELEASE SAVEPOINT {name}")
    except OperationalError as error:
        if NO_SAVEPOINT not in codes(error):
            raise
        raise TransactionLost(
            "The database has ended the job's transaction in mid-run, because of a deadlock or a "
            "statement that commits by itself, such as ALTER TABLE, and the job went on. Let the "
            "error of a deadlock through, and the job is run again."
        ) from error


def _execute(sql: str) -> None:
    with connections[alias()].cursor() as cursor:
        cursor.execute(sql)


def database_now() -> datetime:
    """Return the database's present moment."""
    return clock.read_db_now(connections[alias()])


def seconds_until_due(pk: int) -> float:
    """Return how long a job still waits by the database's clock; 0 if it does not."""
    row = jobs().filter(pk=pk).annotate(db_now=DbNow()).values_list("run_after", "db_now").first()
    return max((row[0] - row[1]).total_seconds(), 0.0) if row else 0.0


def skip_locked(rows: QuerySet[Any]) -> QuerySet[Any]:
    """Lock the rows that nobody holds; SQLite has one writer and needs no row locks."""
    if connections[alias()].features.has_select_for_update_skip_locked:
        return rows.select_for_update(skip_locked=True)
    return rows
