"""Plain, read-only lists: jobs, attempts, duplicates, and what operators did."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.forms.models import BaseInlineFormSet
from django.http import HttpRequest

from dedupjobs import lifecycle
from dedupjobs.models import DuplicateCount, DuplicateSample, JobAttempt, Operation, ProcessedJob

SHOWN_ATTEMPTS = 50
LARGE = ("args", "rerun_args", "result", "error")


class ReadOnly(admin.ModelAdmin):  # type: ignore[type-arg]
    """
    Shows rows and never writes one; counts nothing, since tables grow large.

    Reads the database that decides, and leaves large columns there where a list has no use for
    them.
    """

    show_full_result_count = False
    list_per_page = 50
    actions = None
    large: tuple[str, ...] = ()

    def get_queryset(self, request: HttpRequest) -> Any:
        rows = super().get_queryset(request).using(lifecycle.alias())
        match = request.resolver_match
        if match is None or not str(match.url_name).endswith("_changelist"):
            return rows
        related = tuple(f"job__{name}" for name in LARGE) if self.list_select_related else ()
        return rows.defer(*self.large, *related)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class NewestAttempts(BaseInlineFormSet):  # type: ignore[type-arg]
    """The newest attempts of a job; the list of attempts has them all."""

    def get_queryset(self) -> Any:
        if not hasattr(self, "_newest"):
            rows = super().get_queryset()
            newest = rows.order_by("-number").values_list("pk", flat=True)[:SHOWN_ATTEMPTS]
            self._newest = rows.filter(pk__in=list(newest)).order_by("-number")
        return self._newest


class AttemptInline(admin.TabularInline):  # type: ignore[type-arg]
    model = JobAttempt
    formset = NewestAttempts
    verbose_name_plural = f"newest attempts (up to {SHOWN_ATTEMPTS})"
    fields = ("number", "outcome", "host", "pid", "claimed_at", "ended_at", "run_time", "reason")
    readonly_fields = fields
    ordering = ("-number",)
    extra = 0
    can_delete = False
    show_change_link = True

    def get_queryset(self, request: HttpRequest) -> Any:
        return super().get_queryset(request).using(lifecycle.alias()).defer("traceback")

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(ProcessedJob)
class ProcessedJobAdmin(ReadOnly):
    list_display = (
        "id",
        "name",
        "key",
        "status",
        "attempts",
        "failures",
        "lost_count",
        "duplicates",
        "run_after",
        "finished_at",
    )
    list_filter = ("status", "name", "queue")
    search_fields = ("=key", "=key_hash", "=dispatch_id")
    search_help_text = "The exact key, its hash, or an RQ id."
    ordering = ("-id",)
    inlines = (AttemptInline,)
    large = LARGE


@admin.register(JobAttempt)
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
    search_fields = ("=job__key", "=owner", "=rq_id")
    search_help_text = "The job's exact key, an owner, or an RQ id."
    ordering = ("-id",)


@admin.register(DuplicateCount)
class DuplicateCountAdmin(ReadOnly):
    list_display = ("name", "cause", "count", "first_at", "last_at")
    list_filter = ("cause",)
    ordering = ("-count",)


@admin.register(DuplicateSample)
class DuplicateSampleAdmin(ReadOnly):
    list_display = ("at", "job", "cause", "host", "pid", "request_id", "detail")
    list_filter = ("cause",)
    list_select_related = ("job",)
    ordering = ("-id",)


@admin.register(Operation)
class OperationAdmin(ReadOnly):
    list_display = ("at", "job", "action", "by", "before", "after", "reason")
    list_filter = ("action",)
    list_select_related = ("job",)
    search_fields = ("=by", "=job__key")
    ordering = ("-id",)
