"""The dashboard's page. It reads and never writes, and is polled with an ETag."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.cache import get_conditional_response
from django.utils.decorators import method_decorator
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_safe

from dedupjobs import conf
from dedupjobs.admin import board, period
from dedupjobs.admin.plain import ReadOnly
from dedupjobs.models import InboxMessage, OutboxEvent, ProcessedJob
from dedupjobs.story.spoken import moment

SPAN_WORDS = {"hour": _("last hour"), "day": _("last day")}


class DashboardAdmin(ReadOnly):
    """Stands among the admin's pages as a list would; who may see jobs may see it."""

    class Media:
        css = {"all": ["dedupjobs/admin.css", "dedupjobs/dashboard.css"]}

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        view = get_permission_codename("view", ProcessedJob._meta)
        return bool(request.user.has_perm(f"dedupjobs.{view}"))

    def get_urls(self) -> list[Any]:
        view = self.admin_site.admin_view(self.dashboard_view)
        return [path("", view, name="dedupjobs_dashboard_changelist")]

    @method_decorator(require_safe)
    def dashboard_view(self, request: HttpRequest) -> HttpResponse:
        """Show the whole page, or with ``part=live`` what moves, if it has."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        asked = request.GET.get("span", "")
        found = board.read(asked if asked in period.SPANS else "hour")
        shown = {
            "board": found,
            "settings": conf.get(),
            "jobs_url": self._url_for(request, ProcessedJob),
            "events_url": self._url_for(request, OutboxEvent),
            "messages_url": self._url_for(request, InboxMessage),
            "span_words": SPAN_WORDS[found.span],
        }
        live = render_to_string("dedupjobs/admin/dashboard_live.html", shown, request=request)
        etag = f'"{blake2b(live.encode(), digest_size=16).hexdigest()}"'
        clock = moment(found.now, found.now)
        response: Any
        if request.GET.get("part") == "live":
            response = get_conditional_response(request, etag=etag, response=HttpResponse(live))
        else:
            context = {
                **self.admin_site.each_context(request),
                **shown,
                "title": _("Dashboard"),
                "opts": ProcessedJob._meta,
                "media": self.media,
                "live": live,
                "etag": etag,
                "clock": clock,
                "spans": SPAN_WORDS.items(),
                "has_view_permission": True,
            }
            response = TemplateResponse(request, "dedupjobs/admin/dashboard.html", context)
        response.headers["ETag"] = etag
        response.headers["X-Dedupjobs-At"] = clock
        return response  # type: ignore[no-any-return]

    def _url_for(self, request: HttpRequest, model: Any) -> str:
        """Return the address of a model's list, or nothing for those who may not see it."""
        view = get_permission_codename("view", model._meta)
        if not request.user.has_perm(f"dedupjobs.{view}"):
            return ""
        name = f"admin:dedupjobs_{model._meta.model_name}_changelist"
        return reverse(name, current_app=self.admin_site.name)
