"""Rows in the state that a test wants, and threads in the order that it wants."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from django.db import connection, connections, transaction
from django.db.models import F

from dedupjobs import clock, lifecycle, probes
from dedupjobs.lifecycle import Claim, Place
from dedupjobs.models import JobAttempt, ProcessedJob
from tests import sessions

PATIENCE = 20.0  # seconds; what takes longer hangs

has_row_locks = connection.vendor != "sqlite"


# ---- rows


def job_row(row: ProcessedJob | Claim) -> ProcessedJob:
    """Return the job's row as it is now."""
    return ProcessedJob.objects.get(pk=row.job_pk if isinstance(row, Claim) else row.pk)


def attempt_row(claim: Claim) -> JobAttempt:
    """Return the attempt's row as it is now."""
    return JobAttempt.objects.get(pk=claim.fence)


def alter(row: ProcessedJob | Claim, **columns: Any) -> ProcessedJob:
    """Write columns of a job behind the back of the lifecycle, and return the row."""
    ProcessedJob.objects.filter(pk=job_row(row).pk).update(**columns)
    return job_row(row)


def alter_attempt(claim: Claim, **columns: Any) -> JobAttempt:
    """Write columns of an attempt behind the back of the lifecycle, and return the row."""
    JobAttempt.objects.filter(pk=claim.fence).update(**columns)
    return attempt_row(claim)


def claimed(row: ProcessedJob, *, owner: str = "", begins: bool = True) -> Claim:
    """Claim the job for a new attempt."""
    claim = lifecycle.claim(
        row.pk,
        job_row(row).generation,
        owner=owner or clock.token(),
        place=Place(host="here", pid=1),
        begins=begins,
    )
    assert claim is not None
    return claim


def expire(claim: Claim, *, seconds: float = 60) -> datetime:
    """Let the attempt's lease have ended ``seconds`` ago, and return its last beat."""
    now = lifecycle.database_now()
    until_then = now - timedelta(seconds=seconds)
    return alter_attempt(
        claim, lease_until=until_then, beat_at=until_then - timedelta(seconds=60)
    ).beat_at


def snapshot() -> list[dict[str, Any]]:
    """Return all that both tables hold: equal before and after means nothing was written."""
    return [
        *ProcessedJob.objects.order_by("pk").values(),
        *JobAttempt.objects.order_by("pk").values(),
    ]


@contextmanager
def tables_missing() -> Iterator[None]:
    """
    Let the jobs' table be gone, as before the first migration.

    To be entered before anything is written: MariaDB commits before such a statement.
    """
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE dedupjobs_processedjob RENAME TO gone")
        try:
            yield
        finally:
            cursor.execute("ALTER TABLE gone RENAME TO dedupjobs_processedjob")


# ---- orders


class Side(threading.Thread):
    """Run a function in a thread, on connections of its own, and keep what came of it."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(daemon=True)
        self._call = lambda: function(*args, **kwargs)
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        finally:
            connections.close_all()

    def result(self, seconds: float = PATIENCE) -> Any:
        """Return the function's value or raise its error; fail if it is not done in time."""
        self.join(seconds)
        assert not self.is_alive(), f"still blocked after {seconds} s"
        if self._error is not None:
            raise self._error
        return self._value


def race(*functions: Callable[[], Any], seconds: float = 60) -> list[Any]:
    """Run all functions at the same moment, each in a thread; return values or errors, in order."""

    def answer(function: Callable[[], Any]) -> Callable[[], Any]:
        def ask() -> Any:
            try:
                return function()
            except Exception as error:
                return error

        return ask

    return together(*[answer(function) for function in functions], seconds=seconds)


def together(*functions: Callable[[], Any], seconds: float = 60) -> list[Any]:
    """Do the same, but raise what one of them raises."""
    barrier = threading.Barrier(len(functions))

    def go(function: Callable[[], Any]) -> Any:
        connection.ensure_connection()
        barrier.wait(PATIENCE)
        return function()

    sides = [Side(go, function) for function in functions]
    return [side.result(seconds) for side in sides]


@contextmanager
def at(point: str, action: Callable[[], Any]) -> Iterator[None]:
    """Do ``action`` the first time that this thread reaches a probe; it may wait, or raise."""
    thread = threading.get_ident()

    def hook(reached: str) -> None:
        if reached == point and threading.get_ident() == thread:
            probes.hook = None
            action()

    assert probes.hook is None
    probes.hook = hook
    try:
        yield
        assert probes.hook is None, f"{point} was not reached"
    finally:
        probes.hook = None


class Pause:
    """Stop another thread at a probe, once: wait for ``reached``, then call ``go_on``."""

    def __init__(self, point: str) -> None:
        self.point = point
        self.reached = threading.Event()
        self._go_on = threading.Event()

    def __enter__(self) -> Pause:
        assert probes.hook is None
        probes.hook = self._hook
        return self

    def __exit__(self, *exc_info: object) -> None:
        probes.hook = None
        self._go_on.set()

    def wait(self) -> None:
        """Wait until the other thread stands at the point."""
        assert self.reached.wait(PATIENCE), f"{self.point} was not reached"

    def go_on(self) -> None:
        self._go_on.set()

    def _hook(self, point: str) -> None:
        if point == self.point and not self.reached.is_set():
            self.reached.set()
            assert self._go_on.wait(PATIENCE)


@contextmanager
def before_sql(*words: str, action: Callable[[], Any]) -> Iterator[None]:
    """
    Do ``action`` once, before this connection sends a statement that has all the words.

    Names stand without the quotes that each database has its own of.
    """
    done = []

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if not done and all(word in unquoted(sql) for word in words):
            done.append(sql)
            action()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield
    assert done, f"no statement with {words}"


def unquoted(sql: str) -> str:
    """Return the statement without the quotes around names."""
    return sql.replace('"', "").replace("`", "")


class Held:
    """
    A business transaction on another connection that has updated the job's row and stays open.

    On SQLite, which has one writer, it keeps out all writers.
    """

    def __init__(self, row: ProcessedJob | Claim, **columns: Any) -> None:
        self._pk = job_row(row).pk
        self._columns = columns or {"duplicates": F("duplicates") + 1}
        self._has = threading.Event()
        self._end = threading.Event()

    def __enter__(self) -> Held:
        self._side = Side(self._hold)
        assert self._has.wait(PATIENCE)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.commit()

    def commit(self) -> None:
        self._end.set()
        self._side.result()

    def _hold(self) -> None:
        with transaction.atomic():
            # Not only updated: PostgreSQL lets foreign keys to an updated row pass.
            ProcessedJob.objects.select_for_update().get(pk=self._pk)
            ProcessedJob.objects.filter(pk=self._pk).update(**self._columns)
            self._has.set()
            assert self._end.wait(PATIENCE)


def until_blocked(side: Side) -> None:
    """Wait until the thread waits for a lock. SQLite does not tell; there it must not be done."""
    if has_row_locks:
        sessions.until_one_waits()
    else:
        side.join(0.2)
    assert side.is_alive()


def statements(captured: Any) -> list[str]:
    """Return captured statements without transaction control, as "VERB table"."""
    texts = [unquoted(query["sql"]) for query in captured.captured_queries]
    verbs = [text.split()[0].upper() for text in texts]
    return [
        f"{verb} {'attempt' if _about_attempt(text) else 'job'}"
        for verb, text in zip(verbs, texts, strict=True)
        if verb in ("SELECT", "INSERT", "UPDATE", "DELETE")
    ]


def _about_attempt(sql: str) -> bool:
    """Tell whether the first table named is the attempts'."""
    attempt, job = sql.find("dedupjobs_jobattempt"), sql.find("dedupjobs_processedjob")
    return attempt >= 0 and (job < 0 or attempt < job)
