"""Which rows wait for a message, and which message was sent last."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import transaction

from dedupjobs import clock, probes
from dedupjobs.clock import DbNow
from dedupjobs.lifecycle.rows import UNSENT, alias, jobs, skip_locked
from dedupjobs.models import WAITING, ProcessedJob

CHUNK = 500  # ids of one statement


def new_dispatch_id() -> str:
    """Return a fresh RQ id; no two hand-overs share one, since RQ forgets by id."""
    return f"dedupjobs_{clock.token()}"


def mark_sent(pk: int, version: int, dispatch_id: str | None) -> str | None:
    """
    Give a waiting row a new RQ id, or return None if it has moved on or was sent meanwhile.

    ``dispatch_id`` is the one as read: of two senders, one wins. A row that somebody has locked
    is left for the next round, since a business transaction must not hold all others up.
    """
    probes.reach("mark_sent.before")
    sent_as = new_dispatch_id()
    row = jobs().filter(pk=pk, version=version, status__in=WAITING, dispatch_id=dispatch_id)
    with transaction.atomic(using=alias()):
        if not skip_locked(row).values_list("pk"):
            return None
        return sent_as if row.update(dispatch_id=sent_as, dispatched_at=DbNow()) else None


def mark_sent_together(rows: Sequence[ProcessedJob]) -> tuple[str, list[ProcessedJob]]:
    """
    Give waiting rows one new RQ id; return it, and those that have not moved on meanwhile.

    Guarded as ``mark_sent`` is, by what was read of each row.
    """
    probes.reach("mark_sent.before")
    sent_as = new_dispatch_id()
    waiting = jobs().filter(pk__in=[row.pk for row in rows], status__in=WAITING)
    with transaction.atomic(using=alias()):
        found = skip_locked(waiting.order_by("pk")).values_list("pk", "version", "dispatch_id")
        present = {pk: (version, rq_id) for pk, version, rq_id in found}
        mine = [row for row in rows if present.get(row.pk) == (row.version, row.dispatch_id)]
        # On SQLite, which has one writer, nobody can have come between.
        waiting.filter(pk__in=[row.pk for row in mine]).update(
            dispatch_id=sent_as, dispatched_at=DbNow()
        )
    return sent_as, mine


def mark_unsent(dispatch_ids: Sequence[str]) -> int:
    """
    Forget hand-overs that failed, so that the coordinator's next round makes them again.

    Locked rows are left alone: their messages count as lost once RESEND_AFTER has passed.
    """
    probes.reach("mark_unsent.before")
    marked = 0
    for start in range(0, len(dispatch_ids), CHUNK):
        failed = jobs().filter(
            dispatch_id__in=dispatch_ids[start : start + CHUNK], status__in=WAITING
        )
        with transaction.atomic(using=alias()):
            free = list(skip_locked(failed.order_by("pk")).values_list("pk", flat=True))
            marked += failed.filter(pk__in=free).update(**UNSENT)
    return marked
