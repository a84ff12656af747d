"""
Settings of the ledger: a service with a database of its own. With the shop it shares one stream.

    DJANGO_SETTINGS_MODULE=project.ledger.settings ./manage.py migrate
    DJANGO_SETTINGS_MODULE=project.ledger.settings ./manage.py dedupjobs_consume
"""

from __future__ import annotations

import os

from project.settings import (
    BASE_DIR,
    CACHES,
    DATABASES,
    DEFAULT_AUTO_FIELD,
    RQ_QUEUES,
    SECRET_KEY,
    TIME_ZONE,
    USE_TZ,
)

__all__ = ["CACHES", "DEFAULT_AUTO_FIELD", "RQ_QUEUES", "SECRET_KEY", "TIME_ZONE", "USE_TZ"]

INSTALLED_APPS = ["django_rq", "dedupjobs", "project.ledger"]
RQ = {"WORKER_CLASS": "dedupjobs.worker.DedupWorker"}
DEDUPJOBS = {
    "PREFIX": "ledger",
    "INBOX": {
        "CONSUMERS": {
            "ledger": {
                "stream": "orders",
                # After which another process takes what a dead one had in its hands.
                "claim_after": int(os.environ.get("JOB_LEASE_SECONDS", "60")),
            },
        },
    },
}
DATABASES = {
    "default": {
        **DATABASES["default"],
        "NAME": os.environ.get("LEDGER_DB", str(BASE_DIR / "ledger.sqlite3")),
    }
}
