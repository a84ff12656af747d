"""The steps of a job, as people see them: which are done, and which are in doubt."""

from __future__ import annotations

from dataclasses import dataclass

from django.utils.translation import gettext as _

from dedupjobs import lifecycle
from dedupjobs.models import JobAttempt, JobStep, ProcessedJob, StepState

MOST_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A step. ``in_doubt``: begun by an attempt that has ended, and its end is not known."""

    step: JobStep
    in_doubt: bool

    @property
    def words(self) -> str:
        """Its state."""
        return _("in doubt") if self.in_doubt else str(self.step.get_state_display())

    @property
    def took(self) -> float | None:
        """Seconds."""
        end = self.step.ended_at
        return None if end is None else (end - self.step.started_at).total_seconds()


def steps_of(row: ProcessedJob, newest: JobAttempt | None) -> list[Seen]:
    """Return the newest steps of a row, oldest first; ``newest``: its newest attempt."""
    found = list(lifecycle.steps().filter(job_id=row.pk).order_by("-pk")[:MOST_STEPS])
    at_work = newest.pk if newest is not None and newest.outcome is None else None
    return [
        Seen(step=step, in_doubt=step.state == StepState.STARTED and step.fence != at_work)
        for step in reversed(found)
    ]
