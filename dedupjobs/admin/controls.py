"""The page of live controls: what is in force, what was, a form that adds one and one that ends."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from dedupjobs import controls, levers, lifecycle, visible
from dedupjobs.admin.forms import ReasonForm
from dedupjobs.admin.plain import ReadOnly
from dedupjobs.exceptions import ControlError
from dedupjobs.levers import Wish
from dedupjobs.models import Aim, Control, ControlKind

PROGRESS = (ControlKind.PAUSE, ControlKind.DRAIN)


class ControlForm(ReasonForm):
    """What is wanted; ``levers`` says whether it makes sense."""

    kind = forms.ChoiceField(label=gettext_lazy("Kind"), choices=ControlKind.choices)
    aim = forms.ChoiceField(label=gettext_lazy("About"), choices=Aim.choices)
    target = forms.CharField(
        label=gettext_lazy("Target"),
        required=False,
        strip=False,
        max_length=levers.LONGEST_TARGET,
        widget=forms.TextInput(attrs={"class": "vTextField", "autocomplete": "off"}),
        help_text=gettext_lazy(
            "The job's name, the queue, the key as lists show it, the beginning of keys, the "
            "tenant, or the group, such as tenant:7."
        ),
    )
    value = forms.CharField(
        label=gettext_lazy("Value"),
        required=False,
        max_length=20,
        help_text=gettext_lazy(
            "Of a limit: a whole number. Of a lease or time-out: 90, 90s, 5m, 2h; none: no "
            "time-out. Other kinds have none."
        ),
    )
    holds = forms.BooleanField(
        label=gettext_lazy("Accept and hold"),
        required=False,
        help_text=gettext_lazy("Of a drain or filter: keeps calls for a person to release."),
    )
    lasts = forms.CharField(
        label=gettext_lazy("For"),
        required=False,
        max_length=20,
        help_text=gettext_lazy("30m, 2h, 7d; empty: until somebody ends it."),
    )
    replaces = forms.BooleanField(label=gettext_lazy("End the one in its place"), required=False)
    field_order = ("kind", "aim", "target", "value", "holds", "lasts", "replaces", "reason")

    def add(self, by: str) -> Control:
        """Put it in force; raises ControlError."""
        given = self.cleaned_data
        wish = Wish(
            kind=given["kind"],
            aim=given["aim"],
            target=given["target"],
            value=levers.value_of(given["kind"], given["value"]),
            holds=given["holds"],
            lasts=levers.seconds_of(given["lasts"]) if given["lasts"] else None,
        )
        return levers.add(wish, by=by, reason=given["reason"], replaces=given["replaces"])


class StateFilter(admin.SimpleListFilter):
    title = gettext_lazy("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return (("force", _("in force")), ("ended", _("ended")))

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        if self.value() == "force":
            return queryset.filter(pk__in=controls.in_force().values("pk"))
        return queryset.filter(place=None) if self.value() == "ended" else queryset


class ControlAdmin(ReadOnly):
    list_display = ("what", "state", "by", "reason", "created_at", "until")
    list_display_links = ("what",)
    list_filter = (StateFilter, "kind")
    ordering = ("-id",)

    class Media:
        css = {"all": ["dedupjobs/admin.css"]}

    def may_use(self, request: HttpRequest) -> bool:
        """Return whether the user may add and end controls."""
        return self.has_view_permission(request) and bool(
            request.user.has_perm("dedupjobs.use_control")
        )

    def has_add_permission(self, request: HttpRequest) -> bool:
        return self.may_use(request)

    @admin.display(description=gettext_lazy("control"))
    def what(self, row: Control) -> str:
        return visible.shown(f"#{row.pk} {controls.spoken(row)}", 250)

    @admin.display(description=gettext_lazy("state"))
    def state(self, row: Control) -> str:
        if row.ended_at is not None:
            by = visible.shown(row.ended_by, 60) or _("itself")
            return _("ended by %(by)s") % {"by": by}
        if row.until is not None and row.until <= lifecycle.database_now():
            return _("ended by %(by)s") % {"by": _("itself")}
        if row.kind in PROGRESS:
            return _("in force: %(progress)s") % {"progress": levers.progress(row)}
        return _("in force")

    def add_view(
        self, request: HttpRequest, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Ask what is wanted, and put it in force."""
        if not self.may_use(request):
            raise PermissionDenied
        wanted = {
            name: request.GET[name] for name in ("kind", "aim", "target") if name in request.GET
        }
        form = ControlForm(request.POST or None, initial=wanted)
        if request.method == "POST" and form.is_valid():
            try:
                made = form.add(request.user.get_username())
            except ControlError as error:
                form.add_error(None, visible.shown(error, 500))
            else:
                words = _("In force in all processes within seconds: %(what)s")
                messages.success(request, words % {"what": self.what(made)})
                return redirect(self._address("changelist"))
        context = {**self._context(request, title=_("Add a control")), "form": form}
        return TemplateResponse(request, "dedupjobs/admin/control_add.html", context)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Show a control, and end it."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        row = self.get_object(request, unquote(object_id))
        if row is None:
            return self._get_obj_does_not_exist_redirect(  # type: ignore[no-any-return, attr-defined]
                request, self.opts, object_id
            )
        form = ReasonForm(request.POST or None)
        if request.method == "POST":
            if not self.may_use(request):
                raise PermissionDenied
            if form.is_valid() and self._ended(request, row, form):
                return redirect(self._address("changelist"))
        context = {
            **self._context(request, title=self.what(row)),
            "row": row,
            "original": row,
            "state": self.state(row),
            "form": form,
            "may_end": self.may_use(request) and row.place is not None,
            "now": lifecycle.database_now(),
        }
        return TemplateResponse(request, "dedupjobs/admin/control.html", context)

    def _ended(self, request: HttpRequest, row: Control, form: ReasonForm) -> bool:
        try:
            reason = form.cleaned_data["reason"]
            levers.end(row.pk, by=request.user.get_username(), reason=reason)
        except ControlError as error:
            form.add_error(None, visible.shown(error, 500))
            return False
        messages.success(request, _("Ended: %(what)s") % {"what": self.what(row)})
        return True

    def _address(self, page: str) -> str:
        return reverse(f"admin:dedupjobs_control_{page}", current_app=self.admin_site.name)

    def _context(self, request: HttpRequest, *, title: Any) -> dict[str, Any]:
        return {
            **self.admin_site.each_context(request),
            "title": title,
            "opts": self.opts,
            "media": self.media,
            "list_url": self._address("changelist"),
            "has_view_permission": True,
        }
