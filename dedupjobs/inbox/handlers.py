"""Which function takes which event, for which consumer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from dedupjobs import callables, conf, routes, thresholds
from dedupjobs.envelope import Event
from dedupjobs.exceptions import EventError

H = TypeVar("H", bound=Callable[[Event], Any])

_handlers: dict[tuple[str | None, str], Callable[[Event], Any]] = {}


def handler(name: str, *, consumer: str | None = None) -> Callable[[H], H]:
    """
    Let the decorated function take events called ``name`` ("order.paid", "order.*" or "*").

    It is called with the event, inside the transaction that marks it as applied, on the database
    of our tables. ``consumer``: a name of DEDUPJOBS["INBOX"]["CONSUMERS"]; None: the only one.
    """
    if not routes.is_pattern(name):
        raise EventError(
            f"@inbox.handler({name!r}): give a name such as 'order.paid', or 'order.*', or '*'."
        )

    def register(function: H) -> H:
        if wrong := callables.why_idle(function):
            raise EventError(
                f"@inbox.handler({name!r}): {callables.named(function)} {wrong}, and the event "
                "would count as applied. Give a plain function; let it enqueue a job for what is "
                "async, or wrap that in async_to_sync()."
            )
        known = _handlers.get((consumer, name))
        if known is not None and _path(known) != _path(function):
            raise EventError(
                f"{_path(function)}: {_path(known)} takes {name!r} for consumer {consumer!r} "
                "already. Call both from one function, or give one of them another consumer."
            )
        _handlers[consumer, name] = function
        return function

    return register


def _path(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def find(consumer: str, name: str) -> Callable[[Event], Any] | None:
    """Return who takes an event: by its name, else by the longest pattern that means it."""
    mine = {
        pattern: function
        for (owner, pattern), function in _handlers.items()
        if owner == consumer or (owner is None and _is_only(consumer))
    }
    fitting = sorted(
        (p for p in mine if routes.matches(p, name)), key=lambda p: (p != name, -len(p))
    )
    return mine[fitting[0]] if fitting else None


def _is_only(consumer: str) -> bool:
    return list(conf.inbox().consumers) == [consumer]


def why_unknown(consumer: str) -> str:
    """Return a sentence about a consumer that settings lack; empty: they have it."""
    known = conf.inbox().consumers
    if consumer in known:
        return ""
    where = 'DEDUPJOBS["INBOX"]["CONSUMERS"]'
    return f"{where} has no consumer {consumer!r}. {thresholds.hint(consumer, known)}"


def problems() -> list[str]:
    """Return a sentence per handler that nobody calls."""
    known = conf.inbox().consumers
    found = []
    for (consumer, pattern), function in _handlers.items():
        where = f"{_path(function)} takes {pattern!r} for"
        if consumer is None and len(known) != 1:
            names = ", ".join(known) or "none"
            found.append(f"{where} the only consumer, and there is not one ({names}).")
        elif consumer is not None and consumer not in known:
            found.append(f"{where} consumer {consumer!r}, which INBOX['CONSUMERS'] lacks.")
    return found
