"""prune, purge: final rows go; while their key is held, a tombstone stays."""

from __future__ import annotations

from dataclasses import dataclass, field

from django.db import transaction
from django.db.models import F, Q, QuerySet

from dedupjobs import registry
from dedupjobs.clock import DbNow
from dedupjobs.lifecycle.rows import NO_RERUN, Change, alias, attempts, jobs, skip_locked
from dedupjobs.models import FINAL, ProcessedJob, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """How many rows are gone, and of how many only the key is left; and what has changed."""

    deleted: int = 0
    tombstones: int = 0
    changes: tuple[Change, ...] = field(default=(), compare=False)

    def __add__(self, other: Pruned) -> Pruned:
        """Return the sum; the changes are each page's own."""
        return Pruned(
            deleted=self.deleted + other.deleted, tombstones=self.tombstones + other.tombstones
        )


def prunable(name: str, *, older_than: float) -> QuerySet[ProcessedJob]:
    """
    Return final rows of a job that ended more than ``older_than`` seconds ago, oldest first.

    Not a dead one that keeps an accepted rerun for the operator's retry.
    """
    ended = jobs().filter(name=name, status__in=FINAL, finished_at__lt=DbNow(-older_than))
    final = ended.filter(rerun_args=None)
    return final.exclude(args="").order_by("finished_at", "pk")


def held(name: str) -> Q:
    """Return the condition under which a final row still answers for its key."""
    success = Q(unique_until=None) | Q(unique_until__gt=DbNow())
    condition = Q(status=Status.SUCCEEDED) & success
    if registry.options_of(name).on_dead == "block":
        condition |= Q(status=Status.DEAD)
    return condition


def free_tombstones(name: str) -> QuerySet[ProcessedJob]:
    """Return tombstones of a job that answer for nothing any more."""
    hollow = jobs().filter(name=name, status__in=FINAL, args="")
    return hollow.exclude(held(name)).order_by("pk")


def prune(name: str, *, older_than: float, limit: int) -> Pruned:
    """
    Final and out of retention → gone, or tombstone while the key is held; never an active row.

    One transaction for at most ``limit`` rows. Rows in use are skipped; a call that reopens one
    meanwhile waits, finds no row, and inserts it anew.
    """
    with transaction.atomic(using=alias()):
        pks = _locked(prunable(name, older_than=older_than), limit)
        chosen = jobs().filter(pk__in=pks, status__in=FINAL)
        changes = tuple(Change.of(r, r.status, version=r.version + 1) for r in _plain(chosen))
        attempts().filter(job_id__in=pks).delete()
        kept = chosen.filter(held(name)).update(
            version=F("version") + 1, args="", result=None, error="", **NO_RERUN
        )
        deleted = _delete(chosen.exclude(args=""))
        over = _locked(free_tombstones(name), limit - len(pks))
        deleted += _delete(jobs().filter(pk__in=over, status__in=FINAL))
    return Pruned(deleted=deleted, tombstones=kept, changes=changes)


def _plain(rows: QuerySet[ProcessedJob]) -> QuerySet[ProcessedJob]:
    return rows.defer("result", "error", "rerun_args")


def purge(pk: int, version: int) -> Pruned | None:
    """As prune, for one final row whatever its age; None: it has moved on, or is in use."""
    with transaction.atomic(using=alias()):
        final = jobs().filter(pk=pk, version=version, status__in=FINAL).exclude(args="")
        if not _locked(final, 1):
            return None
        name = final.values_list("name", flat=True)[0]
        attempts().filter(job_id=pk).delete()
        kept = final.filter(held(name)).update(
            version=F("version") + 1, args="", result=None, error="", **NO_RERUN
        )
        return Pruned(tombstones=kept, deleted=0 if kept else _delete(final))


def _locked(rows: QuerySet[ProcessedJob], limit: int) -> list[int]:
    return list(skip_locked(rows).values_list("pk", flat=True)[: max(limit, 0)])


def _delete(rows: QuerySet[ProcessedJob]) -> int:
    _, by_table = rows.delete()
    return by_table.get(ProcessedJob._meta.label, 0)
