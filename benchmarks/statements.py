"""How many SQL statements and commits a job takes, counted on an open connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import connection
from django.test.utils import CaptureQueriesContext

from benchmarks import jobs, usage
from dedupjobs import clock, controls, runner

CONTROL = ("BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE")
Count = dict[str, int]


def measure() -> dict[str, Any]:
    """Return statements and commits by what is done, and the database's name."""
    usage.clear_servers()
    _count_all(0)  # opens connections and fills caches
    version = ".".join(map(str, connection.get_database_version()))
    return {"database": f"{connection.display_name} {version}", "counts": _count_all(1)}


def _count_all(number: int) -> dict[str, Count]:
    counts = {
        "hand-made": _count(lambda: jobs.hand_made(number)),
        "new": _count(lambda: jobs.deduplicated.enqueue(number)),
        "duplicate": _count(lambda: jobs.deduplicated.enqueue(number)),
    }
    row = jobs.deduplicated.enqueue(number).job
    counts["dedupjobs"] = _count(
        lambda: runner.deliver(row.pk, row.generation, owner=clock.token())
    )
    jobs.deduplicated.enqueue(number)  # brings the success to the cache
    counts["done"] = _count(lambda: jobs.deduplicated.enqueue(number))
    return counts


def _count(act: Callable[[], object]) -> Count:
    controls.current(at_most=0)  # read once in a few seconds, whoever calls
    with CaptureQueriesContext(connection) as captured:
        act()
    statements = commits = 0
    inside = False
    for query in captured:
        word = query["sql"].split()[0].upper()
        if word not in CONTROL:
            statements += 1
            commits += not inside and word != "SELECT"  # it commits by itself
        inside = word == "BEGIN" or (inside and word != "COMMIT")
        commits += word == "COMMIT"
    return {"statements": statements, "commits": commits}
