"""Settings of a simulated world: short leases, SQLite in memory, a Redis that is a model."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tests.simulation.lock_servers import ALIASES, FIRST
from tests.simulation.redis_connection import HOST, SimulatedConnection, pool

SECRET_KEY = "not a secret"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django_rq",
    "dedupjobs",
    "tests.simulation",
]

MEMORY = Path("/dev/shm")
_home = tempfile.TemporaryDirectory(
    prefix="dedupjobs-simulation-",
    dir=MEMORY if os.access(MEMORY, os.W_OK) else None,
)

DATABASES = {
    "default": {
        "ENGINE": "tests.simulation.database",
        "NAME": f"{_home.name}/db.sqlite3",
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 0,
            "init_command": "PRAGMA synchronous=OFF; PRAGMA journal_mode=MEMORY",
        },
    }
}

LOCKS = os.environ.get("SIMULATION_LOCKS", "one")  # "one" server, a "quorum", "none"
CACHES = {
    alias: {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": f"redis://{HOST}:6379/{database}",
        "OPTIONS": {
            "CONNECTION_POOL_KWARGS": {"connection_class": SimulatedConnection, "protocol": 2}
        },
    }
    for database, alias in ((1, "default"), *enumerate(ALIASES, FIRST))
}
RQ_QUEUES = {
    "default": {
        "HOST": HOST,
        "PORT": 6379,
        "DB": 0,
        "REDIS_CLIENT_KWARGS": {"connection_pool": pool(0)},
    }
}
RQ = {"WORKER_CLASS": "dedupjobs.worker.DedupWorker"}
DEDUPJOBS = {
    "RECLAIM_EVERY": 2,
    "RESEND_AFTER": 6,
    "LEADER_TTL": 5,
    "PRUNE_EVERY": 2,
    "STATUS_CACHE": None,  # tests of its own order its readers; see tests/test_cache_stress.py
    "BATCH": 2,  # so that few rows are several pages
    "LOCK_CACHE": ALIASES if LOCKS == "quorum" else "default",
    "DEFAULTS": {
        "lease": 6,
        "timeout": None,
        "concurrency_control": "optimistic" if LOCKS == "none" else "pessimistic",
    },
}
LOGGING_CONFIG = None
