"""
Events' rows: what goes out next, and what became of it. The only writer of an event's ``status``.

    WAITING ──▶ DELIVERED ──▶ gone after RETAIN, or WAITING again (replay)
       │  ▲
       │  └─── an operator's retry of RETRYING or DEAD is due at once
       ├─────▶ RETRYING ──▶ DELIVERED, RETRYING again, or DEAD ──▶ DROPPED by a person
       └─────▶ BEHIND: an earlier row of its key is RETRYING or DEAD. Whatever ends that one makes
               the first row behind it RETRYING, due at once, in the same transaction.

So within a target and key exactly one row, the head, is RETRYING or DEAD while others are BEHIND.
All of it happens in transactions that hold the target's turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db.models import Count, F, Max, Min, Q

from dedupjobs import conf, lifecycle, turns
from dedupjobs.backoff import Exponential
from dedupjobs.clock import DbNow, uniform
from dedupjobs.envelope import Event
from dedupjobs.models import EventStatus, OutboxEvent, Turn
from dedupjobs.routes import Target

BACKOFF = Exponential(base=1.0, factor=2.0, cap=600.0)
BATCH = 500  # rows that go out together
SINGLE = 100  # of those that go out one by one
AGAIN_PAGE = 5_000  # rows that are made to go out again by one statement
LONGEST_ERROR = 2_000  # characters

GOING = (EventStatus.WAITING, EventStatus.RETRYING, EventStatus.BEHIND)
STOPPED = (EventStatus.RETRYING, EventStatus.DEAD)
OVER = (EventStatus.DELIVERED, EventStatus.DROPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A row on its way out."""

    pk: int
    event: Event
    tries: int
    head: bool  # of those BEHIND it, or behind such a head itself

    @property
    def lane(self) -> str:
        """What it keeps its place in; empty: nothing waits for it."""
        return self.event.key if self.event.ordered else ""


@dataclass(slots=True)
class Sent:
    """What became of a batch: each row is in one of these, or was not tried."""

    delivered: list[Post] = field(default_factory=list)
    failed: list[tuple[Post, str]] = field(default_factory=list)


def rows(target: str) -> Any:
    """Return the rows of a target, from the database that decides."""
    return OutboxEvent._base_manager.using(lifecycle.alias()).filter(target=target)


# ---- going out


def next_batch(name: str, target: Target, *, limit: int = BATCH) -> list[Post]:
    """
    Return what goes out next, within the target's turn: heads that are due with those behind
    them, then rows that were never tried and have nothing unsettled before them, by pk.
    """
    due = rows(name).filter(status=EventStatus.RETRYING, due_at__lte=DbNow(steady=True))
    heads = _read(due.order_by("due_at", "pk")[: limit // 2], head=True)
    behind = rows(name).filter(status=EventStatus.BEHIND, ordered=True)
    lanes = _lanes(heads)
    led = lanes and _led_by_one(name, target, lanes)
    followers = _read(behind.filter(key__in=led).order_by("pk")[:limit], head=True) if led else []
    fresh = rows(name).filter(status=EventStatus.WAITING, due_at=None)
    free = _free(name, target, _read(fresh.order_by("pk")[:limit], head=False))
    known = set(led)  # exactly: some databases take keys for equal that are not
    chosen = [*heads, *(post for post in followers if post.lane in known), *free]
    return sorted(chosen, key=lambda post: post.pk)


def _read(found: Any, *, head: bool) -> list[Post]:
    columns = ("pk", "event_id", "name", "payload", "key", "ordered", "published_at")
    return [
        Post(
            pk=pk,
            event=Event(
                id=event_id,
                name=name,
                body=body,
                key=key,
                ordered=ordered,
                at=at,
                traceparent=traceparent,
            ),
            tries=tries,
            head=head,
        )
        for pk, event_id, name, body, key, ordered, at, traceparent, tries in found.values_list(
            *columns, "traceparent", "tries"
        )
    ]


def _lanes(posts: Iterable[Post]) -> list[str]:
    return sorted({post.lane for post in posts if post.lane})


def _free(name: str, target: Target, posts: list[Post]) -> list[Post]:
    """Return those before which nothing of their key is unsettled; the others are BEHIND now."""
    lanes = _lanes(posts)
    if not lanes:
        return posts
    unsettled = rows(name).filter(status__in=_blocking(target), ordered=True, key__in=lanes)
    firsts = dict(unsettled.values("key").annotate(first=Min("pk")).values_list("key", "first"))
    if not firsts:
        return posts
    blocked = {p.pk for p in posts if p.lane and p.pk > firsts.get(p.lane, p.pk)}
    rows(name).filter(pk__in=blocked, status=EventStatus.WAITING).update(status=EventStatus.BEHIND)
    return [post for post in posts if post.pk not in blocked]


def _led_by_one(name: str, target: Target, lanes: list[str]) -> list[str]:
    """Return those in which nothing else is unsettled, whose followers can go with their head."""
    unsettled = rows(name).filter(status__in=_blocking(target), ordered=True, key__in=lanes)
    numbers = unsettled.values("key").annotate(number=Count("pk"))
    return sorted(numbers.filter(number=1).values_list("key", flat=True))


def _blocking(target: Target) -> tuple[EventStatus, ...]:
    if target.on_dead == "wait":
        return (EventStatus.RETRYING, EventStatus.DEAD)
    return (EventStatus.RETRYING,)


# ---- what became of it


def settle(name: str, target: Target, batch: Sequence[Post], sent: Sent) -> None:
    """Write what became of a batch, within the target's turn."""
    _deliver(name, [post.pk for post in sent.delivered])
    stay = set()
    for post, error in sent.failed:
        dead = post.tries + 1 >= target.attempts
        _fail(name, post, error, dead=dead)
        if not dead or target.on_dead == "wait":
            stay.add(post.lane)
    ended = {post.pk for post in sent.delivered} | {post.pk for post, _ in sent.failed}
    moved = {p.lane for p in batch if p.lane and p.pk in ended and (p.head or p.pk in _dead(sent))}
    promote(name, target, moved - stay)


def _dead(sent: Sent) -> set[int]:
    return {post.pk for post, _ in sent.failed}


def _deliver(name: str, pks: list[int]) -> None:
    if pks:
        going = rows(name).filter(pk__in=pks, status__in=GOING)
        going.update(status=EventStatus.DELIVERED, due_at=DbNow(), error="")


def _fail(name: str, post: Post, error: str, *, dead: bool) -> None:
    wait = BACKOFF(post.tries + 1, uniform)
    rows(name).filter(pk=post.pk, status__in=GOING).update(
        status=EventStatus.DEAD if dead else EventStatus.RETRYING,
        tries=F("tries") + 1,
        error=error[:LONGEST_ERROR],
        due_at=DbNow(0 if dead else wait),
    )


def promote(name: str, target: Target, lanes: Iterable[str]) -> None:
    """Make the first row that is BEHIND in each lane its head, due at once, if it has none."""
    wanted = sorted(set(lanes))
    if not wanted:
        return
    unsettled = rows(name).filter(status__in=_blocking(target), ordered=True, key__in=wanted)
    led = set(unsettled.values_list("key", flat=True))
    wanted = [lane for lane in wanted if lane not in led]
    behind = rows(name).filter(status=EventStatus.BEHIND, ordered=True, key__in=wanted)
    firsts = behind.values("key").annotate(first=Min("pk")).values_list("first", flat=True)
    pks = list(firsts)
    if pks:
        rows(name).filter(pk__in=pks).update(status=EventStatus.RETRYING, due_at=DbNow())


# ---- again


def again(name: str, *, since: datetime | None = None) -> int:
    """
    Ask that all delivered events of a target, or those delivered ``since``, go out once more,
    before anything new does; return about how many. Within the target's turn.
    """
    found = _delivered(name, since)
    facts = found.aggregate(last=Max("pk"))
    if facts["last"] is None:
        return 0
    turns.of(turns.sending(name)).update(again_after=0, again_to=facts["last"], again_since=since)
    return int(found.count())


def _delivered(name: str, since: datetime | None) -> Any:
    found = rows(name).filter(status=EventStatus.DELIVERED)
    return found if since is None else found.filter(due_at__gte=since)


def take_up_again(turn: Turn, name: str) -> None:
    """Let one page of what was asked for wait again, within the target's turn."""
    within = Q(pk__gt=turn.again_after, pk__lte=turn.again_to)
    found = _delivered(name, turn.again_since).filter(within).order_by("pk")
    pks = list(found.values_list("pk", flat=True)[:AGAIN_PAGE])
    for start in range(0, len(pks), BATCH):
        rows(name).filter(pk__in=pks[start : start + BATCH]).update(
            status=EventStatus.WAITING, due_at=None, tries=0
        )
    turns.of(turn.name).update(again_after=pks[-1] if len(pks) == AGAIN_PAGE else None)


# ---- people


def retry(pk: int) -> bool:
    """DEAD or RETRYING → due at once, with fresh tries; False: it is something else by now."""
    return _acted(pk, EventStatus.RETRYING, lambda _: STOPPED, tries=0)


def drop(pk: int) -> bool:
    """
    DEAD or RETRYING → DROPPED, and those behind it go on; False: it is something else.

    Of a target that is not in the settings any more, whatever is not delivered yet.
    """
    return _acted(pk, EventStatus.DROPPED, _droppable)


def _droppable(target: str) -> tuple[EventStatus, ...]:
    return STOPPED if target in conf.outbox().targets else (*GOING, EventStatus.DEAD)


def _acted(
    pk: int, status: EventStatus, allowed: Callable[[str], tuple[EventStatus, ...]], **changes: Any
) -> bool:
    found = OutboxEvent._base_manager.using(lifecycle.alias()).filter(pk=pk)
    place = found.values_list("target", "ordered", "key").first()
    if place is None:
        return False
    target, ordered, key = place
    with turns.anybodys(turns.sending(target)):
        known = found.filter(status__in=allowed(target))
        done = known.update(status=status, due_at=DbNow(), **changes)
        if done and status == EventStatus.DROPPED and ordered:
            promote(target, conf.outbox().targets.get(target, Target()), [key])
    return bool(done)


# ---- retention


def prune(*, older_than: float, limit: int) -> int:
    """Delete events that were delivered or dropped so many seconds ago; return how many."""
    cutoff = DbNow(-older_than, steady=True)
    gone = 0
    for target in targets():
        for status in OVER:
            old = rows(target).filter(status=status, due_at__lt=cutoff).order_by("due_at", "pk")
            pks = list(old.values_list("pk", flat=True)[: limit - gone])
            if pks:
                over = rows(target).filter(pk__in=pks, status=status)
                gone += over._raw_delete(lifecycle.alias())
            if gone >= limit:
                return gone
    return gone


def targets() -> list[str]:
    """Return the names of all targets that have rows."""
    return lifecycle.values_of("target", most=MOST_TARGETS, model=OutboxEvent)


MOST_TARGETS = 1_000
