"""From the figures of all rounds to medians, ratios, and tables for people."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import redis

from benchmarks.rounds import BATCHED, BULK, CONTESTANTS, WAITING, WAYS, Contestant, Rounds
from benchmarks.servers import CannotRun

BESIDE = {  # what a drain is compared with
    "times_worker": "plain RQ on Worker",
    "times_simple_worker": "plain RQ on SimpleWorker",
    "times_hand_made": "hand-made on Worker",
    "times_waiting": WAITING[0].name,
}
NOTHING = {"statements": 0, "commits": 0}

Row = dict[str, Any]
Columns = dict[str, Callable[[Row], str]]


def summary(
    database: str, drains: Rounds, enqueues: Rounds, bulks: Rounds, counts: dict[str, Row]
) -> dict[str, Any]:
    """Return a row of medians and ratios per contestant and per way to enqueue."""
    return {
        "database": database,
        "drain": [_drained(one, drains, counts) for one in CONTESTANTS],
        "batches": [_drained(one, drains, counts) for one in (*BATCHED, *WAITING)],
        "bulk": [
            {
                "name": way,
                **_medians(bulks[way]),
                "times_plain": _times(bulks[way], bulks[BULK[0]], "new_per_second"),
                "times_single": _times(bulks[way], bulks[BULK[1]], "duplicate_per_second"),
                "rounds": bulks[way],
            }
            for way in BULK
        ],
        "enqueue": [
            {
                "name": way,
                **_medians(enqueues[way]),
                "times_plain": _times(enqueues[way], enqueues[WAYS[0]], "new_per_second"),
                "times_unique": _times(enqueues[way], enqueues[WAYS[1]], "duplicate_per_second"),
                "times_done": _times(enqueues[way], enqueues[WAYS[1]], "done_per_second"),
                "times_mixed": _times(enqueues[way], enqueues[WAYS[1]], "mixed_per_second"),
                **{
                    f"{what}_{unit}": count if way == "dedupjobs" else 0
                    for what in ("new", "duplicate", "done")
                    for unit, count in counts[what].items()
                },
                "rounds": enqueues[way],
            }
            for way in WAYS
        ],
    }


def _drained(one: Contestant, drains: Rounds, counts: dict[str, Row]) -> Row:
    return {
        "name": one.name,
        **_medians(drains[one.name]),
        **{
            ratio: _times(drains[one.name], drains[other], "per_second")
            for ratio, other in BESIDE.items()
        },
        **counts.get(one.dressing, NOTHING),
        "rounds": drains[one.name],
    }


def _medians(rounds: list[dict[str, float]]) -> Row:
    return {figure: median(one[figure] for one in rounds) for figure in rounds[0]}


def _times(mine: list[Row], others: list[Row], figure: str) -> float | None:
    """Return the median ratio within a round, or None where one of them has no such figure."""
    if figure not in mine[0] or figure not in others[0]:
        return None
    return median(a[figure] / b[figure] for a, b in zip(mine, others, strict=True))


def machine(redis_url: str) -> str:
    """Name what the figures depend on."""
    with redis.Redis.from_url(redis_url) as client:
        server = client.info("server")
    name = server.get("server_name", "redis")
    return ", ".join(
        [
            f"{os.cpu_count()} CPUs",
            f"{platform.system()} {platform.machine()}",
            f"Python {platform.python_version()}",
            f"Django {version('django')}",
            f"rq {version('rq')}",
            f"redis-py {version('redis')}",
            f"{name} {server.get(f'{name}_version', server['redis_version'])}",
        ]
    )


# ---- for people


def text(measured: dict[str, Any]) -> str:
    """Return Markdown tables that read well in a terminal, too."""
    parts = [
        f"A job that does nothing; {measured['jobs']} jobs per drain where each forks, medians of "
        f"{measured['rounds']} rounds.\nvs: times the rate, in the same round, of plain RQ on "
        "Worker, of plain RQ on SimpleWorker,\nand of the hand-made decorator on Worker.\n"
        f"{measured['machine']}."
    ]
    for found in measured["databases"].values():
        parts += [_table(f"{found['database']}: drain", DRAIN, found["drain"])]
        parts += [_table(f"{found['database']}: batches of 100", BATCHES, found["batches"])]
        parts += [_table(f"{found['database']}: enqueue", ENQUEUE, found["enqueue"])]
        again = [row for row in found["enqueue"] if "duplicate_per_second" in row]
        parts += [_table(f"{found['database']}: calls again", AGAIN, again)]
        parts += [_table(f"{found['database']}: enqueue in bulk", IN_BULK, found["bulk"])]
    return "\n\n".join(parts)


MARKS = "<!-- measured -->", "<!-- /measured -->"


def put_into(page: Path, measured: str) -> None:
    """Replace what stands between the page's marks."""
    before, begin, rest = page.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not end:
        raise CannotRun(f"{page} has no {MARKS[0]} … {MARKS[1]}")
    page.write_text(f"{before}{begin}\n{measured}\n{end}{after}")


def _figure(key: str, digits: int = 0, unit: str = "") -> Callable[[Row], str]:
    def show(row: Row) -> str:
        value = row.get(key)
        return "–" if value is None else f"{value:,.{digits}f}{unit}"

    return show


def _span(row: Row) -> str:
    rates = [one["per_second"] for one in row["rounds"]]
    return f"{min(rates):,.0f}–{max(rates):,.0f}"


DRAIN: Columns = {
    "jobs/s": _figure("per_second"),
    "all rounds": _span,
    "vs Worker": _figure("times_worker", 2, "×"),
    "vs SimpleWorker": _figure("times_simple_worker", 2, "×"),
    "vs hand-made": _figure("times_hand_made", 2, "×"),
    "CPU ms": _figure("cpu_ms", 2),
    "Redis trips": _figure("redis_trips", 1),
    "commands": _figure("redis_commands", 1),
    "SQL": _figure("statements"),
    "commits": _figure("commits"),
    "memory MB": _figure("memory_mb"),
}
BATCHES: Columns = {
    "jobs/s": _figure("per_second"),
    "all rounds": _span,
    "vs Worker": _figure("times_worker", 1, "×"),
    "vs SimpleWorker": _figure("times_simple_worker", 1, "×"),
    "vs 10 ms, one at a time": _figure("times_waiting", 1, "×"),
    "CPU ms": _figure("cpu_ms", 3),
    "Redis trips": _figure("redis_trips", 2),
    "commands": _figure("redis_commands", 1),
}
IN_BULK: Columns = {
    "new/s": _figure("new_per_second"),
    "vs Queue.enqueue_many": _figure("times_plain", 2, "×"),
    "CPU µs": _figure("new_cpu_us"),
    "duplicates/s": _figure("duplicate_per_second"),
    "vs one by one": _figure("times_single", 2, "×"),
    "its CPU µs": _figure("duplicate_cpu_us"),
}
ENQUEUE: Columns = {
    "new/s": _figure("new_per_second"),
    "vs Queue.enqueue": _figure("times_plain", 2, "×"),
    "Redis trips": _figure("new_redis_trips", 1),
    "SQL": _figure("new_statements"),
}
AGAIN: Columns = {
    "waiting/s": _figure("duplicate_per_second"),
    "vs unique=True": _figure("times_unique", 2, "×"),
    "Redis trips": _figure("duplicate_redis_trips", 1),
    "SQL": _figure("duplicate_statements"),
    "done/s": _figure("done_per_second"),
    "its ratio": _figure("times_done", 2, "×"),
    "its trips": _figure("done_redis_trips", 1),
    "its SQL": _figure("done_statements"),
    "9 of 10 waiting, 1 new/s": _figure("mixed_per_second"),
    "ratio": _figure("times_mixed", 2, "×"),
}


def _table(title: str, columns: Columns, rows: list[Row]) -> str:
    lines = [[title, *columns]]
    lines += [[row["name"], *(show(row) for show in columns.values())] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(_line(cells, widths) for cells in (lines[0], rule, *lines[1:]))


def _line(cells: list[str], widths: list[int]) -> str:
    first, *others = (
        cell.ljust(width) if i == 0 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join([first, *others])} |"
