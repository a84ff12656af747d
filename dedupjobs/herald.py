"""Announces changes to all processes; a receiver of signals that nobody imports but ``apps``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.signals import request_started

from dedupjobs import conf, invalidation, signals
from dedupjobs.lifecycle import Change


def connect() -> None:
    """Announce what changes from now on; listen from the first request on, if that is wanted."""
    signals.hear(signals.job_changed, _announce)
    request_started.connect(_listen, dispatch_uid="dedupjobs.herald")


def _announce(sender: str, changes: Sequence[Change], **_: Any) -> None:
    invalidation.announce(changes)


def _listen(**_: Any) -> None:
    if conf.get().LISTEN == "always":
        invalidation.ensure_listening()
