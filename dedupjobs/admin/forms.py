from __future__ import annotations

from typing import Any

from django import forms
from django.utils.translation import gettext_lazy as _

from dedupjobs import operations
from dedupjobs.admin.deeds import Deed


class ReasonForm(forms.Form):
    """Why it is done; every change keeps that."""

    reason = forms.CharField(
        label=_("Reason"),
        max_length=500,
        widget=forms.TextInput(attrs={"class": "vTextField", "autocomplete": "off"}),
        help_text=_("Stands in the history of each job."),
    )


class LimitForm(ReasonForm):
    limit = forms.IntegerField(
        label=_("Attempt limit"),
        min_value=1,
        max_value=operations.HIGHEST_LIMIT,
        widget=forms.NumberInput(attrs={"class": "vIntegerField"}),
    )
    field_order = ("limit", "reason")


def form_of(deed: Deed, data: Any = None) -> ReasonForm:
    """Return the form that an action asks for."""
    kind = LimitForm if deed.name == "limit" else ReasonForm
    return kind(data)
