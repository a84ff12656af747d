"""What commands refuse of their flags: one sentence, and an exit code of 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from django.core.management.base import CommandError

from dedupjobs import lifecycle, registry


class FlagError(CommandError):
    """A flag that can not be meant; argparse ends with the same code."""

    def __init__(self, flag: str, value: Any, cure: str) -> None:
        super().__init__(f"{flag} {value}: {cure}", returncode=2)


def at_least_one(flag: str, value: int | None) -> None:
    """Refuse a count below 1."""
    if value is not None and value < 1:
        raise FlagError(flag, value, "give a whole number of at least 1")


def seconds(flag: str, value: float) -> None:
    """Refuse a duration that is negative, no number, or longer than a century."""
    if not 0 <= value <= registry.LONGEST_WINDOW.total_seconds():
        raise FlagError(flag, value, "give 0 or more seconds")


def one_of(flag: str, value: str | None, choices: Iterable[str]) -> None:
    """Refuse what is none of the choices, naming the nearest."""
    choices = list(choices)
    if value is None or value in choices:
        return
    near = difflib.get_close_matches(value, choices, 1, 0.5)
    known = f"known are {', '.join(choices) or 'none'}"
    raise FlagError(flag, value, f"did you mean {near[0]}? ({known})" if near else known)


def job_name(flag: str, value: str | None) -> None:
    """Refuse a name that neither this code nor a row has."""
    if value is not None and registry.find(value) is None:
        one_of(flag, value, sorted({*registry.names(), *lifecycle.names()}))
