"""
Statements that PostgreSQL plans once per connection: planning one takes longer than executing it.

Only where a connection leads to one server process for its whole life. Behind a pooler the next
transaction may meet another process, which has not prepared anything. Each process says its number
when it is connected to, and again when asked; a pooler can not pass the first one on, since it is
what a client cancels queries by. (PostgreSQL: "Message Formats", BackendKeyData.)

psycopg keeps the names of what it has prepared; other drivers have nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

WORTH = 8  # statements of ours on one connection, after which the next ones are prepared
PROCESS = "SELECT pg_backend_pid()"

try:
    from psycopg import Cursor, OperationalError
    from psycopg.errors import FeatureNotSupported, InvalidSqlStatementName
    from psycopg.pq import TransactionStatus
    from psycopg.types.numeric import Int8
except ImportError:  # another driver, or another database
    prepares_here = False
else:
    prepares_here = True

    class _Prepared(Cursor[Any]):
        """A cursor that prepares whatever it executes."""

        def execute(self, query: Any, params: Any = None, **_: Any) -> Any:
            raw = self.connection
            threshold, raw.prepare_threshold = raw.prepare_threshold, 0  # None: it never prepares
            try:
                return super().execute(query, _of_one_size(params), prepare=True)
            except (FeatureNotSupported, InvalidSqlStatementName) as error:
                # A migration has changed a type, or somebody has dropped what was prepared.
                _history_of(raw).is_direct = False
                if not raw.autocommit:
                    raise OperationalError(f"a prepared statement fits no more: {error}") from error
                return super().execute(query, params, prepare=False)
            finally:
                raw.prepare_threshold = threshold

    def _is_direct(raw: Any) -> bool:
        if not hasattr(raw, "prepare_threshold"):
            return False  # psycopg2's, in a project that has both
        # By the driver's own cursor: nobody's count of queries is to change now and then.
        with Cursor(raw) as asking:
            (process,) = asking.execute(PROCESS).fetchone() or (0,)
            return bool(process == raw.info.backend_pid)

    def _is_broken(raw: Any) -> bool:
        return bool(raw.info.transaction_status == TransactionStatus.INERROR)

    def _of_one_size(params: Any) -> Any:
        """Give whole numbers one type, whatever their size: a statement is prepared for types."""
        if isinstance(params, Mapping):
            return {name: Int8(v) if type(v) is int else v for name, v in params.items()}
        return [Int8(value) if type(value) is int else value for value in params or ()]


def cursor(connection: Any) -> Any:
    """
    Return a cursor for statements whose text is always the same, as ``connection.cursor()``.

    Where queries are logged it is that one, whose log shows their values.
    """
    usual = connection.vendor != "postgresql" or not prepares_here or connection.queries_logged
    if usual or not _prepares(connection):
        return connection.cursor()
    connection.validate_thread_sharing()
    return connection.make_cursor(_Prepared(connection.connection))


@dataclass(slots=True)
class _History:
    """What is known of a connection. ``is_direct``: None, as long as nobody has asked."""

    asked: int = 0
    is_direct: bool | None = None


_histories: WeakKeyDictionary[Any, _History] = WeakKeyDictionary()


def _history_of(raw: Any) -> _History:
    found = _histories.get(raw)
    if found is None:
        found = _histories[raw] = _History()
    return found


def _prepares(connection: Any) -> bool:
    connection.ensure_connection()
    raw = connection.connection
    history = _history_of(raw)
    history.asked += 1
    if history.is_direct is None and history.asked > WORTH and not _is_broken(raw):
        with connection.wrap_database_errors:
            history.is_direct = _is_direct(raw)
    return bool(history.is_direct)
