"""
Reading a consumer's stream: ``Reader.round()`` is one round, ``run()`` rounds until it is told.

    due again by the table ─▶ entries of dead processes ─▶ new ones ─▶ XACK
                              (XAUTOCLAIM)                 (XREADGROUP)

An entry is acknowledged after the commit of what became of it; one that is delivered again finds
its mark. A group that is not there, because it is new or Redis was wiped, is made from the
stream's begin: what was applied before is known by its mark.

Where an order is kept, one process at a time reads (``turns``), and it first takes over all that
others had in their hands.
"""

from __future__ import annotations

import math
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from django.db import close_old_connections, connections
from redis import Redis
from redis.exceptions import RedisError

from dedupjobs import clock, conf, envelope, probes, signals, streams, turns
from dedupjobs.envelope import LONGEST_ID, LONGEST_KEY, Event
from dedupjobs.exceptions import EventError
from dedupjobs.inbox import marks
from dedupjobs.inbox.marks import Fate, Guard
from dedupjobs.routes import Consumer
from dedupjobs.visible import line

COUNT = 50  # entries that are read at once
BLOCK = 1.0  # seconds that a read waits for a new entry
CLAIM_EVERY = 5.0  # seconds between two looks for entries of dead processes
CLAIMED = 100  # entries of one such look
DEATHS = 5  # deliveries after which an entry that is never acknowledged is HELD
GONE_AFTER = 3_600_000  # milliseconds after which a silent process's name is forgotten
WORST_PAUSE = 5.0  # seconds between tries while something is away

Entry = tuple[str, dict[str, str]]


@dataclass(slots=True)
class Reader:
    """Reads for one consumer under a name that no other process has."""

    consumer: str
    name: str = field(
        default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}-{clock.token()[:8]}"
    )
    stop: Callable[[], bool] = field(default=lambda: False)
    _next_claim: float = -math.inf
    _owes: bool = False  # entries in our hands that we have not settled

    @property
    def options(self) -> Consumer:
        """What settings say of the consumer."""
        return conf.inbox().consumers[self.consumer]

    @property
    def redis(self) -> Redis:
        return streams.client(cache=self.options.cache, url=self.options.url)

    @property
    def stream(self) -> str:
        return self.options.stream or ""

    def round(self, *, block: float = BLOCK) -> Counter[Fate]:
        """
        Take what is due, what others left behind, and what is new; return what became of it.

        ``block``: seconds to wait for something new. Raises what Redis and the database raise.
        """
        if self.options.ordered and not self._has_turn():
            return Counter()
        fates = self._due()
        if not self.stream:
            return fates
        try:
            fates += self._entries(block=0 if fates else block)
        except RedisError as error:
            if not streams.is_missing_group(error):
                raise
            if streams.make_group(self.redis, self.stream, self.consumer):
                signals.tell(signals.group_made, self.consumer, stream=self.stream)
            fates += self._entries(block=0)
        return fates

    def run(self, rest: Callable[[float], bool]) -> None:
        """Do rounds until ``stop()``; whatever fails is tried again, more slowly."""
        pause = 0.0
        while not self.stop() and not (pause and rest(pause)):
            try:
                close_old_connections()
                done = self.round()
                pause = 0.0 if self.stream and (done or not self.options.ordered) else BLOCK
            except Exception as error:
                signals.tell(signals.consumer_troubled, self.consumer, error=error)
                connections.close_all()
                self._owes = True
                pause = min(max(pause, 0.1) * 2, WORST_PAUSE)
        self.leave()

    def leave(self) -> None:
        """Give up the turn, and what is in our hands, so that others can have it at once."""
        try:
            if self.options.ordered:
                turns.give(turns.taking(self.consumer), self.name)
            if self.stream:
                self._give_back()
        except Exception as error:
            signals.tell(signals.consumer_troubled, self.consumer, error=error)

    # ---- where an order is kept

    def _has_turn(self) -> bool:
        turn = turns.take(turns.taking(self.consumer), self.name)
        if turn is None:
            self._next_claim, self._owes = -math.inf, True
        return turn is not None

    def _guard(self) -> Guard | None:
        if not self.options.ordered:
            return None
        return lambda: turns.mine(turns.taking(self.consumer), self.name)

    # ---- what there is to take

    def _due(self) -> Counter[Fate]:
        fates: Counter[Fate] = Counter()
        for event in marks.due(self.consumer, limit=COUNT):
            if self.stop():
                break
            fates[self._take(event, again=True)] += 1
        return fates

    def _entries(self, *, block: float) -> Counter[Fate]:
        if clock.monotonic() >= self._next_claim:
            claimed = self._claimed()
            if len(claimed) < CLAIMED:
                self._next_claim = clock.monotonic() + min(CLAIM_EVERY, self.options.claim_after)
            if claimed:
                return self._settle(claimed)
        if self._owes:
            mine = self._read("0", block=0)
            self._owes = bool(mine)
            if mine:
                return self._settle(mine)
        return self._settle(self._read(">", block=block))

    def _read(self, since: str, *, block: float) -> list[Entry]:
        found: Any = self.redis.xreadgroup(
            self.consumer,
            self.name,
            {self.stream: since},
            count=COUNT,
            block=max(int(block * 1000), 1),
        )
        groups = found.items() if isinstance(found, dict) else found or []
        for _, entries in groups:
            return _entries(entries)
        return []

    def _claimed(self) -> list[Entry]:
        """Take entries that their process has had for too long; hold those that kill everybody."""
        self._forget_gone()
        # Whoever has the turn of an order knows that the others have lost it.
        idle = 0 if self.options.ordered and self._next_claim == -math.inf else None
        least = int(self.options.claim_after * 1000) if idle is None else idle
        found: Any = self.redis.xautoclaim(
            self.stream, self.consumer, self.name, min_idle_time=least, count=CLAIMED
        )
        entries = _entries(found[1])
        often = self._deliveries([entry_id for entry_id, _ in entries])
        deadly = [entry for entry in entries if often.get(entry[0], 0) > DEATHS]
        for entry_id, fields in deadly:
            error = f"{often[entry_id]} processes took it, and none has said what became of it."
            marks.hold(_anyhow(entry_id, fields), consumer=self.consumer, error=error)
            self.redis.xack(self.stream, self.consumer, entry_id)
        return [entry for entry in entries if entry not in deadly]

    def _deliveries(self, ids: list[str]) -> dict[str, int]:
        pipe = self.redis.pipeline(transaction=False)
        for entry_id in ids:
            pipe.xpending_range(self.stream, self.consumer, entry_id, entry_id, 1)
        answers = pipe.execute() if ids else []
        return {
            streams.text(known["message_id"]): int(known["times_delivered"])
            for answer in answers
            for known in answer
        }

    def _give_back(self) -> None:
        mine: Any = self.redis.xpending_range(
            self.stream, self.consumer, "-", "+", COUNT + CLAIMED, consumername=self.name
        )
        if not mine:
            self.redis.xgroup_delconsumer(self.stream, self.consumer, self.name)
            return
        ids = [known["message_id"] for known in mine]
        idle = int(self.options.claim_after * 1000) + 1
        self.redis.xclaim(self.stream, self.consumer, self.name, 0, ids, idle=idle, justid=True)

    def _forget_gone(self) -> None:
        for known in self.redis.xinfo_consumers(self.stream, self.consumer):
            if known["idle"] > GONE_AFTER and not known["pending"]:
                self.redis.xgroup_delconsumer(self.stream, self.consumer, known["name"])

    # ---- taking it

    def _settle(self, entries: Iterable[Entry]) -> Counter[Fate]:
        fates: Counter[Fate] = Counter()
        settled: list[str] = []
        try:
            for entry_id, fields in entries:
                if self.stop():
                    break
                fates[self._take_entry(entry_id, fields)] += 1
                settled.append(entry_id)
        finally:
            if settled:
                probes.reach("inbox.ack")
                self.redis.xack(self.stream, self.consumer, *settled)
        return fates

    def _take_entry(self, entry_id: str, fields: dict[str, str]) -> Fate:
        try:
            event = envelope.of_fields(fields)
        except EventError as error:
            event = _anyhow(entry_id, fields)
            return marks.hold(event, consumer=self.consumer, error=line(error, 500))
        return self._take(event)

    def _take(self, event: Event, *, again: bool = False) -> Fate:
        return marks.attend(event, consumer=self.consumer, guard=self._guard(), again=again)


def _entries(raw: Any) -> list[Entry]:
    """Return entries; of one that was trimmed away meanwhile nothing is left to read."""
    return [(streams.text(i), streams.fields(fields)) for i, fields in raw if fields]


def _anyhow(entry_id: str, fields: dict[str, str]) -> Event:
    """Return an entry that can not be read as an event, so that a person can see it."""
    return Event(
        id=(fields.get("id") or f"entry:{entry_id}")[:LONGEST_ID],
        name=line(fields.get("name", ""), 90),
        body=fields.get("data", "")[: 1024 * 1024].replace("\0", ""),
        key=line(fields.get("key", ""), LONGEST_KEY - 10),
    )
