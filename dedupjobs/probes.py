"""
Named points at the boundaries of the protocol, for tests that crash, pause or order it.

Off, a probe costs one global load. A test sets ``hook`` to a function of the point's name,
which may raise, wait, or kill the process.
"""

from __future__ import annotations

from collections.abc import Callable

hook: Callable[[str], None] | None = None


def reach(point: str) -> None:
    """Tell the hook, if there is one, that ``point`` is reached."""
    if hook is not None:
        hook(point)
