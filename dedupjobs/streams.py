"""
Redis streams, as both sides of the outbox and the inbox use them.

A stream stands under the name that settings give it, without a prefix of ours: others read and
write it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from django_redis import get_redis_connection
from redis import Redis
from redis.exceptions import ResponseError

from dedupjobs import conf, wire

TIMEOUT = 5.0  # seconds of one command

# KEYS[1]: the stream. ARGV: the last entry that we know of ("": none), about how many entries are
# kept, how many words an entry has; then the words of all entries.
# Answers {1, the last entry now}; or {0, the last entry}, if ours is not there any more: what was
# taken in has been lost, with the server, by a fail-over or by a deletion. Nothing is added then.
ADD = """
local last, expected, maxlen, size = '0-0', ARGV[1], ARGV[2], tonumber(ARGV[3])
if redis.call('exists', KEYS[1]) == 1 then
    local facts = redis.call('xinfo', 'stream', KEYS[1])
    for i = 1, #facts, 2 do
        if facts[i] == 'last-generated-id' then last = facts[i + 1] end
    end
end
if expected ~= '' then
    local ms, seq = string.match(last, '(%d+)-(%d+)')
    local known_ms, known_seq = string.match(expected, '(%d+)-(%d+)')
    ms, seq, known_ms, known_seq =
        tonumber(ms), tonumber(seq), tonumber(known_ms), tonumber(known_seq)
    if ms < known_ms or (ms == known_ms and seq < known_seq) then return {0, last} end
end
for i = 4, #ARGV, size do
    last = redis.call('xadd', KEYS[1], 'maxlen', '~', maxlen, '*', unpack(ARGV, i, i + size - 1))
end
return {1, last}
"""


def client(*, cache: str | None, url: str | None, timeout: float = TIMEOUT) -> Redis:
    """Return the client of a Redis that settings name; ``timeout``: seconds of one command."""
    return _client(cache or conf.get().lock_home, url, timeout)


@lru_cache(maxsize=64)
def _client(cache: str, url: str | None, timeout: float) -> Redis:
    source: Any = Redis.from_url(url) if url else get_redis_connection(cache)
    return wire.own_client(source, timeout=timeout)


def forget_clients() -> None:
    """Drop all clients, after a change of settings."""
    _client.cache_clear()


def add(
    redis: Redis, stream: str, *, after: str, maxlen: int, size: int, words: list[str]
) -> tuple[bool, str]:
    """
    Add entries of ``size`` words each, in one trip; return whether, and the stream's last entry.

    ``after``: the last entry that must be there still. Raises what Redis raises.
    """
    answer: Any = redis.eval(ADD, 1, stream, after, maxlen, size, *words)
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
