"""
How the cost of a job and of the coordinator's duties grows: python -m benchmarks.growth [--help].

One PostgreSQL of its own is filled to 10,000, 1 million and 10 million jobs, each with an attempt.
At each size a job that does nothing is called and run, in this process and without RQ, whose cost
does not depend on the tables and would hide what does. Then, at the largest size, leases that
have expired are reclaimed, forgotten rows are sent again, and rows out of retention are pruned,
each by a fresh process whose memory is watched.

CPU is what the kernel says of the process and of the database's process that serves it, so a busy
machine disturbs it little; the lowest of ROUNDS counts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report, rounds, servers
from benchmarks.spent import backend, cpu_of, verdict

SIZES = (10_000, 1_000_000, 10_000_000)
ROUNDS, JOBS = 7, 200
BEATS = 20
PATIENCE = 3_600  # seconds for one measurement; a busy machine fills slowly
DUTY = 900.0  # seconds after which a duty is broken off, and what it did is counted

Figures = dict[str, Any]


def measure(what: str, *arguments: str) -> Figures:
    """Take one measurement in this fresh process."""
    return MEASUREMENTS[what](*map(int, arguments))


# ---- one job


def _fill(*counts: int) -> Figures:
    from benchmarks.growth_rows import KINDS, fill  # noqa: PLC0415

    return fill(dict(zip(KINDS, counts, strict=False)))


def _cost() -> Figures:
    """Return what a call and a run cost: microseconds of CPU, of statements, and rows read."""
    from django.db import connection  # noqa: PLC0415 - after the set-up

    from benchmarks.jobs import deduplicated  # noqa: PLC0415
    from dedupjobs import runner  # noqa: PLC0415

    session = backend()
    statements = _Statements()
    numbers = iter(range(sys.maxsize))
    base = time.time_ns()
    found: list[Figures] = []
    read = _read_rows()
    with connection.execute_wrapper(statements):
        for _ in range(ROUNDS + 1):  # the first one warms up
            statements.seconds = 0.0
            cpu, theirs = time.process_time(), cpu_of(session)
            for _ in range(JOBS):
                row = deduplicated.enqueue(base + next(numbers)).job
                runner.run([[row.pk, row.generation]])
            found.append(
                {
                    "process_us": 1e6 * (time.process_time() - cpu) / JOBS,
                    "database_us": 1e6 * (cpu_of(session) - theirs) / JOBS,
                    "statements_us": 1e6 * statements.seconds / JOBS,
                }
            )
    jobs = JOBS * (ROUNDS + 1)
    after = _read_rows()
    best = {name: min(one[name] for one in found[1:]) for name in found[0]}
    return {
        **best,
        "cpu_us": best["process_us"] + best["database_us"],
        **{name: (after[name] - read[name]) / jobs for name in read},
    }


class _Statements:
    """Adds up the time of statements."""

    seconds = 0.0

    def __call__(self, execute: Any, *statement: Any) -> Any:
        begun = time.perf_counter()
        try:
            return execute(*statement)
        finally:
            self.seconds += time.perf_counter() - begun


def _read_rows() -> Figures:
    """Return how many rows of our tables were read: by scans of a whole table, by indexes."""
    from django.db import connection  # noqa: PLC0415

    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        cursor.execute(
            "SELECT coalesce(sum(seq_tup_read), 0), coalesce(sum(idx_tup_fetch), 0)"
            " FROM pg_stat_user_tables WHERE relname LIKE 'dedupjobs%'"
        )
        scanned, fetched = cursor.fetchone()
    return {"rows_scanned": int(scanned), "rows_by_index": int(fetched)}


# ---- beats


def _beats() -> Figures:
    """Return how many updates PostgreSQL made beside the old row, without touching an index."""
    from benchmarks.jobs import deduplicated  # noqa: PLC0415
    from dedupjobs import clock, lifecycle  # noqa: PLC0415
    from dedupjobs.lifecycle import Place  # noqa: PLC0415

    claims = []
    for number in range(JOBS):
        row = deduplicated.enqueue(-number - time.time_ns()).job
        claims.append(lifecycle.claim(row.pk, 1, owner=clock.token(), place=Place()))
    before = _updates()
    for _ in range(BEATS):
        for claim in claims:
            assert claim is not None
            lifecycle.beat(claim.fence, lease=600)
    beaten = _updates()
    for claim in claims:
        assert claim is not None
        lifecycle.complete(claim, "null", unique_for=None)
    return {
        "beats": beaten["all"] - before["all"],
        "in_place": (beaten["hot"] - before["hot"]) / (beaten["all"] - before["all"]),
    }


def _updates() -> Figures:
    from django.db import connection  # noqa: PLC0415

    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        cursor.execute(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables"
            " WHERE relname = 'dedupjobs_jobattempt'"
        )
        every, hot = cursor.fetchone()
    return {"all": every, "hot": hot}


# ---- the coordinator's duties


def _reclaim(count: int) -> Figures:
    from dedupjobs.coordinator import Coordinator  # noqa: PLC0415

    coordinator = Coordinator()
    memory = _memory()
    begun = time.perf_counter()
    looked = sum(1 for _ in coordinator.suspects())
    look = time.perf_counter() - begun
    assert looked >= count, looked
    time.sleep(0.5)  # a third of these leases
    return {"look_ms": 1000 * look, **_do(lambda: len(coordinator.reclaim()), count, memory)}


def _resend(count: int) -> Figures:
    from dedupjobs.coordinator import Coordinator  # noqa: PLC0415

    coordinator = Coordinator()
    memory = _memory()
    return _do(lambda: coordinator.resend_wiped("default"), count, memory)


def _prune(count: int) -> Figures:
    """Prune while another thread runs jobs, and a third one looks who waits for a row."""
    from benchmarks.jobs import deduplicated  # noqa: PLC0415
    from dedupjobs.coordinator import Coordinator  # noqa: PLC0415

    deduplicated.enqueue(time.time_ns())  # what is slow the first time
    coordinator = Coordinator()
    memory = _memory()
    with _Bystanders() as seen:

        def duty() -> int:
            done = coordinator.prune()
            return done.deleted + done.tombstones

        found = _do(duty, count, memory)
    return {**found, **seen.figures()}


class _Bystanders:
    """A thread that calls and runs a job each 50 ms, and one that looks for waiting sessions."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.times: list[float] = []
        self.looks = self.waiting = 0
        self.threads = [threading.Thread(target=self._run), threading.Thread(target=self._look)]

    def __enter__(self) -> _Bystanders:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()

    def _run(self) -> None:
        from django.db import connection  # noqa: PLC0415

        from benchmarks.jobs import deduplicated  # noqa: PLC0415
        from dedupjobs import runner  # noqa: PLC0415

        while not self.over.wait(0.05):
            begun = time.perf_counter()
            row = deduplicated.enqueue(time.time_ns()).job
            runner.run([[row.pk, row.generation]])
            self.times.append(time.perf_counter() - begun)
        connection.close()

    def _look(self) -> None:
        from django.db import connection  # noqa: PLC0415

        with connection.cursor() as cursor:
            while not self.over.wait(0.02):
                cursor.execute(
                    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                )
                self.looks += 1
                self.waiting += cursor.fetchone()[0]
        connection.close()

    def figures(self) -> Figures:
        return {
            "jobs_meanwhile": len(self.times),
            "job_ms": 1000 * median(self.times),
            "worst_job_ms": 1000 * max(self.times),
            "looks": self.looks,
            "seen_waiting": self.waiting,
        }


def _do(duty: Any, count: int, memory: float) -> Figures:
    """Do a duty again and again, as ticks do, until all is done or DUTY is over."""
    session = backend()
    cpu, theirs, begun = time.process_time(), cpu_of(session), time.perf_counter()
    done, longest = 0, 0.0
    while done < count and time.perf_counter() - begun < DUTY:
        tick = time.perf_counter()
        made = duty()
        longest = max(longest, time.perf_counter() - tick)
        if not made:
            break
        done += made
    seconds = time.perf_counter() - begun
    cpu, theirs = time.process_time() - cpu, cpu_of(session) - theirs
    return {
        "rows": done,
        "seconds": seconds,
        "rows_per_second": done / seconds,
        "rows_per_cpu_second": done / (cpu + theirs),
        "longest_tick_seconds": longest,
        "memory_mb": _memory() - memory,
    }


def _memory() -> float:
    """Return the most memory this process has had, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


MEASUREMENTS = {
    "fill": _fill,
    "cost": _cost,
    "beats": _beats,
    "reclaim": _reclaim,
    "resend": _resend,
    "prune": _prune,
}


# ---- the command


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="jobs, ascending")
    parser.add_argument("--lost", type=int, default=100_000, help="expired leases (100,000)")
    parser.add_argument("--forgotten", type=int, default=1_000_000, help="(1,000,000)")
    parser.add_argument("--old", type=int, default=200_000, help="jobs to prune (200,000)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dedupjobs-bench-")))
        redis_url = stack.enter_context(servers.redis_server(home))
        database = stack.enter_context(servers.database("postgresql", home))
        environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
            "BENCH_REDIS": redis_url,
            "BENCH_DATABASE": json.dumps(database),
            "BENCH_WORKER": "dedupjobs.worker.DedupWorker",
        }
        rounds.python(environment, "-m", "django", "migrate", "--run-syncdb", "--verbosity", "0")
        measured = _measure(environment, sizes, options)
        measured["machine"] = _machine(redis_url)
    print(text(measured))
    if options.write:
        report.put_into(options.write, text(measured))


def _measure(environment: dict[str, str], sizes: list[int], options: Any) -> Figures:
    def take(*arguments: Any) -> Figures:
        begun = time.perf_counter()
        command = ("growth", *map(str, arguments))
        found: Figures = rounds.measure(environment, *command, patience=PATIENCE)
        _say(f"{' '.join(map(str, arguments))}: {time.perf_counter() - begun:.0f} s")
        return found

    costs, filled, there = [], {}, 0
    for size in sizes:
        last = size == sizes[-1]
        more = (
            [options.forgotten, options.lost, options.old, options.old // 2, size // 10]
            if last
            else [0] * 5
        )
        filled = take("fill", max(size - there - sum(more), 0), *more)
        there = int(filled["jobs"])
        costs.append({"name": f"{there:,}", **take("cost")})
    return {
        "costs": costs,
        "filled": filled,
        "beats": take("beats"),
        "reclaim": take("reclaim", options.lost),
        "resend": take("resend", options.forgotten),
        "prune": take("prune", options.old + options.old // 2),
    }


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _machine(redis_url: str) -> str:
    return f"{report.machine(redis_url)}, load {os.getloadavg()[0]:.1f}"


# ---- for people


def text(measured: Figures) -> str:
    """Return tables, and a verdict for each number that is asked for."""
    first = measured["costs"][0]
    lines = [
        f"{measured['machine']}.",
        "",
        "| jobs in the table | CPU of a job | of the process | of the database | statements"
        " | rows read by index | by scans | times the first |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in measured["costs"]:
        lines.append(
            f"| {one['name']} | {one['cpu_us']:,.0f} µs | {one['process_us']:,.0f} µs"
            f" | {one['database_us']:,.0f} µs | {one['statements_us']:,.0f} µs"
            f" | {one['rows_by_index']:.1f} | {one['rows_scanned']:.1f}"
            f" | {one['cpu_us'] / first['cpu_us']:.2f}× CPU,"
            f" {one['statements_us'] / first['statements_us']:.2f}× statements |"
        )
    lines += [
        "",
        "| duty | rows | seconds | rows/s | rows per s of CPU | longest tick | memory |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, words in DUTIES.items():
        duty = measured[name]
        lines.append(
            f"| {words} | {duty['rows']:,} | {duty['seconds']:.0f} | {duty['rows_per_second']:,.0f}"
            f" | {duty['rows_per_cpu_second']:,.0f} | {duty['longest_tick_seconds']:.1f} s"
            f" | {duty['memory_mb']:+.0f} MB |"
        )
    return "\n".join([*lines, "", *_verdicts(measured)])


DUTIES = {
    "reclaim": "expired leases reclaimed",
    "resend": "forgotten rows sent again",
    "prune": "jobs pruned, each with its attempt",
}


def _verdicts(measured: Figures) -> list[str]:
    first, last, prune = measured["costs"][0], measured["costs"][-1], measured["prune"]
    cpu, waited = (last[k] / first[k] for k in ("cpu_us", "statements_us"))
    scanned = max(one["rows_scanned"] for one in measured["costs"])
    # A job and its attempt: two rows.
    rows, by_cpu = (2 * prune[k] for k in ("rows_per_second", "rows_per_cpu_second"))
    filled, beats = measured["filled"], measured["beats"]
    return [
        verdict(cpu <= 1.3, f"a job costs {cpu:.2f}× the CPU at {last['name']} rows (asked: 1.3×)"),
        verdict(waited <= 1.3, f"its statements take {waited:.2f}× the time (asked: 1.3×)"),
        verdict(scanned < 1, f"{scanned:.1f} rows of a job are read by scans of a table"),
        verdict(
            rows >= 20_000,
            f"{rows:,.0f} rows/s are pruned, {by_cpu:,.0f} per second of CPU (asked: 20,000)",
        ),
        verdict(
            not prune["seen_waiting"],
            f"of {prune['jobs_meanwhile']} jobs that ran while it pruned none was seen waiting for"
            f" a lock in {prune['looks']} looks; each took {prune['job_ms']:.1f} ms"
            f" (median; worst {prune['worst_job_ms']:.0f} ms)",
        ),
        verdict(
            beats["in_place"] > 0.9,
            f"{100 * beats['in_place']:.0f} % of {beats['beats']:,} beats touched no index (HOT)",
        ),
        f"- The tables: {filled['jobs']:,} jobs, {filled['attempts']:,} attempts,"
        f" {filled['gigabytes']:.1f} GB.",
        f"- One look at {measured['reclaim']['rows']:,} open attempts takes a sweep"
        f" {measured['reclaim']['look_ms']:,.0f} ms.",
    ]


if __name__ == "__main__":
    main()
