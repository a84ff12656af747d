"""prune, purge: final rows go; while their key is held, a tombstone stays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from django.db import transaction
from django.db.models import BooleanField, ExpressionWrapper, F, Q, QuerySet
from django.db.models.functions import Coalesce

from dedupjobs import registry
from dedupjobs.clock import DbNow
from dedupjobs.lifecycle.rows import NO_RERUN, Change, alias, attempts, jobs, skip_locked, steps
from dedupjobs.lifecycle.statements import among
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


OF_A_CHANGE = ("pk", "key_hash", "name", "scope", "status", "version", "args")

# A tombstone's end moves to where an active row has its due time, out of the index that is swept
# for rows out of retention: else each sweep would pass over all tombstones.
HOLLOW: dict[str, Any] = {
    "version": F("version") + 1,
    "args": "",
    "result": None,
    "error": "",
    "run_after": Coalesce("finished_at", "run_after"),
    "finished_at": None,
    **NO_RERUN,
}


def prunable(name: str, *, older_than: float) -> QuerySet[ProcessedJob]:
    """
    Return final rows of a job that ended more than ``older_than`` seconds ago.

    Not a dead one that keeps an accepted rerun for the operator's retry.
    """
    cutoff = DbNow(-older_than, steady=True)
    ended = jobs().filter(name=name, status__in=FINAL, finished_at__lt=cutoff)
    final = ended.filter(rerun_args=None)
    return final.exclude(args="")


def held(name: str) -> Q:
    """Return the condition under which a final row still answers for its key."""
    success = Q(unique_until=None) | Q(unique_until__gt=DbNow())
    condition = Q(status=Status.SUCCEEDED) & success
    return condition | Q(status=Status.DEAD) if _blocks(name) else condition


def _blocks(name: str) -> bool:
    return registry.options_of(name).on_dead == "block"


def free_tombstones(name: str) -> list[QuerySet[ProcessedJob]]:
    """Return tombstones of a job that answer for nothing any more, by status."""
    hollow = jobs().filter(name=name, finished_at=None, args="")
    over = hollow.filter(status=Status.SUCCEEDED, unique_until__lte=DbNow(steady=True))
    return [over] if _blocks(name) else [over, hollow.filter(status=Status.DEAD)]


def prune(name: str, *, older_than: float, limit: int) -> Pruned:
    """
    Final and out of retention → gone, or tombstone while the key is held; never an active row.

    One transaction for at most ``limit`` rows. Rows in use are skipped; a call that reopens one
    meanwhile waits, finds no row, and inserts it anew.
    """
    ended = prunable(name, older_than=older_than)
    holds = ExpressionWrapper(held(name), BooleanField())
    with transaction.atomic(using=alias()):
        rows = _oldest([ended.filter(status=s).annotate(holds=holds) for s in FINAL], limit)
        kept = _hollow([row.pk for row in rows if row.holds])
        deleted = _delete([row.pk for row in rows if not row.holds])
        over = _oldest(free_tombstones(name), limit - len(rows))
        deleted += _delete([row.pk for row in over])
    changes = tuple(Change.of(row, row.status, version=row.version + 1) for row in rows)
    return Pruned(deleted=deleted, tombstones=kept, changes=changes)


def _oldest(by_status: list[QuerySet[ProcessedJob]], limit: int) -> list[Any]:
    """Lock rows that nobody holds, as the index has them: sorted within each status only."""
    found: list[Any] = []
    for rows in by_status:
        if (room := limit - len(found)) > 0:
            oldest = skip_locked(rows.order_by("finished_at", "unique_until"))
            found += oldest.values_list(*OF_A_CHANGE, *rows.query.annotations, named=True)[:room]
    return found


def _hollow(pks: list[int]) -> int:
    """Leave of final rows that are locked what answers for their keys."""
    if not pks:
        return 0
    of_these = among(pks)
    attempts().filter(job_id__in=of_these).delete()
    steps().filter(job_id__in=of_these).delete()
    return jobs().filter(pk__in=of_these, status__in=FINAL).update(**HOLLOW)


def _delete(pks: list[int]) -> int:
    """Delete final rows that are locked, and what belongs to them, a statement for each table."""
    if not pks:
        return 0
    of_these = among(pks)
    rows = jobs().filter(pk__in=of_these, status__in=FINAL)
    related = ProcessedJob._meta.related_objects
    if any(r.related_model._meta.app_label != ProcessedJob._meta.app_label for r in related):
        _, by_table = rows.delete()  # a project's own tables: as Django does it
        return by_table.get(ProcessedJob._meta.label, 0)
    for relation in related:
        theirs = relation.related_model._base_manager.using(alias())
        theirs.filter(**{f"{relation.field.name}__in": of_these})._raw_delete(alias())
    return rows._raw_delete(alias())


def purge(pk: int, version: int) -> Pruned | None:
    """As prune, for one final row whatever its age; None: it has moved on, or is in use."""
    with transaction.atomic(using=alias()):
        final = jobs().filter(pk=pk, version=version, status__in=FINAL).exclude(args="")
        name = skip_locked(final).values_list("name", flat=True).first()
        if name is None:
            return None
        if final.filter(held(name)).exists():
            return Pruned(tombstones=_hollow([pk]))
        return Pruned(deleted=_delete([pk]))
