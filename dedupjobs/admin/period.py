"""The last hour or day, as the summaries tell it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from dedupjobs import summaries
from dedupjobs.summaries import HOUR, MINUTE, Point, Totals

SPANS: dict[str, tuple[int, int]] = {"hour": (MINUTE, 60), "day": (HOUR, 24)}
"""By name: the seconds of a point, and how many points."""


@dataclass(slots=True, kw_only=True)
class Period:
    """
    The points of a span by moment. ``duplicates``: by moment and cause. ``seen``: what stood
    there each time that somebody looked, beginning with the last time before the span.
    """

    name: str
    moments: Sequence[datetime]
    points: Sequence[Point]
    duplicates: dict[datetime, dict[str, int]] = field(default_factory=dict)
    seen: Sequence[dict[str, Any]] = ()

    def measure_duplicates(self, totals: Sequence[Point]) -> None:
        """Take the differences of the counts so far, each at the later one's moment."""
        known = [p for p in totals if "duplicates" in p.gauges]
        for before, after in pairwise(known):
            old, new = before.gauges["duplicates"], after.gauges["duplicates"]
            self.duplicates[after.begin] = {
                cause: max(number - old.get(cause, 0), 0) for cause, number in new.items()
            }

    def grown(self, what: str) -> Counter[str] | None:
        """
        Return by how much the counts of Redis have grown in all of it; None: nobody compared two.

        One that has become less began anew, with the Redis.
        """
        known = [seen[what] for seen in self.seen if what in seen]
        found: Counter[str] = Counter()
        for old, new in pairwise(known):
            for name, number in new.items():
                found[name] += number - old.get(name, 0) if number >= old.get(name, 0) else number
        return found if len(known) > 1 else None

    def of(self, queue: str = "") -> dict[datetime, Point]:
        """Return the points of a queue, or of all, by moment."""
        return {p.begin: p for p in self.points if p.queue == queue}

    @property
    def total(self) -> Totals:
        """What ended in all of it."""
        return summaries.merged(p.totals for p in self.points if not p.queue)

    @property
    def by_cause(self) -> Counter[str]:
        """How many duplicates were turned away in all of it."""
        found: Counter[str] = Counter()
        for counts in self.duplicates.values():
            found.update(counts)
        return found

    @property
    def measured(self) -> dict[str, Any]:
        """What stood there when somebody measured last; {} if nobody did."""
        found = (p.gauges for p in reversed(self.points) if p.gauges and not p.queue)
        return next(found, {})


def read(name: str, now: datetime) -> Period:
    """Read the span of that name, up to now."""
    size, number = SPANS[name]
    first = summaries.floor(now, size) - timedelta(seconds=size * (number - 1))
    # One point more, since duplicates are told by differences.
    points = summaries.points(size, first - timedelta(seconds=size))
    found = Period(
        name=name,
        moments=[first + timedelta(seconds=size * i) for i in range(number)],
        points=[point for point in points if point.begin >= first],
        seen=[point.gauges for point in points if point.gauges and not point.queue],
    )
    found.measure_duplicates([point for point in points if not point.queue])
    return found
