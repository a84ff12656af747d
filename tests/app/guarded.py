"""Specimen jobs that write only if their attempt is still the one, by either guard."""

from __future__ import annotations

from dedupjobs import FOREVER, current_attempt, job
from tests.app.jobs import note


@job(key="by fence:{tag}", unique_for=FOREVER)
def record_fenced(*, tag: str) -> None:
    with current_attempt().fenced():
        note(tag)


@job(key="by check:{tag}", unique_for=FOREVER)
def record_checked(*, tag: str) -> None:
    current_attempt().check()
    note(tag)


@job(key=("depth",), unique_for=FOREVER)
def chain(*, depth: int) -> None:
    if depth > 1:
        chain.enqueue(depth=depth - 1)
    note("chain", str(depth))
