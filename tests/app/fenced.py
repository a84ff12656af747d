"""Specimen jobs that write by their fence, or complete themselves in their own transaction."""

from __future__ import annotations

import os
import time
from pathlib import Path

from django.db import transaction

from dedupjobs import FOREVER, current_attempt, job
from dedupjobs.exceptions import LeaseLost
from tests.app.jobs import note


def _wait(release: str) -> None:
    """Wait for this attempt's own file: ``release`` and its number."""
    while not Path(f"{release}.{current_attempt().number}").exists():
        time.sleep(0.02)


@job(key="fenced:{tag}", unique_for=FOREVER, lease=3, timeout=60, backoff=0.1)
def write_fenced(*, tag: str, release: str) -> None:
    """Write once it is released, but only if this attempt is still the one."""
    number = current_attempt().number
    note(tag, f"begin {number} {os.getpid()}")
    _wait(release)
    try:
        with current_attempt().fenced():
            note(tag, f"write {number}")
    except LeaseLost:
        Path(f"{release}.{number}.stale").touch()
        raise


@job(key="unfenced:{tag}", unique_for=FOREVER, lease=3, timeout=60, backoff=0.1)
def write_unfenced(*, tag: str, release: str) -> None:
    """Write once it is released, whoever owns the job by then."""
    number = current_attempt().number
    note(tag, f"begin {number} {os.getpid()}")
    _wait(release)
    note(tag, f"write {number}")
    Path(f"{release}.{number}.stale").touch()


@job(key="complete:{tag}", unique_for=FOREVER, lease=3, backoff=0.1, max_attempts=3)
def complete_itself(*, tag: str, first: str = "") -> None:
    """Write and complete in one transaction; ``first``: what goes wrong on the first attempt."""
    attempt = current_attempt()
    trouble = first if attempt.number == 1 else ""
    with transaction.atomic():
        note(tag, f"effect {attempt.number}")
        attempt.complete({"by": attempt.number})
        if trouble == "rolled back":
            transaction.set_rollback(True)
        if trouble == "raises inside":
            raise ValueError("before the commit")
    if trouble == "raises afterwards":
        raise ValueError("after the commit")


@job(key="wrong:{tag}", unique_for=FOREVER, max_attempts=1)
def complete_outside_atomic(*, tag: str) -> None:
    note(tag)
    current_attempt().complete()


@job(key="both:{tag}", unique_for=FOREVER, max_attempts=1, atomic=True, timeout=15)
def complete_in_atomic_job(*, tag: str) -> None:
    note(tag)
    current_attempt().complete()
