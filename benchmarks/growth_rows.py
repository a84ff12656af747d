"""The rows of ``benchmarks.growth``: done, forgotten, lost, and out of retention."""

from __future__ import annotations

from typing import Any

from benchmarks import filling

JOBS = """
INSERT INTO dedupjobs_processedjob (
    key_hash, key, scope, name, queue, status, version, generation, attempts, failures, lost_count,
    args, fingerprint, run_after, dispatch_id, dispatched_at, cancel_requested, hold_requested,
    result, error, error_class, duplicates, traceparent, created_at, enqueued_at, started_at,
    finished_at, unique_until)
SELECT
    md5('{kind}' || i) || md5(i || '{kind}'), '{kind}:' || i, '', {name}, 'default', '{status}',
    2, 1, {attempts}, 0, 0, '{args}', repeat('f', 64), {at}, 'dedupjobs_' || md5('{kind}' || i),
    {at}, false, false, {result}, '', '', 0, '', {at}, {at}, {at}, {finished}, {until}
FROM generate_series({first}::bigint, {last}::bigint) AS i
"""

ATTEMPTS = """
INSERT INTO dedupjobs_jobattempt (
    job_id, number, generation, owner, lease_until, beat_at, began_at, progress, outcome,
    late_ending, host, pid, rq_id, error_class, error_message, traceback, reason, queue_delay,
    run_time, claimed_at, group_hash, ended_at)
SELECT
    id, 1, 1, md5(id::text), started_at + interval '1 second', started_at, started_at, '',
    {outcome}, '', 'worker', 1, dispatch_id, '', '', '', '', 0.1, 0.1, started_at, '', finished_at
FROM dedupjobs_processedjob WHERE id > {before} AND attempts = 1
"""

# Within retention: spread over the last 20 days. Out of it: 40 days ago.
RECENT = "now() - interval '20 days' + (i %% 1700000) * interval '1 second'"
OLD = "now() - interval '40 days' + (i %% 500000) * interval '1 second'"

KINDS: dict[str, dict[str, Any]] = {
    "done": {"name": "'shop.job_' || i %% 20", "at": RECENT, "finished": RECENT},
    "forgotten": {
        "name": "'growth.forgotten'",
        "status": "PENDING",
        "attempts": 0,
        "at": "now() - interval '1 hour' + (i %% 1000) * interval '1 ms'",
        "result": "NULL",
    },
    "lost": {
        "name": "'growth.lost'",
        "status": "RUNNING",
        "at": "now() - interval '10 minutes'",
        "result": "NULL",
        "outcome": "NULL",
    },
    "gone": {"name": "'growth.gone'", "at": OLD, "finished": OLD, "until": OLD},
    "held": {"name": "'growth.held'", "at": OLD, "finished": OLD},
    "hollow": {"name": "'growth.held'", "attempts": 0, "args": "", "at": OLD, "result": "NULL"},
}
DEFAULTS = {
    "status": "SUCCEEDED",
    "attempts": 1,
    "args": "{}",
    "result": "'null'",
    "finished": "NULL",
    "until": "NULL",
    "outcome": "'SUCCEEDED'",
}


def fill(wanted: dict[str, int]) -> dict[str, float]:
    """Add that many rows of each kind; return seconds and what the database then holds."""
    with filling.bare() as (cursor, figures):
        cursor.execute("SELECT coalesce(max(id), 0) FROM dedupjobs_processedjob")
        before = cursor.fetchone()[0]
        for kind, count in wanted.items():
            if count:
                facts = {**DEFAULTS, "kind": kind, **KINDS[kind]}
                cursor.execute(JOBS.format(**facts, first=before + 1, last=before + count), {})
                cursor.execute(ATTEMPTS.format(**facts, before=before), {})
                cursor.execute("SELECT max(id) FROM dedupjobs_processedjob")
                before = cursor.fetchone()[0]
    return figures
