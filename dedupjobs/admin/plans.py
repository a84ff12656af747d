"""What the dashboard's charts show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from django.utils.translation import gettext as _

from dedupjobs import summaries
from dedupjobs.admin.charts import Plan, Series
from dedupjobs.admin.period import Period
from dedupjobs.admin.tiles import CAUSES, number_words
from dedupjobs.models import Status
from dedupjobs.story.spoken import brief
from dedupjobs.summaries import Histogram, Point, Totals

MOST_QUEUES = 6
SHARES = (50, 95, 99)


def plans(period: Period) -> list[Plan]:
    """Return the charts of a span, in their order."""
    per = {"per": _("per minute") if period.name == "hour" else _("per hour")}
    quiet = _("Nothing ended in this time. Enqueue a job, and it shows here.")
    return [
        Plan(
            key="throughput",
            title=_("Throughput"),
            hint=_("runs that succeeded, %(per)s") % per,
            series=(_counted(period, "succeeded", _("succeeded"), 3),),
            stacked=True,
            say=whole,
            least=2,
            empty=quiet,
        ),
        Plan(
            key="failures",
            title=_("Failures"),
            hint=_("runs that did not, %(per)s") % per,
            series=(
                _counted(period, "failed", _("failed"), 0),
                _counted(period, "timed_out", _("timed out"), 1),
                _counted(period, "lost", _("lost"), 2),
            ),
            stacked=True,
            say=whole,
            least=2,
            empty=_("No failures in this time."),
        ),
        Plan(
            key="delay",
            title=_("Queue delay"),
            hint=_("from due to started"),
            series=_percentiles(period, lambda totals: totals.delays),
            stacked=False,
            say=brief,
            empty=quiet,
        ),
        Plan(
            key="run",
            title=_("Run time"),
            hint=_("of the jobs' own code"),
            series=_percentiles(period, lambda totals: totals.runs),
            stacked=False,
            say=brief,
            empty=quiet,
        ),
        Plan(
            key="backlog",
            title=_("Backlog"),
            hint=_("jobs that wait, by queue"),
            series=_backlog(period),
            stacked=False,
            say=whole,
            least=2,
            empty=_("No backlog was seen in this time."),
        ),
        Plan(
            key="duplicates",
            title=_("Duplicates"),
            hint=_("calls and messages turned away, %(per)s") % per,
            series=_causes(period),
            stacked=True,
            say=whole,
            least=2,
            empty=_("Nobody asked twice in this time."),
        ),
        Plan(
            key="pressure",
            title=_("Pressure"),
            hint=_("the adaptive backoff's score, from 0 to 1"),
            series=(_pressure(period),),
            stacked=False,
            say=share,
            least=1,
            empty=_("The pressure was not measured in this time."),
        ),
    ]


def _values(period: Period, ask: Callable[[Totals], float | None]) -> list[float | None]:
    points = period.of()
    return [ask(points[m].totals) if m in points else None for m in period.moments]


def _counted(period: Period, name: str, label: str, kind: int) -> Series:
    values = _values(period, lambda totals: totals.numbers[name])
    total = number_words(period.total.numbers[name])
    return Series(kind=kind, label=label, values=values, total=total)


def _percentiles(period: Period, ask: Callable[[Totals], Histogram]) -> tuple[Series, ...]:
    def of(share: int) -> list[float | None]:
        return _values(period, lambda totals: summaries.percentile(ask(totals), share / 100))

    whole_span = ask(period.total)
    return tuple(
        Series(
            kind=kind, label=f"p{share}", values=of(share), total=_brief(whole_span, share / 100)
        )
        for kind, share in enumerate(SHARES)
    )


def _backlog(period: Period) -> tuple[Series, ...]:
    """Return what waits, by queue; those with most, where there are many."""

    def waiting(point: Point | None) -> float | None:
        gauges = point.gauges if point else {}
        return (
            gauges[Status.PENDING] + gauges[Status.RETRYING] if Status.PENDING in gauges else None
        )

    found = {}
    for queue in {p.queue for p in period.points if p.queue}:
        points = period.of(queue)
        found[queue] = [waiting(points.get(moment)) for moment in period.moments]
    most = sorted(found, key=lambda queue: (-max(v or 0 for v in found[queue]), queue))
    return tuple(
        Series(kind=kind, label=queue, values=found[queue], total=_last(found[queue]))
        for kind, queue in enumerate(most[:MOST_QUEUES])
    )


def _pressure(period: Period) -> Series:
    points = period.of()
    values = [points[m].gauges.get("pressure") if m in points else None for m in period.moments]
    known = [value for value in values if value is not None]
    total = share(known[-1]) if known else "–"
    return Series(kind=0, label=_("score"), values=values, total=total)


def _causes(period: Period) -> tuple[Series, ...]:
    totals = period.by_cause
    return tuple(
        Series(
            kind=kind,
            label=str(words),
            values=[
                period.duplicates[m].get(cause, 0) if m in period.duplicates else None
                for m in period.moments
            ],
            total=number_words(totals[cause]),
        )
        for kind, (cause, words) in enumerate(CAUSES.items())
        if totals[cause]
    )


def _last(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return whole(known[-1]) if known else "–"


def whole(value: float) -> str:
    """Return a number of jobs as an axis says it."""
    return number_words(int(value) if value == int(value) else round(value, 1))


def share(value: float) -> str:
    """Return a score as an axis says it."""
    return number_words(round(value, 2))


def _brief(histogram: Counter[int], share: float) -> str:
    found = summaries.percentile(histogram, share)
    return "–" if found is None else brief(found)
