"""
The truth screen: what the rows, the lock, the status cache and RQ say about one job, side by
side. The row decides; where another one says something else it has drifted, and has a button.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from django.utils.translation import gettext as _
from redis.exceptions import RedisError

from dedupjobs import cache, conf, dispatch, lifecycle, locks, registry
from dedupjobs.cache import Stored
from dedupjobs.dispatch import Trace
from dedupjobs.exceptions import UnknownQueue
from dedupjobs.locks import Seen
from dedupjobs.models import WAITING, JobAttempt, ProcessedJob, Status
from dedupjobs.story.spoken import span
from dedupjobs.wire import UNREACHABLE

GRACE = 2.0  # seconds in which two stores may say different things, since one is read first


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One line of a column. ``at``: a moment that is shown in the reader's time zone."""

    label: str
    value: str = ""
    at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """What one store says; ``trouble``: why it could not be asked."""

    title: str
    facts: tuple[Fact, ...] = ()
    trouble: str = ""
    drifted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A difference from the row. ``heal``: the operation that mends it, or "" if none does."""

    store: str
    words: str
    heal: str = ""
    label: str = ""
    harmless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """All of it, as of ``now`` by the database's clock."""

    columns: tuple[Column, ...]
    drifts: tuple[Drift, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """What was read: a value, None for nothing there, or the error that kept it from us."""

    lock: Seen | Exception | None
    message: Trace | Exception | None
    entry: Stored | Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the tables say. ``newest``: the newest attempt."""

    row: ProcessedJob
    newest: JobAttempt | None
    now: datetime
    resend_after: float = field(default_factory=lambda: conf.get().RESEND_AFTER)

    @property
    def open_one(self) -> JobAttempt | None:
        return self.newest if self.newest and self.newest.outcome is None else None

    @property
    def expired(self) -> bool:
        return self.open_one is not None and self.open_one.lease_until < self.now

    @property
    def waits(self) -> bool:
        return self.row.status in WAITING

    @property
    def due(self) -> bool:
        return self.waits and self.row.run_after <= self.now

    def since(self, at: datetime) -> float:
        return (self.now - at).total_seconds()


def look(known: Known) -> Truth:
    """Read the stores and compare them; never raises because one can not be reached."""
    stores = read(known.row)
    return compare(known, stores)


def read(row: ProcessedJob) -> Stores:
    """Ask Redis, at a bounded cost in time."""

    def message() -> Trace | None:
        return dispatch.trace(row.queue, row.dispatch_id) if row.dispatch_id else None

    return Stores(
        lock=_asked(lambda: locks.seen([row.pk]).get(row.pk)),
        message=_asked(message),
        entry=_asked(lambda: cache.stored(row.key_hash)) if cache.is_on() else None,
    )


def _asked(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except (*UNREACHABLE, RedisError, UnknownQueue) as error:
        return error


def compare(known: Known, stores: Stores) -> Truth:
    """Return all columns and what differs from the row."""
    drifts = (
        *_in_rows(known),
        *_in_lock(known, stores.lock),
        *_in_message(known, stores.message),
        *_in_cache(known, stores.entry),
    )
    drifted = {drift.store for drift in drifts if not drift.harmless}
    columns = (
        Column(title=_("Rows"), facts=_row_facts(known), drifted="rows" in drifted),
        _column(_("Redis lock"), stores.lock, partial(_lock_facts, known.row), "lock" in drifted),
        _column(_("Status cache"), stores.entry, _entry_facts, "cache" in drifted),
        _column(_("RQ"), stores.message, _message_facts, "rq" in drifted),
    )
    return Truth(columns=columns, drifts=drifts)


# ---- differences


def _in_rows(known: Known) -> Iterator[Drift]:
    if known.row.status == Status.RUNNING and known.open_one is None:
        yield Drift(store="rows", words=_("The row says running, but no attempt is open."))
    if known.expired and known.open_one is not None:
        words = _("The lease of attempt %(number)s expired %(ago)s ago: its worker is gone.")
        ago = span(known.since(known.open_one.lease_until))
        yield Drift(
            store="rows",
            words=words % {"number": known.open_one.number, "ago": ago},
            heal="reclaim",
            label=_("Take the job from it"),
        )
    if known.due and known.row.dispatched_at is None:
        late = known.since(known.row.run_after)
        if late > max(10 * conf.get().TICK, GRACE):
            words = _("Due for %(ago)s, and nobody has handed it over: no coordinator runs.")
            yield Drift(
                store="rows",
                words=words % {"ago": span(late)},
                heal="send again",
                label=_("Hand it over now"),
            )


def _in_lock(known: Known, lock: Seen | Exception | None) -> Iterator[Drift]:
    if isinstance(lock, Exception):
        return
    if lock is None:
        yield from _without_lock(known)
        return
    holder = known.open_one or _keeps_lock(known)
    if holder is not None and holder.owner == lock.owner:
        return
    if known.open_one is not None:
        yield Drift(
            store="lock",
            words=_("The lock belongs to %(owner)s, but attempt %(number)s runs by the row.")
            % {"owner": lock.owner, "number": known.open_one.number},
            heal="free lock" if known.expired else "put back",
            label=_("Free the lock") if known.expired else _("Give it to the attempt"),
        )
        return
    yield Drift(
        store="lock",
        words=_("An orphan: %(owner)s holds the lock, and no attempt of that name is at work.")
        % {"owner": lock.owner},
        heal="free lock",
        label=_("Free the lock"),
    )


def _without_lock(known: Known) -> Iterator[Drift]:
    if known.open_one is None or known.expired or not _takes_lock(known.row):
        return
    yield Drift(
        store="lock",
        words=_("Attempt %(number)s runs without its lock. Harmless: the row decides.")
        % {"number": known.open_one.number},
        heal="put back",
        label=_("Put the lock back"),
        harmless=True,
    )


def _takes_lock(row: ProcessedJob) -> bool:
    return registry.options_of(row.name).takes_lock


def _keeps_lock(known: Known) -> JobAttempt | None:
    """After a failure the lock stays until the retry is due."""
    return known.newest if known.row.status == Status.RETRYING and not known.due else None


def _in_message(known: Known, message: Trace | Exception | None) -> Iterator[Drift]:
    if not isinstance(message, Trace):
        return
    if known.waits:
        yield from _of_waiting(known, message)
    elif message.place is not None:
        yield _leftover(_("Its message still stands in the queue; a worker would drop it."))
    elif message.leftover:
        yield _leftover(_("RQ's registries name its message, which has no hash any more."))
    elif "failed" in message.registries:
        yield _leftover(_("RQ counts its message as failed; the row has gone on by itself."))


def _of_waiting(known: Known, message: Trace) -> Iterator[Drift]:
    sent = known.row.dispatched_at
    if lifecycle.is_aside(known.row):
        return
    if not known.due or sent is None or (message.alive and message.status is not None):
        return
    if known.since(sent) <= GRACE:
        return
    words = _("Its message is lost: it is in no queue and in no worker's hands.")
    if message.alive:
        words = _("Its message has no hash any more: a worker would pass it over.")
    yield Drift(store="rq", words=words, heal="send again", label=_("Send it again"))


def _leftover(words: str) -> Drift:
    return Drift(store="rq", words=words, heal="forget", label=_("Remove what RQ keeps"))


# ---- columns


def _in_cache(known: Known, entry: Any) -> Iterator[Drift]:
    if not isinstance(entry, Stored):
        return
    if entry.version < known.row.version or known.row.status != Status.SUCCEEDED:
        words = _(
            "The cache knows version %(version)s as a success, the row has version %(row)s: "
            "readers may believe the old one until it ends."
        )
        facts = {"version": entry.version, "row": known.row.version}
        label = _("Forget what the cache says")
        yield Drift(store="cache", words=words % facts, heal="uncache", label=label)


def _column(
    title: str, found: Any, facts: Callable[[Any], tuple[Fact, ...]], drifted: bool
) -> Column:
    if isinstance(found, Exception):
        trouble = _("can not be asked: %(error)s") % {"error": f"{type(found).__name__}: {found}"}
        return Column(title=title, trouble=trouble)
    return Column(title=title, facts=facts(found), drifted=drifted)


def _handed_over(row: ProcessedJob) -> Fact:
    if lifecycle.is_aside(row):
        return Fact(label=_("handed over"), value=_("not yet: set aside"))
    return Fact(label=_("handed over"), at=row.dispatched_at, value="–")


def _row_facts(known: Known) -> tuple[Fact, ...]:
    row, open_one = known.row, known.open_one
    facts = [
        Fact(label=_("status"), value=str(row.get_status_display())),
        Fact(label=_("version"), value=str(row.version)),
        Fact(label=_("generation"), value=str(row.generation)),
        Fact(label=_("not before"), at=row.run_after),
        _handed_over(row),
    ]
    if open_one is not None:
        facts += [
            Fact(label=_("owner"), value=open_one.owner),
            Fact(label=_("leased until"), at=open_one.lease_until),
            Fact(label=_("last beat"), at=open_one.beat_at),
        ]
    return tuple(facts)


def _lock_facts(row: ProcessedJob, lock: Seen | None) -> tuple[Fact, ...]:
    if lock is None and not _takes_lock(row):
        return (Fact(label=_("owner"), value=_("none is taken (optimistic)")),)
    if lock is None:
        return (Fact(label=_("owner"), value=_("free")),)
    ttl = _("none: it never ends") if lock.ttl is None else span(lock.ttl)
    return (Fact(label=_("owner"), value=lock.owner), Fact(label=_("ends in"), value=ttl))


def _entry_facts(entry: Stored | None) -> tuple[Fact, ...]:
    if entry is None:
        return (Fact(label=_("version"), value=_("none")),)
    version = Fact(label=_("version"), value=str(entry.version))
    return (version, Fact(label=_("ends in"), value=span(entry.ttl)))


def _message_facts(message: Trace | None) -> tuple[Fact, ...]:
    if message is None:
        return (Fact(label=_("message"), value=_("none")),)
    place = "–"
    if message.place is not None:
        place = _("%(place)s of %(length)s") % {
            "place": message.place + 1,
            "length": message.length,
        }
    yes, no = _("yes"), _("no")
    return (
        Fact(label=_("place in the queue"), value=place),
        Fact(label=_("intermediate list"), value=yes if message.popped else no),
        Fact(label=_("started"), value=yes if message.started else no),
        Fact(label=_("registries"), value=", ".join(message.registries) or "–"),
        Fact(label=_("message's status"), value=message.status or _("no hash")),
    )


# ---- locks of many rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LockLine:
    """A lock, its row and its attempt. ``age``: seconds since the claim."""

    row: ProcessedJob
    owner: str
    age: float | None
    ttl: float | None
    drift: Drift | None

    @property
    def seen(self) -> str:
        """The row as it stands in the button's form."""
        return f"{self.row.pk}:{self.row.version}:{self.row.status}"


def lock_lines(pairs: list[Known]) -> list[LockLine]:
    """Return a line for each row that has a lock or should have one; raises what Redis raises."""
    found = locks.seen([known.row.pk for known in pairs])
    return [line for known in pairs if (line := _line(known, found.get(known.row.pk)))]


def _line(known: Known, lock: Seen | None) -> LockLine | None:
    drift = next(_in_lock(known, lock), None)
    if lock is None and drift is None:
        return None
    newest = known.newest
    mine = newest is not None and lock is not None and newest.owner == lock.owner
    return LockLine(
        row=known.row,
        owner=lock.owner if lock else "",
        age=known.since(newest.claimed_at) if newest and (mine or lock is None) else None,
        ttl=lock.ttl if lock else None,
        drift=drift,
    )
