"""
The rows of alerts: each is raised and cleared in turns by a guarded UPDATE, so that of any number
of coordinators one does it; what is to be told goes into the same transaction.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import F

from dedupjobs import conf, lifecycle, load, signals
from dedupjobs.alerts import rules
from dedupjobs.alerts.rules import Found
from dedupjobs.clock import DbNow
from dedupjobs.models import Alert, AlertNotice, Severity

MAIL, WEBHOOK = "mail", "webhook"
MOST_OPEN = 500  # rows that a reader looks at
MOST_NOTICES = 200  # that wait for one channel; beyond, the oldest go
KEPT = timedelta(days=30)  # since it was cleared

Key = tuple[str, str]
"""Kind and subject."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """An alert as it was raised or cleared. ``id``: the same only for the same event."""

    id: str
    event: str
    kind: str
    subject: str
    severity: str
    words: str
    cure: str
    times: int
    raised_at: datetime
    cleared_at: datetime | None

    @property
    def is_open(self) -> bool:
        return self.cleared_at is None

    def as_json(self) -> str:
        """Return it as a webhook gets it."""
        return json.dumps(asdict(self), default=datetime.isoformat)


def standing() -> list[Alert]:
    """
    Return the alerts that are open, the oldest first, as anybody may see them.

    That nobody coordinates is among them as soon as it shows in the table, whoever has said so:
    who would raise it is what is missing.
    """
    found = list(_open().order_by("raised_at", "pk")[:MOST_OPEN])
    raised = any(alert.kind == "no_coordinator" for alert in found)
    if not raised and (gap := absence()) is not None:
        found.insert(0, _row_of("no_coordinator", rules.missing(gap.age)))
    return found


def everything() -> list[Alert]:
    """Return all alerts that are remembered, what was raised last first."""
    return list(_rows().order_by("-raised_at", "-pk")[:MOST_OPEN])


@dataclass(frozen=True, slots=True)
class Gap:
    """That nobody looks. ``age``: seconds since somebody did; None: nobody ever has."""

    age: float | None


def absence() -> Gap | None:
    """Return the gap if no coordinator has looked within NO_COORDINATOR; None: one has, or OFF."""
    if "no_coordinator" in conf.alerts().OFF:
        return None
    seen = load.last()
    if seen is None:
        # Where nothing was ever enqueued there is nothing to coordinate.
        return Gap(None) if lifecycle.jobs().exists() else None
    age = load.age(seen)
    return Gap(age) if age > conf.alerts().NO_COORDINATOR else None


def _row_of(kind: str, found: Found) -> Alert:
    return Alert(
        kind=kind,
        subject=found.subject,
        severity=found.severity,
        words=found.words,
        cure=found.cure,
        is_open=True,
    )


def open_keys() -> dict[Key, int]:
    """Return the open alerts with their primary keys."""
    rows = _open().values_list("kind", "subject", "pk")[:MOST_OPEN]
    return {(kind, subject): pk for kind, subject, pk in rows}


def announce(kind: str, found: Found) -> bool:
    """Raise an alert and tell; False: it stands already."""
    subject = found.subject[:200]
    rows = _rows().filter(kind=kind, subject=subject)
    if not rows.exists():
        row = _row_of(kind, found)
        row.subject, row.is_open = subject, False
        _rows().bulk_create([row], ignore_conflicts=True)
    return _turn(
        rows.filter(is_open=False),
        is_open=True,
        times=F("times") + 1,
        raised_at=DbNow(),
        seen_at=DbNow(),
        cleared_at=None,
        severity=found.severity,
        words=found.words,
        cure=found.cure,
    )


def renew(pk: int, found: Found) -> None:
    """Note that an open alert was seen again, and as what."""
    _rows().filter(pk=pk, is_open=True).update(
        seen_at=DbNow(), words=found.words, cure=found.cure, severity=found.severity
    )


def clear(pk: int) -> bool:
    """Clear an alert and tell; False: somebody has."""
    return _turn(_rows().filter(pk=pk, is_open=True), is_open=False, cleared_at=DbNow())


def _turn(rows: Any, **sets: Any) -> bool:
    with transaction.atomic(using=lifecycle.alias()):
        pk = rows.values_list("pk", flat=True).first()
        if pk is None or not rows.filter(pk=pk).update(**sets):
            return False
        news = _news(_rows().get(pk=pk))
        for channel in channels():
            _put(channel, news)
    signals.tell(signals.alert_changed, news.kind, alert=news)
    return True


def _news(row: Alert) -> News:
    event = "raised" if row.is_open else "cleared"
    return News(
        id=f"{row.pk}:{row.times}:{event}",
        event=event,
        kind=row.kind,
        subject=row.subject,
        severity=str(Severity(row.severity)),
        words=row.words,
        cure=row.cure,
        times=row.times,
        raised_at=row.raised_at,
        cleared_at=row.cleared_at,
    )


# ---- what is to be delivered


def channels() -> Iterator[str]:
    """Yield the channels that the settings name."""
    told = conf.alerts()
    if told.MAIL and settings.ADMINS:
        yield MAIL
    if told.WEBHOOK is not None:
        yield WEBHOOK


def _put(channel: str, news: News) -> None:
    now = DbNow()
    notices(channel).create(channel=channel, body=news.as_json(), made_at=now, due_at=now)
    too_old = notices(channel).order_by("-pk").values_list("pk", flat=True)
    for pk in list(too_old[MOST_NOTICES : MOST_NOTICES + 1]):
        notices(channel).filter(pk__lte=pk).delete()


def notices(channel: str) -> Any:
    """Return the notices that wait for a channel."""
    return AlertNotice._base_manager.using(lifecycle.alias()).filter(channel=channel)


def forget() -> None:
    """Delete alerts that were cleared long ago."""
    _rows().filter(is_open=False, cleared_at__lt=DbNow(-KEPT)).delete()


def _open() -> Any:
    return _rows().filter(is_open=True)


def _rows() -> Any:
    return Alert._base_manager.using(lifecycle.alias())
