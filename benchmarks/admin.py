"""
How the admin behaves at size, on PostgreSQL: python -m benchmarks.admin [--help].

Makes the rows by SQL in a server of its own, below the system's temporary directory, which is
removed at the end; then asks for each page, retries dead rows in bulk while pages are read, and
measures what the summaries cost.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import filling, report, servers
from benchmarks.spent import verdict

ROUNDS = 5
DAYS = 30  # over which the rows are spread
DEAD_SHARE = 25  # each 25th row is dead: 200,000 of 5 million

# Of 1,000 rows: what most systems look like, with more that is wrong than one would wish.
JOBS = """
INSERT INTO dedupjobs_processedjob (
    key_hash, key, scope, name, queue, status, version, generation, attempts, failures, lost_count,
    args, fingerprint, run_after, dispatch_id, dispatched_at, cancel_requested, hold_requested,
    result, error, error_class, duplicates, traceparent, created_at, enqueued_at, started_at,
    finished_at)
SELECT
    md5(i::text) || md5((-i)::text), 'order:' || i, 'tenant-' || i %% 500,
    'shop.job_' || i %% 20, (ARRAY['default', 'high', 'low'])[1 + i %% 3], status,
    2, 1, 1 + (i %% 5 < 3)::int, (status = 'DEAD')::int * 5, 0,
    '{"order_id":' || i || ',"amount":"9.90"}', repeat('f', 64), at,
    'dedupjobs_' || i, at, false, false,
    CASE WHEN status = 'SUCCEEDED' THEN '{"ok":true}' END,
    CASE WHEN status IN ('DEAD', 'RETRYING') THEN 'no' ELSE '' END,
    CASE WHEN status IN ('DEAD', 'RETRYING')
        THEN (ARRAY['builtins.ValueError', 'shop.Declined', 'builtins.OSError'])[1 + i %% 3]
        ELSE '' END,
    (i %% 50 = 0)::int, '', at, at, at,
    CASE WHEN status IN ('SUCCEEDED', 'DEAD', 'CANCELLED') THEN at + interval '2 seconds' END
FROM (
    SELECT i, clock_timestamp() - (%(rows)s - i) * interval '%(days)s days' / %(rows)s AS at,
        CASE
            WHEN i > %(rows)s - 200 THEN 'RUNNING'
            WHEN i > %(rows)s - 20000 AND i %% 2 = 0 THEN 'PENDING'
            WHEN i %% %(dead)s = 0 THEN 'DEAD'
            WHEN i %% 500 = 1 THEN 'RETRYING'
            WHEN i %% 2000 = 2 THEN 'HELD'
            WHEN i %% 400 = 3 THEN 'CANCELLED'
            ELSE 'SUCCEEDED'
        END AS status
    FROM generate_series(1, %(rows)s) AS i
) AS made
"""

ATTEMPTS = """
INSERT INTO dedupjobs_jobattempt (
    job_id, number, generation, owner, lease_until, beat_at, began_at, progress, outcome,
    late_ending, host, pid, rq_id, error_class, error_message, traceback, reason, queue_delay,
    run_time, claimed_at, group_hash, ended_at)
SELECT
    id, number, 1, md5(id::text || '-' || number), enqueued_at + interval '1 minute', enqueued_at,
    enqueued_at, '', outcome, '', 'worker-' || id %% 10, 1000 + id %% 7, '',
    CASE WHEN outcome = 'FAILED' THEN (ARRAY['builtins.ValueError', 'shop.Declined', 'builtins.OSError'])[1 + id %% 3] ELSE '' END,
    '', '', '', (id %% 997) / 100.0, (id %% 1009) / 500.0, enqueued_at, '',
    CASE WHEN outcome IS NOT NULL THEN enqueued_at + interval '2 seconds' END
FROM (
    SELECT id, number, enqueued_at,
        CASE
            WHEN status = 'RUNNING' AND number = attempts THEN NULL
            WHEN number < attempts AND id %% 100 = 7 THEN 'LOST'
            WHEN number < attempts OR status IN ('DEAD', 'RETRYING') THEN 'FAILED'
            WHEN status = 'CANCELLED' THEN 'CANCELLED'
            WHEN status = 'HELD' THEN 'HELD'
            ELSE 'SUCCEEDED'
        END AS outcome
    FROM dedupjobs_processedjob, generate_series(1, attempts) AS number
    WHERE attempts >= number
) AS made
"""  # noqa: E501

FILTERS = (
    "",
    *(f"state={s}" for s in ("PENDING", "RUNNING", "RETRYING", "SUCCEEDED", "DEAD")),
    "state=CANCELLED", "state=HELD",
    *(f"condition={c}" for c in ("stuck", "silent", "failed", "lost", "duplicates", "contended")),
    "queue=high", "name=shop.job_7", "age=1h", "age=7d", "age=30d", "scope=tenant-7",
    "error=ValueError", "error=shop.Declined", "error=Unknown",
    "state=DEAD&queue=low&name=shop.job_5", "state=DEAD&age=7d", "state=CANCELLED&name=shop.job_3",
    "state=PENDING&scope=tenant-7", "queue=high&error=ValueError", "state=DEAD&error=ValueError",
    "name=shop.job_5&error=ValueError", "state=DEAD&condition=lost", "state=DEAD&q=order_id=77",
    "q=order:4999", '''q="order:77"''', "q=77", "q=order_id=77", "q=nothing",
    "o=5", "o=-5", "state=PENDING&o=5", "p=2", "p=199", "state=SUCCEEDED&p=150",
)  # fmt: skip


def measure(jobs: str, retried: str) -> dict[str, Any]:
    """Return the figures, all times in milliseconds."""
    from django.core.management import call_command  # noqa: PLC0415 - after the set-up

    call_command("migrate", verbosity=0)
    figures = {"rows": _fill(int(jobs))}
    figures["pages"] = _pages()
    figures["summaries"] = _summaries()
    figures["bulk"] = _bulk(int(retried))
    return figures


def _fill(jobs: int) -> dict[str, float]:
    with filling.bare() as (cursor, figures):
        cursor.execute(JOBS, {"rows": jobs, "days": DAYS, "dead": DEAD_SHARE})
        cursor.execute(ATTEMPTS, {})
        _say("filled; making the indexes")
    return figures


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


# ---- pages


def _client() -> Any:
    from django.contrib.auth.models import User  # noqa: PLC0415
    from django.test import Client  # noqa: PLC0415

    client = Client()
    user, _ = User.objects.get_or_create(username="boss", is_staff=True, is_superuser=True)
    client.force_login(user)
    return client


def _pages() -> list[dict[str, Any]]:
    from django.urls import reverse  # noqa: PLC0415

    from dedupjobs import lifecycle, summaries  # noqa: PLC0415

    client = _client()
    _history()
    jobs = reverse("admin:dedupjobs_processedjob_changelist")
    addresses = {f"list ?{query}": f"{jobs}?{query}" for query in FILTERS}
    for status in ("DEAD", "RUNNING", "SUCCEEDED"):
        row = lifecycle.jobs().filter(status=status).order_by("-pk")[0]
        addresses[f"job {status}"] = reverse("admin:dedupjobs_processedjob_change", args=[row.pk])
    addresses["locks"] = reverse("admin:dedupjobs_processedjob_locks")
    board = reverse("admin:dedupjobs_dashboard_changelist")
    addresses |= {f"dashboard {q}": f"{board}?{q}" for q in ("", "span=day", "part=live")}
    assert summaries.newest() is not None
    return [{"page": name, **_page(client, address)} for name, address in addresses.items()]


def _page(client: Any, address: str) -> dict[str, Any]:
    from django.db import connection, reset_queries  # noqa: PLC0415
    from django.test import override_settings  # noqa: PLC0415

    times, cpu = [], []
    for _ in range(ROUNDS):
        begun, burnt = time.perf_counter(), time.process_time()
        answer = client.get(address)
        times.append(1000 * (time.perf_counter() - begun))
        cpu.append(1000 * (time.process_time() - burnt))
        assert answer.status_code == 200, (address, answer.status_code)
    statements = []
    for _ in range(ROUNDS):
        with override_settings(DEBUG=True):
            reset_queries()
            client.get(address)
            slowest = max(connection.queries, key=lambda query: float(query["time"]))
            count = len(connection.queries)
            statements.append(1000 * sum(float(query["time"]) for query in connection.queries))
    return {
        "first": times[0],
        "median": median(times),
        "best": min(times),
        "cpu": min(cpu),
        "queries": count,
        "statements": min(statements),
        "slowest": 1000 * float(slowest["time"]),
        "sql": slowest["sql"][:3000],
    }


# ---- summaries


def _history() -> None:
    """Let a coordinator have kept the last hours."""
    from dedupjobs import lifecycle, summaries  # noqa: PLC0415

    now = lifecycle.database_now()
    begin = summaries.floor(now, summaries.MINUTE) - timedelta(hours=25)
    while begin < now:
        summaries._make_minute(begin)
        begin += timedelta(minutes=1)
    for hours in range(26):
        summaries._make_hour(summaries.floor(now - timedelta(hours=hours), summaries.HOUR))
    summaries.keep()


def _summaries() -> dict[str, float]:
    """Measure one round on a busy minute, and add up what each ended attempt costs."""
    from django.db import connection  # noqa: PLC0415

    from dedupjobs import lifecycle, summaries  # noqa: PLC0415

    idle = _best(summaries.keep)
    snapshot = _best(lambda: summaries._measure(summaries.floor(lifecycle.database_now(), 60)))
    busy = 60_000
    minute = summaries.floor(lifecycle.database_now() - timedelta(days=3), summaries.MINUTE)
    with connection.cursor() as cursor:
        cursor.execute("SELECT max(id) FROM dedupjobs_jobattempt")
        newest = cursor.fetchone()[0]
        cursor.execute(
            "UPDATE dedupjobs_jobattempt SET ended_at = %s + (id %% 60) * interval '1 second'"
            " WHERE id > %s AND outcome IS NOT NULL",
            [minute, newest - busy],
        )
        moved = cursor.rowcount
    whole = _best(lambda: _make_anew(minute))
    found = summaries.Summary.objects.get(span=60, begin=minute, queue="", name="")
    assert found.succeeded + found.failed + found.lost + found.other >= moved
    again = _best(lambda: summaries._make_minute(minute))
    hour = _best(lambda: summaries._make_hour(summaries.floor(minute, summaries.HOUR)))
    return {
        "idle_round_ms": idle,
        "snapshot_ms": snapshot,
        "minute_of_attempts": moved,
        "minute_ms": whole,
        "minute_without_news_ms": again,
        "hour_ms": hour,
        # Made in part twice while it lasts (a third and two thirds of it) and once in full; once
        # more it is looked whether there is something new.
        "microseconds_per_attempt": 1000 * (2 * whole + again) / moved,
        "milliseconds_of_a_job": _job(),
    }


def _make_anew(minute: datetime) -> None:
    from dedupjobs import summaries  # noqa: PLC0415

    summaries._all().filter(span=summaries.MINUTE, begin=minute).delete()
    summaries._make_minute(minute)


def _job() -> float:
    """Return the milliseconds of the cheapest way to run a job: in this process, without RQ."""
    from benchmarks.jobs import deduplicated  # noqa: PLC0415
    from dedupjobs.testing import run_pending  # noqa: PLC0415

    begun = time.perf_counter()
    for number in range(300):
        deduplicated.enqueue(number)
    run_pending(name=deduplicated.name)
    return 1000 * (time.perf_counter() - begun) / 300


def _best(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - begun))
    return median(times)


# ---- bulk


def _bulk(retried: int) -> dict[str, Any]:
    """Retry dead rows in bulk, and read pages from another thread meanwhile."""
    from django.contrib.auth.models import User  # noqa: PLC0415

    from benchmarks.spent import backend, cpu_of  # noqa: PLC0415
    from dedupjobs import bulk, lifecycle  # noqa: PLC0415

    boss = User.objects.get(username="boss")
    dead = lifecycle.jobs().filter(status="DEAD").order_by("pk").values_list("pk", flat=True)
    pks = list(dead[:retried])
    started = bulk.start("retry", {"state": "DEAD"}, user=boss, reason="benchmark")
    bulk._all().filter(pk=started.pk).update(upto=pks[-1])
    over, times = threading.Event(), []
    reader = threading.Thread(target=_read_until, args=(over, times, started.pk))
    reader.start()
    session = backend()
    begun, cpu, theirs = time.perf_counter(), time.thread_time(), cpu_of(session)
    while not bulk.page(started.pk):
        pass
    seconds = time.perf_counter() - begun
    cpu, theirs = time.thread_time() - cpu, cpu_of(session) - theirs
    over.set()
    reader.join()
    ended = bulk._all().get(pk=started.pk)
    assert ended.changed == len(pks), (ended.changed, ended.refused)
    return {
        "rows": ended.changed,
        "seconds": seconds,
        "rows_per_second": ended.changed / seconds,
        "rows_per_cpu_second": ended.changed / (cpu + theirs),
        "worker_us_per_row": 1e6 * cpu / ended.changed,
        "database_us_per_row": 1e6 * theirs / ended.changed,
        "page_median_ms": median(times) if times else 0.0,
        "page_worst_ms": max(times, default=0.0),
    }


def _read_until(over: threading.Event, times: list[float], bulk_pk: int) -> None:
    """Read pages, one each half second, and note how long each took."""
    from django.db import connection  # noqa: PLC0415
    from django.urls import reverse  # noqa: PLC0415

    client = _client()
    addresses = [
        reverse("admin:dedupjobs_dashboard_changelist"),
        reverse("admin:dedupjobs_processedjob_changelist") + "?state=DEAD",
        reverse("admin:dedupjobs_processedjob_bulk", args=[bulk_pk]),
    ]
    while not over.wait(0.5):
        for address in addresses:
            begun = time.perf_counter()
            assert client.get(address).status_code == 200
            times.append(1000 * (time.perf_counter() - begun))
    connection.close()


# ---- the command


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.admin", description=__doc__)
    parser.add_argument("--jobs", type=int, default=5_000_000, help="rows of jobs (5,000,000)")
    parser.add_argument("--retried", type=int, default=100_000, help="rows of the bulk (100,000)")
    parser.add_argument("--sql", action="store_true", help="show the slowest statements, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page")
    options = parser.parse_args()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis_url = stack.enter_context(servers.redis_server(home))
        database = stack.enter_context(servers.database("postgresql", home))
        environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "benchmarks.admin_settings",
            "BENCH_REDIS": redis_url,
            "BENCH_DATABASE": json.dumps(database),
            "BENCH_WORKER": "dedupjobs.worker.DedupWorker",
        }
        arguments = ["admin", str(options.jobs), str(options.retried)]
        command = [sys.executable, "-m", "benchmarks.measure", *arguments]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        machine = f"{report.machine(redis_url)}, load {os.getloadavg()[0]:.1f}"
    figures = json.loads(done.stdout.splitlines()[-1])
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    _print(figures, sql=options.sql)
    words = f"{machine}.\n\n{text(figures)}"
    print(f"\n{words}")
    if options.write:
        report.put_into(options.write, words)


def _print(figures: dict[str, Any], *, sql: bool) -> None:
    columns = ("first", "median", "best", "cpu", "slowest", "queries")
    print(f"{'page (ms)':42}" + "".join(f"{column:>9}" for column in columns))
    for page in sorted(figures["pages"], key=lambda page: -page["median"]):
        print(f"{page['page']:42}" + "".join(f"{page[column]:9.0f}" for column in columns))
        if sql:
            print(f"    {page['sql']}\n")
    for part in ("rows", "summaries", "bulk"):
        print(f"\n{part}")
        for what, figure in figures[part].items():
            print(f"  {what.replace('_', ' '):32} {figure:>14,.2f}")


# ---- for a page

SHOWN = 12


def text(figures: dict[str, Any]) -> str:
    """Return the slowest pages, and a verdict for each number that is asked for."""
    pages = sorted(figures["pages"], key=lambda page: -page["best"])
    lines = [
        "| page | CPU of the web process | statements | whole answer, best | queries |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for page in pages[:SHOWN]:
        times = " | ".join(f"{page[what]:.0f} ms" for what in ("cpu", "statements", "best"))
        lines.append(f"| `{page['page']}` | {times} | {page['queries']} |")
    lines.append(f"\nThe slowest {SHOWN} of {len(pages)} pages.\n")
    return "\n".join([*lines, *_verdicts(figures)])


def _verdicts(figures: dict[str, Any]) -> list[str]:
    def slowest(kind: str) -> dict[str, Any]:
        return max((p for p in figures["pages"] if p["page"].startswith(kind)), key=_best_of)

    made = []
    for kind, asked in (("list", 200), ("job", 100), ("dashboard", 150)):
        page = slowest(kind)
        made.append(
            verdict(
                page["best"] <= asked,
                f"the slowest {kind}, `{page['page']}`, takes {page['best']:.0f} ms"
                f" (CPU and statements: {page['cpu'] + page['statements']:.0f} ms; asked: {asked})",
            )
        )
    rows, bulk, kept = figures["rows"], figures["bulk"], figures["summaries"]
    share = kept["microseconds_per_attempt"] / kept["milliseconds_of_a_job"] / 1000
    return [
        *made,
        verdict(
            bulk["rows_per_second"] >= 2_000,
            f"{bulk['rows']:,} rows were retried in bulk at {bulk['rows_per_second']:,.0f} rows/s"
            f" (asked: 2,000), {bulk['rows_per_cpu_second']:,.0f} per second of CPU"
            f" ({bulk['worker_us_per_row']:.0f} µs a row in the worker,"
            f" {bulk['database_us_per_row']:.0f} µs in the database)",
        ),
        f"- Pages that were read meanwhile took {bulk['page_median_ms']:.0f} ms (median; worst"
        f" {bulk['page_worst_ms']:.0f} ms).",
        verdict(
            share <= 0.01,
            f"keeping summaries costs {kept['microseconds_per_attempt']:.0f} µs an attempt,"
            f" {100 * share:.1f} % of a job (asked: 1 %)",
        ),
        f"- The tables: {rows['jobs']:,} jobs, {rows['attempts']:,} attempts,"
        f" {rows['gigabytes']:.1f} GB.",
    ]


def _best_of(page: dict[str, Any]) -> float:
    return float(page["best"])


if __name__ == "__main__":
    main()
