"""
SQLite in which the world knows who writes, reads the world's time, and sees each commit.

SQLite has one writer, and one actor runs at a time: so two raw connections serve them all, one
for the open transaction, if there is one, and one for those who read beside it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

from django.db import InterfaceError
from django.db.backends.sqlite3 import base

from tests.simulation import stage

WATCHED = ("dedupjobs_processedjob", "dedupjobs_jobattempt", "simulation_effect")

_raw: list[sqlite3.Connection] = []


class Line:
    """What one thread believes to be its connection."""

    isolation_level = None

    def __init__(self) -> None:
        self.raw: sqlite3.Connection | None = None  # while its transaction is open
        self.dirty: set[str] = set()  # tables that it has written and the observer watches
        self.broken = False  # whether the server is gone: nothing but close() works

    def cursor(self, factory: Any = None) -> Cursor:
        return self._present().cursor(factory=lambda raw: Cursor(raw, self))

    def begin(self) -> None:
        self.raw = _raw[0]
        self.raw.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        if self.raw is not None:
            self.raw.commit()
            self.raw = None

    def rollback(self) -> None:
        self.dirty.clear()
        if self.raw is not None:
            self.raw.rollback()
            self.raw = None

    def interrupt(self) -> None: ...

    def getlimit(self, category: int) -> int:
        return _raw[0].getlimit(category)

    def read(self, query: str, *params: Any) -> list[Any]:
        """Read what is committed; for the observer."""
        return _raw[0].execute(query, params).fetchall()

    def _present(self) -> sqlite3.Connection:
        if self.raw is not None:
            return self.raw
        return _raw[1] if _raw[0].in_transaction else _raw[0]


class Cursor(base.SQLiteCursorWrapper):
    def __init__(self, raw: sqlite3.Connection, line: Line) -> None:
        super().__init__(raw)
        self.line = line
        self.returned: list[Any] = []

    def execute(self, query: str, params: Any = None) -> Any:
        world, line = stage.world, self.line
        if world is None:
            return super().execute(query, params)
        if line.broken:
            raise sqlite3.OperationalError("the server closed the connection unexpectedly")
        if query[:6] in ("INSERT", "UPDATE", "DELETE"):
            line.dirty.update(table for table in WATCHED if table in query)
            if line.raw is None:
                return world.autocommit(line, self._alone(query, params))
        else:
            world.touch()
        return super().execute(query, params)

    def _alone(self, query: str, params: Any) -> Callable[[], Any]:
        """Return the execution of a statement once nobody else writes: on a cursor of its own."""

        def execute() -> Any:
            Cursor.__init__(self, _raw[0], self.line)
            super(Cursor, self).execute(query, params)
            if "RETURNING" in query:  # what is not fetched keeps the statement going
                self.returned = super(Cursor, self).fetchall()
            return self

        return execute

    def fetchone(self) -> Any:
        return self.returned.pop(0) if self.returned else super().fetchone()

    def fetchall(self) -> Any:
        rows, self.returned = self.returned, []
        return rows or super().fetchall()


class Operations(base.DatabaseOperations):
    compiler_module = "tests.simulation.database.compiler"


class DatabaseWrapper(base.DatabaseWrapper):
    connection: Line
    ops_class = Operations

    def get_new_connection(self, conn_params: dict[str, Any]) -> Line:
        if stage.world is not None:
            stage.world.touch()
        while len(_raw) < 2:
            raw = super().get_new_connection({**conn_params, "cached_statements": 1000})
            raw.create_function("strftime", -1, stage.strftime)
            raw.isolation_level = None
            _raw.append(raw)
        return Line()

    def create_cursor(self, name: str | None = None) -> Any:
        return self.connection.cursor()

    def is_usable(self) -> bool:
        return not self.connection.broken

    def _set_autocommit(self, autocommit: bool) -> None: ...

    def _start_transaction_under_autocommit(self) -> None:
        with self.wrap_database_errors:
            if stage.world is not None:
                if self.connection.broken:
                    raise sqlite3.OperationalError("the server closed the connection")
                stage.world.begin(self.connection)
            self.connection.begin()

    def _commit(self) -> None:
        if stage.world is None or self.connection is None:
            super()._commit()
        else:
            stage.world.commit(self.connection)

    def _rollback(self) -> None:
        line = self.connection
        if line is not None:
            if line.broken:
                raise InterfaceError("connection already closed")
            hang_up(line)

    def _close(self) -> None:
        if self.connection is not None:
            hang_up(self.connection)


def hang_up(line: Line) -> None:
    """Roll back what is open, as the end of a connection does."""
    line.rollback()
    if stage.world is not None:
        stage.world.rolled_back(line)


def cut_off(wrapper: DatabaseWrapper) -> None:
    """Take a dead process's connection away from it, as its end does."""
    if wrapper.connection is not None:
        hang_up(wrapper.connection)
        wrapper.connection = None  # type: ignore[assignment]
