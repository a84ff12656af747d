"""The list of jobs: its pages at a bounded cost, and what its columns show."""

from __future__ import annotations

from datetime import datetime
from functools import cached_property
from operator import itemgetter
from typing import Any

from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.models import F
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from dedupjobs import lifecycle
from dedupjobs.models import JobAttempt, ProcessedJob, Status
from dedupjobs.story.spoken import moment, span

COUNTED = 10_000  # rows that a list counts; more are "more than"

ICONS = {
    Status.PENDING: "◷",
    Status.RUNNING: "▶",
    Status.RETRYING: "↻",
    Status.SUCCEEDED: "✓",
    Status.DEAD: "✕",
    Status.CANCELLED: "⊘",
    Status.HELD: "‖",
}


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """Counts COUNTED rows and one more, never the whole table."""

    @cached_property
    def count(self) -> int:
        rows: Any = self.object_list
        return int(rows.order_by()[: COUNTED + 1].count())

    @property
    def is_cut(self) -> bool:
        return self.count > COUNTED


class JobList(ChangeList):
    """Knows the database's present moment, and each shown row's newest attempt, in two queries."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.now = lifecycle.database_now()
        pks = self._pks()
        found = {row.pk: row for row in self.root_queryset.filter(pk__in=pks)}
        rows = [found[pk] for pk in pks if pk in found]
        newest = newest_of(rows)
        for row in rows:
            row.newest, row.now = newest.get(row.pk), self.now
        self.result_list = rows

    def _pks(self) -> list[int]:
        """
        Return the primary keys of the page, for which an index is often enough.

        What was counted is sorted here: asked for an order, a database may walk that order's index
        through the whole table.
        """
        first = (self.page_num - 1) * self.list_per_page if self.multi_page else 0
        page = slice(first, first + self.list_per_page)
        if self.paginator.is_cut:
            return list(self.queryset.values_list("pk", flat=True)[page])
        order = self.queryset.query.order_by
        columns = list(dict.fromkeys(["pk", *(column.lstrip("-") for column in order)]))
        there = self.paginator.count and self.queryset.order_by().values_list(*columns)
        found = list(there[:COUNTED]) if there else []
        for column in reversed(order):
            place = columns.index(column.lstrip("-"))
            found.sort(key=itemgetter(place), reverse=column.startswith("-"))
        return [row[0] for row in found[page]]


def newest_of(rows: list[ProcessedJob]) -> dict[int, JobAttempt]:
    """Return the newest attempt of each row, in one query."""
    found = lifecycle.attempts().filter(
        job_id__in=[row.pk for row in rows], number=F("job__attempts")
    )
    return {attempt.job_id: attempt for attempt in found.defer("traceback", "error_message")}


def badge(status: str) -> SafeString:
    """Return a status as a word with a sign, so that colour is never all there is."""
    if status not in Status.values:
        return format_html("{}", status)
    known = Status(status)
    return format_html(
        '<span class="dj-state dj-{}"><span aria-hidden="true">{}</span> {}</span>',
        known.lower(),
        ICONS[known],
        known.label,
    )


def when(moment: datetime, words: str) -> SafeString:
    """Return a ``<time>`` that says ``words``."""
    exact = timezone.localtime(moment) if timezone.is_aware(moment) else moment
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        moment.isoformat(),
        exact.strftime("%Y-%m-%d %H:%M:%S.%f %Z"),
        words,
    )


def condition(row: Any, stall_after: float | None) -> str:
    """Return "stuck", "silent" or nothing, in words."""
    newest, now = row.newest, row.now
    if row.status != Status.RUNNING or newest is None or newest.outcome is not None:
        return ""
    if newest.lease_until < now:
        return _("stuck")
    last = newest.active_at or newest.claimed_at
    if stall_after is not None and (now - last).total_seconds() > stall_after:
        return _("silent")
    return ""


def upcoming(row: Any) -> tuple[datetime | None, str]:
    """Return the moment that matters next for a row, and a word or two about it."""
    now, newest = row.now, row.newest
    if row.status == Status.RUNNING and newest is not None and newest.outcome is None:
        left = (newest.lease_until - now).total_seconds()
        words = _("lease: %(span)s left") if left >= 0 else _("lease over for %(span)s")
        return newest.lease_until, words % {"span": span(left)}
    if row.status in (Status.PENDING, Status.RETRYING):
        wait = (row.run_after - now).total_seconds()
        if wait > 0:
            return row.run_after, _("runs in %(span)s") % {"span": span(wait)}
        return row.run_after, _("due for %(span)s") % {"span": span(wait)}
    if row.ended_at is not None:
        return row.ended_at, _("ended %(at)s") % {"at": moment(row.ended_at, now)}
    return None, "–"
