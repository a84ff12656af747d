"""
Where a tracer plugs in. Without one, as by default, each of these costs next to nothing.

``tracing`` sets ``tracer`` where OpenTelemetry is installed; what it makes of a call or a run is
its own affair, and none of it changes what the call or the run does.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol


class Producing(Protocol):
    """A call that enqueues. ``traceparent``: its W3C trace context, as the rows keep it."""

    traceparent: str

    def answered(self, answers: Any) -> None:
        """The call has found or made these rows (``lifecycle.Answer``)."""


class Consuming(Protocol):
    """An attempt at work."""

    def ended(self, outcome: str | None, status: str | None, error: str) -> None:
        """It has ended so; ``error``: the error's class, or empty."""


class Tracer(Protocol):
    def producing(
        self, name: str, queue: str, count: int
    ) -> AbstractContextManager[Producing | None]: ...

    def consuming(self, claim: Any) -> AbstractContextManager[Consuming | None]: ...

    def headers(self) -> dict[str, str]: ...

    def flush(self) -> None: ...


tracer: Tracer | None = None
_forked = False


def _after_fork() -> None:
    global _forked  # noqa: PLW0603 - what RQ's workers do for each message
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def stay() -> None:
    """Note that this process, although forked, runs one message after the other."""
    global _forked  # noqa: PLW0603 - see above
    _forked = False


def leave() -> None:
    """Send what was traced: nothing may come for a while, or ever."""
    if tracer is not None:
        with suppress(Exception):
            tracer.flush()


def producing(name: str, queue: str, count: int = 1) -> AbstractContextManager[Producing | None]:
    """Trace the block, which enqueues ``count`` calls of a job; None: nobody wants it."""
    return nullcontext() if tracer is None else tracer.producing(name, queue, count)


def consuming(claim: Any) -> AbstractContextManager[Consuming | None]:
    """Trace the block, which runs an attempt; None: nobody wants it."""
    return nullcontext() if tracer is None else tracer.consuming(claim)


def headers() -> dict[str, str]:
    """Return what a request to another service should carry; empty where nothing is traced."""
    return {} if tracer is None else tracer.headers()


def flush() -> None:
    """Send what was traced, in a forked process: it will leave without another chance."""
    if _forked:
        leave()
