"""
Enqueueing jobs by the clock: one row per slot, whatever the number of coordinators.

The slot stands in the key, so a slot that two coordinators enqueue is one row. ``catch_up`` says
what becomes of slots that passed while no coordinator ran: the "latest" one runs, all are
"skip"ped, or "all" run. A job that never ran starts with its next slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, tzinfo
from itertools import islice, takewhile
from typing import Any

from django.db import DatabaseError
from django.utils import timezone

from dedupjobs import client, keys, lifecycle, registry, signals, slots
from dedupjobs.models import WAITING
from dedupjobs.registry import Job, Variant

ON_TIME = timedelta(seconds=15)  # a slot younger than this was not missed
MOST = 500  # slots that one tick enqueues for one job; the next tick goes on
LOOK = 50  # newest rows of a job that are asked for the newest slot


@dataclass(slots=True)
class Schedule:
    """Remembers the newest slot that this process has dealt with, and the next one, by job."""

    _done: dict[str, datetime] = field(default_factory=dict)
    _next: dict[str, datetime] = field(default_factory=dict)

    def tick(self, now: datetime) -> int:
        """Enqueue what is due at ``now``, the database's moment; return how many rows that made."""
        return sum(self._tick(job, now) for job in registry.every() if job.options.scheduled)

    def _tick(self, job: Job[..., Any], now: datetime) -> int:
        made = 0
        if now < self._next.get(job.name, now):
            return made  # the calendar is asked once a slot, not once a tick
        try:
            for slot in self._due(job, now):
                made += _enqueue(job, slot)
                self._done[job.name] = slot  # only now: a slot whose INSERT failed is due again
            newest = slots.last(now, **rule(job))
            if job.options.catch_up != "all":
                self._done[job.name] = max(newest, self._done[job.name])
            if self._done[job.name] >= newest:  # else a long pause goes on at the next tick
                self._next[job.name] = next(slots.after(now, **rule(job)))
        except DatabaseError:
            raise
        except Exception as error:  # one job's mistake stops no other
            signals.tell(signals.coordinator_failed, job.name, error=error)
        return made

    def _due(self, job: Job[..., Any], now: datetime) -> list[datetime]:
        newest = slots.last(now, **rule(job))
        done = self._done.setdefault(job.name, _newest_enqueued(job, now) or newest)
        if newest <= done:
            return []
        # Another coordinator may have led meanwhile.
        done = max(done, _newest_enqueued(job, now) or done)
        if job.options.catch_up == "skip":
            done = max(done, now - ON_TIME)
        missed = takewhile(lambda slot: slot <= newest, slots.after(done, **rule(job)))
        if job.options.catch_up == "latest":
            return [newest] if newest > done else []
        return list(islice(missed, MOST))


def _enqueue(job: Job[..., Any], slot: datetime) -> bool:
    waiting = lifecycle.jobs().filter(name=job.name, status__in=WAITING)
    if job.options.catch_up != "all" and waiting.exists():
        signals.tell(signals.slot_skipped, job.name, slot=slot)
        return False
    return client.enqueue(Variant(job=job), (), {"slot": slot}, refuses=False).created


def rule(job: Job[..., Any]) -> dict[str, Any]:
    """Return when the job is due, as ``slots`` takes it; cron is read in TIME_ZONE."""
    zone: tzinfo = timezone.get_default_timezone()
    return {"every": job.options.every, "cron": job.options.cron, "zone": zone}


def upcoming(job: Job[..., Any], now: datetime, count: int) -> Iterator[datetime]:
    """Yield the job's next ``count`` slots."""
    for _, slot in zip(range(count), slots.after(now, **rule(job)), strict=False):
        yield slot


def _newest_enqueued(job: Job[..., Any], now: datetime) -> datetime | None:
    """
    Return the newest slot up to ``now`` among the job's newest rows, or None if there is none.

    Not the newest row's: a person may have enqueued an old slot again, or one to come.
    """
    rows = lifecycle.jobs().filter(name=job.name).exclude(args="").order_by("-pk")
    found = (keys.decode(args).get("slot") for args in rows.values_list("args", flat=True)[:LOOK])
    past = [slot for slot in found if isinstance(slot, datetime) and slot <= now]
    return max(past, default=None)
