"""Durations and moments in words."""

from __future__ import annotations

from datetime import datetime

from django.utils import formats, timezone
from django.utils.translation import gettext as _

MINUTE, HOUR, DAY = 60, 3_600, 86_400
PRECISE = 10  # seconds below which tenths matter
UNITS = ((10**9, 2, "GB"), (10**6, 1, "MB"), (10**3, 0, "kB"), (1, 0, "B"))


def span(seconds: float) -> str:
    """Return a duration as people say it: ``"0.4 s"``, ``"40 s"``, ``"3 min"``, ``"2 h"``."""
    seconds = abs(seconds)
    if seconds < PRECISE and seconds != int(seconds):
        return _("%(number)s s") % {"number": formats.number_format(round(seconds, 1))}
    if seconds < 2 * MINUTE:
        return _("%(number)s s") % {"number": round(seconds)}
    if seconds < 2 * HOUR:
        return _("%(number)s min") % {"number": round(seconds / MINUTE)}
    if seconds < 2 * DAY:
        return _("%(number)s h") % {"number": round(seconds / HOUR)}
    return _("%(number)s d") % {"number": round(seconds / DAY)}


def brief(seconds: float) -> str:
    """Return a duration as an axis says it: ``"40 ms"``, ``"2.5 s"``, ``"3 min"``."""
    if not 0 < seconds < 1:
        return span(seconds)
    number = seconds * 1_000
    return f"{formats.number_format(round(number) if number >= PRECISE else round(number, 1))} ms"


def beat(seconds: float) -> str:
    """Return the age of a heartbeat; a fresh one does not change with every look."""
    if seconds < PRECISE:
        return _("just now")
    return _("%(span)s ago") % {"span": span(seconds // PRECISE * PRECISE)}


def size(number: int) -> str:
    """Return a number of bytes: ``"2.1 MB"``."""
    unit, digits, sign = next(u for u in UNITS if number >= u[0] or u[0] == 1)
    shown = round(number / unit, digits) if digits else round(number / unit)
    return f"{formats.number_format(shown)} {sign}"


def moment(at: datetime, now: datetime) -> str:
    """Return a moment in the current time zone: the time alone where it is near ``now``."""
    here = timezone.localtime(at) if timezone.is_aware(at) else at
    clock = here.strftime("%H:%M:%S")
    if abs((at - now).total_seconds()) < DAY / 2:
        return clock
    return f"{here:%Y-%m-%d} {clock}"
