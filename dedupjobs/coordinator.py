"""
Getting every job going again: hand over what is due, reclaim what has died, re-send what RQ lost.

One round is ``Coordinator.tick()``; loops and commands call it. Any number of coordinators may
run: each act is a guarded UPDATE, and the leader lease in Redis only saves double work. Every
sweep starts from the beginning, so a row that can not be handled blocks none behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import count
from typing import Any

from django.db import DatabaseError, connections
from django.db.models import Q
from redis.exceptions import RedisError

from dedupjobs import (
    asides,
    clock,
    conf,
    controls,
    counters,
    dispatch,
    lifecycle,
    load,
    locks,
    registry,
    signals,
    stats,
    summaries,
)
from dedupjobs.alerts import watch
from dedupjobs.asides import Sweep
from dedupjobs.clock import DbNow
from dedupjobs.controls import InForce
from dedupjobs.dispatch import Delivery
from dedupjobs.inbox import marks
from dedupjobs.lifecycle import Lost, Pruned
from dedupjobs.locks import Grip
from dedupjobs.models import ACTIVE, WAITING, ProcessedJob, Status
from dedupjobs.outbox import relay, shelf
from dedupjobs.schedule import Schedule
from dedupjobs.wire import UNREACHABLE

ROLE = "coordinator"  # whose sign of life each round leaves
PAGES = 20  # of BATCH rows that one sweep of one tick works through
LOOKED_AT = 10  # times BATCH: attempts of one page of a sweep that only looks
HEAD = 100  # ids read at the head of a queue to find one of ours
CROWD = 10_000  # ids searched for one of ours where foreign jobs crowd the head
EPOCH_TTL = 86_400
PATIENCE = 5.0  # seconds that a page of messages may take
DUTY_SECONDS = 4.0  # of one tick for one duty, so that the leader's lease is renewed in time
PRUNE_PAGE = 1_000  # rows of one transaction
PRUNE_SECONDS = 1.0  # of one tick
WORST_PAUSE = 5.0  # seconds between tries while something is away, so also until it is noticed


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one tick did. ``leads``: False, another coordinator is at it."""

    leads: bool = True
    scheduled: int = 0
    handed_over: int = 0
    resent: int = 0
    pruned: Pruned = field(default_factory=Pruned)
    lost: tuple[Lost, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """An open attempt as a sweep saw it; ``still``: seconds its beat was seen unchanged."""

    fence: int
    job_pk: int
    name: str
    key: str
    owner: str
    beat_at: datetime
    lease: float
    overdue: float
    still: float

    @property
    def expired(self) -> bool:
        """The lease is over by the database's clock, and no beat came for a third of it."""
        return self.overdue > 0 and self.still >= self.lease / 3

    @property
    def ahead(self) -> bool:
        """The lease ends later than any beat of a right clock writes, and no beat came for it."""
        return self.overdue < -self.lease and self.still >= self.lease


@dataclass(slots=True)
class Coordinator:
    """Keeps between ticks only what it has seen itself: who beat when, by its own clock."""

    owner: str = field(default_factory=clock.token)
    leads: bool = False  # at its last tick
    _beats: dict[int, tuple[datetime, float]] = field(default_factory=dict)
    _taken: dict[str, float] = field(default_factory=dict)
    _wiped: dict[str, datetime] = field(default_factory=dict)
    _schedule: Schedule = field(default_factory=Schedule)
    _next: dict[str, float] = field(default_factory=dict)
    _unpruned: list[str] = field(default_factory=list)
    _force: InForce = field(default_factory=InForce)
    _asides: Sweep = field(default_factory=Sweep)

    def tick(self) -> Round:
        """Do one round, if no other coordinator leads; without Redis all lead, harmlessly."""
        if locks.lead(self.owner, ttl=conf.get().LEADER_TTL) is Grip.BUSY:
            self._beats.clear()
            return Round(leads=False)
        with counters.gathering():
            done = self._round()
        counters.pay(ROLE)
        return done

    def _round(self) -> Round:
        force = controls.current()
        sweep = self._is_time("sweep", conf.get().RECLAIM_EVERY)
        lost = self.reclaim() if sweep else []
        if sweep:
            controls.close_expired()
        with _one_row():
            self._asides.do(
                rooms=sweep or force.rules != self._force.rules, most=PAGES * conf.get().BATCH
            )
        self._force = force
        scheduled = self._schedule.tick(lifecycle.database_now())
        queues = dispatch.reachable_queues()
        # Re-sent before the hand-over, or what that sends would be sent twice.
        resent = sum(self._resend(queue, sweep) for queue in queues)
        handed_over = self.hand_over(queues)
        if self._is_time("fold", conf.get().FOLD_EVERY):
            self.fold()
        if self._is_time("summarise", conf.get().SUMMARISE_EVERY):
            with _one_row():
                summaries.keep(_counted)
        if self._is_time("prune events", conf.get().PRUNE_EVERY):
            self.prune_events()
        due = self._is_time("prune", conf.get().PRUNE_EVERY)
        return Round(
            scheduled=scheduled,
            handed_over=handed_over,
            resent=resent,
            lost=tuple(lost),
            pruned=self.prune() if due else Pruned(),
        )

    def _is_time(self, duty: str, every: float) -> bool:
        if clock.monotonic() < self._next.get(duty, -math.inf):
            return False
        self._next[duty] = clock.monotonic() + every
        return True

    def _resend(self, queue: str, sweep: bool) -> int:
        try:
            return self.resend_wiped(queue) + (self.resend_lost(queue) if sweep else 0)
        except (RedisError, OSError) as error:
            signals.tell(signals.coordinator_failed, "", error=error)
            return 0

    def run(self, rest: Callable[[float], bool]) -> None:
        """Tick until ``rest(seconds)`` returns True; whatever fails is tried again, more slowly."""
        pause = conf.get().TICK
        with watch.standing(lambda: self.leads), relay.standing(lambda: self.leads):
            while not rest(pause):
                try:
                    self.leads = self.tick().leads
                    pause = load.tick(conf.get().TICK)
                except Exception as error:
                    signals.tell(signals.coordinator_failed, "", error=error)
                    connections.close_all()
                    pause = min(pause * 2, WORST_PAUSE)
            self.leads = False
            locks.resign(self.owner)

    # ---- due rows that have no message

    def hand_over(self, queues: Iterable[str]) -> int:
        """Push waiting rows that are due and were never sent, oldest first."""
        due = lifecycle.jobs().filter(
            status__in=WAITING,
            dispatched_at=None,
            run_after__lte=DbNow(steady=True),
            queue__in=list(queues),
        )
        return sum(_send(asides.startable(rows)).pushed for rows in _pages(due, "run_after"))

    def send_due(self, queues: Collection[str]) -> int:
        """
        Send what is due in these queues and has no message, or has lost it; leads nobody.

        Return how many messages were sent.
        """
        resent = sum(self._resend(queue, sweep=True) for queue in queues)
        return resent + self.hand_over(queues)

    # ---- attempts whose worker is gone

    def reclaim(self, *, limit: int | None = None, within: float = DUTY_SECONDS) -> list[Lost]:
        """
        Take the jobs of attempts that are expired by both witnesses; ``limit``: at most.

        What takes longer than ``within`` (seconds), the next sweep does; each looks at all.
        """
        taken: list[Lost] = []
        spent = 0.0
        for suspect in self.suspects():
            if limit is not None and len(taken) >= limit:
                break
            if not (suspect.expired or suspect.ahead) or spent >= within:
                continue
            begun = clock.monotonic()
            lost = None
            with _one_row():
                lost = lifecycle.reclaim(
                    suspect.fence,
                    beat_at=suspect.beat_at,
                    ahead_of=suspect.lease if suspect.ahead else None,
                    reason=f"lost: no heartbeat since {suspect.beat_at:%Y-%m-%d %H:%M:%S} UTC",
                )
            if lost:
                taken.append(lost)
                if registry.options_of(suspect.name).takes_lock:
                    locks.release(suspect.job_pk, suspect.owner)
                tell_lost(lost, "lease")
            spent += clock.monotonic() - begun
        return taken

    def suspects(self) -> Iterator[Suspect]:
        """
        Yield all open attempts with how long each beat stood still by *our* monotonic clock.

        Two witnesses: the lease by the database's clock, the standstill by ours. A jump of
        either clock alone takes no live job.
        """
        seen: dict[int, tuple[datetime, float]] = {}
        for fence, job_pk, name, key, owner, beat_at, lease_until, db_now in _open_attempts():
            now = clock.monotonic()
            then, since = self._beats.get(fence, (None, now))
            since = since if then == beat_at else now
            seen[fence] = (beat_at, since)
            yield Suspect(
                fence=fence,
                job_pk=job_pk,
                name=name,
                key=key,
                owner=owner,
                beat_at=beat_at,
                # As its own last beat wrote it: another deploy may have another lease.
                lease=(lease_until - beat_at).total_seconds(),
                overdue=(db_now - lease_until).total_seconds(),
                still=now - since,
            )
        self._beats = seen

    # ---- messages that RQ has lost

    def resend_wiped(self, queue: str) -> int:
        """Send everything again that waits on a server which has lost our epoch key."""
        server = dispatch.server_of(queue)
        if server not in self._wiped:
            if dispatch.touch_epoch(queue, ttl=EPOCH_TTL):
                return 0
            self._wiped[server] = lifecycle.database_now()
        resent, until = 0, clock.monotonic() + DUTY_SECONDS
        for name in dispatch.queue_names():
            if dispatch.server_of(name) == server:
                resent += self._resend_before(name, self._wiped[server], until)
        if clock.monotonic() < until:  # or the next tick goes on
            dispatch.set_epoch(queue, ttl=EPOCH_TTL)
            del self._wiped[server]
        return resent

    def _resend_before(self, queue: str, moment: datetime, until: float) -> int:
        resent, waits = 0, _Waits(lifecycle.database_now())
        for rows in _pages(_sent_before(queue, moment), "dispatched_at", most=None):
            sent = _send(rows)
            resent += sent.pushed
            waits.note(rows)
            if sent.pushed < sent.marked:
                raise RedisError(f"queue {queue!r} can not be filled again right now")
            if clock.monotonic() >= until:
                break
        _tell_resent(queue, resent, "wiped", waits)
        return resent

    def resend_lost(self, queue: str) -> int:
        """
        Send again what has waited longer than RESEND_AFTER and is in no worker's or queue's hands.

        RQ's job hash proves nothing: it outlives a message that was popped and lost. Queues are
        first in, first out, so a row that was handed over well before the one at the head can
        not stand behind it; a long honest backlog is not copied and costs one page.
        """
        after = timedelta(seconds=conf.get().RESEND_AFTER)
        waits = _Waits(lifecycle.database_now())
        horizon = waits.now - after
        if not _sent_before(queue, horizon).exists():
            return 0
        view = dispatch.view(queue, count=HEAD)
        in_hands = self._freshly_taken(view.started | view.popped)
        first = _first_of_ours(view.head)
        if first is not None:
            horizon = min(horizon, first - after)
        crowded = bool(view.head) and first is None
        resent = 0
        for rows in _pages(_sent_before(queue, horizon), "dispatched_at"):
            gone = [
                row
                for row in rows
                if row.dispatch_id not in in_hands
                and not (crowded and _stands_in(queue, row.dispatch_id))
            ]
            resent += _send(gone).pushed
            waits.note(gone)
        _tell_resent(queue, resent, "lost", waits)
        return resent

    # ---- the books

    def fold(self) -> None:
        """Move the counts of duplicates from Redis into the tables."""
        try:
            stats.fold()
        except (RedisError, OSError) as error:
            signals.tell(signals.coordinator_failed, "", error=error)

    def prune(self) -> Pruned:
        """Delete or hollow rows out of retention; what PRUNE_SECONDS leave, the next tick does."""
        total, until = Pruned(), clock.monotonic() + PRUNE_SECONDS
        self._unpruned = self._unpruned or lifecycle.names()
        while self._unpruned:
            name = self._unpruned[0]
            older_than = registry.options_of(name).retain_for
            page = prune_page(name, older_than=older_than, limit=PRUNE_PAGE)
            total += page
            if page.deleted + page.tombstones < PRUNE_PAGE:
                del self._unpruned[0]
            if self._unpruned and clock.monotonic() >= until:
                self._next.pop("prune", None)
                break
        return total

    def prune_events(self) -> int:
        """Delete events and marks out of retention; the next tick does what is left of them."""
        total, until = 0, clock.monotonic() + PRUNE_SECONDS
        for prune, retain in (
            (shelf.prune, conf.outbox().retain),
            (marks.prune, conf.inbox().retain),
        ):
            page = PRUNE_PAGE
            while page == PRUNE_PAGE:
                if clock.monotonic() >= until:
                    self._next.pop("prune events", None)
                    return total
                page = prune(older_than=retain, limit=PRUNE_PAGE)
                total += page
        return total

    def _freshly_taken(self, ids: frozenset[str]) -> set[str]:
        """
        Return the ids in workers' hands that we have not yet seen there for RESEND_AFTER.

        A worker that died between pop and start leaves its id for up to half an hour, one that
        died between start and claim for as long as RQ believes in it, up to 90 seconds. A living
        one claims at once; should it be slow, the copy finds the row taken.
        """
        now = clock.monotonic()
        self._taken = {i: self._taken.get(i, now) for i in ids}
        return {i for i, since in self._taken.items() if now - since < conf.get().RESEND_AFTER}


def _counted() -> dict[str, Any]:
    """Return what stands in Redis for the summaries; nothing where it can not be asked."""
    try:
        return counters.sums() if conf.get().METRICS else {}
    except UNREACHABLE:
        return {}


def tell_lost(lost: Lost, cause: str) -> None:
    """Say that an attempt was taken from its owner, and that its job is dead if it is."""
    signals.tell(signals.attempt_lost, lost.name, lost=lost, cause=cause)
    if lost.change is not None:
        signals.tell(signals.job_changed, lost.name, changes=[lost.change])
    if lost.status == Status.DEAD:
        signals.tell(signals.job_dead, lost.name, job_pk=lost.job_pk, key=lost.key, reason="lost")


def prune_page(name: str, *, older_than: float, limit: int) -> Pruned:
    """Prune at most ``limit`` rows of a job, and tell who may remember them."""
    page = lifecycle.prune(name, older_than=older_than, limit=limit)
    if page.changes:
        signals.tell(signals.job_changed, name, changes=page.changes)
    return page


def unknown_names() -> list[str]:
    """Return the names of active rows that no job of this process has."""
    active = lifecycle.jobs().filter(status__in=ACTIVE)
    unknown = (name for name in lifecycle.names() if registry.find(name) is None)
    return [name for name in unknown if active.filter(name=name).exists()]


def _open_attempts() -> Iterator[tuple[Any, ...]]:
    """
    Yield open attempts by their jobs, a page at a time, each with the database's clock.

    A job has one open attempt at most. By the attempts' own primary key a database might walk
    through all that have ended: the open ones are the newest.
    """
    columns = ("pk", "job_id", "job__name", "job__key", "owner", "beat_at", "lease_until")
    size = LOOKED_AT * conf.get().BATCH
    open_ones = lifecycle.attempts().filter(outcome=None, ended_at=None)
    ordered = open_ones.order_by("outcome", "ended_at", "job_id")
    last, full = 0, True
    while full:
        # No models: a hundred thousand of them would take longer than a sweep may.
        behind = ordered.filter(job_id__gt=last).annotate(db_now=DbNow())
        rows = list(behind.values_list(*columns, "db_now")[:size])
        yield from rows
        full = len(rows) == size
        last = rows[-1][1] if rows else last


@dataclass(slots=True)
class _Waits:
    """How long rows have waited since their last hand-over."""

    now: datetime
    rows: int = 0
    seconds: float = 0.0

    def note(self, rows: list[ProcessedJob]) -> None:
        for row in rows:
            if row.dispatched_at is not None:
                self.rows += 1
                self.seconds += (self.now - row.dispatched_at).total_seconds()


def _tell_resent(queue: str, count: int, cause: str, waits: _Waits) -> None:
    if count:
        waited = max(waits.seconds / max(waits.rows, 1), 0.0)
        facts = {"queue": queue, "count": count, "cause": cause, "waited": waited}
        signals.tell(signals.messages_resent, "", **facts)


def _sent_before(queue: str, moment: datetime) -> Any:
    """Return waiting rows of a queue that were handed over before ``moment``."""
    return lifecycle.jobs().filter(status__in=WAITING, queue=queue, dispatched_at__lt=moment)


def _pages(rows: Any, by: str, *, most: int | None = PAGES) -> Iterator[list[ProcessedJob]]:
    """
    Yield pages in the order of column ``by``, each from behind the last one; ``most`` pages.

    Each status by itself: an index has the rows in their order within one only, and a database
    that has to sort them would do so with all that wait, for each page.
    """
    for status in WAITING:
        yield from _pages_of(rows.filter(status=status), by, most)


def _pages_of(rows: Any, by: str, most: int | None) -> Iterator[list[ProcessedJob]]:
    fields = ("pk", "version", "generation", "attempts", "name", "queue", "dispatch_id", by)
    size = conf.get().BATCH
    # As the index has them: those that were never sent all have the same ``dispatched_at``.
    ordered = rows.only(*fields).order_by(*dict.fromkeys(("dispatched_at", by, "pk")))
    behind = Q()
    for _ in range(most) if most is not None else count():
        page = list(ordered.filter(behind)[:size])
        yield page
        if len(page) < size:
            return
        last = page[-1]
        at = getattr(last, by)
        # The first of the three bounds what an index is searched for, which OR does not.
        behind = Q(**{f"{by}__gte": at}) & (Q(**{f"{by}__gt": at}) | Q(pk__gt=last.pk))


def _stands_in(queue: str, dispatch_id: str | None) -> bool:
    return dispatch_id is not None and dispatch.in_queue(queue, dispatch_id, within=CROWD)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """How many rows got a new RQ id, and how many of those Redis took."""

    marked: int
    pushed: int


def _send(rows: list[ProcessedJob]) -> _Sent:
    """Give each row that has not moved on a new RQ id, which a batch shares, and push them."""
    deliveries = []
    for group in dispatch.in_batches(rows):
        with _one_row():
            sent_as, mine = lifecycle.mark_sent_together(group)
            if mine:
                deliveries.append(Delivery.of_all(mine, sent_as))
    marked = sum(len(delivery.rows) for delivery in deliveries)
    return _Sent(marked=marked, pushed=dispatch.push(deliveries, within=PATIENCE))


@contextmanager
def _one_row() -> Iterator[None]:
    """Let what the database refuses stop nobody behind it; a lost connection goes on up."""
    try:
        yield
    except DatabaseError as error:
        if not connections[lifecycle.alias()].is_usable():
            raise
        signals.tell(signals.coordinator_failed, "", error=error)


def _first_of_ours(head: tuple[str, ...]) -> datetime | None:
    """Return when the first row at the head whose message is still its newest was handed over."""
    found = lifecycle.jobs().filter(dispatch_id__in=head, status__in=WAITING)
    handed_over = dict(found.values_list("dispatch_id", "dispatched_at"))
    return next((handed_over[i] for i in head if i in handed_over), None)
