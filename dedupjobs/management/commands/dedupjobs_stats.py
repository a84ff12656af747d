from __future__ import annotations

import json
import signal
import threading
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from dedupjobs import clock, readings
from dedupjobs.management import asked
from dedupjobs.readings import Family

EVERY = 2.0  # seconds between two tables of --watch
CLEAR = "\x1b[2J\x1b[H"


class Command(BaseCommand):
    help = (
        "Shows the figures of /metrics as tables: queues, jobs, locks, duplicates, Redis. What can "
        "not be read is left out and named. Exit codes: 0, 1 database or Redis away, 2 bad input."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")
        parser.add_argument(
            "--watch",
            type=float,
            nargs="?",
            const=EVERY,
            metavar="SECONDS",
            help=f"Show them again every so often ({EVERY:g} s), until Ctrl-C.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        every = options["watch"]
        if every is None:
            if not self._show(options["json"]):
                raise SystemExit(1)
            return
        if not 0.1 <= every <= 86_400:  # noqa: PLR2004
            raise asked.refused(f"--watch {every:g}: give from 0.1 to 86,400 seconds.")
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        while not stopped.is_set():
            if self.stdout.isatty() and not options["json"]:
                self.stdout.write(CLEAR, ending="")
            self._show(options["json"])
            self.stdout.flush()
            clock.wait(stopped, every)

    def _show(self, as_json: bool) -> bool:
        """Print all once; return whether everything could be read."""
        families = {family.name: family for family in readings.collect()}
        up = {name: bool(_value(families, f"{name}_up")) for name in ("database", "redis")}
        if as_json:
            facts = {name: _as_json(family) for name, family in families.items()}
            self.stdout.write(json.dumps({"up": up, "metrics": facts}))
            return all(up.values())
        for name, answers in up.items():
            if not answers:
                self.stdout.write(f"The {name} does not answer; its figures are left out.")
        for title, rows in _tables(families):
            self.stdout.write(title)
            for line in _aligned(rows):
                self.stdout.write(f"  {line}")
        return all(up.values())


def _value(families: dict[str, Family], name: str, *labels: str) -> Any:
    family = families.get(name)
    return family.samples.get(labels) if family else None


def _as_json(family: Family) -> list[dict[str, Any]]:
    samples = []
    for labels, value in family.samples.items():
        sample: dict[str, Any] = dict(zip(family.labels, labels, strict=True))
        if family.kind == "histogram":
            bounds = [*(f"{bound:g}" for bound in family.bounds), "+Inf"]
            sample["buckets"] = dict(zip(bounds, value.counts, strict=True))
            sample["sum"] = value.total
        else:
            sample["value"] = value
        samples.append(sample)
    return samples


# ---- tables

Rows = list[tuple[str, ...]]


def _tables(families: dict[str, Family]) -> list[tuple[str, Rows]]:
    tables = [
        ("Queues", _queues(families)),
        ("Jobs", _jobs(families)),
        ("Duplicates", _counted(families, "duplicate_detected_total")),
        ("Retries", _counted(families, "job_retry_total")),
        ("Recovered", _counted(families, "recovered_total", "requeued_stuck_total")),
        ("Else", _singles(families)),
    ]
    return [(title, rows) for title, rows in tables if rows]


def _queues(families: dict[str, Family]) -> Rows:
    backlog = families.get("backlog")
    if backlog is None:
        return []
    columns = ("backlog", "delayed", "backlog_oldest_age_seconds", "messages", "workers",
               "worker_heartbeat_age_seconds")  # fmt: skip
    rows: Rows = [("queue", "due", "later", "oldest s", "messages", "workers", "last sign s")]
    for (queue,) in backlog.samples:
        rows.append((queue, *(_said(_value(families, name, queue)) for name in columns)))
    return rows


def _jobs(families: dict[str, Family]) -> Rows:
    attempts, durations = (
        families.get(name) for name in ("attempts_total", "job_processing_duration_seconds")
    )
    if attempts is None or durations is None or not attempts.samples:
        return []
    rows: Rows = [("job", "attempts", "mean s", "outcomes")]
    for job in sorted({job for _, job in attempts.samples}):
        by_outcome = {o: n for (o, j), n in attempts.samples.items() if j == job}
        took = durations.samples.get((job,))
        mean = _said(took.total / took.counts[-1]) if took and took.counts[-1] else "–"
        words = ", ".join(f"{n:,} {o}" for o, n in sorted(by_outcome.items()))
        rows.append((job, f"{sum(by_outcome.values()):,}", mean, words))
    return rows


def _counted(families: dict[str, Family], *names: str) -> Rows:
    return [
        (" ".join(labels), f"{value:,}")
        for name in names
        if name in families
        for labels, value in sorted(families[name].samples.items())
    ]


def _singles(families: dict[str, Family]) -> Rows:
    """Return what has no labels, or few; in the order in which it is measured."""
    told = {"backlog", "delayed", "messages", "backlog_oldest_age_seconds", "workers",
            "worker_heartbeat_age_seconds", "attempts_total", "job_retry_total",
            "duplicate_detected_total", "recovered_total", "requeued_stuck_total",
            "database_up", "redis_up"}  # fmt: skip
    return [
        (" ".join((name, *labels)), _said(value))
        for name, family in families.items()
        if name not in told and family.kind != "histogram"
        for labels, value in family.samples.items()
        if value or name != "alerts"  # eighteen kinds, of which few are open
    ]


def _said(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}".rstrip("0").rstrip(".")


def _aligned(rows: Rows) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
