"""Two plain, read-only lists: the jobs, and their attempts."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from dedupjobs.models import JobAttempt, ProcessedJob


class ReadOnly(admin.ModelAdmin):  # type: ignore[type-arg]
    """Shows rows and never writes one; counts nothing, since tables grow large."""

    show_full_result_count = False
    list_per_page = 50
    actions = None

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class AttemptInline(admin.TabularInline):  # type: ignore[type-arg]
    model = JobAttempt
    fields = ("number", "outcome", "host", "pid", "claimed_at", "ended_at", "run_time", "reason")
    readonly_fields = fields
    ordering = ("-number",)
    extra = 0
    can_delete = False
    show_change_link = True

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
        "run_after",
        "finished_at",
    )
    list_filter = ("status", "name", "queue")
    search_fields = ("=key", "=key_hash", "=dispatch_id")
    search_help_text = "The exact key, its hash, or an RQ id."
    ordering = ("-id",)
    inlines = (AttemptInline,)

    def get_queryset(self, request: HttpRequest) -> Any:
        return super().get_queryset(request).defer("args", "rerun_args", "result", "error")


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
    search_fields = ("=job__key", "=owner", "=rq_id")
    search_help_text = "The job's exact key, an owner, or an RQ id."
    ordering = ("-id",)
