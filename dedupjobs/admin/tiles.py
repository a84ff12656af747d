"""
The dashboard's numbers, each with its meaning and the list behind it.

What stands in the tables now is counted to LIVE rows, as those lists do; what happened comes from
the summaries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Min
from django.utils import formats
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from dedupjobs import criteria, lifecycle, summaries
from dedupjobs.admin.listing import COUNTED, ICONS
from dedupjobs.admin.period import Period
from dedupjobs.models import Cause, Status
from dedupjobs.story.spoken import brief, span

LIVE = COUNTED
LONG = 60.0  # seconds that a due job may wait before its tile says so


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A number, what it means and the filter behind it. ``level``: calm, good, wait, warn, bad."""

    key: str
    label: str
    value: str
    hint: str
    level: str = "calm"
    sign: str = ""
    query: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """What stands in the tables at this moment, each number to LIVE."""

    at: datetime
    by_status: dict[str, int]
    stuck: int
    silent: int
    oldest: datetime | None


def look() -> Now:
    """Count what stands in the tables now."""
    jobs = lifecycle.jobs()
    watched = (Status.PENDING, Status.RUNNING, Status.RETRYING, Status.HELD, Status.DEAD)
    at = lifecycle.database_now()
    return Now(
        at=at,
        by_status={s.value: summaries.count(jobs.filter(status=s), LIVE + 1) for s in watched},
        stuck=criteria.stuck().order_by()[: LIVE + 1].count(),
        silent=criteria.silent().order_by()[: LIVE + 1].count(),
        oldest=_oldest(at),
    )


def _oldest(now: datetime) -> datetime | None:
    """
    Return since when the job that waits longest has been due.

    Of those handed over, the first LIVE are looked at, which stand in an index with what is asked.
    """
    pending = lifecycle.jobs().filter(status=Status.PENDING, run_after__lte=now)
    unsent = pending.filter(dispatched_at=None).order_by("run_after")
    sent = pending.filter(dispatched_at__isnull=False).order_by("dispatched_at")
    first: datetime | None = unsent.values_list("run_after", flat=True).first()
    other = sent.values("run_after")[:LIVE].aggregate(Min("run_after"))["run_after__min"]
    return min(filter(None, (first, other)), default=None)


def now_tiles(now: Now, period: Period) -> list[Tile]:
    """Return the tiles of this moment."""
    measured = period.measured

    def tile(status: Status, hint: str, level: str) -> Tile:
        number = now.by_status[status]
        return Tile(
            key=status.lower(),
            label=str(status.label),
            value=bounded(number, measured, status),
            hint=hint,
            level=level if number else "calm",
            sign=ICONS[status],
            query=f"state={status}",
        )

    age = (now.at - now.oldest).total_seconds() if now.oldest else None
    return [
        tile(Status.PENDING, _("wait for a worker"), "wait"),
        tile(Status.RUNNING, _("a worker is at them"), "good"),
        tile(Status.RETRYING, _("failed, and are tried again"), "wait"),
        Tile(
            key="oldest",
            label=_("longest wait"),
            value="–" if age is None else span(age),
            hint=_("of a job that is due") if age is not None else _("no job is due"),
            level="calm" if age is None else "warn" if age > LONG else "wait",
            sign="◔",
            query="state=PENDING",
        ),
        tile(Status.HELD, _("wait for a person"), "warn"),
        tile(Status.DEAD, _("given up: retry or purge them"), "bad"),
        _condition("stuck", _("stuck"), _("their lease is over"), now.stuck, "bad"),
        _condition("silent", _("silent"), _("alive, without progress"), now.silent, "warn"),
    ]


def _condition(key: str, label: str, hint: str, number: int, level: str) -> Tile:
    return Tile(
        key=key,
        label=label,
        value=bounded(number),
        hint=hint,
        level=level if number else "calm",
        sign="⚠" if number else "✓",
        query=f"condition={key}",
    )


def happened_tiles(period: Period) -> list[Tile]:
    """Return the tiles of the span."""
    causes, total = period.by_cause, period.total
    known = [f"{number_words(causes[c])} {words}" for c, words in CAUSES.items() if causes[c]]
    lost = total.numbers["lost"]
    return [
        Tile(
            key="succeeded",
            label=_("succeeded"),
            value=number_words(total.numbers["succeeded"]),
            hint=_("runs that ended well"),
            level="good" if total.numbers["succeeded"] else "calm",
            sign=ICONS[Status.SUCCEEDED],
            query="state=SUCCEEDED",
        ),
        Tile(
            key="failures",
            label=_("failures"),
            value=number_words(total.failures),
            hint=_("runs that failed, timed out or were lost"),
            level="warn" if total.failures else "calm",
            sign=ICONS[Status.DEAD],
            query="condition=failed",
        ),
        Tile(
            key="duplicates",
            label=_("duplicates turned away"),
            value=number_words(sum(causes.values())),
            hint=", ".join(known) or _("nobody asked twice"),
            sign="≡",
            query="condition=duplicates",
        ),
        Tile(
            key="contended",
            label=_("contention"),
            value=number_words(causes[Cause.RACE]),
            hint=_("workers that met at one job"),
            sign="⇄",
            query="condition=contended",
        ),
        Tile(
            key="recovered",
            label=_("recovered after a crash"),
            value=number_words(lost),
            hint=_("runs taken over from a lost worker"),
            level="warn" if lost else "calm",
            sign="⟲",
            query="condition=lost",
        ),
        _reads(period.grown("reads")),
        _waits(period.grown("waits")),
    ]


def _reads(grown: Counter[str] | None) -> Tile:
    """Return how often the status cache spared the database a read."""
    number = sum((grown or {}).values())
    if grown is None:
        value, hint = "–", str(_NOBODY)
    elif not number:
        value, hint = "–", _("no status was asked for")
    else:
        share = 1 - grown["missed"] / number
        value = f"{formats.number_format(100 * share, 1)} %"
        hint = _("of %(number)s reads spared the database") % {"number": number_words(number)}
    return Tile(
        key="reads",
        label=_("status cache"),
        value=value,
        hint=hint,
        sign="⚡",
        query="state=SUCCEEDED",
    )


def _waits(grown: Counter[str] | None) -> Tile:
    """Return how long runs waited for a lock that another delivery had."""
    waits = Counter({summaries.bucket_of(float(bound)): n for bound, n in (grown or {}).items()})
    seconds = summaries.percentile(waits, 0.95)
    if grown is None:
        value, hint = "–", str(_NOBODY)
    elif seconds is None:
        value, hint = "–", _("no run had to wait for a lock")
    else:
        value = brief(seconds)
        number = number_words(sum(waits.values()))
        hint = _("p95 of %(number)s runs that met a busy lock") % {"number": number}
    return Tile(
        key="waits",
        label=_("lock wait"),
        value=value,
        hint=hint,
        sign="⧗",
        query="condition=contended",
    )


_NOBODY = gettext_lazy("a coordinator has not counted yet")


CAUSES = {
    Cause.PRODUCER: gettext_lazy("while active"),
    Cause.REPLAY: gettext_lazy("after success"),
    Cause.REDELIVERY: gettext_lazy("delivered again"),
    Cause.RACE: gettext_lazy("at the same time"),
    Cause.LEASE: gettext_lazy("after a lost lease"),
}
"""The causes of duplicates, in two words."""


def number_words(number: float) -> str:
    """Return a number as people write it."""
    return formats.number_format(number, force_grouping=True)


def bounded(number: int, measured: Mapping[str, Any] | None = None, status: str = "") -> str:
    """Return a number that was counted to LIVE; beyond that, the one that was measured last."""
    if number <= LIVE:
        return number_words(number)
    last = (measured or {}).get(status, 0)
    cut = last <= LIVE or status in (measured or {}).get("cut", ())
    return f"> {number_words(max(last, LIVE))}" if cut else f"≈ {number_words(last)}"
