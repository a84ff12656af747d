"""How far a job has said it is: ``attempt.progress(5, 14, "going")``."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from django.utils import formats
from django.utils.translation import gettext as _

WRITTEN_OUT = 1e15  # what is larger is spelled with an exponent


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """As of an attempt's last beat that brought one; ``text`` is the project's own."""

    done: float
    total: float | None
    text: str

    @property
    def words(self) -> str:
        """As people read it: ``"5 of 14 · going"``."""
        words = _number(self.done)
        if self.total is not None:
            words = _("%(done)s of %(total)s") % {"done": words, "total": _number(self.total)}
        return f"{words} · {self.text}" if self.text else words

    @property
    def percent(self) -> float | None:
        """What a bar shows, 0 to 100; None: it is part of no total."""
        if not self.total or not math.isfinite(self.done) or not math.isfinite(self.total):
            return None
        return min(max(self.done / self.total * 100, 0.0), 100.0)


def read(stored: str) -> Progress | None:
    """Return what stands in an attempt's column; None: nothing, or nothing that can be read."""
    try:
        done, total, text = json.loads(stored)
        limit = None if total is None else float(total)
        return Progress(done=float(done), total=limit, text=str(text))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def _number(number: float) -> str:
    if abs(number) < WRITTEN_OUT:
        return str(formats.number_format(int(number) if number.is_integer() else round(number, 2)))
    return f"{number:g}"
