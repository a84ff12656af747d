"""What is wrong with the system as a whole, in plain words, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from dedupjobs import conf
from dedupjobs.admin.period import Period
from dedupjobs.admin.tiles import Now, bounded
from dedupjobs.census import Problem
from dedupjobs.fleet import Fleet
from dedupjobs.models import Status
from dedupjobs.story.spoken import span
from dedupjobs.summaries import MINUTE, Point

PATIENCE = 3  # rounds of summaries that may be missing before the numbers are called old
GRACE = 15.0  # seconds
MEMORY_SHARE = 0.9  # of a limit that Redis may use before a banner says so


@dataclass(frozen=True, slots=True, kw_only=True)
class Banner:
    """Something that is wrong, and what to do about it."""

    level: str
    words: str
    cure: str = ""


def banners(now: Now, seen: Fleet, newest: datetime | None, period: Period) -> list[Banner]:
    found = [
        _unreachable(server.address, server.trouble) for server in seen.servers if server.trouble
    ]
    if seen.leader_trouble:
        if not seen.lock_troubles:  # which say it
            found.append(_unreachable(_("of the locks"), seen.leader_trouble))
    elif seen.leader is None:
        found.append(
            Banner(
                level="bad",
                words=_("No coordinator runs: retries, due jobs and lost workers are left lying."),
                cure=_("Start a DedupWorker: each one has a coordinator."),
            )
        )
    found += [_among_lock_servers(problem) for problem in seen.lock_troubles]
    found += _too_full(seen)
    if not found and not seen.workers:
        words, cure = _("No worker runs: jobs wait."), _("Start one: manage.py rqworker default")
        found.append(Banner(level="warn", words=words, cure=cure))
    elif not found:
        found += _unattended(seen, period)
    if newest is not None and (age := _age_of_numbers(now, newest)) is not None:
        words = _("The charts are old: they end %(span)s ago.") % {"span": span(age)}
        found.append(Banner(level="warn", words=words, cure=_("A coordinator brings them on.")))
    return found


def _unreachable(what: str, trouble: str) -> Banner:
    words = _("Redis %(what)s can not be asked: %(trouble)s")
    return Banner(
        level="bad",
        words=words % {"what": what, "trouble": trouble},
        cure=_("No job is lost: the rows stand in the database, and are handed over again."),
    )


def _among_lock_servers(problem: Problem) -> Banner:
    # In English, as checks and the doctor have it, so that it can be searched for.
    return Banner(
        level="bad" if problem.is_fatal else "warn", words=problem.words, cure=problem.cure
    )


def _too_full(seen: Fleet) -> list[Banner]:
    words, cure = _("Redis %(what)s is nearly full."), _("Raise maxmemory, or find what fills it.")
    return [
        Banner(level="warn", words=words % {"what": server.address}, cure=cure)
        for server in seen.servers
        if server.limit and server.used > MEMORY_SHARE * server.limit
    ]


def _unattended(seen: Fleet, period: Period) -> list[Banner]:
    """Name the queues in which jobs wait and no worker listens."""
    attended = {queue for worker in seen.workers for queue in worker.queues}
    newest: dict[str, Point] = {p.queue: p for p in period.points if p.queue and p.gauges}
    waiting = {queue for queue, point in newest.items() if point.gauges.get(Status.PENDING)}
    words = _("Jobs wait where no worker listens: %(queues)s.")
    cure = _("Start a worker for these queues.")
    left = ", ".join(sorted(waiting - attended))
    return [Banner(level="warn", words=words % {"queues": left}, cure=cure)] if left else []


def _age_of_numbers(now: Now, newest: datetime) -> float | None:
    age = (now.at - newest).total_seconds() - MINUTE
    return age if age > PATIENCE * conf.get().SUMMARISE_EVERY + GRACE else None


def worst(now: Now, found: Sequence[Banner]) -> str:
    """Return how bad it is: good, warn or bad."""
    levels = {banner.level for banner in found}
    if "bad" in levels or now.stuck:
        return "bad"
    people = now.by_status[Status.DEAD] or now.by_status[Status.HELD] or now.silent
    return "warn" if "warn" in levels or people else "good"


def headline(level: str, now: Now, seen: Sequence[Banner], alerts: Sequence[Banner]) -> str:
    """Return the one line above all: the worst of what is seen and alerted, and who is needed."""
    if level == "good":
        return _("All is well.")
    people = sum(now.by_status[status] for status in (Status.DEAD, Status.HELD)) + now.silent
    words = ngettext("%(n)s job needs a person.", "%(n)s jobs need a person.", people)
    said = [_worst_words(now, seen, alerts), words % {"n": bounded(people)} if people else ""]
    return " ".join(filter(None, said)) or _("It runs, but not as it should.")


def _worst_words(now: Now, seen: Sequence[Banner], alerts: Sequence[Banner]) -> str:
    if now.stuck:
        words = ngettext("%(n)s job is stuck.", "%(n)s jobs are stuck.", now.stuck)
        return words % {"n": bounded(now.stuck)}
    if any(banner.level == "bad" for banner in seen):
        return _("Something is down.")
    critical = sum(alert.level == "bad" for alert in alerts)
    words = ngettext("%(n)s critical alert is open.", "%(n)s critical alerts are open.", critical)
    return words % {"n": critical} if critical else ""
