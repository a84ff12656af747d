"""How long it took from a fault until a job was at work again, by the database's stamps."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from dedupjobs.models import JobAttempt
from tests.faults.stage import Strike


def times(strikes: list[Strike], lines: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the seconds per kind: of each job, or of the first one where service was away."""
    claims: dict[int, list[float]] = defaultdict(list)
    for job, at in JobAttempt.objects.order_by("claimed_at").values_list("job_id", "claimed_at"):
        claims[job].append(at.timestamp())
    found: dict[str, list[float]] = defaultdict(list)
    for strike in strikes:
        again = [_next(claims[job], strike.since) for job in strike.jobs]
        seconds = [moment - strike.since for moment in again if moment is not None]
        found[strike.kind] += sorted(seconds)[:1] if strike.first else seconds
    for line in lines:
        if line["what"] == "strike" and line["job"] is not None:
            moment = _next(claims[line["job"]], line["at"])
            if moment is not None:
                found[name_of(line)].append(moment - line["at"])
    return found


def name_of(line: dict[str, Any]) -> str:
    """Return the kind of a strike at a probe."""
    return f"{line['role']}: {line['action']}"


def _next(moments: list[float], since: float) -> float | None:
    return next((moment for moment in moments if moment > since), None)
