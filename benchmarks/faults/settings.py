"""Django settings of the contestants; ``__main__`` sets the environment."""

from __future__ import annotations

import os

SECRET_KEY = "not a secret"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django_rq", "dedupjobs", "benchmarks.faults"]

REDIS_URL = os.environ["BENCH_REDIS"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.path.join(os.environ["BENCH_HOME"], "faults.sqlite3"),
        "OPTIONS": {
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
        },
    }
}
CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": REDIS_URL}}
RQ_QUEUES = {name: {"URL": REDIS_URL} for name in ("default", "low")}
RQ = {"WORKER_CLASS": os.environ["BENCH_WORKER"]}
DEDUPJOBS = {"SHUTDOWN_GRACE": 2, "RESEND_AFTER": 10, "DEFAULTS": {"lease": 5}}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"quiet": {"class": "logging.NullHandler"}},
    "root": {"handlers": ["quiet"]},
}
