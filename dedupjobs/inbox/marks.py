"""
Marks: that a consumer has applied an event, committed with the effect. The only writer of a
message's ``status``.

    – ──▶ APPLIED (the handler returned) ──▶ gone after RETAIN
    – ──▶ RETRYING (it raised) ──▶ APPLIED, RETRYING again, or HELD once it raised too often
    – ──▶ HELD: unreadable, or its consumers died at it. By a person: RETRYING, or DROPPED
    – ──▶ BEHIND: the consumer keeps an order, and an earlier message of the key is not settled

What failed stands in the table with its payload, so it holds up nothing else: the stream's entry
is acknowledged, and whoever consumes takes it from here when it is due.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any

from django.db import DatabaseError, IntegrityError, InterfaceError, connections, transaction
from django.db.models import Min

from dedupjobs import callables, conf, lifecycle, probes, signals, turns
from dedupjobs.backoff import Exponential
from dedupjobs.clock import DbNow, uniform
from dedupjobs.envelope import Event
from dedupjobs.exceptions import EventError
from dedupjobs.inbox import handlers
from dedupjobs.models import InboxMessage, MessageStatus
from dedupjobs.routes import Consumer
from dedupjobs.visible import line

BACKOFF = Exponential(base=1.0, factor=2.0, cap=600.0)
LONGEST_ERROR = 2_000  # characters
UNSETTLED = (MessageStatus.RETRYING, MessageStatus.HELD, MessageStatus.BEHIND)
OVER = (MessageStatus.APPLIED, MessageStatus.DROPPED)


class Fate(StrEnum):
    """What became of a message."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"  # it was applied, or is known to wait: nothing was done
    FAILED = "failed"  # tried again later
    HELD = "held"
    BEHIND = "behind"
    UNKNOWN = "unknown"  # no handler of the consumer takes events of this name


def messages(consumer: str) -> Any:
    """Return a consumer's messages, from the database that decides."""
    return InboxMessage._base_manager.using(lifecycle.alias()).filter(consumer=consumer)


def take(event: Event, *, consumer: str) -> Fate:
    """
    Let the consumer's handler take an event, unless it has; say what became of it.

    For whoever gets events by a way of his own: acknowledge the message once this returns, or,
    where it is FAILED, have it sent again. Raises EventError for a consumer that settings lack,
    what a database raises that is out of reach, and nothing that the handler does.
    """
    if wrong := handlers.why_unknown(consumer):
        raise EventError(wrong)
    return attend(event, consumer=consumer, again=has_failed(event, consumer))


def attend(event: Event, *, consumer: str, guard: Guard | None = None, again: bool = False) -> Fate:
    """
    Do so for a message of which it is known whether it failed before.

    ``guard``: the transaction in which all of it happens, where an order is kept. ``again``: it
    failed before and is due.
    """
    handle = handlers.find(consumer, event.name)
    options, error = conf.inbox().consumers.get(consumer, Consumer()), ""
    guard = guard or _plain
    try:
        if handle is None:
            fate = _unknown(event, consumer) if again else Fate.UNKNOWN
        else:
            fate = _apply(event, consumer, options, guard, handle, again)
    except Exception as raised:
        if isinstance(raised, (DatabaseError, InterfaceError)) and not _is_usable():
            raise
        if isinstance(raised, turns.TurnLost):
            raise
        error = line(f"{type(raised).__name__}: {raised}", LONGEST_ERROR)
        fate = _note_failure(event, consumer, options, guard, error)
    signals.tell(signals.event_taken, consumer, event=event, fate=fate, error=error)
    return fate


Guard = Callable[[], AbstractContextManager[None]]


def _plain() -> AbstractContextManager[None]:
    return transaction.atomic(using=lifecycle.alias())


def _is_usable() -> bool:
    connection = connections[lifecycle.alias()]
    return connection.connection is not None and connection.is_usable()


def _unknown(event: Event, consumer: str) -> Fate:
    """Keep a message for a person that a handler took once, which is gone."""
    error = f"No handler of this consumer takes {event.name!r} any more."
    _retrying(event, consumer).update(status=MessageStatus.HELD, error=error, due_at=DbNow())
    return Fate.HELD


def _apply(
    event: Event,
    consumer: str,
    options: Consumer,
    guard: Guard,
    handle: Callable[[Event], Any],
    again: bool,
) -> Fate:
    with guard():
        if not again and (known := _known(event, consumer)):
            return known
        if not again and options.ordered and _is_behind(event, consumer):
            _insert(event, consumer, status=MessageStatus.BEHIND)
            return Fate.BEHIND
        if not (_mark_again if again else _mark)(event, consumer):
            return Fate.DUPLICATE
        probes.reach("inbox.marked")
        callables.carry_out(handle, event)
        probes.reach("inbox.handled")
        if again and event.key:
            promote(consumer, event.key)
    probes.reach("inbox.committed")
    return Fate.APPLIED


def _known(event: Event, consumer: str) -> Fate | None:
    found = messages(consumer).filter(event_id=event.id)
    return Fate.DUPLICATE if found.exists() else None


def _is_behind(event: Event, consumer: str) -> bool:
    if not event.key:
        return False
    return bool(messages(consumer).filter(key=event.key, status__in=UNSETTLED).exists())


def _mark(event: Event, consumer: str) -> bool:
    """
    Mark the event as applied, in the open transaction; False: another delivery has done so.

    Of two deliveries at once the second waits at the unique constraint until the first commits.
    """
    try:
        with transaction.atomic(using=lifecycle.alias()):
            _insert(event, consumer, status=MessageStatus.APPLIED)
    except IntegrityError:
        return False
    return True


def _mark_again(event: Event, consumer: str) -> bool:
    """Do so for one that has failed before; of two at once the second waits for the row."""
    changes: dict[str, Any] = {"due_at": DbNow(), "payload": "", "error": ""}
    return bool(_retrying(event, consumer).update(status=MessageStatus.APPLIED, **changes))


def _retrying(event: Event, consumer: str) -> Any:
    return messages(consumer).filter(event_id=event.id, status=MessageStatus.RETRYING)


def has_failed(event: Event, consumer: str) -> bool:
    """Whether it waits for another try."""
    return bool(_retrying(event, consumer).exists())


def _insert(event: Event, consumer: str, *, status: MessageStatus, **more: Any) -> None:
    row = InboxMessage(
        consumer=consumer,
        event_id=event.id,
        name=event.name,
        key=event.key,
        payload="" if status == MessageStatus.APPLIED else event.body,
        status=status,
        published_at=event.at,
        received_at=DbNow(),
        due_at=more.pop("due_at", DbNow()),
        **more,
    )
    row.save(using=lifecycle.alias(), force_insert=True)


def _note_failure(event: Event, consumer: str, options: Consumer, guard: Guard, error: str) -> Fate:
    """Keep a message that failed, for its next try or for a person."""
    with guard():
        found = messages(consumer).filter(event_id=event.id).select_for_update()
        known = found.values_list("status", "tries").first()
        status, tries = known or (None, 0)
        if status is not None and status != MessageStatus.RETRYING:
            return Fate.DUPLICATE
        held = tries + 1 >= options.attempts
        kept: dict[str, Any] = {
            "status": MessageStatus.HELD if held else MessageStatus.RETRYING,
            "tries": tries + 1,
            "error": error,
            "due_at": DbNow(0 if held else BACKOFF(tries + 1, uniform)),
        }
        if status is None:
            _insert(event, consumer, **kept)
        else:
            found.update(**kept)
    return Fate.HELD if held else Fate.FAILED


def hold(event: Event, *, consumer: str, error: str) -> Fate:
    """Keep a message for a person that can not, or must not, be handled; once."""
    if messages(consumer).filter(event_id=event.id).exists():
        return Fate.DUPLICATE
    try:
        with transaction.atomic(using=lifecycle.alias()):
            _insert(event, consumer, status=MessageStatus.HELD, error=error[:LONGEST_ERROR])
    except IntegrityError:
        return Fate.DUPLICATE
    signals.tell(signals.event_taken, consumer, event=event, fate=Fate.HELD, error=error)
    return Fate.HELD


# ---- what is due again


def due(consumer: str, *, limit: int) -> list[Event]:
    """Return messages that failed and are due, those that have waited longest first."""
    found = messages(consumer).filter(status=MessageStatus.RETRYING, due_at__lte=DbNow(steady=True))
    columns = ("event_id", "name", "payload", "key", "published_at")
    return [
        Event(id=event_id, name=name, body=body, key=key, at=at)
        for event_id, name, body, key, at in found.order_by("due_at", "pk").values_list(*columns)[
            :limit
        ]
    ]


def promote(consumer: str, key: str) -> None:
    """Let the first message that is BEHIND in this key be due, now that nothing is before it."""
    mine = messages(consumer).filter(key=key)
    if mine.filter(status__in=(MessageStatus.RETRYING, MessageStatus.HELD)).exists():
        return
    first = mine.filter(status=MessageStatus.BEHIND).aggregate(first=Min("pk"))["first"]
    if first is not None:
        mine.filter(pk=first).update(status=MessageStatus.RETRYING, due_at=DbNow())


# ---- people


def release(pk: int) -> bool:
    """HELD or RETRYING → due at once, with fresh tries; False: it is something else by now."""
    return _acted(pk, MessageStatus.RETRYING, tries=0)


def drop(pk: int) -> bool:
    """HELD or RETRYING → DROPPED: never applied; False: it is something else by now."""
    return _acted(pk, MessageStatus.DROPPED, payload="")


def _acted(pk: int, status: MessageStatus, **changes: Any) -> bool:
    found = InboxMessage._base_manager.using(lifecycle.alias()).filter(pk=pk)
    place = found.values_list("consumer", "key").first()
    if place is None:
        return False
    consumer, key = place
    stopped = (MessageStatus.HELD, MessageStatus.RETRYING)
    with turns.anybodys(turns.taking(consumer)):
        done = found.filter(status__in=stopped).update(status=status, due_at=DbNow(), **changes)
        if done and status == MessageStatus.DROPPED and key:
            promote(consumer, key)
    return bool(done)


# ---- retention


MOST_CONSUMERS = 1_000


def prune(*, older_than: float, limit: int) -> int:
    """Delete marks that were made so many seconds ago; return how many."""
    cutoff = DbNow(-older_than, steady=True)
    gone = 0
    for consumer in consumers():
        for status in OVER:
            old = messages(consumer).filter(status=status, due_at__lt=cutoff)
            pks = list(old.order_by("due_at").values_list("pk", flat=True)[: limit - gone])
            if pks:
                over = messages(consumer).filter(pk__in=pks, status=status)
                gone += over._raw_delete(lifecycle.alias())
            if gone >= limit:
                return gone
    return gone


def consumers() -> list[str]:
    """Return the names of all consumers that have messages."""
    return lifecycle.values_of("consumer", most=MOST_CONSUMERS, model=InboxMessage)
