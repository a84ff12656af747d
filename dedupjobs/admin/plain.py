"""Plain, read-only lists: attempts, duplicates, operations, and what all lists share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.contrib import admin
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from dedupjobs import lifecycle
from dedupjobs.models import (
    Alert,
    BulkOperation,
    DuplicateCount,
    DuplicateSample,
    JobAttempt,
    Operation,
)

if TYPE_CHECKING or not apps.is_installed("unfold"):
    from django.contrib.admin import ModelAdmin
else:
    from unfold.admin import ModelAdmin

LARGE = ("args", "rerun_args", "result", "error")


class ReadOnly(ModelAdmin):  # type: ignore[type-arg]
    """
    Shows rows and never writes one; counts nothing, since tables grow large.

    Reads the database that decides, and leaves large columns there where a list has no use for
    them. Only the filters that are named can be asked for: any other would be a way to guess
    columns that a user may not see.
    """

    show_full_result_count = False
    list_per_page = 50
    list_max_show_all = 0
    show_facets = admin.ShowFacets.NEVER
    actions: Any = None
    large: tuple[str, ...] = ()

    def get_queryset(self, request: HttpRequest) -> Any:
        rows = super().get_queryset(request).using(lifecycle.alias())
        match = request.resolver_match
        if match is None or not str(match.url_name).endswith("_changelist"):
            return rows
        related = tuple(f"job__{name}" for name in LARGE) if self.list_select_related else ()
        return rows.defer(*self.large, *related)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        for allowed in self.list_filter:
            name = getattr(allowed, "parameter_name", allowed)
            if lookup in (name, f"{name}__exact"):
                return True
        return False

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class JobAttemptAdmin(ReadOnly):
    list_display = (
        "id",
        "job",
        "number",
        "outcome",
        "host",
        "pid",
        "claimed_at",
        "lease_until",
        "ended_at",
        "error_class",
    )
    list_filter = ("outcome",)
    list_select_related = ("job",)
    large = ("traceback", "error_message")
    search_fields = ("owner__exact",)
    ordering = ("-id",)


class DuplicateCountAdmin(ReadOnly):
    list_display = ("name", "cause", "count", "first_at", "last_at")
    list_filter = ("cause",)
    ordering = ("-count",)


class DuplicateSampleAdmin(ReadOnly):
    list_display = ("at", "job", "cause", "host", "pid", "request_id", "detail")
    list_filter = ("cause",)
    list_select_related = ("job",)
    ordering = ("-id",)


class OperationAdmin(ReadOnly):
    list_display = ("at", "job", "action", "by", "before", "after", "reason")
    list_filter = ("action",)
    list_select_related = ("job",)
    search_fields = ("by__exact", "job__key__exact")
    ordering = ("-id",)


class BulkOperationAdmin(ReadOnly):
    list_display = ("created_at", "action", "by", "total", "changed", "refused", "note", "progress")
    list_filter = ("action",)
    ordering = ("-id",)

    @admin.display(description=_("progress"))
    def progress(self, row: BulkOperation) -> SafeString:
        name = "admin:dedupjobs_processedjob_bulk"
        address = reverse(name, args=[row.pk], current_app=self.admin_site.name)
        return format_html('<a href="{}">{}</a>', address, _("progress and outcomes"))


class AlertAdmin(ReadOnly):
    list_display = (
        "raised_at",
        "kind",
        "subject",
        "severity",
        "is_open",
        "words",
        "cure",
        "cleared_at",
        "times",
    )
    list_filter = ("is_open", "kind", "severity")
    search_fields = ("subject__exact",)
    ordering = ("-is_open", "-raised_at", "-id")


PLAIN: dict[type[Any], type[admin.ModelAdmin[Any]]] = {
    JobAttempt: JobAttemptAdmin,
    DuplicateCount: DuplicateCountAdmin,
    DuplicateSample: DuplicateSampleAdmin,
    Operation: OperationAdmin,
    BulkOperation: BulkOperationAdmin,
    Alert: AlertAdmin,
}
