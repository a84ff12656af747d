"""Puts every duplicate into the ledger; a receiver of signals that nobody imports but ``apps``."""

from __future__ import annotations

from typing import Any

from dedupjobs import signals, stats


def connect() -> None:
    """Count what is turned away from now on."""
    signals.duplicate_detected.connect(_count, dispatch_uid="dedupjobs.ledger")


def _count(sender: str, job_pk: int, cause: str, detail: str, **_: Any) -> None:
    stats.count_duplicate(job_pk, sender, cause, detail)
