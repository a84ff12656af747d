"""
What ended, minute by minute and hour by hour, so that no page has to count the tables.

A minute is always made anew from the attempts that ended in it, and replaces what was there: any
coordinator may do it, any number of times. What was done last stands in the table itself, so a
coordinator that dies loses nothing, and minutes in which nothing ended are passed over.

An ending may be committed after its minute was made: it is made once more when the next one has
begun, and again when it is LATE minutes old.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connections, transaction
from django.db.models import Case, Count, F, IntegerField, OuterRef, Subquery, Sum, Value, When
from django.db.models.functions import Concat

from dedupjobs import clock, lifecycle
from dedupjobs.models import AttemptOutcome, DuplicateCount, Status, Summary, Watch

MINUTE, HOUR = 60, 3_600
KEPT = {MINUTE: timedelta(days=2), HOUR: timedelta(days=400)}
LATE = 15  # minutes
BUDGET = 0.5  # seconds of one round; a backlog of minutes is made in the rounds after it
MOST_QUEUES = 50  # whose backlog is measured
COUNTED = 100_000  # rows of one queue in one status; the true number may be higher

EDGES: tuple[float, ...] = tuple(
    digit * 10.0**power for power in range(-3, 5) for digit in (1, 2, 5)
)
"""Upper ends of a histogram's buckets in seconds, from 1 ms to 14 h; the last bucket has none."""

COLUMNS: dict[str, str] = {
    AttemptOutcome.SUCCEEDED: "succeeded",
    AttemptOutcome.FAILED: "failed",
    AttemptOutcome.TIMED_OUT: "timed_out",
    AttemptOutcome.LOST: "lost",
}
UNKNOWN = -1  # the bucket of attempts without such a duration, which is not kept
FAILURES = ("failed", "timed_out", "lost")
NUMBERS = ("succeeded", *FAILURES, "other")
BACKLOG = (Status.PENDING, Status.RUNNING, Status.RETRYING)

Histogram = Counter[int]
"""How many durations fell into each bucket, by its number."""


@dataclass(slots=True)
class Totals:
    """What ended, in one group and span of time."""

    numbers: Counter[str] = field(default_factory=Counter)
    delays: Histogram = field(default_factory=Counter)
    runs: Histogram = field(default_factory=Counter)

    def add(self, other: Totals) -> None:
        """Add what ended in another group or span."""
        self.numbers.update(other.numbers)
        self.delays.update(other.delays)
        self.runs.update(other.runs)

    @property
    def failures(self) -> int:
        """How many attempts failed, timed out or were lost."""
        return sum(self.numbers[name] for name in FAILURES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One minute or hour of one queue ("": all). ``gauges``: {} if nobody looked."""

    begin: datetime
    queue: str
    totals: Totals
    gauges: dict[str, Any]


Groups = dict[tuple[str, str], Totals]


# ---- keeping them


Counted = Callable[[], Mapping[str, Any]]


def keep(counted: Counted = dict) -> int:
    """
    Bring the summaries up to date; return how many minutes were made.

    ``counted`` is asked once a minute for what others count, to be kept with what stands there.
    """
    current = floor(lifecycle.database_now(), MINUTE)
    made = _catch_up(newest() or floor(_first_ended() or current, MINUTE), current)
    measured = _all().filter(span=MINUTE, begin=current, queue="", name="").exclude(gauges="{}")
    begun = not measured.exists()
    if begun:
        _measure(current, counted)
        forget(current)
    if begun and made[-1] == current:
        made.append(_make_minute(current - timedelta(minutes=LATE)))
    if begun or made[0] < current - timedelta(minutes=1):  # it was away
        for hour in sorted({floor(minute, HOUR) for minute in made}):
            _make_hour(hour)
    return len(made)


def _catch_up(begin: datetime, current: datetime) -> list[datetime]:
    """Make the minutes from ``begin`` to the current one, oldest first, while time is left."""
    until = clock.monotonic() + BUDGET
    made = [_make_minute(begin)]
    while made[-1] < current and (len(made) == 1 or clock.monotonic() < until):
        following = _first_ended(made[-1] + timedelta(seconds=MINUTE))
        made.append(_make_minute(min(floor(following or current, MINUTE), current)))
    return made


def forget(now: datetime) -> None:
    """Delete summaries that are out of retention."""
    for span, kept in KEPT.items():
        _all().filter(span=span, begin__lt=now - kept).delete()


def floor(moment: datetime, span: int) -> datetime:
    """Return the begin of the minute or hour that a moment lies in."""
    seconds = int(moment.timestamp()) // span * span
    return datetime.fromtimestamp(seconds, UTC)


def _first_ended(since: datetime | None = None) -> datetime | None:
    """Return when the first attempt ended since then, or within what is kept."""
    since = since or lifecycle.database_now() - KEPT[MINUTE]
    ended = lifecycle.attempts().filter(ended_at__gte=since).order_by("ended_at")
    # One look into the index for each outcome.
    firsts = [
        ended.filter(outcome=outcome).values_list("ended_at", flat=True).first()
        for outcome in AttemptOutcome.values
    ]
    return min((first for first in firsts if first is not None), default=None)


def _make_minute(begin: datetime) -> datetime:
    ended: Any = lifecycle.attempts().filter(
        outcome__in=AttemptOutcome.values,
        ended_at__gte=begin,
        ended_at__lt=begin + timedelta(seconds=MINUTE),
    )
    if ended.count() == _counted_in(begin):  # what an index says for a tenth of the cost
        return begin
    facts = {"of": _queue_and_name(), "delay": _bucket("queue_delay"), "run": _bucket("run_time")}
    grouped = ended.annotate(**facts).values_list("of", "outcome", "delay", "run").order_by()
    groups: Groups = {("", ""): Totals()}
    for of, outcome, delay, run, number in grouped.annotate(number=Count("pk")):
        queue, _, name = of.partition("\n")
        for group in {("", ""), (queue, ""), (queue, name)}:
            totals = groups.get(group) or groups.setdefault(group, Totals())
            totals.numbers[COLUMNS.get(outcome, "other")] += number
            totals.delays[delay] += number
            totals.runs[run] += number
    _write(MINUTE, begin, groups)
    return begin


def _counted_in(begin: datetime) -> int | None:
    """Return how many endings a minute has by its summary; None if there is none."""
    total = _all().filter(span=MINUTE, begin=begin, queue="", name="", counted=True).first()
    return sum(getattr(total, column) for column in NUMBERS) if total else None


def _queue_and_name() -> Subquery:
    """
    Return the queue and name of an attempt's job, looked up by its key.

    A join would let the planner read the whole table of jobs.
    """
    job = lifecycle.jobs().filter(pk=OuterRef("job_id"))
    return Subquery(job.values(of=Concat("queue", Value("\n"), "name"))[:1])


def _make_hour(begin: datetime) -> None:
    """Add the minutes of an hour up; what stood there last is what stands there."""
    minutes = _all().filter(
        span=MINUTE, begin__gte=begin, begin__lt=begin + timedelta(seconds=HOUR)
    )
    groups: Groups = {}
    gauges: dict[tuple[str, str], str] = {}
    for row in minutes.order_by("begin"):
        group = (row.queue, row.name)
        groups.setdefault(group, Totals()).add(_totals(row))
        if row.gauges != "{}":
            gauges[group] = row.gauges
    _write(HOUR, begin, groups)
    _write_gauges(HOUR, begin, gauges)


def _bucket(column: str) -> Case:
    """Return the number of the bucket that a duration falls into."""
    edges = [When(**{f"{column}__lte": edge}, then=Value(i)) for i, edge in enumerate(EDGES)]
    beyond = When(**{f"{column}__isnull": False}, then=Value(len(EDGES)))
    return Case(*edges, beyond, default=Value(UNKNOWN), output_field=IntegerField())


def _write(span: int, begin: datetime, groups: Groups) -> None:
    """Put what was counted in the place of what stood there; gauges stay."""
    rows = [
        Summary(
            **{"span": span, "begin": begin, "queue": queue, "name": name, "counted": True},
            **{column: totals.numbers[column] for column in NUMBERS},
            delays=_dumped(totals.delays),
            runs=_dumped(totals.runs),
        )
        for (queue, name), totals in sorted(groups.items())
    ]
    empty = dict.fromkeys(NUMBERS, 0) | {"delays": "{}", "runs": "{}"}
    with transaction.atomic(using=lifecycle.alias()):
        there = _all().filter(span=span, begin=begin, counted=True)
        for row in there.order_by("queue", "name").only("queue", "name"):
            if (row.queue, row.name) not in groups:  # its attempts are gone
                _all().filter(pk=row.pk).update(**empty)
        _upsert(rows, ("counted", *NUMBERS, "delays", "runs"))


def _write_gauges(span: int, begin: datetime, gauges: Mapping[tuple[str, str], str]) -> None:
    _upsert(
        [
            Summary(span=span, begin=begin, queue=queue, name=name, gauges=text)
            for (queue, name), text in sorted(gauges.items())
        ],
        ("gauges",),
    )


def _upsert(rows: Sequence[Summary], columns: Sequence[str]) -> None:
    named = connections[lifecycle.alias()].features.supports_update_conflicts_with_target
    _all().bulk_create(
        rows,
        update_conflicts=True,
        update_fields=columns,
        unique_fields=("span", "begin", "queue", "name") if named else None,
    )


# ---- what stands there at a moment


def _measure(begin: datetime, counted: Counted = dict) -> None:
    """Note how many rows wait and run, each to a bound, so the cost has one, too."""
    gauges: dict[tuple[str, str], str] = {}
    totals: Counter[str] = Counter()
    cut: set[str] = set()
    for queue in lifecycle.values_of("queue", most=MOST_QUEUES):
        rows = lifecycle.jobs().filter(queue=queue)
        found = {status.value: count(rows.filter(status=status), COUNTED) for status in BACKLOG}
        totals.update(found)
        cut |= {status for status, number in found.items() if number == COUNTED}
        gauges[queue, ""] = json.dumps(found)
    for status in (Status.HELD, Status.DEAD):
        number = totals[status.value] = count(lifecycle.jobs().filter(status=status), COUNTED)
        cut |= {status.value} if number == COUNTED else set()
    seen = {
        **totals,
        "cut": sorted(cut),
        "duplicates": duplicates(),
        "pressure": _pressure(),
        **counted(),
    }
    gauges["", ""] = json.dumps(seen)
    _write_gauges(MINUTE, begin, gauges)


def _pressure() -> float:
    """Return the score of the adaptive backoff."""
    found = Watch._base_manager.using(lifecycle.alias()).values_list("score", flat=True).first()
    return round(found or 0.0, 3)


def count(rows: Any, most: int) -> int:
    """Count rows, ``most`` at the most, in an index that has their status."""
    return int(rows.order_by().values("status")[:most].count())


def duplicates() -> dict[str, int]:
    """Return by cause how many duplicates were ever turned away."""
    counts = DuplicateCount._base_manager.using(lifecycle.alias())
    by_cause = counts.order_by("cause").values_list("cause").annotate(Sum("count"))
    return dict(by_cause)


# ---- reading them


def points(span: int, since: datetime) -> list[Point]:
    """Return what is known since then, oldest first, of each queue and of all ("")."""
    rows = _all().filter(span=span, begin__gte=since, name="").order_by("begin", "queue")
    return [
        Point(begin=r.begin, queue=r.queue, totals=_totals(r), gauges=_loaded(r.gauges))
        for r in rows
    ]


def by_name(span: int, since: datetime, *, most: int) -> list[dict[str, Any]]:
    """Return what ended since then by job, the most failures first."""
    rows = _all().filter(span=span, begin__gte=since).exclude(name="")
    sums = {column: Sum(column) for column in NUMBERS}
    failures = Sum(F("failed") + F("timed_out") + F("lost"))
    grouped = rows.order_by().values("name").annotate(failures=failures).annotate(**sums)
    return list(grouped.order_by("-failures", "-succeeded", "name")[:most])


def by_job(since: datetime) -> dict[str, Totals]:
    """Return what ended in the minutes since then, by job."""
    found: dict[str, Totals] = {}
    for row in _all().filter(span=MINUTE, begin__gte=since).exclude(name=""):
        found.setdefault(row.name, Totals()).add(_totals(row))
    return found


def newest() -> datetime | None:
    """Return the minute of the newest summary."""
    found: datetime | None = _counted().values_list("begin", flat=True).first()
    return found


def percentile(histogram: Histogram, share: float) -> float | None:
    """
    Return the seconds below which that share of the durations lies; None: there are none.

    Within a bucket they count as evenly spread, so the answer is right to within the bucket.
    """
    wanted = share * sum(histogram.values())
    if not wanted:
        return None
    seen = 0
    for bucket in sorted(histogram):
        seen += histogram[bucket]
        if seen >= wanted:
            low = EDGES[bucket - 1] if bucket else 0.0
            high = EDGES[bucket] if bucket < len(EDGES) else EDGES[-1] * 2
            return high - (seen - wanted) / histogram[bucket] * (high - low)
    raise AssertionError("unreachable")


def mean(histogram: Histogram) -> float | None:
    """Return the mean of the durations, each taken as the middle of its bucket; None: no such."""
    number = sum(histogram.values())
    if not number:
        return None
    edges = (0.0, *EDGES, EDGES[-1] * 2)
    return sum((edges[b] + edges[b + 1]) / 2 * n for b, n in histogram.items()) / number


def bucket_of(seconds: float) -> int:
    """Return the number of the bucket that a duration falls into."""
    return bisect_left(EDGES, seconds)


def merged(parts: Iterable[Totals]) -> Totals:
    """Return the sum of what ended."""
    total = Totals()
    for part in parts:
        total.add(part)
    return total


def _totals(row: Summary) -> Totals:
    return Totals(
        numbers=Counter({column: getattr(row, column) for column in NUMBERS}),
        delays=Counter({int(b): n for b, n in _loaded(row.delays).items()}),
        runs=Counter({int(b): n for b, n in _loaded(row.runs).items()}),
    )


def _dumped(histogram: Histogram) -> str:
    histogram.pop(UNKNOWN, None)
    return json.dumps({str(bucket): histogram[bucket] for bucket in sorted(histogram)})


def _loaded(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


def _counted() -> Any:
    found = _all().filter(span=MINUTE, queue="", name="", counted=True)
    return found.order_by("-begin")


def _all() -> Any:
    return Summary._base_manager.using(lifecycle.alias())
