"""Django settings of the measuring processes; ``rounds`` sets the environment."""

from __future__ import annotations

import json
import os

SECRET_KEY = "not a secret"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django_rq", "dedupjobs", "benchmarks"]

REDIS_URL = os.environ["BENCH_REDIS"]
DATABASES = {"default": json.loads(os.environ["BENCH_DATABASE"])}
CACHES = {
    alias: {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url}
    for alias, url in (
        ("default", REDIS_URL),
        *((f"locks{at}", url) for at, url in enumerate(os.environ.get("BENCH_LOCKS", "").split())),
    )
}
RQ_QUEUES = {"default": {"URL": REDIS_URL}}
RQ = {"WORKER_CLASS": os.environ["BENCH_WORKER"]}
# The loops here are no web request: on a busy machine they would run into its time budget.
DEDUPJOBS = {"PUSH_TIMEOUT": 10, "THREADS": int(os.environ.get("BENCH_THREADS", "1"))}
