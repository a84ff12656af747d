"""
Which rows wait for a message, which message was sent last, and which wait without one.

A row that may not run yet (a pause, no room in its group, no lock to be had) is *set aside*: a
mark stands where the RQ id of its last hand-over would, and ``dispatched_at`` lies beyond all
time. So neither the hand-over nor the search for lost messages sees it, it costs no queue
anything, and all rows that wait for the same thing are found by one index.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from django.db import transaction
from django.db.models import QuerySet

from dedupjobs import clock, probes
from dedupjobs.clock import DbNow
from dedupjobs.lifecycle.rows import UNSENT, alias, jobs, skip_locked
from dedupjobs.models import WAITING, ProcessedJob

CHUNK = 500  # ids of one statement
# Letters and digits only, so that all marks lie between these two in every collation.
ASIDE, NO_MORE = "aside", "asidf"
PAUSE_MARKS, ROOM_MARKS = f"{ASIDE}pause", f"{ASIDE}room"  # how marks begin, in this order
NO_LOCKS = f"{ASIDE}redis"  # the mark, between those, of rows whose job does not run without a lock
BEYOND = datetime(9000, 1, 1, tzinfo=UTC)  # when a row that was set aside was handed over


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


# ---- rows that may not run yet


def is_aside(row: ProcessedJob) -> bool:
    """Return whether a row waits without a message, until it is recalled."""
    return (row.dispatch_id or "").startswith(ASIDE) and row.dispatched_at == BEYOND


def set_aside(pk: int, generation: int, *, sent_as: str | None, mark: str) -> bool:
    """Let a waiting row wait without a message; ``sent_as`` is the hand-over as read."""
    probes.reach("set_aside.before")
    row = jobs().filter(pk=pk, generation=generation, status__in=WAITING, dispatch_id=sent_as)
    return bool(row.update(dispatch_id=mark, dispatched_at=BEYOND))


def set_aside_unsent(pks: Sequence[int], mark: str) -> int:
    """Let waiting rows that have no message wait on without one, under a mark."""
    rows = jobs().filter(pk__in=pks, status__in=WAITING, dispatched_at=None)
    with transaction.atomic(using=alias()):
        free = list(skip_locked(rows.order_by("pk")).values_list("pk", flat=True))
        return rows.filter(pk__in=free).update(dispatch_id=mark, dispatched_at=BEYOND)


def aside(mark: str) -> QuerySet[ProcessedJob]:
    """Return the rows that wait under this mark, the oldest first."""
    return jobs().filter(dispatch_id=mark, status__in=WAITING).order_by("pk")


def release(mark: str, *, most: int) -> int:
    """Let the coordinator's hand-over see rows again; those that others have locked wait on."""
    with transaction.atomic(using=alias()):
        free = list(skip_locked(aside(mark)).values_list("pk", flat=True)[:most])
        return jobs().filter(pk__in=free, dispatch_id=mark).update(**UNSENT)


def marks(*, most: int, after: str = ASIDE, before: str = NO_MORE) -> list[str]:
    """Return the marks that rows are set aside under, in order, hopping through the index."""
    found: list[str] = []
    last = after
    while len(found) < most:
        others = jobs().filter(dispatch_id__gt=last, dispatch_id__lt=before)
        mark = others.order_by("dispatch_id").values_list("dispatch_id", flat=True).first()
        if mark is None:
            break
        found.append(mark)
        last = mark
    return found


def forget_mark(mark: str) -> int:
    """Wipe a mark that no waiting row bears from those that ran or ended with it."""
    ended = jobs().filter(dispatch_id=mark).exclude(status__in=WAITING)
    return ended.update(**UNSENT)
