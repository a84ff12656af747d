"""Puts every duplicate into the ledger; a receiver of signals that nobody imports but ``apps``."""

from __future__ import annotations

import atexit
from typing import Any

from django.core.signals import request_finished

from dedupjobs import signals, stats


def connect() -> None:
    """Count what is turned away from now on."""
    signals.hear(signals.duplicate_detected, _count)
    request_finished.connect(_flush, dispatch_uid="dedupjobs.ledger")
    atexit.register(stats.flush)


def _count(sender: str, job_pk: int, cause: str, detail: str, **_: Any) -> None:
    stats.count_duplicate(job_pk, sender, cause, detail)


def _flush(**_: Any) -> None:
    stats.flush()
