"""
How the admin's templates show foreign text, moments and durations.

The admin is imported when a filter is used: an admin theme may load all template libraries while
it is being imported itself.
"""

from __future__ import annotations

from datetime import datetime

from django import template
from django.utils.safestring import SafeString

register = template.Library()


@register.filter
def visible(text: object) -> str:
    """Return a text whose every character can be seen, at a bounded length."""
    from dedupjobs.visible import shown  # noqa: PLC0415

    return shown(text)


@register.filter
def span(seconds: float) -> str:
    """Return a duration in words."""
    from dedupjobs.story import spoken  # noqa: PLC0415

    return spoken.span(seconds)


@register.filter
def beat(seconds: float) -> str:
    """Return the age of a heartbeat in words."""
    from dedupjobs.story import spoken  # noqa: PLC0415

    return spoken.beat(seconds)


@register.filter
def size(number: int) -> str:
    """Return a number of bytes in words."""
    from dedupjobs.story import spoken  # noqa: PLC0415

    return spoken.size(number)


@register.filter
def badge(status: str) -> SafeString:
    """Return a status as a sign and a word."""
    from dedupjobs.admin import listing  # noqa: PLC0415

    return listing.badge(status)


@register.filter
def at(moment: datetime | None, now: datetime) -> SafeString | str:
    """Return a moment in the reader's time zone, with the exact instant as its title."""
    from dedupjobs.admin import listing  # noqa: PLC0415
    from dedupjobs.story import spoken  # noqa: PLC0415

    return "–" if moment is None else listing.when(moment, spoken.moment(moment, now))


@register.filter
def unlocalize_number(number: float) -> str:
    """Return a number as SVG and HTML attributes spell it, whatever the language."""
    return str(number) if isinstance(number, int) else f"{number:.1f}"


@register.filter
def add_number(number: float, more: int) -> str:
    """Return the sum, spelled likewise."""
    return unlocalize_number(number + more)
