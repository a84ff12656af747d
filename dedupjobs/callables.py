"""What can be called and does its work then: anything else is refused where a function is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from dedupjobs.exceptions import EventError

_IDLE: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (inspect.iscoroutinefunction, "is async: a call of it runs nothing"),
    (inspect.isasyncgenfunction, "is an async generator: a call of it runs nothing"),
    (inspect.isgeneratorfunction, "is a generator: a call of it runs nothing"),
)


def why_idle(function: Any) -> str:
    """Return why a call of this would do nothing, behind its name; empty: it would do its work."""
    if not callable(function):
        return "can not be called"
    for part in (function, type(function).__call__):
        for is_so, words in _IDLE:
            if is_so(part):
                return words
    return ""


def carry_out(function: Callable[..., Any], event: Any) -> None:
    """Call it with an event; EventError: it returned what would still have to run."""
    returned = function(event)
    if inspect.iscoroutine(returned) or inspect.isgenerator(returned):
        returned.close()
    elif not inspect.isasyncgen(returned):
        return
    raise EventError(f"{named(function)} returned what nobody runs; is it async?")


def named(function: Any) -> str:
    """Return how people call this: a function's name, or what it is."""
    return getattr(function, "__qualname__", None) or repr(function)
