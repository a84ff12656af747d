"""What commands are asked for, read from words; a word that does not fit ends with code 2."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from django.core.management.base import CommandError
from django.utils.dateparse import parse_date, parse_datetime

from dedupjobs import lifecycle, registry
from dedupjobs.visible import line

BAD_INPUT = 2  # the exit code of a command that was asked for what makes no sense
UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400}
LISTED = 20  # names in a sentence
LONGEST = 36_525 * 86_400  # seconds, a century; years of databases end

_SPAN = re.compile(r"([0-9]{1,9})([smhdw])")


def refused(words: str) -> CommandError:
    """Return the error that ends a command with the exit code for bad input."""
    return CommandError(words, returncode=BAD_INPUT)


def since(text: str, now: datetime) -> datetime:
    """Return the moment that "90m", "2h", "7d", "2026-11-29" or "2026-11-29T12:00Z" means."""
    if found := _SPAN.fullmatch(text):
        return now - timedelta(seconds=min(int(found[1]) * UNITS[found[2]], LONGEST))
    at = _moment(text)
    if at is None:
        raise refused(
            f"--since {line(text, 50)!r}: give a time span such as 90m, 2h or 7d, or a moment such "
            "as 2026-11-29 or 2026-11-29T12:00Z (UTC unless it says otherwise)."
        )
    if at > now:
        raise refused(f"--since {line(text, 50)}: that is yet to come.")
    return at


def _moment(text: str) -> datetime | None:
    try:
        at = parse_datetime(text)
        day = None if at else parse_date(text)
    except ValueError:  # well formed, but there is no such day
        return None
    if at is None and day is not None:
        at = datetime(day.year, day.month, day.day)
    if at is None:
        return None
    return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)


def job_name(text: str, flag: str = "--job") -> str:
    """Return the name of a job that is known here or has rows."""
    if registry.find(text) is not None:
        return text
    return one_of(flag, text, sorted({*registry.names(), *lifecycle.names()}), what="no such job")


def one_of(flag: str, text: str, choices: Iterable[str], *, what: str = "no such choice") -> str:
    """Return what is one of the choices; refused with the nearest one's name."""
    known = list(choices)
    if text in known:
        return text
    near = difflib.get_close_matches(text, known, 1, 0.4)
    meant = f" Did you mean {near[0]}?" if near else ""
    more = ", …" if len(known) > LISTED else ""
    listed = f"{', '.join(known[:LISTED]) or 'none'}{more}"
    raise refused(f"{flag} {line(text)}: {what}.{meant} Known are: {listed}.")


def at_least_one(flag: str, count: int | None) -> None:
    """Refuse a count that is given and less than 1."""
    if count is not None and count < 1:
        raise refused(f"{flag} {count}: give a whole number of at least 1.")


def lasting(flag: str, text: str) -> float:
    """Return the seconds that "90", "90s", "10m", "2h" or "7d" means; at most a century."""
    found = _SPAN.fullmatch(text)
    try:
        value = int(found[1]) * UNITS[found[2]] if found else float(text)
    except ValueError:
        words = f"{flag} {line(text, 50)!r}: give seconds, or a time such as 90s, 10m, 2h or 7d."
        raise refused(words) from None
    return seconds(flag, value)


def seconds(flag: str, value: float) -> float:
    """Return a duration that is not negative, a number, and no longer than a century."""
    if not 0 <= value <= LONGEST:
        raise refused(f"{flag} {value:g}: give 0 to {LONGEST:,} seconds.")
    return value
