"""
What people may do here, in one table: which permission each action asks for, and its words.

An action changes jobs by its arrow; a heal mends what has drifted from one row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.core import signing
from django.db import DatabaseError, transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from redis.exceptions import RedisError

from dedupjobs import bulk, clock, journal, lifecycle, operations
from dedupjobs.exceptions import StaleVersion, UnknownQueue
from dedupjobs.journal import Entry
from dedupjobs.models import ProcessedJob

SALT = "dedupjobs.admin.seen"
DIGITS = 19  # fewer than these fit into 64 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """``danger``: can not be undone. ``heals``: is about one row's drift, not about many rows."""

    name: str
    permission: str
    label: Any
    help: Any
    danger: bool = False
    heals: bool = False

    @property
    def slug(self) -> str:
        """The name as it stands in an address or as a method's name."""
        return self.name.replace(" ", "_")


DEEDS: dict[str, Deed] = {
    deed.name: deed
    for deed in (
        Deed(
            name="retry",
            permission="retry",
            label=gettext_lazy("Retry"),
            help=gettext_lazy(
                "Runs it now, in the same generation and with fresh budgets. Effects of earlier "
                "attempts may have happened; the idempotency key stays the same."
            ),
        ),
        Deed(
            name="cancel",
            permission="cancel",
            label=gettext_lazy("Cancel"),
            help=gettext_lazy(
                "A waiting or held job ends at once and its key is free. A running one is asked "
                "to stop. A waiting rerun is dropped."
            ),
            danger=True,
        ),
        Deed(
            name="hold",
            permission="hold",
            label=gettext_lazy("Hold"),
            help=gettext_lazy("It does not run until somebody unholds it; a running one stops."),
        ),
        Deed(
            name="unhold",
            permission="hold",
            label=gettext_lazy("Unhold"),
            help=gettext_lazy("It runs now, with fresh budgets."),
        ),
        Deed(
            name="limit",
            permission="retry",
            label=gettext_lazy("Raise the attempt limit"),
            help=gettext_lazy(
                "How often it may fail before it is dead, instead of what the job says. A dead "
                "one stays dead until it is retried."
            ),
        ),
        Deed(
            name="free lock",
            permission="free",
            label=gettext_lazy("Free an orphaned lock"),
            help=gettext_lazy("Removes a lock in Redis that no attempt at work has."),
        ),
        Deed(
            name="purge",
            permission="purge",
            label=gettext_lazy("Purge"),
            help=gettext_lazy(
                "Removes a final job and its attempts for good. While its key is held, an empty "
                "row stays."
            ),
            danger=True,
        ),
        Deed(
            name="reclaim",
            permission="retry",
            label=gettext_lazy("Take the job from a lost worker"),
            help=gettext_lazy(
                "Ends the attempt as lost, as the coordinator would; the job goes on as it says."
            ),
            heals=True,
        ),
        Deed(
            name="send again",
            permission="retry",
            label=gettext_lazy("Send the message again"),
            help=gettext_lazy("Hands the row over under a new RQ id."),
            heals=True,
        ),
        Deed(
            name="put back",
            permission="free",
            label=gettext_lazy("Put the lock back"),
            help=gettext_lazy(
                "Gives the lock to the attempt that runs, for the rest of its lease."
            ),
            heals=True,
        ),
        Deed(
            name="forget",
            permission="free",
            label=gettext_lazy("Remove what RQ keeps"),
            help=gettext_lazy("Removes the message from RQ's lists and registries."),
            heals=True,
        ),
        Deed(
            name="uncache",
            permission="free",
            label=gettext_lazy("Forget what the cache says"),
            help=gettext_lazy("Removes the entry of the status cache and tells all processes."),
            heals=True,
        ),
    )
}
ACTIONS = tuple(deed for deed in DEEDS.values() if not deed.heals)

assert {deed.name: deed.permission for deed in ACTIONS} == bulk.PERMISSIONS  # noqa: S101


@dataclass(frozen=True, slots=True, kw_only=True)
class AsSeen:
    """A row as somebody looked at it."""

    pk: int
    version: int
    status: str

    @classmethod
    def of(cls, row: ProcessedJob) -> AsSeen:
        return cls(pk=row.pk, version=row.version, status=row.status)

    @classmethod
    def parsed(cls, text: str) -> AsSeen | None:
        """Return what ``str()`` wrote into a form, or None: nobody of us wrote that."""
        pk, _colon, rest = text.partition(":")
        version, _colon, status = rest.partition(":")
        fits = all(n.isascii() and n.isdigit() and len(n) < DIGITS for n in (pk, version))
        return cls(pk=int(pk), version=int(version), status=status[:10]) if fits else None

    def __str__(self) -> str:
        return f"{self.pk}:{self.version}:{self.status}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a person has confirmed. ``seen``: the signed beat that they looked at."""

    deed: Deed
    by: str
    user_pk: Any
    reason: str
    limit: int | None = None
    seen: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What became of one row."""

    changed: bool
    words: str
    gone: bool = False


def do(wish: Wish, seen: AsSeen) -> Done:
    """Do it to one row if it is still as it was seen, and log who did what and why."""
    row = lifecycle.jobs().filter(pk=seen.pk).first()
    if row is None:
        return Done(changed=False, words=_("Row %(pk)s is gone.") % {"pk": seen.pk})
    row.version, row.status = seen.version, seen.status
    try:
        with transaction.atomic(using=lifecycle.alias()):
            after = _act(wish, row)
            gone = after == GONE
            line = journal.line(wish.deed.name, seen.status, after, wish.reason)
            journal.write(wish.user_pk, [Entry(row=row, words=line, gone=gone)])
    except (StaleVersion, RedisError, UnknownQueue, DatabaseError, OSError) as error:
        return Done(changed=False, words=str(error))
    words = _("%(action)s: %(row)s") % {"action": wish.deed.label, "row": row}
    return Done(changed=True, words=words, gone=gone)


GONE = "gone"


def _act(wish: Wish, row: ProcessedJob) -> str:
    who: dict[str, Any] = {"by": wish.by, "reason": wish.reason}
    if wish.deed.name in _SIMPLE:
        return str(_SIMPLE[wish.deed.name](row, **who))
    if wish.deed.name == "limit":
        return str(operations.limit(row, limit=wish.limit or 0, **who))
    if wish.deed.name == "purge":
        return GONE if operations.purge(row, **who) else row.status
    if wish.deed.name == "reclaim":
        beat_at, still = watched(row.pk, wish.seen)
        return str(operations.reclaim(row, seen=beat_at, still=still, **who))
    owner = operations.orphans([row]).get(row.pk)
    if owner is None:
        words = _("row %(pk)s has no orphaned lock; look again")
        raise StaleVersion(words % {"pk": row.pk})
    return str(operations.free(row, owner=owner, **who))


_SIMPLE: dict[str, Callable[..., Any]] = {
    "retry": operations.retry,
    "cancel": operations.cancel,
    "hold": operations.hold,
    "unhold": operations.unhold,
    "send again": operations.send_again,
    "put back": operations.put_back,
    "forget": operations.forget,
    "uncache": operations.uncache,
}


# ---- the second witness of a reclaim


def watch(pk: int, beat_at: datetime) -> str:
    """Return a signed note that this beat was seen now, by this machine's clock."""
    return signing.dumps([pk, beat_at.isoformat(), clock.utcnow().isoformat()], salt=SALT)


def watched(pk: int, note: str) -> tuple[datetime, float]:
    """Return the beat of such a note and for how many seconds it has been watched."""
    try:
        noted, beat_at, at = signing.loads(note, salt=SALT)
    except signing.BadSignature:
        noted = None
    if noted != pk:
        words = _("reclaim: row %(pk)s was not looked at; look again")
        raise StaleVersion(words % {"pk": pk})
    still = clock.utcnow() - datetime.fromisoformat(at)
    return datetime.fromisoformat(beat_at), still.total_seconds()
