"""
Who gets events: a Redis stream takes a batch in one trip, all others an event at a time.

A target that takes nothing at present, whatever the event is, raises Unavailable: nothing counts
as failed then. What it raises otherwise is about one event, which is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from django.utils.module_loading import import_string
from redis.exceptions import RedisError

from dedupjobs import callables, clock, envelope, posting, signals, streams
from dedupjobs.envelope import FIELDS, Event
from dedupjobs.exceptions import Unavailable
from dedupjobs.outbox.shelf import Post, Sent
from dedupjobs.routes import Target
from dedupjobs.streams import Place
from dedupjobs.visible import line

PATIENCE = 10.0  # seconds that one batch of single deliveries may take, and the last one its own


class Wiped(Exception):
    """A stream has lost what it had taken in; ``left``: the last of our entries that it has."""

    def __init__(self, left: Place) -> None:
        super().__init__(f"the stream has lost entries of ours; it has them up to {left.last}")
        self.left = left


def send(target: Target, batch: Sequence[Post], *, after: str) -> tuple[Sent, str]:
    """
    Send a batch, in its order; return what became of it, and our place in a stream.

    ``after``: the place that it must know still. Raises Unavailable, Wiped.
    """
    if target.stream:
        place = _add(target, batch, Place.of(after))
        return Sent(delivered=list(batch)), str(place)
    return _one_by_one(batch, sender_of(target)), ""


# ---- a Redis stream


def _add(target: Target, batch: Sequence[Post], after: Place) -> Place:
    words: list[str] = []
    for post in batch:
        for name, word in zip(FIELDS, post.event.words(), strict=True):
            words += (name, word)
    redis = streams.client(cache=target.cache, url=target.url)
    try:
        added, last = streams.add(
            redis,
            target.stream or "",
            after=after,
            maxlen=target.maxlen,
            size=2 * len(FIELDS),
            words=words,
        )
    except (RedisError, OSError, ValueError) as error:
        raise Unavailable(_words(error)) from error
    if not added:
        raise Wiped(after.moved(last))
    return after.moved(last)


# ---- one by one


def _one_by_one(batch: Sequence[Post], deliver: Callable[[Event], object]) -> Sent:
    sent, until = Sent(), clock.monotonic() + PATIENCE
    stopped: set[str] = set()
    for post in batch:
        if clock.monotonic() >= until:
            break
        if post.lane and post.lane in stopped:
            continue
        try:
            callables.carry_out(deliver, post.event)
        except Unavailable:
            if sent.delivered or sent.failed:
                break  # what was sent is noted first
            raise
        except Exception as error:
            sent.failed.append((post, _words(error)))
            stopped.add(post.lane)
        else:
            sent.delivered.append(post)
    return sent


def sender_of(target: Target) -> Callable[[Event], object]:
    """Return what delivers one event; Unavailable: there is no function that does."""
    if target.webhook:
        return _hook(target)
    if target.signal:
        return _signal
    return _imported(target.call or "")


@lru_cache(maxsize=64)
def _imported(path: str) -> Callable[[Event], object]:
    try:
        found: Callable[[Event], object] = import_string(path)
    except ImportError as error:
        raise Unavailable(f"{path}: {error}") from error
    if wrong := callables.why_idle(found):
        raise Unavailable(f"{path} {wrong}, and the event would count as delivered")
    return found


def _signal(event: Event) -> None:
    signals.event_published.send(sender=event.name, event=event)


def _hook(target: Target) -> Callable[[Event], None]:
    def deliver(event: Event) -> None:
        text, now = event.text(), clock.utcnow().timestamp()
        signed = envelope.headers(event.id, text, now=now, secrets=target.secrets)
        if event.traceparent:
            signed["traceparent"] = event.traceparent
        try:
            posting.post(target.webhook or "", text, signed, timeout=target.timeout)
        except posting.NotReached as error:
            raise Unavailable(_words(error)) from error

    return deliver


def _words(error: BaseException) -> Any:
    return line(f"{type(error).__name__}: {error}", 500)
