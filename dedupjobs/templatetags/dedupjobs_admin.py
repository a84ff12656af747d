"""How the admin's templates show foreign text, moments and durations."""

from __future__ import annotations

from datetime import datetime

from django import template
from django.utils.safestring import SafeString

from dedupjobs.admin import spoken, text
from dedupjobs.admin.listing import badge, when

register = template.Library()

register.filter("visible", text.shown)
register.filter("span", spoken.span)
register.filter("badge", badge)


@register.filter
def unlocalize_number(number: float) -> str:
    """Return a number as SVG and HTML attributes spell it, whatever the language."""
    return str(number) if isinstance(number, int) else f"{number:.1f}"


@register.filter
def add_number(number: float, more: int) -> str:
    """Return the sum, spelled likewise."""
    return unlocalize_number(number + more)


@register.filter
def at(moment: datetime | None, now: datetime) -> SafeString | str:
    """Return a moment in the reader's time zone, with the exact instant as its title."""
    if moment is None:
        return "–"
    return when(moment, spoken.moment(moment, now))
