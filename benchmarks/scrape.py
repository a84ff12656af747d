"""
What a scrape of /metrics costs with a million rows.

Rows are made by generate_series: all of them have succeeded but for a backlog, a few at work and
a few whose worker is gone. The middle of TIMES scrapes counts.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from django.db import connection
from django.test import RequestFactory, override_settings

from dedupjobs import prometheus

TIMES = 41
BACKLOG = 50_000
AT_WORK = 200

JOBS = """
INSERT INTO dedupjobs_processedjob (
    key_hash, key, scope, name, queue, status, version, generation, attempts, failures,
    lost_count, args, fingerprint, run_after, cancel_requested, hold_requested, error, error_class,
    duplicates, traceparent, created_at, enqueued_at, dispatched_at, dispatch_id)
SELECT md5(n::text) || md5('x' || n), 'noop:' || n, '', 'benchmarks.deduplicated', 'default',
    CASE WHEN n <= %(done)s THEN 'SUCCEEDED' WHEN n <= %(rows)s - %(work)s THEN 'PENDING'
         ELSE 'RUNNING' END,
    2, 1, CASE WHEN n <= %(done)s THEN 1 ELSE 0 END, 0, 0, '{}', '', now() - interval '1 minute',
    false, false, '', '', 0, '', now(), now(), now(), md5(n::text)
FROM generate_series(1, %(rows)s) AS n
"""
ATTEMPTS = """
INSERT INTO dedupjobs_jobattempt (
    job_id, number, generation, owner, lease_until, beat_at, outcome, progress, late_ending, host,
    rq_id, error_class, error_message, traceback, reason, group_hash, claimed_at)
SELECT id, 1, 1, md5(id::text), now() + interval '1 day', now(),
    CASE WHEN status = 'SUCCEEDED' THEN 'SUCCEEDED' END,
    '', '', 'here', '', '', '', '', '', '', now()
FROM dedupjobs_processedjob WHERE status <> 'PENDING'
"""


STALE = """
UPDATE dedupjobs_jobattempt SET lease_until = now() - interval '1 hour'
WHERE outcome IS NULL AND id % 10 = 0
"""


def measure(rows: str) -> dict[str, Any]:
    """Fill the tables and scrape; ``rows``: how many jobs."""
    facts = {"rows": int(rows), "work": AT_WORK, "done": int(rows) - BACKLOG - AT_WORK}
    with connection.cursor() as cursor:
        cursor.execute(JOBS, facts)
        for sql in (ATTEMPTS, STALE, "ANALYZE"):
            cursor.execute(sql)
    request = RequestFactory().get("/metrics", headers={"Authorization": "Bearer secret"})
    seconds = []
    with override_settings(DEDUPJOBS={"METRICS_TOKEN": "secret", "LOCK_TIMEOUT": 10}):
        for _ in range(TIMES):
            begun = time.perf_counter()
            answer = prometheus.metrics(request)
            seconds.append(time.perf_counter() - begun)
    text = answer.content.decode()
    for sample in ('backlog{queue="default"} 5000.0', "stale_processing_records 20.0"):
        if f"dedupjobs_{sample}\n" not in text:
            raise RuntimeError(f"{sample} is missing in:\n{text}")
    return {
        "rows": int(rows),
        "lines": text.count("\n"),
        "middle_ms": round(statistics.median(seconds) * 1000, 1),
        "worst_ms": round(max(seconds[1:]) * 1000, 1),
        "first_ms": round(seconds[0] * 1000, 1),
    }
