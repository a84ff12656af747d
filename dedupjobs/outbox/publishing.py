"""Publishing: a row per target, in the caller's transaction; after the commit the relay is told."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from django.db import connections, transaction

from dedupjobs import bell, clock, conf, lifecycle, routes, spans
from dedupjobs.clock import DbNow
from dedupjobs.envelope import GRAMMAR, LONGEST_KEY
from dedupjobs.exceptions import EventError, PayloadTooLarge
from dedupjobs.models import EventLane, OutboxEvent

LANES = 4_096  # on MySQL: keys that share one wait for each other
PAGE = 500  # rows of one INSERT


def publish(
    name: str, payload: Any = None, *, key: str | int = "", ordered: bool | None = None
) -> str:
    """
    Tell all targets of ``name`` what happened, if the caller's transaction commits; return the
    event's id, which stays the same however often it is delivered.

    ``payload``: a JSON value of MAX_PAYLOAD bytes at the most. ``key``: what the event is about.
    Events of one key arrive in the order of their commits, so their publishers wait for each
    other's commit; ``ordered=False`` gives that up. Raises EventError, PayloadTooLarge.
    """
    return _store([_row(name, payload, key, ordered)])[0]


def publish_many(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """
    Publish several events, each a dict of ``publish``'s arguments; return their ids.

    They are stored in this order, in one transaction, by few statements.
    """
    return _store([_row(**_known(event)) for event in events])


def _known(event: Any) -> dict[str, Any]:
    if not isinstance(event, Mapping):
        raise EventError(
            f"An event is {repr(event)[:80]}; give dicts of publish()'s arguments, such as "
            '{"name": "order.paid", "payload": {"order": 7}}.'
        )
    arguments = {"payload": None, "key": "", "ordered": None, **event}
    unknown = sorted(set(arguments) - {"name", "payload", "key", "ordered"})
    if unknown or "name" not in arguments:
        raise EventError(
            f"An event has {', '.join(unknown) or 'no name'}; give name, payload, key and ordered, "
            "as publish() takes them."
        )
    return arguments


def _row(name: str, payload: Any, key: str | int, ordered: bool | None) -> OutboxEvent:
    """Return the event without a target."""
    if not routes.is_event_name(name):
        raise EventError(f"The event's name is {name!r}; {GRAMMAR}")
    if type(ordered) not in (bool, type(None)):
        raise EventError(f"{name}: ordered={repr(ordered)[:80]}; give True, False or None.")
    key = _key(name, key)
    if ordered and not key:
        raise EventError(
            f"{name}: ordered=True without a key. Order is kept among the events of one key: give "
            'key=, for example key=f"order:{order.pk}", or leave ordered out.'
        )
    return OutboxEvent(
        event_id=clock.uuid(),
        name=name,
        key=key,
        ordered=bool(key) if ordered is None else ordered,
        payload=_text(name, payload),
        traceparent=spans.headers().get("traceparent", "")[:64],
        published_at=DbNow(),
    )


def _key(name: str, key: Any) -> str:
    text = str(key) if type(key) in (str, int) else None
    if text is None or len(text) > LONGEST_KEY or "\0" in text or _has_surrogate(text):
        shown = repr(key)[:80]
        raise EventError(
            f"{name}: key={shown} must be a text or a whole number, {LONGEST_KEY} characters at "
            "most, none of them NUL. Use the primary key of what the event is about."
        )
    return text


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= c <= "\udfff" for c in text)


def _text(name: str, payload: Any) -> str:
    """Return the payload as JSON; EventError names the value that is none."""
    try:
        _check(payload, f"{name}: payload")
        text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError as error:
        raise EventError(
            f"{name}: payload is nested too deep, or contains itself; flatten it."
        ) from error
    size, limit = len(text.encode()), conf.get().MAX_PAYLOAD
    if size > limit:
        raise PayloadTooLarge(
            f"{name}: the payload has {size:,} bytes, MAX_PAYLOAD is {limit:,}. Store the data and "
            "publish its primary key or address."
        )
    return text


def _check(value: Any, where: str) -> None:  # noqa: C901 - a table
    match value:
        case None | bool():
            return
        case int() | float():
            if not math.isfinite(value):
                raise EventError(f"{where} is {value!r}, which JSON lacks; give a number or None.")
        case str():
            if _has_surrogate(value):
                raise EventError(f"{where} has half a character (a surrogate); decode it rightly.")
        case dict():
            _check_dict(value, where)
        case list() | tuple():
            for i, inner in enumerate(value):
                _check(inner, f"{where}[{i}]")
        case _:
            raise EventError(
                f"{where} is a {type(value).__name__}, which JSON lacks; give a text, number, "
                "True, False, None, list or dict, for example str(value)."
            )


def _check_dict(value: dict[Any, Any], where: str) -> None:
    for name, inner in value.items():
        if not isinstance(name, str):
            raise EventError(f"{where} has the name {name!r}; JSON's names are texts.")
        _check(name, where)
        _check(inner, f"{where}[{name!r}]")


# ---- rows


def _store(events: list[OutboxEvent]) -> list[str]:
    targets = {event.name: _targets(event.name) for event in events}
    rows = [_to(event, target) for event in events for target in targets[event.name]]
    alias = lifecycle.alias()
    with transaction.atomic(using=alias, savepoint=False):
        _line_up({event.key for event in events if event.ordered})
        OutboxEvent._base_manager.using(alias).bulk_create(rows, batch_size=PAGE)
        bell.ring_on_commit(alias)
    return [event.event_id for event in events]


def _targets(name: str) -> tuple[str, ...]:
    outbox = conf.outbox()
    found = outbox.targets_of(name)
    if not found:
        known = ", ".join(outbox.routes or outbox.targets) or "none"
        cure = (
            f"to ROUTES: {{{name!r}: [...]}}"
            if outbox.targets
            else """a target: {"TARGETS": {"events": {"stream": "events"}}}"""
        )
        raise EventError(
            f'{name}: nobody gets it. DEDUPJOBS["OUTBOX"] has no route for this name (there: '
            f"{known}). Add {cure}."
        )
    return found


def _to(event: OutboxEvent, target: str) -> OutboxEvent:
    return OutboxEvent(
        event_id=event.event_id,
        target=target,
        name=event.name,
        key=event.key,
        ordered=event.ordered,
        payload=event.payload,
        traceparent=event.traceparent,
        published_at=event.published_at,
    )


def _line_up(keys: set[str]) -> None:
    """
    Wait until nobody else has an open transaction that has published under these keys.

    So a row's primary key is drawn after the commit of all earlier ones of its key. Without this
    a sequence says nothing: who has drawn first may commit last. SQLite has one writer.
    """
    connection = connections[lifecycle.alias()]
    if connection.vendor == "postgresql":
        numbers = sorted(_number(key) for key in keys)
        with connection.cursor() as cursor:
            for number in numbers:
                cursor.execute("SELECT pg_advisory_xact_lock(%s)", [number])
    elif connection.vendor == "mysql":
        lanes = sorted({_number(key) % LANES for key in keys})
        table = connection.ops.quote_name(EventLane._meta.db_table)
        with connection.cursor() as cursor:
            for lane in lanes:
                cursor.execute(
                    f"INSERT INTO {table} (number) VALUES (%s) "  # noqa: S608 - our own table
                    "ON DUPLICATE KEY UPDATE number = number",
                    [lane],
                )


def _number(key: str) -> int:
    """Return a number of 63 bits for a key, as no other user of advisory locks makes it."""
    digest = hashlib.blake2b(key.encode(), digest_size=8, person=b"dedupjobs outbox").digest()
    return int.from_bytes(digest) >> 1
