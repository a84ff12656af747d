"""
Settings of a project with two databases, for the processes that test_multidb starts.

MULTIDB_SETUP names the router, MULTIDB_HOME the directory of the two SQLite files.
"""

from __future__ import annotations

import os
from typing import Any

from tests.settings import *  # noqa: F403

SETUP = os.environ.get("MULTIDB_SETUP", "replica")
HOME = os.environ.get("MULTIDB_HOME", "")
OTHER = {"replica": "replica", "own": "jobs"}[SETUP]

DEDUPJOBS = {"PUSH_TIMEOUT": 10, "LOCK_TIMEOUT": 10}  # the machine may be busy


def _sqlite(name: str) -> dict[str, Any]:
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": f"{HOME}/{name}.sqlite3" if HOME else ":memory:",
        "OPTIONS": {
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
        },
    }


DATABASES = {alias: _sqlite(alias) for alias in ("default", OTHER)}


class ReadsFromReplica:
    """Our app's reads go to a copy that lags behind, its writes to ``default``."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "replica" if model._meta.app_label == "dedupjobs" else None

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "default" if model._meta.app_label == "dedupjobs" else None


class JobsOfTheirOwn:
    """Our app's tables are in ``jobs``, all others in ``default``."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "jobs" if model._meta.app_label == "dedupjobs" else None

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return (db == "jobs") == (app_label == "dedupjobs")


DATABASE_ROUTERS = [
    f"{__name__}.{ {'replica': 'ReadsFromReplica', 'own': 'JobsOfTheirOwn'}[SETUP] }"
]
