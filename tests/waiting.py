"""Wait for something to become true: the only place of the suite that sleeps."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(
    predicate: Callable[[], T], seconds: float = 10, every: float = 0.02, what: str = ""
) -> T:
    """Return the predicate's first true answer, or fail the test at the deadline."""
    deadline = time.monotonic() + seconds
    while not (answer := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(
                f"not within {seconds} s: {what or _source(predicate)} (last answer: {answer!r})"
            )
        time.sleep(every)
    return answer


def _source(predicate: Callable[[], object]) -> str:
    try:
        return inspect.getsource(predicate).strip()
    except (OSError, TypeError):
        return repr(predicate)
