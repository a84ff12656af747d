"""
What the commands that we use do to a Redis server, in memory and in virtual time.

``test_redis_model.py`` holds it against a real Valkey. Replies have the shape of RESP2: bytes,
integers, lists, None; an error is returned, not raised, as a server would send it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

from redis.exceptions import NoScriptError, ResponseError
from redis.lock import Lock

OK = b"OK"
WRONG_TYPE = ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")

Key = tuple[int, bytes]


class Store:
    """
    The server's memory: databases of keys. ``clock`` returns its wall clock in milliseconds.

    ``deleted(db, key, value, command)`` is told of each key that a client removes.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.values: dict[Key, Any] = {}
        self.expiries: dict[Key, int] = {}
        self.deleted: Callable[[int, bytes, Any, str], None] | None = None

    def exchange(self, db: int, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Run what one client sends in one go, a transaction or a pipeline, and reply to all."""
        if commands[0][0] != "MULTI":
            return [self.execute(db, command) for command in commands]
        done = [self.execute(db, command) for command in commands[1:-1]]
        return [OK, *[b"QUEUED"] * len(done), done]

    def execute(self, db: int, args: tuple[Any, ...]) -> Any:
        """Run one command and return its reply."""
        name = str(args[0]).upper()
        if name == "SCRIPT":
            return self._script(args[1:])
        words = [_bytes(arg) for arg in args[1:]]
        if " " in name:  # redis-py joins the words of some names
            name, *more = name.split()
            words = [_bytes(word) for word in more] + words
            if name == "SCRIPT":
                return self._script(tuple(words))
        try:
            return getattr(self, f"_{name.lower()}")(db, *words)
        except ResponseError as error:
            return error

    def peek(self, db: int, key: str) -> Any:
        """Return a live value as it is stored, or None."""
        return self._live(db, key.encode())

    def contents(self) -> list[tuple[int, str, int | None]]:
        """Return all live keys as (database, name, milliseconds to live or None)."""
        now = self.clock()
        live = [k for k in self.values if self.expiries.get(k, math.inf) > now]
        return [(db, key.decode(), self._left((db, key))) for db, key in live]

    # ---- life of a key

    def _live(self, db: int, key: bytes, kind: type | None = None) -> Any:
        full = (db, key)
        expiry = self.expiries.get(full)
        if expiry is not None and expiry <= self.clock():
            del self.expiries[full]
            del self.values[full]
        value = self.values.get(full)
        if value is not None and kind is not None and type(value) is not kind:
            raise WRONG_TYPE
        return value

    def _make(self, db: int, key: bytes, kind: type) -> Any:
        value = self._live(db, key, kind)
        if value is None:
            value = self.values[db, key] = kind()
        return value

    def _drop(self, db: int, key: bytes, command: str) -> int:
        value = self._live(db, key)
        if value is None:
            return 0
        self.expiries.pop((db, key), None)
        del self.values[db, key]
        if self.deleted is not None:
            self.deleted(db, key, value, command)
        return 1

    def _tidy(self, db: int, key: bytes) -> None:
        if not self.values[db, key]:
            self.expiries.pop((db, key), None)
            del self.values[db, key]

    def _left(self, full: Key) -> int | None:
        expiry = self.expiries.get(full)
        return None if expiry is None else expiry - self.clock()

    # ---- any key

    def _del(self, db: int, *keys: bytes) -> int:
        return sum(self._drop(db, key, "DEL") for key in keys)

    def _exists(self, db: int, *keys: bytes) -> int:
        return sum(self._live(db, key) is not None for key in keys)

    def _pexpire(self, db: int, key: bytes, milliseconds: bytes) -> int:
        if self._live(db, key) is None:
            return 0
        left = int(milliseconds)
        if left <= 0:
            return self._drop(db, key, "PEXPIRE")
        self.expiries[db, key] = self.clock() + left
        return 1

    def _expire(self, db: int, key: bytes, seconds: bytes) -> int:
        return self._pexpire(db, key, b"%d" % (int(seconds) * 1000))

    def _pttl(self, db: int, key: bytes) -> int:
        if self._live(db, key) is None:
            return -2
        left = self._left((db, key))
        return -1 if left is None else left

    def _rename(self, db: int, old: bytes, new: bytes) -> Any:
        value = self._live(db, old)
        if value is None:
            raise ResponseError("no such key")
        expiry = self.expiries.pop((db, old), None)
        del self.values[db, old]
        self.expiries.pop((db, new), None)
        self.values[db, new] = value
        if expiry is not None:
            self.expiries[db, new] = expiry
        return OK

    def _flushall(self, db: int, *_: bytes) -> bytes:
        self.values.clear()
        self.expiries.clear()
        return OK

    def _ping(self, db: int) -> bytes:
        return b"PONG"

    def _time(self, db: int) -> list[bytes]:
        seconds, milliseconds = divmod(self.clock(), 1000)
        return [b"%d" % seconds, b"%d" % (milliseconds * 1000)]

    def _info(self, db: int, *_: bytes) -> bytes:
        return b"redis_version:7.2.4\r\n"

    def _select(self, db: int, *_: bytes) -> bytes:
        return OK

    # ---- strings

    def _set(self, db: int, key: bytes, value: bytes, *options: bytes) -> bytes | None:
        words = [option.upper() for option in options]
        there = self._live(db, key) is not None
        if (b"NX" in words and there) or (b"XX" in words and not there):
            return None
        self.values[db, key] = value
        self.expiries.pop((db, key), None)
        for unit, factor in ((b"PX", 1), (b"EX", 1000)):
            if unit in words:
                self.expiries[db, key] = self.clock() + factor * int(words[words.index(unit) + 1])
        return OK

    def _get(self, db: int, key: bytes) -> bytes | None:
        value: bytes | None = self._live(db, key, bytes)
        return value

    # ---- hashes

    def _hset(self, db: int, key: bytes, *pairs: bytes) -> int:
        value = self._make(db, key, dict)
        before = len(value)
        value.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(value) - before

    def _hget(self, db: int, key: bytes, field: bytes) -> bytes | None:
        value: bytes | None = (self._live(db, key, dict) or {}).get(field)
        return value

    def _hgetall(self, db: int, key: bytes) -> list[bytes]:
        value = self._live(db, key, dict) or {}
        return [part for pair in value.items() for part in pair]

    def _hincrby(self, db: int, key: bytes, field: bytes, by: bytes) -> int:
        value = self._make(db, key, dict)
        number = int(value.get(field, 0)) + int(by)
        value[field] = b"%d" % number
        return number

    # ---- lists

    def _rpush(self, db: int, key: bytes, *items: bytes) -> int:
        value = self._make(db, key, list)
        value.extend(items)
        return len(value)

    def _lpush(self, db: int, key: bytes, *items: bytes) -> int:
        value = self._make(db, key, list)
        value[:0] = reversed(items)
        return len(value)

    def _lrange(self, db: int, key: bytes, first: bytes, last: bytes) -> list[bytes]:
        value = self._live(db, key, list) or []
        return list(value[_slice(len(value), int(first), int(last))])

    def _ltrim(self, db: int, key: bytes, first: bytes, last: bytes) -> bytes:
        value = self._live(db, key, list)
        if value is not None:
            value[:] = value[_slice(len(value), int(first), int(last))]
            self._tidy(db, key)
        return OK

    def _llen(self, db: int, key: bytes) -> int:
        return len(self._live(db, key, list) or ())

    def _lpos(self, db: int, key: bytes, item: bytes, *options: bytes) -> int | None:
        value = self._live(db, key, list) or []
        words = [option.upper() for option in options]
        longest = int(words[words.index(b"MAXLEN") + 1]) if b"MAXLEN" in words else 0
        searched = value[:longest] if longest else value
        return searched.index(item) if item in searched else None

    def _lrem(self, db: int, key: bytes, count: bytes, item: bytes) -> int:
        value = self._live(db, key, list)
        if value is None:
            return 0
        most, before = int(count) or len(value), len(value)
        backwards = most < 0
        if backwards:
            value.reverse()
        for _ in range(abs(most)):
            if item in value:
                value.remove(item)
        if backwards:
            value.reverse()
        gone = before - len(value)
        self._tidy(db, key)
        return gone

    def _lpop(self, db: int, key: bytes) -> bytes | None:
        value = self._live(db, key, list)
        if value is None:
            return None
        item: bytes = value.pop(0)
        self._tidy(db, key)
        return item

    def _lmove(self, db: int, old: bytes, new: bytes, here: bytes, there: bytes) -> bytes | None:
        source = self._live(db, old, list)
        if source is None:
            return None
        self._live(db, new, list)  # of the wrong type: an error before anything is moved
        item: bytes = source.pop(0 if here.upper() == b"LEFT" else -1)
        target = source if old == new else self._make(db, new, list)
        target.insert(0 if there.upper() == b"LEFT" else len(target), item)
        self._tidy(db, old)
        return item

    # ---- sets and sorted sets

    def _sadd(self, db: int, key: bytes, *members: bytes) -> int:
        value = self._make(db, key, set)
        before = len(value)
        value.update(members)
        return len(value) - before

    def _zadd(self, db: int, key: bytes, *pairs: bytes) -> int:
        value = self._make(db, key, _Scores)
        before = len(value)
        value.update({m: float(s) for s, m in zip(pairs[::2], pairs[1::2], strict=True)})
        return len(value) - before

    def _zrem(self, db: int, key: bytes, *members: bytes) -> int:
        value = self._live(db, key, _Scores)
        if value is None:
            return 0
        gone = sum(value.pop(member, None) is not None for member in members)
        self._tidy(db, key)
        return gone

    def _zrangebyscore(self, db: int, key: bytes, low: bytes, high: bytes) -> list[bytes]:
        value = self._live(db, key, _Scores) or {}
        found = [(s, m) for m, s in value.items() if float(low) <= s <= float(high)]
        return [member for _, member in sorted(found)]

    # ---- scripts

    def _script(self, args: tuple[Any, ...]) -> Any:
        verb, text = _bytes(args[0]).upper(), _bytes(args[1])
        if verb != b"LOAD":
            return ResponseError(f"SCRIPT {verb!r} is not modelled")
        digest = hashlib.sha1(text).hexdigest()
        self.loaded.add(digest)
        return digest.encode()

    loaded: set[str] = set()  # scripts survive FLUSHALL, and here also the world

    def _evalsha(self, db: int, digest: bytes, number: bytes, *rest: bytes) -> Any:
        if digest.decode() not in self.loaded:
            raise NoScriptError("NOSCRIPT No matching script. Please use EVAL.")
        count = int(number)
        from dedupjobs import counters, locks, stats  # when called: they need the settings

        ours = {
            hashlib.sha1(text.encode()).hexdigest(): name
            for text, name in (
                (stats._DELETE_IF, "_lock_release"),
                (locks.TAKE, "_lock_take"),
                (locks.TAKE_MANY, "_locks_take"),
                (locks.REPLACE_MANY, "_locks_replace"),
                (locks.EXTEND_MANY, "_locks_extend"),
                (locks.RELEASE_MANY, "_locks_release"),
                (counters.ADD, "_count"),
            )
        }
        script = getattr(self, {**SCRIPTS, **ours}[digest.decode()])
        return script(db, rest[:count], rest[count:])

    def _eval(self, db: int, text: bytes, number: bytes, *rest: bytes) -> Any:
        digest = hashlib.sha1(text).hexdigest()
        self.loaded.add(digest)
        return self._evalsha(db, digest.encode(), number, *rest)

    def _lock_take(self, db: int, keys: tuple[bytes, ...], args: tuple[bytes, ...]) -> list[int]:
        lock, mark = keys
        token, life, longest = args
        got = self._set(db, lock, token, b"NX", b"PX", life) or self._get(db, lock) == token
        if not got:
            self._set(db, mark, b"", b"NX", b"PX", longest)
        return [int(bool(got)), self._pttl(db, mark)]

    def _locks_take(self, db: int, keys: tuple[bytes, ...], args: tuple[bytes, ...]) -> list[Any]:
        life, longest, *tokens = args
        pairs = zip(keys[::2], keys[1::2], tokens, strict=True)
        return [self._lock_take(db, (lock, mark), (t, life, longest)) for lock, mark, t in pairs]

    def _locks_replace(
        self, db: int, keys: tuple[bytes, ...], args: tuple[bytes, ...]
    ) -> list[Any]:
        for lock, token in zip(keys[::2], args[1:], strict=True):
            self._set(db, lock, token, b"PX", args[0])
        return [1] * len(args[1:])

    def _locks_extend(self, db: int, keys: tuple[bytes, ...], args: tuple[bytes, ...]) -> list[Any]:
        pairs = zip(keys[::2], args[1:], strict=True)
        return [
            self._pexpire(db, lock, args[0]) if self._get(db, lock) == token else 0
            for lock, token in pairs
        ]

    def _locks_release(
        self, db: int, keys: tuple[bytes, ...], args: tuple[bytes, ...]
    ) -> list[Any]:
        self._del(db, *keys[1::2])
        pairs = zip(keys[::2], args, strict=True)
        return [self._lock_release(db, (lock,), (token,)) for lock, token in pairs]

    def _count(self, db: int, keys: tuple[bytes, ...], args: tuple[bytes, ...]) -> int:
        life, since, *pairs = args
        if type(self._live(db, keys[0])) not in (dict, type(None)):
            self._drop(db, keys[0], "count")
        for field, number in zip(pairs[::2], pairs[1::2], strict=True):
            self._hincrby(db, keys[0], field, number)
        if self._hget(db, keys[0], b"since") is None:
            self._hset(db, keys[0], b"since", since)
        return self._expire(db, keys[0], life)

    def _lock_release(self, db: int, keys: tuple[bytes, ...], args: tuple[bytes, ...]) -> int:
        if self._get(db, keys[0]) != args[0]:
            return 0
        return self._drop(db, keys[0], "release")

    def _lock_extend(self, db: int, keys: tuple[bytes, ...], args: tuple[bytes, ...]) -> int:
        token, more, replaces = args
        left = self._pttl(db, keys[0])
        if self._get(db, keys[0]) != token or left < 0:
            return 0
        longer = int(more) if replaces == b"1" else int(more) + left
        self._pexpire(db, keys[0], b"%d" % longer)
        return 1


class _Scores(dict[bytes, float]):
    """A sorted set; a class of its own, so that a hash is no sorted set."""


SCRIPTS = {
    hashlib.sha1(script.encode()).hexdigest(): name
    for script, name in (
        (Lock.LUA_RELEASE_SCRIPT, "_lock_release"),
        (Lock.LUA_EXTEND_SCRIPT, "_lock_extend"),
    )
}


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    return repr(value).encode()


def _slice(length: int, first: int, last: int) -> slice:
    """Return Redis' inclusive range, which may count from the end, as Python's."""
    first = max(length + first, 0) if first < 0 else first
    last = length + last if last < 0 else last
    return slice(first, max(last + 1, 0))
