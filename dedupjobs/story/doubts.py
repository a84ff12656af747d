"""What may have run twice: attempts that were given up while their effects may have happened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Exists, OuterRef, Q

from dedupjobs import lifecycle
from dedupjobs.models import AttemptOutcome

DOUBTFUL = (AttemptOutcome.LOST, AttemptOutcome.TIMED_OUT)
# Only what somebody else has ended can end once more; successes are left out, being many.
GIVEN_UP = tuple(set(AttemptOutcome) - {AttemptOutcome.SUCCEEDED, AttemptOutcome.FAILED})
PAGE = 500
COLUMNS = ("ended_at", "job", "key", "scope", "row", "attempt", "fence", "outcome", "late_ending",
           "succeeded_in", "host", "why")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """An attempt whose effects may have come beside another's."""

    ended_at: datetime
    job: str
    key: str
    scope: str
    row: int
    attempt: int
    fence: int
    outcome: str
    late_ending: str
    succeeded_in: int | None
    host: str

    @property
    def words(self) -> str:
        gone = f"{self.outcome} on {self.host or 'an unknown host'}"
        late = f", and yet it ended as {self.late_ending}" if self.late_ending else ""
        then = f"; attempt {self.succeeded_in} succeeded" if self.succeeded_in else ""
        return f"{gone}{late}{then}"

    def as_dict(self) -> dict[str, Any]:
        """Return it by COLUMNS, as JSON takes it."""
        values = {name: getattr(self, name) for name in COLUMNS[:-1]}
        return {**values, "ended_at": self.ended_at.isoformat(), "why": self.words}


def since(moment: datetime, *, name: str | None, most: int) -> Iterator[Doubt]:
    """Yield the doubts that ended since, oldest first, a page at a time; ``name``: of one job."""
    later = lifecycle.attempts().filter(
        job_id=OuterRef("job_id"), number__gt=OuterRef("number"), outcome=AttemptOutcome.SUCCEEDED
    )
    rows = lifecycle.attempts().filter(outcome__in=GIVEN_UP, ended_at__gte=moment)
    if name is not None:
        rows = rows.filter(job__name=name)
    twice = Q(outcome__in=DOUBTFUL) & Exists(later)
    rows = rows.filter(twice | ~Q(late_ending="")).select_related("job")
    fields = ("number", "outcome", "late_ending", "ended_at", "host", "job__name", "job__key")
    rows = rows.only(*fields, "job__scope").order_by("pk")
    last, left = 0, most
    while left > 0:
        page = list(rows.filter(pk__gt=last)[: min(PAGE, left)])
        succeeded = _successes(page)
        for attempt in page:
            yield _doubt(attempt, succeeded.get(attempt.job_id, []))
        if len(page) < PAGE:
            return
        last, left = page[-1].pk, left - len(page)


def _successes(page: list[Any]) -> dict[int, list[int]]:
    ids = {attempt.job_id for attempt in page}
    won = lifecycle.attempts().filter(job_id__in=ids, outcome=AttemptOutcome.SUCCEEDED)
    found: dict[int, list[int]] = {}
    for job, number in won.order_by("number").values_list("job_id", "number"):
        found.setdefault(job, []).append(number)
    return found


def _doubt(attempt: Any, successes: list[int]) -> Doubt:
    return Doubt(
        ended_at=attempt.ended_at,
        job=attempt.job.name,
        key=attempt.job.key,
        scope=attempt.job.scope,
        row=attempt.job_id,
        attempt=attempt.number,
        fence=attempt.pk,
        outcome=attempt.outcome,
        late_ending=attempt.late_ending,
        succeeded_in=next((n for n in successes if n > attempt.number), None),
        host=attempt.host,
    )
