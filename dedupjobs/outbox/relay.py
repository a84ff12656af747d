"""
The relay: what was published and committed is sent to its targets, in order per key.

``Relay.round()`` sends one batch of one target; ``standing()`` runs rounds in threads of a
coordinator, one for each target, so that a slow one delays neither a tick nor another target. A
target's turn (``turns``) is held by one process at a time, whoever leads.

    turn ─▶ read and, where an earlier one is unsettled, put behind ─▶ send ─▶ turn again: settle

A process that dies between sending and settling has sent what the next one sends again: at least
once, under the same ids.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial

from django.db import close_old_connections, connections, transaction

from dedupjobs import bell, clock, conf, lifecycle, probes, signals, turns
from dedupjobs.exceptions import Unavailable
from dedupjobs.models import Turn
from dedupjobs.outbox import shelf, targets
from dedupjobs.outbox.shelf import Post, Sent
from dedupjobs.outbox.targets import Wiped
from dedupjobs.routes import Target
from dedupjobs.turns import TurnLost
from dedupjobs.wire import UNREACHABLE

GOING = 5.0  # seconds that a coordinator waits for its threads at its end
LONGEST_REST = 30.0  # seconds between two tries at a target that is away
LISTENED = 1.0  # seconds after which a listener looks whether it is to end
MARGIN = timedelta(minutes=5)  # by which a Redis's clock may differ from the database's


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round did. ``mine``: False, another process has the turn; ``away``: why."""

    mine: bool = True
    sent: int = 0
    failed: int = 0
    away: str = ""
    more: bool = False


@dataclass(slots=True)
class Relay:
    """Sends to one target; keeps nothing between rounds that the tables do not have."""

    name: str
    owner: str = field(default_factory=clock.token)

    @property
    def turn(self) -> str:
        return turns.sending(self.name)

    def round(self) -> Round:
        """Send the next batch; raises what the database raises."""
        target = conf.outbox().targets.get(self.name)
        if target is None:
            return Round()
        limit = shelf.BATCH if target.stream else shelf.SINGLE
        with transaction.atomic(using=lifecycle.alias()):
            turn = turns.take(self.turn, self.owner, lease=_lease(target))
            if turn is None:
                return Round(mine=False)
            if turn.again_after is not None:
                shelf.take_up_again(turn, self.name)
                return Round(more=True)
            batch = shelf.next_batch(self.name, target, limit=limit)
        if not batch and not (target.stream and turn.position):
            return Round()
        # Nothing to send is sent to a stream, too: it may have lost what it had.
        return self._send(target, turn, batch, full=len(batch) >= limit)

    def _send(self, target: Target, turn: Turn, batch: list[Post], *, full: bool) -> Round:
        if batch:
            probes.reach("relay.before")
        try:
            sent, place = targets.send(target, batch, after=turn.position)
        except Wiped as wiped:
            self._begin_again(target, wiped)
            return Round(more=True)
        except Unavailable as error:
            signals.tell(signals.target_away, self.name, error=error)
            return Round(away=str(error))
        if not batch:
            return Round()
        probes.reach("relay.after")
        with self._mine(target):
            shelf.settle(self.name, target, batch, sent)
            if place != turn.position:
                turns.of(self.turn).update(position=place)
        self._tell(target, sent)
        tried = len(sent.delivered) + len(sent.failed)
        more = full or tried < len(batch) or any(post.head for post in batch)
        return Round(sent=len(sent.delivered), failed=len(sent.failed), more=more and tried > 0)

    def _begin_again(self, target: Target, wiped: Wiped) -> None:
        """Ask for all that the stream may have lost; whoever got it before knows it by its id."""
        with self._mine(target):
            since = _moment_of(wiped.left.last)
            shelf.again(self.name, since=since)
            turns.of(self.turn).update(position=str(wiped.left) if since else "")
        signals.tell(signals.events_again, self.name, cause="wiped")

    def _tell(self, target: Target, sent: Sent) -> None:
        if sent.delivered:
            signals.tell(signals.events_relayed, self.name, count=len(sent.delivered))
        for post, error in sent.failed:
            tries = post.tries + 1
            facts = {"event": post.event, "tries": tries, "dead": tries >= target.attempts}
            signals.tell(signals.event_refused, self.name, error=error, **facts)

    def _mine(self, target: Target) -> AbstractContextManager[None]:
        return turns.mine(self.turn, self.owner, lease=_lease(target))


def _lease(target: Target) -> float:
    """Return for how long a turn must last: a batch, and one delivery that takes its time-out."""
    leads: float = conf.get().LEADER_TTL  # another one leads after as long
    return leads if target.stream else leads + targets.PATIENCE + target.timeout


def _moment_of(entry: str) -> datetime | None:
    """Return when a stream's entry was made, less a margin; None: there is no such entry."""
    milliseconds = int(entry.partition("-")[0])
    if not milliseconds:
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC) - MARGIN


def relay_all(*, most: int = 10_000) -> int:
    """Send what waits for all targets, until nothing is due; return how many were delivered."""
    return sum(relay_one(name, most=most)[0] for name in conf.outbox().targets)


def relay_one(name: str, *, most: int = 10_000) -> tuple[int, str]:
    """Do so for one target; return how many, and why it takes no more, if it is away."""
    relay, total, away = Relay(name), 0, ""
    for _ in range(most):
        done = relay.round()
        total, away = total + done.sent, done.away
        if not done.more:
            break
    turns.give(relay.turn, relay.owner)
    return total, away


# ---- beside the ticks of a coordinator


@contextmanager
def standing(leads: Callable[[], bool]) -> Iterator[None]:
    """Relay, a thread for each target and one for the bell, while the block runs and we lead."""
    names = list(conf.outbox().targets)
    over = threading.Event()
    rung = {name: threading.Event() for name in names}
    joins = [
        clock.start(partial(_relay, name, leads, over, rung[name]), name=f"dedupjobs-relay-{name}")
        for name in names
    ]
    if names:
        listen = partial(_listen, leads, over, list(rung.values()))
        joins.append(clock.start(listen, name="dedupjobs-relay-bell"))
    try:
        yield
    finally:
        over.set()
        for event in rung.values():
            event.set()
        until = clock.monotonic() + GOING
        for join in joins:
            join(max(until - clock.monotonic(), 0.0))


def _listen(leads: Callable[[], bool], over: threading.Event, rung: list[threading.Event]) -> None:
    """Tell the relays that it rang; who does not lead must not take the bell's strokes away."""
    while not over.is_set():
        try:
            heard = leads() and bell.wait(min(conf.get().TICK, LISTENED))
        except UNREACHABLE:
            heard = False
            clock.wait(over, conf.get().TICK)
        if heard:
            for event in rung:
                event.set()
        elif not leads():
            clock.wait(over, conf.get().TICK)


def _relay(
    name: str, leads: Callable[[], bool], over: threading.Event, rung: threading.Event
) -> None:
    relay, rest, held = Relay(name), conf.get().TICK, False
    try:
        while not over.is_set():
            rung.clear()
            done = _round(relay) if leads() else Round(mine=False)
            if held and not done.mine:
                turns.give(relay.turn, relay.owner)  # who leads now need not wait for its end
            held = done.mine
            if done.more:
                continue
            rest = min(rest * 2, LONGEST_REST) if done.away else conf.get().TICK
            clock.wait(over if done.away else rung, clock.uniform(rest / 2, rest))
        turns.give(relay.turn, relay.owner)
    finally:
        connections.close_all()


def _round(relay: Relay) -> Round:
    close_old_connections()
    try:
        return relay.round()
    except TurnLost:
        return Round(mine=False)
    except Exception as error:  # tried again, with a fresh connection
        signals.tell(signals.coordinator_failed, "", error=error)
        connections.close_all()
        return Round(away=type(error).__name__)
