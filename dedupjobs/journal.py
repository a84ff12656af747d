"""What people did, in Django's own log (``LogEntry``), where that is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.db import router
from django.db.models import CharField, QuerySet, Value
from django.db.models.functions import Cast, Concat, Left

from dedupjobs import lifecycle
from dedupjobs.models import ProcessedJob

SHOWN = 200  # characters of a row's text in the log


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line: which row, what was done to it and why."""

    row: ProcessedJob
    words: str
    gone: bool = False


def line(action: str, before: str, after: str, reason: str) -> str:
    """Return what changed, and why, as one line of the log."""
    moved = f"{before} → {after}" if before != after else before
    return f"{action}: {moved}; {reason}" if reason else f"{action}: {moved}"


def write(user_pk: Any, entries: Sequence[Entry]) -> None:
    """Write the lines in the name of a user; the user's database is the router's choice."""
    if not entries or not apps.is_installed("django.contrib.admin"):
        return
    from django.contrib.admin.models import CHANGE, DELETION, LogEntry  # noqa: PLC0415

    LogEntry.objects.bulk_create(
        LogEntry(
            user_id=user_pk,
            content_type_id=_kind(),
            object_id=str(entry.row.pk),
            object_repr=str(entry.row)[:SHOWN],
            action_flag=DELETION if entry.gone else CHANGE,
            change_message=entry.words,
        )
        for entry in entries
    )


def write_alike(user_pk: Any, rows: QuerySet[ProcessedJob], words: str) -> bool:
    """Write the same line for each of the rows by one statement; False: not in this database."""
    if not apps.is_installed("django.contrib.admin"):
        return True
    from django.contrib.admin.models import CHANGE, LogEntry  # noqa: PLC0415

    if router.db_for_write(LogEntry) != rows.db:
        return False
    lifecycle.insert_for_each(
        rows,
        LogEntry,
        action_time=LogEntry._meta.get_field("action_time").get_default(),
        user_id=user_pk,
        content_type_id=_kind(),
        object_id=Cast("pk", CharField(max_length=SHOWN)),
        object_repr=Left(Concat("name", Value(" "), "key"), SHOWN),
        action_flag=CHANGE,
        change_message=words,
    )
    return True


def _kind() -> int:
    from django.contrib.contenttypes.models import ContentType  # noqa: PLC0415

    return ContentType.objects.get_for_model(ProcessedJob).pk
