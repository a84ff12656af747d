"""
Which jobs a person means: the filters and the search of the admin, as conditions on rows.

A filter is a mapping of text to text, as it stands in an address: ``{"state": "DEAD", "q":
"order_id=7"}``. Lists and bulk operations read it alike. Text from an address is never trusted:
what can not match any row matches none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import UUID

from django.db import connections
from django.db.models import Case, Count, F, Min, Q, QuerySet, When
from django.db.models.functions import Coalesce

from dedupjobs import conf, lifecycle, registry
from dedupjobs.clock import DbNow
from dedupjobs.models import (
    WAITING,
    AttemptOutcome,
    Cause,
    DuplicateSample,
    ProcessedJob,
    Status,
)

Rows = QuerySet[ProcessedJob]

SEARCHED = 10_000  # rows, the newest ones, that a search for an argument's value reads
LARGEST_PK = 2**63 - 1
HOUR, WEEK = 3_600, 7 * 86_400
DIGEST = 64  # hex digits of a key's hash

AGES = {"1h": 3_600, "1d": 86_400, "7d": 7 * 86_400, "30d": 30 * 86_400}
"""How long ago a job was enqueued, at least; seconds."""


def matching(rows: Rows, given: Mapping[str, str], *, arguments: bool) -> Rows:
    """Return the rows that match all of a filter; ``arguments``: may their values be asked for."""
    for name, narrow in FILTERS.items():
        if value := given.get(name):
            rows = narrow(rows, value)
    if text := given.get("q", ""):
        rows = search(rows, text, arguments=arguments, since=primary_key(given.get("since", "")))
    return rows


def frozen(rows: Rows, given: Mapping[str, str]) -> dict[str, str]:
    """Return the filter with the bound that a search for an argument's value has now."""
    known = {name: given[name] for name in (*FILTERS, "q") if given.get(name)}
    if _argument(known.get("q", "")):
        unsearched = {name: value for name, value in known.items() if name != "q"}
        known["since"] = str(_since(matching(rows, unsearched, arguments=False)))
    return known


def clean(text: str) -> str | None:
    """Return the text if a database can compare with it: no NUL, no lone surrogate."""
    return None if "\x00" in text or any("\ud800" <= c <= "\udfff" for c in text) else text


# ---- filters


def _state(rows: Rows, value: str) -> Rows:
    return rows.filter(status=value) if value in Status.values else rows.none()


def _exactly(column: str) -> Callable[[Rows, str], Rows]:
    def narrow(rows: Rows, value: str) -> Rows:
        text = clean(value)
        return rows.none() if text is None else rows.filter(**{column: text})

    return narrow


def _age(rows: Rows, value: str) -> Rows:
    seconds = AGES.get(value)
    return rows.none() if seconds is None else rows.filter(enqueued_at__lt=_ago(seconds))


def _ago(seconds: float) -> datetime:
    """Return a moment by the database's clock; as a value, so that the planner can judge by it."""
    return lifecycle.database_now() - timedelta(seconds=seconds)


def _error(rows: Rows, value: str) -> Rows:
    text = clean(value)
    if text is None:
        return rows.none()
    # Python's own without their module, too: so people know them.
    spelled = [text] if "." in text else [text, f"builtins.{text}"]
    return rows.filter(error_class__in=spelled)


def _condition(rows: Rows, value: str) -> Rows:
    find = CONDITIONS.get(value)
    return rows.none() if find is None else find(rows)


def stuck(*, longer: float = 0) -> Any:
    """Return the open attempts whose lease has expired, more than ``longer`` seconds ago."""
    return lifecycle.attempts().filter(outcome=None, lease_until__lt=DbNow(-longer))


def silent() -> Any:
    """Return the open attempts that beat, but show no activity for their job's stall_after."""
    quiet = Q(pk__in=[])
    for job in registry.every():
        if job.options.stall_after is not None:
            quiet |= Q(job__name=job.name, last__lt=DbNow(-job.options.stall_after))
    open_ones = lifecycle.attempts().filter(outcome=None, lease_until__gte=DbNow())
    return open_ones.annotate(last=Coalesce("active_at", "began_at", "claimed_at")).filter(quiet)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """
    Rows of a queue that wait, and those of them that are due and were not set aside; ``oldest``:
    due since then.
    """

    waiting: int
    due: int
    oldest: datetime | None


def backlog(queue: str, *, most: int) -> Backlog:
    """Return what waits in a queue, counted to ``most``."""
    waiting = lifecycle.jobs().filter(queue=queue, status__in=WAITING)
    may_run = Q(dispatched_at=None) | Q(dispatched_at__lt=lifecycle.BEYOND)
    due = Case(When(may_run, run_after__lte=DbNow(steady=True), then=F("run_after")))
    rows = waiting.annotate(due=due)[:most]
    seen = rows.aggregate(all=Count("pk"), ready=Count("due"), oldest=Min("due"))
    return Backlog(waiting=seen["all"], due=seen["ready"], oldest=seen["oldest"])


def _of(attempts: Callable[[], Any]) -> Callable[[Rows], Rows]:
    return lambda rows: rows.filter(pk__in=attempts().values("job_id"))


def _lost() -> Any:
    return lifecycle.attempts().filter(outcome=AttemptOutcome.LOST, ended_at__gt=_ago(WEEK))


def _failed() -> Any:
    failures = (AttemptOutcome.FAILED, AttemptOutcome.TIMED_OUT, AttemptOutcome.LOST)
    return lifecycle.attempts().filter(outcome__in=failures, ended_at__gt=_ago(HOUR))


def _contended() -> Any:
    samples = DuplicateSample._base_manager.using(lifecycle.alias())
    return samples.filter(cause=Cause.RACE)


CONDITIONS: dict[str, Callable[[Rows], Rows]] = {
    "stuck": _of(stuck),
    "silent": _of(silent),
    "lost": _of(_lost),
    "duplicates": lambda rows: rows.filter(duplicates__gt=0),
    "failed": _of(_failed),
    "contended": _of(_contended),
}

FILTERS: dict[str, Callable[[Rows, str], Rows]] = {
    "state": _state,
    "condition": _condition,
    "queue": _exactly("queue"),
    "name": _exactly("name"),
    "scope": _exactly("scope"),
    "age": _age,
    "error": _error,
}


# ---- search


def search(rows: Rows, text: str, *, arguments: bool, since: int | None = None) -> Rows:
    """
    Return the rows whose key starts with ``text``, or is it, where it is "quoted"; or whose
    id, key hash or RQ id it is; or, for ``name=value``, those that have such an argument.
    """
    wanted = clean(text.strip())
    if not wanted:
        return rows.none() if text.strip() else rows
    if wanted[0] == wanted[-1] == '"' and len(wanted) > 1:
        return rows.filter(key=wanted[1:-1])
    found = _identity(wanted)
    if (argument := _argument(wanted)) and arguments and not is_redacted(argument[0]):
        behind = _since(rows) if since is None else since
        return rows.filter(found | (Q(pk__gt=behind) & _has_argument(*argument)))
    return rows.filter(found)


def is_argument(text: str) -> bool:
    """Return whether a search asks for an argument's value."""
    return _argument(text) is not None


def is_redacted(name: str) -> bool:
    """Return whether values of this name are shown to nobody."""
    return any(part.lower() in name.lower() for part in conf.get().REDACT)


def _identity(text: str) -> Q:
    found = starts_with(text) | Q(dispatch_id=text)
    if len(text) == DIGEST:
        found |= Q(key_hash=text)
    if (number := primary_key(text)) is not None:
        found |= Q(pk=number)
    return found


def starts_with(text: str) -> Q:
    """Return the condition that a key begins with ``text``, by its index."""
    prefix = Q(key__startswith=text)
    if connections[lifecycle.alias()].vendor == "sqlite":  # whose LIKE uses no index
        prefix &= Q(key__gte=text, key__lt=text + "\U0010ffff")
    return prefix


def primary_key(text: str) -> int | None:
    """Return the primary key that a text is, or None."""
    if not text.isascii() or not text.isdigit():
        return None
    return min(int(text[:19]), LARGEST_PK)


def _argument(text: str) -> tuple[str, str] | None:
    name, equals, value = text.strip().partition("=")
    return (name, value) if equals and name.isidentifier() else None


def _since(rows: Rows) -> int:
    """Return the primary key behind which the newest SEARCHED of these rows stand."""
    newest = rows.order_by("-pk").values_list("pk", flat=True)
    return next(iter(newest[SEARCHED : SEARCHED + 1]), 0)


def _has_argument(name: str, value: str) -> Q:
    found = Q()
    for spelled in _json_spellings(value):
        pair = f"{json.dumps(name)}:{spelled}"
        for end in ",}":
            found |= Q(args__contains=pair + end)
    return found


def _json_spellings(value: str) -> list[str]:
    """Return how a value of that text may stand in stored arguments."""
    found = [json.dumps(value)]
    if value in ("true", "false", "null"):
        found.append(value)
    try:
        number = Decimal(value)
    except InvalidOperation:
        pass
    else:
        found += [value, _tagged("decimal", value)] if number.is_finite() else []
    with suppress(ValueError):
        found.append(_tagged("uuid", UUID(value).hex))
    return found


def _tagged(kind: str, value: str) -> str:
    return json.dumps({"$": kind, "v": value}, separators=(",", ":"))
