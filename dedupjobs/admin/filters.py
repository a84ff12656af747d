"""The list's filters; what each means is said in ``criteria``, which bulk operations read, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from dedupjobs import criteria, dispatch, lifecycle
from dedupjobs.models import Status
from dedupjobs.visible import shown

MOST = 50  # choices of one filter; others are reached by search


class Filter(admin.SimpleListFilter):
    """One of the criteria."""

    parameter_name: str

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        value = self.value()
        return criteria.FILTERS[self.parameter_name](queryset, value) if value else queryset


class StateFilter(Filter):
    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return Status.choices


class ConditionFilter(Filter):
    title = _("condition")
    parameter_name = "condition"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return [
            ("stuck", _("stuck: lease expired")),
            ("silent", _("silent: beats, no activity")),
            ("failed", _("failed within an hour")),
            ("lost", _("lost within 7 days")),
            ("duplicates", _("duplicates")),
            ("contended", _("contended of late")),
        ]


class QueueFilter(Filter):
    title = _("queue")
    parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return [(name, shown(name)) for name in dispatch.queue_names()[:MOST]]


class NameFilter(Filter):
    title = _("job")
    parameter_name = "name"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return [(name, shown(name)) for name in lifecycle.values_of("name", most=MOST)]


class AgeFilter(Filter):
    title = _("age")
    parameter_name = "age"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return [
            ("1h", _("enqueued more than an hour ago")),
            ("1d", _("more than a day ago")),
            ("7d", _("more than 7 days ago")),
            ("30d", _("more than 30 days ago")),
        ]


class Typed(Filter):
    """A filter whose value is typed, since there may be too many to list."""

    template = "dedupjobs/admin/filter_typed.html"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return ()

    def has_output(self) -> bool:
        return True

    def choices(self, changelist: Any) -> Iterator[Any]:
        others = changelist.get_filters_params()
        hidden = [
            (name, value)
            for name, values in others.items()
            if name != self.parameter_name
            for value in values
        ]
        if changelist.query:
            hidden.append(("q", changelist.query))
        yield {
            "name": self.parameter_name,
            "value": self.value() or "",
            "hidden": hidden,
            "clear": changelist.get_query_string(remove=[self.parameter_name]),
        }


class ScopeFilter(Typed):
    title = _("scope")
    parameter_name = "scope"


class ErrorFilter(Typed):
    title = _("error class")
    parameter_name = "error"


ALL = (
    StateFilter,
    ConditionFilter,
    QueueFilter,
    NameFilter,
    AgeFilter,
    ScopeFilter,
    ErrorFilter,
)
