"""Foreign text made fit to be shown: visible, bounded, masked. Escaping is the templates' part."""

from __future__ import annotations

import json
from typing import Any

from django.utils.translation import gettext as _

from dedupjobs import criteria
from dedupjobs.visible import shown

DEEPEST = 20


def pairs(stored: str | None) -> list[tuple[str, str]]:
    """Return stored arguments as names and texts; values of redacted names are masked."""
    found = _loaded(stored)
    if not isinstance(found, dict):
        return [("", plain(stored))] if stored else []
    if found.get("$") == "dict" and isinstance(found.get("v"), dict):
        found = found["v"]
    return [(shown(name, 200), _value(name, value)) for name, value in found.items()]


def plain(stored: str | None) -> str:
    """Return a stored value as text, masked inside."""
    if not stored:
        return ""
    found = _loaded(stored)
    return _("not readable") if found is _BROKEN else _value("", found)


_BROKEN: Any = object()


def _loaded(stored: str | None) -> Any:
    try:
        return json.loads(stored or "")
    except (ValueError, RecursionError):
        return _BROKEN


def _value(name: str, value: Any) -> str:
    masked = _masked(name, value, 0)
    return shown(masked if isinstance(masked, str) else json.dumps(masked, ensure_ascii=False))


def _masked(name: str, value: Any, depth: int) -> Any:
    if criteria.is_redacted(name):
        return "••••••"
    if depth > DEEPEST:
        return "…"
    if isinstance(value, dict):
        if value.get("$") in _PLAIN and "v" in value:  # our notation for what JSON lacks
            return _masked(name, value["v"], depth + 1)
        return {key: _masked(key, inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [_masked("", inner, depth + 1) for inner in value]
    return value


_PLAIN = ("decimal", "datetime", "date", "uuid", "dict")
