"""
What is known of keys without asking the database: in this process (L1), and in Redis (L2).

    <PREFIX>:status:<key hash>    "?<token>"            somebody reads the row: a lease to fill
                                  "1|<stamp>|<seal>|…"  a success that holds its key, as JSON
    stamp = <row pk>.<version>, of fixed width, so that text compares as the numbers do

L1 keeps any state, for L1_TTL from the moment its reading began. L2 keeps only successes that
hold their key, for at most the window that is left. What is not there is never remembered.

A reader that was slow can not put an old row over a newer one: before it asks the database it
takes a lease on the entry, and whoever changes the row breaks it after his commit. A wiped Redis
has no lease either. (Leases as in memcache at Facebook, NSDI 2013.)
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from django.db import connections
from django_redis import get_redis_connection

from dedupjobs import clock, conf, lifecycle, probes, seal, wire
from dedupjobs.clock import DbNow
from dedupjobs.models import ProcessedJob, Status
from dedupjobs.wire import UNREACHABLE

SCHEME = "1"
LEASE = 10.0  # seconds that a reader has to bring a row from the database
LARGEST_RESULT = 4_096  # characters of a result that travel with an entry; else it is read

# KEYS[1]: an entry. ARGV: the lease that was taken, the entry, its milliseconds.
_FILL = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('set', KEYS[1], ARGV[2], 'px', ARGV[3])
return 1
"""

# KEYS[1]: an entry. ARGV[1]: the stamp of a change. Newer entries are left alone.
DROP = """
local there = redis.call('get', KEYS[1])
if not there then return 0 end
if string.sub(there, 1, 2) == '1|' and string.sub(there, 3, 2 + #ARGV[1]) >= ARGV[1] then
    return 0
end
return redis.call('del', KEYS[1])
"""


class Stamp(NamedTuple):
    """Which of two states of a key is the newer one."""

    pk: int
    version: int

    def __str__(self) -> str:
        return f"{self.pk:020d}.{self.version:012d}"


class Known(NamedTuple):  # cheaper to make than a frozen dataclass, and made with each read
    """
    The state of a key as the database had it. ``holds``: a success that answers for the key.

    ``result``: JSON, or None where it has to be read.
    """

    key_hash: str
    stamp: Stamp
    status: Status
    holds: bool
    generation: int
    name: str
    key: str
    scope: str
    queue: str
    fingerprint: str
    unique_until: datetime | None
    result: str | None

    def row(self) -> ProcessedJob:
        """Return the row as far as it is known; other fields are read when they are asked for."""
        values = {
            "id": self.stamp.pk,
            "version": self.stamp.version,
            "key_hash": self.key_hash,
            **{name: getattr(self, name) for name in _CARRIED},
        }
        if self.result is not None:
            values["result"] = self.result
        fields = [f.attname for f in ProcessedJob._meta.concrete_fields if f.attname in values]
        return ProcessedJob.from_db(lifecycle.alias(), fields, [values[name] for name in fields])


_CARRIED = ("status", "generation", "name", "key", "scope", "queue", "fingerprint", "unique_until")


# ---- reading


def read(key_hash: str, *, holds: bool, bypassed: bool = False) -> Known | None:
    """
    Return the state of a key: from here, from Redis, or by one query; None: there is no such key.

    ``holds``: a success of this job keeps its key. Inside a transaction only the database is
    asked, since it alone knows what the transaction has changed; ``bypassed``: always.
    """
    if bypassed or not is_on() or connections[lifecycle.alias()].in_atomic_block:
        known, _ = _from_database(key_hash, holds)
        return known
    if (found := _l1.get(key_hash)) is not None:
        counts["process"] += 1
        return found
    with _l1.reading(key_hash) as reading:
        found = _from_redis(key_hash)
        if found is not None and not _l1.has_newer(key_hash, found):
            counts["redis"] += 1
            return _l1.put(reading, found, conf.get().L1_TTL)
        counts["missed"] += 1
        return _load(reading, holds, _take_lease(key_hash))


def bring(key_hash: str) -> None:
    """Read a success for all from the database, unless it is there or somebody is at it."""
    if _l1.get(key_hash) is not None:
        return
    with _l1.reading(key_hash) as reading:
        if lease := _take_lease(key_hash):
            _load(reading, True, lease)


def _load(reading: _Reading, holds: bool, lease: str) -> Known | None:
    key_hash = reading.key_hash
    probes.reach("cache.leased")
    known, left = _from_database(key_hash, holds)
    probes.reach("cache.loaded")
    if known is None:
        _l1.forget(key_hash)
        return None
    if known.holds:
        _fill(key_hash, lease, known, left)
    return _l1.put(reading, known, _shorter(conf.get().L1_TTL, left if known.holds else None))


def success(key_hash: str) -> Known | None:
    """Return a success that is known to hold this key, without asking the database."""
    if not is_on():
        return None
    found, level = _l1.get(key_hash), "process"
    if found is None:
        with _l1.reading(key_hash) as reading:
            found, level = _from_redis(key_hash), "redis"
            if found is None or _l1.has_newer(key_hash, found):
                counts["missed"] += 1
                return None
            found = _l1.put(reading, found, conf.get().L1_TTL)
    counts[level if found.holds else "missed"] += 1
    return found if found.holds else None


def peek(key_hash: str) -> Known | None:
    """Return what this process believes right now, without waiting for anything."""
    return _l1.get(key_hash)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An entry of Redis as it stands there: its row's version, and the seconds until it ends."""

    version: int
    ttl: float


def stored(key_hash: str) -> Stored | None:
    """Return what Redis has of a key, for people who look; raises RedisError."""
    with client().deadline(conf.get().LOCK_TIMEOUT):
        pipe = client().redis.pipeline(transaction=False)
        pipe.get(entry_key(key_hash))
        pipe.pttl(entry_key(key_hash))
        raw, milliseconds = pipe.execute()
    known = None if raw is None else _decoded(key_hash, raw)
    return Stored(version=known.stamp.version, ttl=milliseconds / 1000) if known else None


def is_on() -> bool:
    """Whether the project has a status cache."""
    return conf.get().STATUS_CACHE is not None


def _shorter(ttl: float, left: float | None) -> float:
    return ttl if left is None else min(ttl, left)


counts: Counter[str] = Counter()
"""How many reads of this process were answered by the "process", by "redis", or "missed"."""


# ---- the database


def _from_database(key_hash: str, holds: bool) -> tuple[Known | None, float | None]:
    """Return a key's state, and the seconds that its window is still open (None: for ever)."""
    rows = lifecycle.jobs().filter(key_hash=key_hash).defer("args", "rerun_args", "error")
    row: Any = rows.annotate(db_now=DbNow()).first()
    if row is None:
        return None, None
    left = None
    if row.unique_until is not None:
        left = (row.unique_until - row.db_now).total_seconds()
    succeeded = row.status == Status.SUCCEEDED
    fits = row.result is not None and len(row.result) <= LARGEST_RESULT
    known = Known(
        key_hash=key_hash,
        stamp=Stamp(row.pk, row.version),
        status=Status(row.status),
        holds=holds and succeeded and (left is None or left > 0),
        result=row.result if succeeded and fits else None,
        **{name: getattr(row, name) for name in _CARRIED if name != "status"},
    )
    return known, left


# ---- this process


@dataclass(slots=True)
class _Reading:
    """A look at one key that is under way; broken by whoever changes the key meanwhile."""

    key_hash: str
    begun: float
    broken: bool = False


@dataclass(frozen=True, slots=True)
class _Entry:
    known: Known
    stored: float
    until: float


@dataclass(slots=True)
class _L1:
    """
    The newest states that this process has seen, L1_SIZE at the most.

    An entry that is out of date stays until it is pushed out: it keeps a slower answer of Redis
    from being taken for newer.
    """

    entries: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)
    readings: dict[str, list[_Reading]] = field(default_factory=dict)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def get(self, key_hash: str) -> Known | None:
        entry = self.entries.get(key_hash)
        if entry is None or entry.until <= clock.monotonic():
            return None
        try:  # noqa: SIM105 - the fastest line of all
            self.entries.move_to_end(key_hash)
        except KeyError:
            pass  # it was pushed out meanwhile
        return entry.known

    @contextmanager
    def reading(self, key_hash: str) -> Iterator[_Reading]:
        reading = _Reading(key_hash, clock.monotonic())
        with self.guard:
            self.readings.setdefault(key_hash, []).append(reading)
        try:
            yield reading
        finally:
            with self.guard:
                others = [r for r in self.readings.get(key_hash, ()) if r is not reading]
                if others:
                    self.readings[key_hash] = others
                else:
                    self.readings.pop(key_hash, None)

    def has_newer(self, key_hash: str, known: Known) -> bool:
        entry = self.entries.get(key_hash)
        return entry is not None and entry.known.stamp > known.stamp

    def put(self, reading: _Reading, known: Known, ttl: float) -> Known:
        """Keep ``known``, unless a newer state was seen while it was on its way: return that."""
        with self.guard:
            there = self.entries.get(reading.key_hash)
            if there and there.known.stamp > known.stamp and there.stored >= reading.begun:
                return there.known
            until = reading.begun if reading.broken else reading.begun + ttl
            self.entries[reading.key_hash] = _Entry(known, clock.monotonic(), until)
            self.entries.move_to_end(reading.key_hash)
            while len(self.entries) > conf.get().L1_SIZE:
                self.entries.popitem(last=False)
            return known

    def expire(self, key_hash: str) -> None:
        """The key has changed: believe nothing that was read before now."""
        with self.guard:
            self._expire(key_hash)

    def expire_all(self) -> None:
        with self.guard:
            for key_hash in [*self.entries, *self.readings]:
                self._expire(key_hash)

    def _expire(self, key_hash: str) -> None:
        for reading in self.readings.get(key_hash, ()):
            reading.broken = True
        if (entry := self.entries.get(key_hash)) is not None:
            self.entries[key_hash] = _Entry(entry.known, entry.stored, 0.0)

    def forget(self, key_hash: str) -> None:
        with self.guard:
            self.entries.pop(key_hash, None)


_l1 = _L1()


def _forget_l1() -> None:
    global _l1  # noqa: PLW0603 - its lock may have been held by a thread that a fork leaves behind
    _l1 = _L1()


os.register_at_fork(after_in_child=_forget_l1)
os.register_at_fork(after_in_child=counts.clear)


def expire(key_hash: str) -> None:
    """Believe nothing of this key that was read before now."""
    _l1.expire(key_hash)


def expire_all() -> None:
    """Believe nothing that was read before now: changes may have been missed."""
    _l1.expire_all()


# ---- Redis


budget = wire.Budget()  # its own: a slow cache must not cost jobs their messages


def entry_key(key_hash: str) -> str:
    """Return the name of a key's entry in Redis."""
    return f"{conf.get().PREFIX}:status:{key_hash}"


def _from_redis(key_hash: str) -> Known | None:
    try:
        with client().spending(budget):
            raw = client().get(entry_key(key_hash))
    except UNREACHABLE:
        return None
    return None if raw is None else _decoded(key_hash, raw)


def _take_lease(key_hash: str) -> str:
    """Return the lease under which this key may be filled, or "" if another reader has it."""
    lease = f"?{clock.token()}"
    try:
        with client().spending(budget):
            milliseconds = round(LEASE * 1000)
            mine = client().redis.set(entry_key(key_hash), lease, nx=True, px=milliseconds)
    except UNREACHABLE:
        return ""
    return lease if mine else ""


def _fill(key_hash: str, lease: str, known: Known, left: float | None) -> None:
    """Store a success for others, so short that no L1 copy of it outlives its window."""
    ttl = conf.get().L2_TTL if left is None else min(conf.get().L2_TTL, left - conf.get().L1_TTL)
    if not lease or ttl <= 0:
        return
    entry, milliseconds = _encoded(key_hash, known), max(round(ttl * 1000), 1)
    with suppress(*UNREACHABLE), client().spending(budget):
        client().redis.eval(_FILL, 1, entry_key(key_hash), lease, entry, str(milliseconds))


def _encoded(key_hash: str, known: Known) -> str:
    until = known.unique_until.isoformat() if known.unique_until else None
    body = [known.generation, known.name, known.key, known.scope, known.queue]
    text = json.dumps([*body, known.fingerprint, until, known.result], separators=(",", ":"))
    signature = seal.sign(f"status:{key_hash}", f"{known.stamp}|{text}")
    return f"{SCHEME}|{known.stamp}|{signature}|{text}"


def _decoded(key_hash: str, raw: bytes | str) -> Known | None:
    """Return an entry as we wrote it; what is a lease, of another scheme or forged is nothing."""
    try:
        text = raw.decode() if isinstance(raw, bytes) else raw
        scheme, stamp, signature, body = text.split("|", 3)
        if scheme != SCHEME or not seal.is_genuine(
            f"status:{key_hash}", f"{stamp}|{body}", signature
        ):
            return None
    except ValueError:
        return None
    pk, version = stamp.split(".")
    generation, name, key, scope, queue, fingerprint, until, result = json.loads(body)
    return Known(  # by place, which is faster than by name
        key_hash,
        Stamp(int(pk), int(version)),
        Status.SUCCEEDED,
        True,
        generation,
        name,
        key,
        scope,
        queue,
        fingerprint,
        datetime.fromisoformat(until) if until else None,
        result,
    )


def forget_clients() -> None:
    """Drop the client and all that is believed, after a change of settings."""
    wire.close(client)
    budget.reset()
    _forget_l1()


@lru_cache(maxsize=1)
def client() -> wire.Client:
    """Return our own client of the status cache's server."""
    source: Any = get_redis_connection(conf.get().STATUS_CACHE)
    return wire.Client.to(source, timeout=conf.get().PUSH_TIMEOUT)
