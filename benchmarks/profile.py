"""
Where the time of one job goes, step by step: ``python -m benchmarks.profile [--write PAGE]``.

Another process asks it every millisecond where it stands, waits included, which distorts less
than counting each call. What is measured runs as it does in earnest: `rqworker --burst`, a loop
of calls. Each sample belongs to the innermost of our functions (the step) and to whoever is at
work there: we, Django, the driver, redis-py, RQ, or nobody, while a server is waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import report, rounds, servers

INTERVAL = 0.001  # seconds between two samples
SIGNAL = signal.SIGUSR2  # RQ and our time-outs need SIGALRM
BATCHES = {
    "batch, each ending": "deduplicated",
    "batch, atomic": "atomic",
    "batch, group": "grouped",
}
SUBJECTS = (
    *("run on SimpleWorker", "run on Worker", *BATCHES),
    *("call", "duplicate", "calls in bulk", "duplicates in bulk"),
)
MANY = (*BATCHES, "calls in bulk", "duplicates in bulk")
PER_MESSAGE = 5  # times as many where many share a message or a statement
PARTIES = ("we", "Django", "driver", "redis-py", "RQ", "other", "waiting")
PACKAGES = {
    "dedupjobs": "we",
    "django": "Django",
    "asgiref": "Django",
    "psycopg": "driver",
    "psycopg_c": "driver",
    "psycopg_binary": "driver",
    "sqlite3": "driver",
    "redis": "redis-py",
    "django_redis": "redis-py",
    "rq": "RQ",
    "django_rq": "RQ",
}
WAITS = {"_read_from_socket", "wait", "_wait_for_tstate_lock", "select", "poll", "waitpid"}
LEAST = 0.005  # share of the whole below which a step is no line of its own
OTHER_STEPS = "all others together"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_500, help="jobs or calls of each (1500)")
    parser.add_argument("--subject", choices=SUBJECTS, action="append")
    parser.add_argument("--database", choices=servers.DATABASES, action="append")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put it between its marks")
    options = parser.parse_args()
    parts = []
    with (
        tempfile.TemporaryDirectory(prefix="dedupjobs-profile-") as home,
        servers.redis_server(Path(home)) as redis_url,
    ):
        for name in options.database or servers.installed_databases():
            with servers.database(name, Path(home)) as tables:
                parts += _profiles(name, redis_url, tables, options)
    text = "\n\n".join(parts)
    print(text)
    if options.write:
        report.put_into(options.write, text)
    return 0


def _profiles(
    name: str, redis_url: str, tables: dict[str, Any], options: argparse.Namespace
) -> Iterator[str]:
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
        "BENCH_REDIS": redis_url,
        "BENCH_DATABASE": json.dumps(tables),
        "BENCH_WORKER": "rq.SimpleWorker",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    rounds.python(environment, "-m", "django", "migrate", "--run-syncdb", "--verbosity", "0")
    for subject in options.subject or SUBJECTS:
        print(f"{name}: {subject}", file=sys.stderr, flush=True)
        environment["BENCH_WORKER"] = (
            "rq.Worker" if subject.endswith(" Worker") else ("rq.SimpleWorker")
        )
        count = options.jobs // (20 if subject.endswith(" Worker") else 1)
        count *= PER_MESSAGE if subject in MANY else 1
        found = rounds.measure(environment, "profile", subject, str(count))
        yield _table(f"{name}: {subject}", found)


# ---- in the measured process


def measure(subject: str, count: str) -> dict[str, Any]:
    """Return the seconds and the samples of ``count`` jobs or calls, by step and party."""
    from benchmarks import jobs, usage  # noqa: PLC0415 - they need Django

    number = int(count)
    usage.clear_servers()
    job = getattr(jobs, BATCHES.get(subject, "deduplicated"))
    call = _in_bulk if subject in MANY else _one_by_one
    call(job, range(-50, 0))
    with tempfile.TemporaryDirectory() as home:
        run: Callable[[], object] = _work
        if subject.startswith(("call", "duplicate")):
            run = lambda: call(job, range(number))  # noqa: E731 - as short as it is
        if not subject.startswith("call"):
            call(job, range(number))
        if run is _work:
            number += 50  # those of the beginning wait, too
        begun = time.perf_counter()
        with sampling(Path(home)) as samples:
            run()
        seconds = time.perf_counter() - begun
        return {"number": number, "seconds": seconds, "samples": samples()}


def _one_by_one(job: Any, numbers: range) -> None:
    for number in numbers:
        job.enqueue(number)


def _in_bulk(job: Any, numbers: range) -> None:
    job.enqueue_many({"number": number} for number in numbers)


def _work() -> None:
    from django.core.management import call_command  # noqa: PLC0415

    call_command("rqworker", "default", burst=True, verbosity=0)


@contextmanager
def sampling(home: Path) -> Iterator[Callable[[], list[Any]]]:
    """Sample this process, or the newest that it has forked; then say what was seen."""
    seen: Counter[tuple[str, str]] = Counter()

    def look(signum: int, frame: FrameType | None) -> None:
        seen[_place(frame)] += 1

    def in_child() -> None:
        seen.clear()
        asker.stdin.write(f"{os.getpid()}\n".encode())

    def leave(status: int) -> None:
        (home / f"{os.getpid()}.json").write_text(json.dumps([[*k, n] for k, n in seen.items()]))
        exit_now(status)

    def found() -> list[Any]:
        for path in home.glob("*.json"):
            for step, party, count in json.loads(path.read_text()):
                seen[step, party] += count
        return [[step, party, count] for (step, party), count in seen.items()]

    previous = signal.signal(SIGNAL, look)
    asker: Any = subprocess.Popen(
        [sys.executable, "-c", ASKER, str(os.getpid()), str(INTERVAL), str(int(SIGNAL))],
        stdin=subprocess.PIPE,
        bufsize=0,
    )
    os.register_at_fork(after_in_child=in_child)
    exit_now, os._exit = os._exit, leave  # type: ignore[assignment] # where a horse ends
    try:
        yield found
    finally:
        os._exit = exit_now
        asker.terminate()
        asker.wait()
        signal.signal(SIGNAL, previous)


# Another process, since a thread would ask only where the interpreter lets it in: at waits.
ASKER = """
import os, select, sys, time
home, interval, number = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
child = 0
while True:
    if select.select([0], [], [], interval)[0]:
        child = int(os.read(0, 100).split()[-1])
    try:
        if child and open(f"/proc/{child}/stat").read().rpartition(") ")[2][0] == "Z":
            child = 0
        os.kill(child or home, number)
    except OSError:
        child = 0
"""


def _place(frame: FrameType | None) -> tuple[str, str]:
    """Return the step a sample belongs to, and who was at work in it."""
    party = step = ""
    waits = frame is not None and frame.f_code.co_name in WAITS
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if not party and package in PACKAGES:
            party = PACKAGES[package]
        if package == "dedupjobs":
            step = f"{module.removeprefix('dedupjobs.')}.{frame.f_code.co_qualname}"
            break
        frame = frame.f_back
    if not step:
        step = "RQ's own" if party in ("RQ", "redis-py") else "Python's start and imports"
    return step, "waiting" if waits else party or "other"


# ---- the page


def _table(title: str, found: dict[str, Any]) -> str:
    samples = sum(count for _, _, count in found["samples"])
    micros = found["seconds"] / found["number"] * 1e6
    share = micros / max(samples, 1)
    by_step: dict[str, Counter[str]] = {}
    for step, party, count in found["samples"]:
        by_step.setdefault(step, Counter())[party] += count
    rest: Counter[str] = Counter()
    for step, counts in list(by_step.items()):
        if counts.total() < LEAST * samples:
            rest += by_step.pop(step)
    by_step[OTHER_STEPS] = rest
    lines = [
        f"**{title}**: {micros:,.0f} µs each, {samples:,} samples.",
        "",
        "| step | µs | " + " | ".join(PARTIES) + " |",
        "|---|--:|" + "--:|" * len(PARTIES),
    ]
    total: Counter[str] = Counter()
    for step, counts in sorted(by_step.items(), key=lambda item: -item[1].total()):
        total += counts
        lines.append(_line(f"`{step}`", counts, share))
    lines.append(_line("**all**", total, share))
    return "\n".join(lines)


def _line(step: str, counts: Counter[str], share: float) -> str:
    cells = [f"{counts[party] * share:,.0f}" if counts[party] else "" for party in PARTIES]
    return f"| {step} | {counts.total() * share:,.0f} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
