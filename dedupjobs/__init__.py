"""
Deduplicated background jobs on RQ: work with the same business identity runs once.

    from dedupjobs import job

    @job(key="payment:{order_id}", unique_for=FOREVER)
    def charge(*, order_id: int, amount: str) -> dict: ...

    charge.enqueue(order_id=7, amount="9.90")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dedupjobs.backoff import Exponential as Exponential
    from dedupjobs.client import Outcome as Outcome
    from dedupjobs.context import Attempt as Attempt
    from dedupjobs.context import current_attempt as current_attempt
    from dedupjobs.exceptions import Cancel as Cancel
    from dedupjobs.exceptions import Retry as Retry
    from dedupjobs.exceptions import Snooze as Snooze
    from dedupjobs.fences import FencedModel as FencedModel
    from dedupjobs.invalidation import bump_stamp as bump_stamp
    from dedupjobs.invalidation import cache_stamp as cache_stamp
    from dedupjobs.invalidation import on_invalidate as on_invalidate
    from dedupjobs.models import Kind as Kind
    from dedupjobs.registry import FOREVER as FOREVER
    from dedupjobs.registry import Job as Job
    from dedupjobs.registry import job as job
    from dedupjobs.steps import Done as Done
    from dedupjobs.steps import NotDone as NotDone

__version__ = "0.1.0"

# Names resolve on first use: an app lists us in INSTALLED_APPS before models can load.
_HOMES = {
    "job": "registry",
    "Job": "registry",
    "FOREVER": "registry",
    "Exponential": "backoff",
    "current_attempt": "context",
    "Attempt": "context",
    "Done": "steps",
    "NotDone": "steps",
    "FencedModel": "fences",
    "Outcome": "client",
    "Kind": "models",
    "on_invalidate": "invalidation",
    "cache_stamp": "invalidation",
    "bump_stamp": "invalidation",
    "Retry": "exceptions",
    "Snooze": "exceptions",
    "Cancel": "exceptions",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dedupjobs' has no attribute {name!r}")
    return getattr(import_module(f"dedupjobs.{_HOMES[name]}"), name)
