"""The admin of jobs: list, job page, locks, actions on one, on some, and on all that match."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.decorators import method_decorator
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from django.views.decorators.http import require_POST, require_safe
from redis.exceptions import RedisError

from dedupjobs import bulk, criteria, lifecycle, operations, registry, visible
from dedupjobs.admin import deeds, filters, page, text, truth
from dedupjobs.admin.deeds import ACTIONS, DEEDS, AsSeen, Deed, Wish
from dedupjobs.admin.forms import form_of
from dedupjobs.admin.listing import (
    COUNTED,
    BoundedPaginator,
    JobList,
    badge,
    condition,
    newest_of,
    upcoming,
    when,
)
from dedupjobs.admin.plain import LARGE, ReadOnly
from dedupjobs.admin.truth import Known
from dedupjobs.models import (
    FINAL,
    WAITING,
    BulkOperation,
    BulkRefusal,
    Operation,
    ProcessedJob,
    Status,
)
from dedupjobs.story.situation import where
from dedupjobs.story.spoken import span
from dedupjobs.wire import UNREACHABLE

ORDER = "dedupjobs.order"  # in the session
MOST_ROWS = 1_000  # of one confirmation
SAMPLE = 10
SHOWN_OUTCOMES = 100
SHOWN_LOCKS = 200
ORPHANS_WITHIN = 200  # rows that ended last, whose locks are looked for


def _chosen(deed: Deed) -> Any:
    """Return an admin action: a page that asks for the reason, and shows what would happen."""

    def choose(self: ProcessedJobAdmin, request: HttpRequest, queryset: Any) -> HttpResponse:
        if request.POST.get("select_across") == "1":
            return self.bulk_preview(request, deed)
        rows = list(queryset.order_by("-pk")[:MOST_ROWS])
        return self.confirm(request, deed, [AsSeen.of(row) for row in rows])

    choose.__name__ = deed.slug  # what stands in the form
    return admin.action(description=deed.label, permissions=[deed.permission])(choose)


class ProcessedJobAdmin(ReadOnly):
    list_display = ("job", "state", "attempt", "next", "enqueued")
    list_display_links = ("job",)
    list_filter = filters.ALL
    search_fields = ("key",)  # shows the search field; ``get_search_results`` does it
    search_help_text = gettext_lazy(
        'Start of a key, "a whole key" in quotes, row id, RQ id, or an argument: order_id=7'
    )
    sortable_by = ("job", "enqueued")
    ordering = ("-pk",)
    paginator = BoundedPaginator
    large = LARGE
    actions = [_chosen(deed) for deed in ACTIONS]
    change_list_template = "dedupjobs/admin/job_list.html"

    class Media:
        css = {"all": ["dedupjobs/admin.css"]}

    # ---- permissions

    def may(self, request: HttpRequest, what: str) -> bool:
        """Return whether the user has ``dedupjobs.<what>_processedjob``, and may see jobs."""
        codename = get_permission_codename(what, self.opts)
        return self.has_view_permission(request) and request.user.has_perm(
            f"{self.opts.app_label}.{codename}"
        )

    # Django asks ``has_<permission>_permission`` of each action's permissions.

    def has_retry_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "retry")

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "cancel")

    def has_hold_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "hold")

    def has_free_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "free")

    def has_purge_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "purge")

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        view = get_permission_codename("view", self.opts)
        return bool(request.user.has_perm(f"{self.opts.app_label}.{view}"))

    # ---- addresses

    def get_urls(self) -> list[Any]:
        def wrap(view: Callable[..., HttpResponse]) -> Any:
            def guarded(*args: Any, **kwargs: Any) -> HttpResponse:
                return self.admin_site.admin_view(view)(*args, **kwargs)

            guarded.model_admin = self  # type: ignore[attr-defined]
            return update_wrapper(guarded, view)

        name = "dedupjobs_processedjob_{}".format
        own = [
            path("order/", wrap(self.order_view), name=name("order")),
            path("operate/", wrap(self.operate_view), name=name("operate")),
            path("locks/", wrap(self.locks_view), name=name("locks")),
            path("bulk/", wrap(self.bulk_start_view), name=name("bulk_start")),
            path("bulk/<int:bulk_pk>/", wrap(self.bulk_view), name=name("bulk")),
            path("bulk/<int:bulk_pk>/progress/", wrap(self.progress_view), name=name("progress")),
            path("bulk/<int:bulk_pk>/stop/", wrap(self.bulk_stop_view), name=name("bulk_stop")),
        ]
        return own + super().get_urls()

    def address(self, page: str, *args: Any) -> str:
        """Return the address of one of these pages in the admin site that shows it."""
        name = f"admin:dedupjobs_processedjob_{page}"
        return reverse(name, args=args, current_app=self.admin_site.name)

    # ---- the list

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> Any:
        return JobList

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        order = request.session.get(ORDER)
        if order and "o" not in request.GET and _is_order(order):
            given = request.GET.copy()
            given["o"] = order
            request.GET = given  # type: ignore[assignment]
        asked = request.GET.get("q", "")
        extra = {
            "locks_url": self.address("locks"),
            "order_url": self.address("order"),
            "order": request.GET.get("o", "") if _is_order(request.GET.get("o", "")) else "",
            "saved_order": order or "",
            "argument_search": criteria.is_argument(asked),
            "may_search_arguments": self.may(request, "arguments"),
            "searched": criteria.SEARCHED,
            "counted": COUNTED,
            **(extra_context or {}),
        }
        return super().changelist_view(request, extra)

    def get_ordering(self, request: HttpRequest) -> Any:
        # Old rows stand far from the newest primary key, but together in the index of ages.
        return ("-enqueued_at", "-pk") if request.GET.get("age") else super().get_ordering(request)

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> Any:
        allowed = self.may(request, "arguments")
        return criteria.search(queryset, search_term, arguments=allowed), False

    @admin.display(description=gettext_lazy("job"), ordering="pk")
    def job(self, row: ProcessedJob) -> SafeString:
        words = ngettext("%(n)s duplicate", "%(n)s duplicates", row.duplicates)
        again = words % {"n": row.duplicates} if row.duplicates else ""
        return format_html(
            '<span class="dj-name">{} · {}</span> <bdi class="dj-key">{}</bdi>{}',
            visible.shown(row.name, 200),
            visible.shown(row.queue, 100),
            visible.shown(row.key or f"#{row.pk}", 200),
            format_html(' <span class="dj-quiet">{}</span>', again) if again else "",
        )

    @admin.display(description=gettext_lazy("state"))
    def state(self, row: Any) -> SafeString:
        if row.status != Status.RUNNING:
            return badge(row.status)
        more = condition(row, registry.options_of(row.name).stall_after)
        flag = format_html(' <span class="dj-condition">{}</span>', more) if more else ""
        owner = visible.shown(where(row.newest), 80)
        return format_html(
            '{}{} <span class="dj-owner"><bdi>{}</bdi></span>', badge(row.status), flag, owner
        )

    @admin.display(description=gettext_lazy("attempt"))
    def attempt(self, row: ProcessedJob) -> str:
        lost = _(", %(lost)s lost") % {"lost": row.lost_count} if row.lost_count else ""
        another = row.status in (Status.RUNNING, Status.SUCCEEDED)
        return f"{row.failures + another}/{operations.limit_of(row)}{lost}"

    @admin.display(description=gettext_lazy("next"))
    def next(self, row: Any) -> SafeString | str:
        moment, words = upcoming(row)
        return words if moment is None else when(moment, words)

    @admin.display(description=gettext_lazy("enqueued"), ordering="enqueued_at")
    def enqueued(self, row: Any) -> SafeString:
        words = span((row.now - row.enqueued_at).total_seconds())
        return when(row.enqueued_at, _("%(span)s ago") % {"span": words})

    @method_decorator(require_POST)
    def order_view(self, request: HttpRequest) -> HttpResponse:
        """Keep the order of the list, for this user's session, or forget it."""
        self._must(request, "view")
        order = request.POST.get("o", "")
        if order and _is_order(order):
            request.session[ORDER] = order
        else:
            request.session.pop(ORDER, None)
        return redirect(self.address("changelist"))

    # ---- the page of a job

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        if request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        self._must(request, "view")
        row = self.get_object(request, unquote(object_id))
        if row is None:
            return self._get_obj_does_not_exist_redirect(  # type: ignore[no-any-return, attr-defined]
                request, self.opts, object_id
            )
        found = page.read(row)
        may_see = self.may(request, "arguments")
        open_one = found.newest if found.newest and found.newest.outcome is None else None
        context = {
            **self._context(request, title=visible.shown(row, 120)),
            "row": row,
            "original": row,
            "object_id": object_id,
            "page": found,
            "seen": AsSeen.of(row),
            "watch": deeds.watch(row.pk, open_one.beat_at) if open_one else "",
            "buttons": self._buttons(request, row),
            "may_heal": [d.name for d in DEEDS.values() if self.may(request, d.permission)],
            "may_see_arguments": may_see,
            "arguments": text.pairs(row.args) if may_see else (),
            "rerun_arguments": text.pairs(row.rerun_args) if may_see else (),
            "result": text.plain(row.result) if may_see else "",
            "steps": [(s, text.plain(s.step.result) if may_see else "") for s in found.steps],
            "operate_url": self.address("operate"),
            "history_url": self.address("history", row.pk),
            **(extra_context or {}),
        }
        return TemplateResponse(request, "dedupjobs/admin/job.html", context)

    def _buttons(self, request: HttpRequest, row: ProcessedJob) -> list[Deed]:
        allowed = (deed for deed in ACTIONS if self.may(request, deed.permission))
        return [d for d in allowed if d.name in operations.FROM and operations.applies(d.name, row)]

    # ---- locks

    @method_decorator(require_safe)
    def locks_view(self, request: HttpRequest) -> HttpResponse:
        """All locks of rows that have one or should; the rows are asked, never the server."""
        self._must(request, "view")
        now = lifecycle.database_now()
        rows = _rows_with_locks()
        newest = newest_of(rows)
        known = [Known(row=row, newest=newest.get(row.pk), now=now) for row in rows]
        lines, trouble = [], ""
        try:
            lines = truth.lock_lines(known)
        except (*UNREACHABLE, RedisError) as error:
            trouble = f"{type(error).__name__}: {error}"
        context = {
            **self._context(request, title=_("Locks")),
            "lines": lines,
            "trouble": trouble,
            "now": now,
            "operate_url": self.address("operate"),
            "may_heal": [d.name for d in DEEDS.values() if self.may(request, d.permission)],
            "looked_at": len(rows),
            "cut": len(rows) >= SHOWN_LOCKS,
        }
        return TemplateResponse(request, "dedupjobs/admin/locks.html", context)

    # ---- actions on rows that were chosen

    @method_decorator(require_POST)
    def operate_view(self, request: HttpRequest) -> HttpResponse:
        """Ask for the reason, or, once it is given, do it to each row and say what came of it."""
        deed = self._deed(request)
        rows = [AsSeen.parsed(value) for value in request.POST.getlist("row")[:MOST_ROWS]]
        seen = [row for row in rows if row is not None]
        form = form_of(deed, request.POST)
        if "confirmed" not in request.POST or not form.is_valid():
            return self.confirm(request, deed, seen)
        wish = Wish(
            deed=deed,
            by=request.user.get_username(),
            user_pk=request.user.pk,
            reason=form.cleaned_data["reason"],
            limit=form.cleaned_data.get("limit"),
            seen=request.POST.get("seen", ""),
        )
        done = [deeds.do(wish, row) for row in seen]
        self._tell(request, deed, done)
        if len(seen) == 1 and not done[0].gone:
            return redirect(self.address("change", seen[0].pk))
        return redirect(self.address("changelist"))

    def _tell(self, request: HttpRequest, deed: Deed, done: list[deeds.Done]) -> None:
        changed = sum(d.changed for d in done)
        for one in [d for d in done if not d.changed][:SAMPLE]:
            words = _("Nothing was changed: %(words)s")
            messages.error(request, words % {"words": visible.shown(one.words, 500)})
        if changed == 1:
            words = next(d.words for d in done if d.changed)
            messages.success(request, visible.shown(words, 500))
        elif changed or not done:
            words = _("%(action)s: %(changed)s of %(all)s jobs were changed.")
            facts = {"action": deed.label, "changed": changed, "all": len(done)}
            (messages.success if changed else messages.warning)(request, words % facts)

    def confirm(self, request: HttpRequest, deed: Deed, seen: list[AsSeen]) -> HttpResponse:
        """The page that shows the rows and asks why."""
        there = {row.pk: row for row in lifecycle.jobs().filter(pk__in=[s.pk for s in seen])}
        moved = [s for s in seen if s.pk not in there or there[s.pk].version != s.version]
        context = {
            **self._context(request, title=deed.label),
            "deed": deed,
            "rows": [(s, there[s.pk]) for s in seen if s not in moved],
            "moved": moved,
            "form": form_of(deed, request.POST if "confirmed" in request.POST else None),
            "seen_note": request.POST.get("seen", ""),
            "operate_url": self.address("operate"),
        }
        return TemplateResponse(request, "dedupjobs/admin/confirm.html", context)

    # ---- actions on all rows that match

    def bulk_preview(self, request: HttpRequest, deed: Deed, given: Any = None) -> HttpResponse:
        """The page that shows what all rows of a filter are, and asks why."""
        self._must(request, deed.permission)
        source = request.GET if given is None else given
        wanted = {n: source[n] for n in (*criteria.FILTERS, "q") if source.get(n)}
        may_see = self.may(request, "arguments")
        rows = criteria.matching(lifecycle.jobs(), wanted, arguments=may_see)
        rows = rows.exclude(name=bulk.do_in_bulk.name)
        counted = list(rows.order_by().values_list("status", flat=True)[: COUNTED + 1])
        context = {
            **self._context(
                request, title=_("%(action)s: all that match") % {"action": deed.label}
            ),
            "deed": deed,
            "wanted": wanted,
            "counts": Counter(counted[:COUNTED]).most_common(),
            "count": min(len(counted), COUNTED),
            "cut": len(counted) > COUNTED,
            "sample": list(rows.order_by("-pk").defer(*LARGE)[:SAMPLE]),
            "form": form_of(deed, request.POST if "confirmed" in request.POST else None),
            "start_url": self.address("bulk_start"),
        }
        return TemplateResponse(request, "dedupjobs/admin/bulk_preview.html", context)

    @method_decorator(require_POST)
    def bulk_start_view(self, request: HttpRequest) -> HttpResponse:
        deed = self._deed(request)
        if deed.heals:
            raise Http404
        form = form_of(deed, request.POST)
        if not form.is_valid():
            return self.bulk_preview(request, deed, request.POST)
        wanted = {n: request.POST[n] for n in (*criteria.FILTERS, "q") if request.POST.get(n)}
        started = bulk.start(
            deed.name,
            wanted,
            user=request.user,
            reason=form.cleaned_data["reason"],
            limit=form.cleaned_data.get("limit"),
        )
        return redirect(self.address("bulk", started.pk))

    @method_decorator(require_safe)
    def bulk_view(self, request: HttpRequest, bulk_pk: int) -> HttpResponse:
        """Progress and outcomes of a bulk operation."""
        found = self._bulk(request, bulk_pk)
        deed = DEEDS[found.action]
        alias = lifecycle.alias()
        changed = Operation._base_manager.using(alias).filter(bulk=found).select_related("job")
        refused = BulkRefusal._base_manager.using(alias).filter(bulk=found)
        context = {
            **self._context(
                request, title=_("%(action)s: all that match") % {"action": deed.label}
            ),
            "bulk": found,
            "deed": deed,
            "progress": self._progress(found),
            "job": lifecycle.jobs().filter(key_hash=bulk.identity_of(found)).first(),
            "changed": list(changed.order_by("-pk")[:SHOWN_OUTCOMES]),
            "refused": list(refused.order_by("-pk")[:SHOWN_OUTCOMES]),
            "shown": SHOWN_OUTCOMES,
            "now": lifecycle.database_now(),
            "may_stop": self.may(request, deed.permission),
            "stop_url": self.address("bulk_stop", found.pk),
            "progress_url": self.address("progress", found.pk),
        }
        return TemplateResponse(request, "dedupjobs/admin/bulk.html", context)

    @method_decorator(require_safe)
    def progress_view(self, request: HttpRequest, bulk_pk: int) -> HttpResponse:
        return JsonResponse(self._progress(self._bulk(request, bulk_pk)))

    @method_decorator(require_POST)
    def bulk_stop_view(self, request: HttpRequest, bulk_pk: int) -> HttpResponse:
        found = self._bulk(request, bulk_pk)
        self._must(request, DEEDS[found.action].permission)
        if bulk.stop(found, by=request.user.get_username()):
            messages.success(request, _("No further page of rows begins."))
        else:
            messages.warning(request, _("It has ended already."))
        return redirect(self.address("bulk", found.pk))

    def _bulk(self, request: HttpRequest, pk: int) -> BulkOperation:
        self._must(request, "view")
        found = BulkOperation._base_manager.using(lifecycle.alias()).filter(pk=pk).first()
        if found is None:
            raise Http404
        return found

    def _progress(self, found: BulkOperation) -> dict[str, Any]:
        done = found.changed + found.refused
        if found.ended_at is not None:
            state, words = "ended", visible.shown(found.note, 500)
        elif found.total is None:
            state, words = "waiting", _("waiting for a worker")
        else:
            state, words = "running", _("at work")
        numbers = _(
            "%(done)s of %(total)s rows: %(changed)s changed, %(refused)s left as they were"
        )
        total = found.total if found.total is not None else "?"
        facts = {"done": done, "total": total, "changed": found.changed, "refused": found.refused}
        return {
            "state": state,
            "words": words,
            "numbers": numbers % facts,
            "done": done,
            "total": found.total or max(done, 1),
        }

    # ---- what all pages need

    def _context(self, request: HttpRequest, *, title: Any) -> dict[str, Any]:
        return {
            **self.admin_site.each_context(request),
            "title": title,
            "opts": self.opts,
            "media": self.media,
            "has_view_permission": True,
        }

    def _must(self, request: HttpRequest, what: str) -> None:
        allowed = self.has_view_permission(request) if what == "view" else self.may(request, what)
        if not allowed:
            raise PermissionDenied

    def _deed(self, request: HttpRequest) -> Deed:
        self._must(request, "view")
        deed = DEEDS.get(request.POST.get("action", ""))
        if deed is None:
            raise Http404
        self._must(request, deed.permission)
        return deed


def _is_order(text: str) -> bool:
    """Return whether a text is what Django's list writes for an order: ``"1.-2"``."""
    return bool(re.fullmatch(r"-?\d{1,2}(\.-?\d{1,2}){0,9}", text))


def _rows_with_locks() -> list[ProcessedJob]:
    """Return rows that have a lock, should have one, or may have left one behind."""
    jobs = lifecycle.jobs().defer(*LARGE)
    running = jobs.filter(status=Status.RUNNING).order_by("-pk")[:SHOWN_LOCKS]
    waiting = jobs.filter(status__in=WAITING, attempts__gt=0).order_by("-pk")[:SHOWN_LOCKS]
    ended = jobs.filter(status__in=(*FINAL, Status.HELD)).order_by("-pk")[:ORPHANS_WITHIN]
    return [*running, *waiting, *ended]
