"""The lists of events sent and received: where each is, what was said to it, and another try."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from dedupjobs import lifecycle
from dedupjobs.admin import text
from dedupjobs.admin.listing import BoundedPaginator
from dedupjobs.admin.plain import ReadOnly
from dedupjobs.inbox import marks
from dedupjobs.models import InboxMessage, OutboxEvent
from dedupjobs.outbox import shelf
from dedupjobs.visible import shown

MOST = 50  # choices of a filter


class _NamedFilter(admin.SimpleListFilter):
    """The different values of an indexed column."""

    parameter_name: str
    model: Any

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        found = lifecycle.values_of(self.parameter_name, most=MOST, model=self.model)
        return [(name, shown(name)) for name in found]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.filter(**{self.parameter_name: self.value()}) if self.value() else queryset


class TargetFilter(_NamedFilter):
    title = gettext_lazy("target")
    parameter_name = "target"
    model = OutboxEvent


class ConsumerFilter(_NamedFilter):
    title = gettext_lazy("consumer")
    parameter_name = "consumer"
    model = InboxMessage


class EventList(ReadOnly):
    """What both lists share: bounded pages, a payload for those who may see it, and actions."""

    class Media:
        css = {"all": ["dedupjobs/admin.css"]}

    paginator = BoundedPaginator
    large = ("payload", "error")
    ordering = ("-id",)
    columns: tuple[str, ...] = ()
    acts: str  # the permission to act
    sees: str  # the permission to see payloads

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        may_see = request.user.has_perm(f"dedupjobs.{self.sees}")
        return [*self.columns, *(["shown_payload"] if may_see else [])]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return self.get_fields(request, obj)

    @admin.display(description=gettext_lazy("last error"))
    def shown_error(self, row: Any) -> str:
        return shown(row.error, 2_000) or "–"

    @admin.display(description=gettext_lazy("payload"))
    def shown_payload(self, row: Any) -> str:
        return text.plain(row.payload) or "–"

    def has_act_permission(self, request: HttpRequest) -> bool:
        """Whether the actions may be seen and done."""
        return bool(request.user.has_perm(f"dedupjobs.{self.acts}"))

    def _do(self, request: HttpRequest, rows: Any, act: Callable[[int], bool], what: str) -> None:
        done = 0
        for row in rows:
            if act(row.pk):
                done += 1
                self.log_change(request, row, f"{what}: {row.status}")
        left = len(rows) - done
        if done:
            messages.success(request, f"{what}: {done}")
        if left:
            words = _("%(number)s left as they are: only what has failed can be tried or dropped.")
            messages.warning(request, words % {"number": left})


class OutboxEventAdmin(EventList):
    list_display = ("id", "name", "key", "target", "status", "tries", "published_at", "due_at")
    list_filter = ("status", TargetFilter)
    search_fields = ("event_id__exact", "key__exact")
    search_help_text = gettext_lazy("An event's id, or a whole key.")
    actions = ("retry", "drop")
    columns = (
        "event_id",
        "name",
        "target",
        "key",
        "ordered",
        "status",
        "tries",
        "shown_error",
        "published_at",
        "due_at",
    )
    acts = "retry_outboxevent"
    sees = "payload_outboxevent"

    @admin.action(description=gettext_lazy("Try again now"), permissions=["act"])
    def retry(self, request: HttpRequest, rows: Any) -> None:
        self._do(request, rows, shelf.retry, _("tried again"))

    @admin.action(
        description=gettext_lazy("Drop: it is never sent, and those behind it go on"),
        permissions=["act"],
    )
    def drop(self, request: HttpRequest, rows: Any) -> None:
        self._do(request, rows, shelf.drop, _("dropped"))


class InboxMessageAdmin(EventList):
    list_display = (
        "id",
        "name",
        "key",
        "consumer",
        "status",
        "tries",
        "received_at",
        "due_at",
    )
    list_filter = ("status", ConsumerFilter)
    search_fields = ("event_id__exact", "key__exact")
    search_help_text = gettext_lazy("An event's id, or a whole key.")
    actions = ("release", "drop")
    columns = (
        "event_id",
        "name",
        "consumer",
        "key",
        "status",
        "tries",
        "shown_error",
        "published_at",
        "received_at",
        "due_at",
    )
    acts = "release_inboxmessage"
    sees = "payload_inboxmessage"

    @admin.action(description=gettext_lazy("Release: try again now"), permissions=["act"])
    def release(self, request: HttpRequest, rows: Any) -> None:
        self._do(request, rows, marks.release, _("released"))

    @admin.action(
        description=gettext_lazy("Drop: it is never applied, and those behind it go on"),
        permissions=["act"],
    )
    def drop(self, request: HttpRequest, rows: Any) -> None:
        self._do(request, rows, marks.drop, _("dropped"))
