"""The servers of one stage, each behind a proxy that can misbehave; nothing here knows Django."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from tests.proxy import Proxy
from tests.servers import HOST, MariaDB, PostgreSQL, Server, Valkey

LIBFAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))

BRISK: dict[str, Any] = {
    "TICK": 0.3,
    "RECLAIM_EVERY": 1,
    "RESEND_AFTER": 4,
    "LEADER_TTL": 2,
    "SHUTDOWN_GRACE": 1,
    "TIMEOUT_GRACE": 1,
}
"""So that a run on each push ends in time."""

USUAL: dict[str, Any] = {"SHUTDOWN_GRACE": 1, "TIMEOUT_GRACE": 1}
"""The defaults, but for how long a deploy waits for its jobs."""


LOCKS = ("one", "quorum", "none")
"""Where a stage's locks are: with all else in Redis, on three servers of their own, nowhere."""

LEASES = {True: 3, False: 5}  # seconds, of a brisk stage and of a usual one


class MovableValkey(Valkey):
    """Valkey whose wall clock can be moved, where libfaketime is installed."""

    @property
    def offset(self) -> Path:
        return self.home / "offset"

    def move(self, seconds: float) -> None:
        """Set the clock so far from the right time."""
        new = self.home / "offset.new"
        new.write_text(f"{seconds:+.0f}\n")
        new.replace(self.offset)

    def start(self) -> None:
        self.move(0)
        super().start()

    def _command(self) -> list[str]:
        return [*faketime(self.offset), *super()._command()]


def faketime(offset: Path) -> list[str]:
    """Return what stands before a command whose clock shall be moved by a file."""
    if not LIBFAKETIME:
        return []
    return [
        "env",
        f"LD_PRELOAD={LIBFAKETIME[0]}",
        f"FAKETIME_TIMESTAMP_FILE={offset}",
        "FAKETIME_CACHE_DURATION=1",
        "DONT_FAKE_MONOTONIC=1",
    ]


class KeptPostgreSQL(PostgreSQL):
    """PostgreSQL that keeps what it has committed when it is killed."""

    def _command(self) -> list[str]:
        return [*super()._command(), "--synchronous_commit=on"]


class KeptMariaDB(MariaDB):
    """MariaDB that keeps what it has committed when it is killed."""

    def _command(self) -> list[str]:
        return [*super()._command(), "--innodb-flush-log-at-trx-commit=2"]


SERVERS: dict[str, type[Server]] = {"postgresql": KeptPostgreSQL, "mariadb": KeptMariaDB}


class House:
    """
    Valkey and the database of a stage. ``env()`` leads its actors through the proxies.

    ``hosts``: where actors may run, by what stands before a command that shall run there.
    """

    hosts: dict[str, tuple[str, ...]] = {"": ()}
    locks: str = "one"
    lock_servers: Sequence[Valkey] = ()
    lock_proxies: Sequence[Proxy] = ()

    def __init__(self, database: str, home: Path, locks: str = "one") -> None:
        self.locks = locks
        self.lock_servers = [Valkey() for _ in range(3 if locks == "quorum" else 0)]
        self.lock_proxies = []
        self.database = database
        self.home = home
        self.valkey = MovableValkey()
        self.server: Any = SERVERS[database]() if database in SERVERS else None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._stack.enter_context(self.valkey)
            self.redis_proxy = self._stack.enter_context(Proxy(self.valkey.port))
            for server in self.lock_servers:
                self._stack.enter_context(server)
                proxy = self._stack.enter_context(Proxy(server.port))
                self.lock_proxies = [*self.lock_proxies, proxy]
            self.db_proxy: Proxy | None = None
            if self.server is not None:
                self._stack.enter_context(self.server)
                self.db_proxy = self._stack.enter_context(Proxy(self.server.port))
            if self.database == "mariadb":
                with self.server.connect() as connection, connection.cursor() as cursor:
                    cursor.execute("CREATE DATABASE stage")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def env(self, *, direct: bool, settings: dict[str, Any], worker: str) -> dict[str, str]:
        """Return the variables of a process; ``direct``: past the proxies, for the judge."""
        found = {
            "DJANGO_SETTINGS_MODULE": "tests.faults.settings",
            "FAULTS_HOME": str(self.home),
            "DEDUPJOBS_TEST_HOME": str(self.home),
            "DEDUPJOBS_TEST_DB": self.database,
            "DEDUPJOBS_TEST_REDIS": self.redis_url(direct=direct),
            "DEDUPJOBS_TEST_WORKER": worker,
            "DEDUPJOBS_TEST_SETTINGS": json.dumps(settings),
            "FAULTS_LEASE": str(LEASES[BRISK.items() <= settings.items()]),
            "DEDUPJOBS_TEST_LOG": "WARNING",
            "DEDUPJOBS_TEST_DB_NAME": self._database_name(),
            "PYTHONPATH": os.getcwd(),
            "PYTHONUNBUFFERED": "1",
        }
        if self.lock_servers:
            ways: list[Any] = self.lock_servers if direct else self.lock_proxies
            names = [f"locks{number}" for number in range(len(ways))]
            found["DEDUPJOBS_TEST_LOCKS"] = " ".join(f"redis://{HOST}:{w.port}/0" for w in ways)
            found["DEDUPJOBS_TEST_SETTINGS"] = json.dumps({**settings, "LOCK_CACHE": names})
        if self.locks == "none":
            found["FAULTS_CONTROL"] = "optimistic"
        if self.server is not None:
            address = self.server_address(direct=direct)
            found[f"DEDUPJOBS_TEST_{self.database.upper()}"] = address
        found.pop("PYTEST_XDIST_WORKER", None)
        return found

    def redis_url(self, *, direct: bool) -> str:
        """Return where Redis is found, without a database number."""
        return f"redis://{HOST}:{self.valkey.port if direct else self.redis_proxy.port}"

    def server_address(self, *, direct: bool) -> str:
        """Return the host and port of the database's server, if it has one."""
        assert self.db_proxy is not None
        return f"{HOST}:{self.server.port if direct else self.db_proxy.port}"

    def _database_name(self) -> str:
        names = {"sqlite": str(self.home / "stage.sqlite3"), "postgresql": "postgres"}
        return names.get(self.database, "stage")


def new_seed() -> str:
    """Return a seed that nobody has chosen."""
    return secrets.token_hex(4)
