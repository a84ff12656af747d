"""
Redis streams, as both sides of the outbox and the inbox use them.

A stream stands under the name that settings give it, without a prefix of ours: others read and
write it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from django.core.cache import InvalidCacheBackendError
from django_redis import get_redis_connection
from redis import Redis
from redis.exceptions import ResponseError

from dedupjobs import clock, conf, wire
from dedupjobs.exceptions import Unavailable

TIMEOUT = 5.0  # seconds of one command

# KEYS[1]: the stream. ARGV: the last entry that we have added ("": none), our mark, about how many
# entries are kept, how many words an entry has; then the words of all entries.
# The mark is a consumer group that nobody reads by: it stands in the stream itself, so it is lost
# with it, and says how far we had got, whatever others have added since.
# Answers {1, our last entry now}; or {0, what the mark says}, if our last one is not there any
# more: it went with the server, by a fail-over or by a deletion. Nothing is added then.
ADD = """
local expected, mark, maxlen, size = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local last, marked = '0-0', false
local function parts(id)
    local ms, seq = string.match(id, '(%d+)-(%d+)')
    return tonumber(ms), tonumber(seq)
end
if redis.call('exists', KEYS[1]) == 1 then
    for _, group in ipairs(redis.call('xinfo', 'groups', KEYS[1])) do
        local facts = {}
        for i = 1, #group, 2 do facts[group[i]] = group[i + 1] end
        if facts['name'] == mark then last, marked = facts['last-delivered-id'], true end
    end
end
if expected ~= '' then
    local ms, seq = parts(last)
    local known_ms, known_seq = parts(expected)
    if ms < known_ms or (ms == known_ms and seq < known_seq) then return {0, last} end
end
if #ARGV < 5 then return {1, expected} end
for i = 5, #ARGV, size do
    last = redis.call('xadd', KEYS[1], 'maxlen', '~', maxlen, '*', unpack(ARGV, i, i + size - 1))
end
redis.call('xgroup', marked and 'setid' or 'create', KEYS[1], mark, last)
return {1, last}
"""
MARK = "dedupjobs:published:"  # then a token of the publisher's


@dataclass(frozen=True, slots=True)
class Place:
    """How far a publisher has got in a stream: his last entry, and the mark that he left there."""

    last: str
    mark: str

    @classmethod
    def of(cls, text: str) -> Place:
        """Return it as ``str`` has written it; a new one for an empty text."""
        last, _, token = text.partition(" ")
        return cls(last, MARK + (token or clock.token()))

    def moved(self, last: str) -> Place:
        """Return the place behind the entry ``last``."""
        return Place(last, self.mark)

    def __str__(self) -> str:
        return f"{self.last} {self.mark.removeprefix(MARK)}"


def client(*, cache: str | None, url: str | None, timeout: float = TIMEOUT) -> Redis:
    """
    Return the client of a Redis that settings name; ``timeout``: seconds of one command.

    Raises Unavailable, if they name none.
    """
    return _client(cache or conf.get().lock_home, url, timeout)


@lru_cache(maxsize=64)
def _client(cache: str, url: str | None, timeout: float) -> Redis:
    try:
        source: Any = Redis.from_url(url) if url else get_redis_connection(cache)
        return wire.own_client(source, timeout=timeout)
    except (InvalidCacheBackendError, NotImplementedError, AttributeError, ValueError) as error:
        named = "its url" if url else f"cache {cache!r}"  # an address may hold a password
        raise Unavailable(f"{named} is no Redis: {type(error).__name__}: {error}") from error


def forget_clients() -> None:
    """Drop all clients, after a change of settings."""
    _client.cache_clear()


def add(
    redis: Redis, stream: str, *, after: Place, maxlen: int, size: int, words: list[str]
) -> tuple[bool, str]:
    """
    Add entries of ``size`` words each, in one trip; return whether, and our last entry there.

    ``after``: the place that the stream must know still. Raises what Redis raises.
    """
    answer: Any = redis.eval(ADD, 1, stream, after.last, after.mark, maxlen, size, *words)
    added, last = answer
    return bool(added), text(last)


def make_group(redis: Redis, stream: str, group: str) -> bool:
    """Let there be a group that reads from the stream's begin; False: it was there."""
    try:
        redis.xgroup_create(stream, group, id="0", mkstream=True)
    except ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise
        return False
    return True


def is_missing_group(error: Exception) -> bool:
    """Whether a command failed because the group, or the stream with it, is not there."""
    words = str(error)
    return isinstance(error, ResponseError) and ("NOGROUP" in words or "no such key" in words)


def fields(raw: Mapping[Any, Any]) -> dict[str, str]:
    """Return an entry's fields as texts."""
    return {text(name): text(value) for name, value in raw.items()}


def text(value: Any) -> str:
    """Return what Redis answers as text; foreign bytes are made visible."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
