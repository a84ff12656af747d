"""Which rows wait for a message, and which message was sent last."""

from __future__ import annotations

from dedupjobs import clock
from dedupjobs.clock import DbNow
from dedupjobs.lifecycle.rows import UNSENT, jobs
from dedupjobs.models import (
    WAITING,
)


def new_dispatch_id() -> str:
    """Return a fresh RQ id; no two hand-overs share one, since RQ forgets by id."""
    return f"dedupjobs_{clock.token()}"


def mark_sent(pk: int, version: int, dispatch_id: str | None) -> str | None:
    """
    Give a waiting row a new RQ id, or return None if it has moved on or was sent meanwhile.

    ``dispatch_id`` is the one as read: of two senders, one wins.
    """
    sent_as = new_dispatch_id()
    row = jobs().filter(pk=pk, version=version, status__in=WAITING, dispatch_id=dispatch_id)
    return sent_as if row.update(dispatch_id=sent_as, dispatched_at=DbNow()) else None


def mark_unsent(dispatch_ids: list[str]) -> int:
    """Forget hand-overs that failed, so that the coordinator's next round makes them again."""
    return jobs().filter(dispatch_id__in=dispatch_ids, status__in=WAITING).update(**UNSENT)
