"""
The Redis lock in front of a row: a cheap first filter, and a live display of who is at work.

It may vanish, outlive its owner or be stolen, and nothing breaks: the row decides. So every
answer here is advice, and an unreachable Redis only means that the row is asked at once.

    key      <KEY_PREFIX>:<VERSION>:<PREFIX>:lock:{<row pk>}     (as cache.lock makes it)
    value    <row pk>:<owner>
    TTL      the lease, renewed by the beats; after a failure, the delay of the retry

LOCK_CACHE may name several servers (``quorum``): then all are asked for the same lock, and it is
held where a majority of them says so. What stands in one place only (the leader's lease, and with
it the counters) is on the first of them.

Beside it stands <KEY_PREFIX>:<VERSION>:<PREFIX>:waited:{<row pk>} once a delivery met a busy lock:
how old it is shows in its TTL, and it goes with the end of the next attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from typing import Any, cast

from django.core.cache import caches
from django_redis import get_redis_connection
from redis import Redis
from redis.exceptions import LockError, ResponseError
from redis.lock import Lock

from dedupjobs import ballot, conf, probes, seal, votes, wire
from dedupjobs.quorum import Quorum
from dedupjobs.wire import UNREACHABLE, Cargo, Load

WAITED_TTL = 86_400_000  # milliseconds that a wait is remembered, and measured
OVER = 0  # milliseconds to live: PEXPIRE deletes the key

# KEYS: a lock, and the mark that a delivery met it busy; both of one row, so in one slot.
# ARGV: a token, its milliseconds, the mark's. Returns whether it is ours, and the mark’s TTL.
# A SET whose reply was lost may have taken it for us, so the value is compared with our own token.
TAKE = """
if redis.call('set', KEYS[1], ARGV[1], 'nx', 'px', ARGV[2])
    or redis.call('get', KEYS[1]) == ARGV[1] then
    return {1, redis.call('pttl', KEYS[2])}
end
redis.call('set', KEYS[2], '', 'nx', 'px', ARGV[3])
return {0, redis.call('pttl', KEYS[2])}
"""


# The same for the locks and marks of several rows, in turns. ARGV: what the single one has besides
# its token, and then a token per row. Returns an answer per row.
TAKE_MANY = """
local found = {}
for i = 1, #KEYS / 2 do
    local lock, mark, token = KEYS[2 * i - 1], KEYS[2 * i], ARGV[2 + i]
    if redis.call('set', lock, token, 'nx', 'px', ARGV[1]) or redis.call('get', lock) == token then
        found[i] = {1, redis.call('pttl', mark)}
    else
        redis.call('set', mark, '', 'nx', 'px', ARGV[2])
        found[i] = {0, redis.call('pttl', mark)}
    end
end
return found
"""
REPLACE_MANY = """
local found = {}
for i = 1, #KEYS / 2 do
    redis.call('set', KEYS[2 * i - 1], ARGV[1 + i], 'px', ARGV[1])
    found[i] = 1
end
return found
"""
EXTEND_MANY = """
local found = {}
for i = 1, #KEYS / 2 do
    found[i] = 0
    if redis.call('get', KEYS[2 * i - 1]) == ARGV[1 + i] then
        found[i] = redis.call('pexpire', KEYS[2 * i - 1], ARGV[1])
    end
end
return found
"""
RELEASE_MANY = """
local found = {}
for i = 1, #KEYS / 2 do
    found[i] = 0
    redis.call('del', KEYS[2 * i])
    if redis.call('get', KEYS[2 * i - 1]) == ARGV[i] then
        found[i] = redis.call('del', KEYS[2 * i - 1])
    end
end
return found
"""


class Grip(Enum):
    """What became of a try to take or renew a lock."""

    HELD = "held"
    BUSY = "busy"
    UNREACHABLE = "unreachable"
    UNUSED = "unused"  # nobody asked for it


@dataclass(frozen=True, slots=True)
class Taken:
    """``waited``: seconds since the first delivery that met the lock busy; None: none has."""

    grip: Grip
    waited: float | None = None


def take(pk: int, owner: str, *, ttl: float) -> Taken:
    """Try once to take the lock for ``ttl`` seconds, in one round trip."""
    if _quorum() is not None:
        return take_many([(pk, owner)], ttl=ttl)[pk]
    probes.reach("lock.before")
    waited: list[float] = []

    def ask() -> Grip:
        keys = _name(f"lock:{{{pk}}}"), _name(f"waited:{{{pk}}}")
        words = _token(pk, owner), _milliseconds(ttl), WAITED_TTL
        got, left = _client().eval(TAKE, 2, *keys, *words)
        if 0 <= left <= WAITED_TTL:
            waited.append((WAITED_TTL - left) / 1000)
        return Grip.HELD if got else Grip.BUSY

    grip = _advice(ask)
    probes.reach("lock.after")
    return Taken(grip, *waited)


def acquire(pk: int, owner: str, *, ttl: float) -> Grip:
    """As ``take``, for those to whom it is all the same how long somebody has waited."""
    return take(pk, owner, ttl=ttl).grip


def replace(pk: int, owner: str, *, ttl: float) -> Grip:
    """Take the lock from whoever has it: the row is won, so any other holder is a leftover."""
    if _quorum() is not None:
        return replace_many([(pk, owner)], ttl=ttl)[pk]

    def take() -> Grip:
        _client().set(name_of(pk), _token(pk, owner), px=_milliseconds(ttl))
        return Grip.HELD

    return _advice(take)


def extend(
    pk: int, owner: str, *, ttl: float, waited: bool = True, cargo: Sequence[Cargo] = ()
) -> Grip:
    """
    Let our own lock live ``ttl`` seconds from now; BUSY: it is gone or somebody else's.

    ``waited``: keep the mark that somebody waits. ``cargo`` travels in the same round trip.
    """
    if _quorum() is not None:
        return _own_by_majority(pk, owner, ttl, waited=waited, cargo=cargo)
    words = _token(pk, owner), _milliseconds(ttl), 1
    return _own(pk, Lock.LUA_EXTEND_SCRIPT, words, waited=waited, cargo=cargo)


def release(pk: int, owner: str, *, waited: bool = True, cargo: Sequence[Cargo] = ()) -> Grip:
    """Give our own lock up; another's is left alone (compare and delete, in one script)."""
    probes.reach("release.before")
    if _quorum() is not None:
        return _own_by_majority(pk, owner, None, waited=waited, cargo=cargo)
    words = (_token(pk, owner),)
    return _own(pk, Lock.LUA_RELEASE_SCRIPT, words, waited=waited, cargo=cargo)


def _own(
    pk: int, script: str, words: tuple[Any, ...], *, waited: bool, cargo: Sequence[Cargo]
) -> Grip:
    """Do something to our own lock, by a script that compares its token."""
    load = Load(cargo)
    try:
        pipe = _client().pipeline(transaction=False)
        pipe.eval(script, 1, name_of(pk), *words)
        if not waited:
            pipe.delete(_name(f"waited:{{{pk}}}"))
        load.load(pipe)
        answers: Any = pipe.execute(raise_on_error=False)
    except UNREACHABLE as error:
        load.left_behind(error)
        return Grip.UNREACHABLE
    load.arrived(answers)
    if isinstance(answers[0], Exception):
        return Grip.UNREACHABLE
    return Grip.HELD if answers[0] else Grip.BUSY


Held = Sequence[tuple[int, str]]  # row pk, owner


def take_many(held: Held, *, ttl: float) -> dict[int, Taken]:
    """As ``take`` for each row, all in one round trip."""
    probes.reach("lock.before")
    answers = _for_each(TAKE_MANY, held, _milliseconds(ttl), WAITED_TTL, ttl=ttl)
    probes.reach("lock.after")
    taken = {pk: _taken(answer) for (pk, _), answer in zip(held, answers, strict=True)}
    if _quorum() is not None:
        _give_back(held, {pk: one.grip for pk, one in taken.items()})
    return taken


def _taken(answer: Any) -> Taken:
    if not isinstance(answer, list):
        return Taken(Grip.UNREACHABLE)
    got, left = answer
    waited = (WAITED_TTL - left) / 1000 if 0 <= left <= WAITED_TTL else None
    return Taken(Grip.HELD if got else Grip.BUSY, waited)


def replace_many(held: Held, *, ttl: float) -> dict[int, Grip]:
    """As ``replace`` for each row."""
    grips = _grips(held, _for_each(REPLACE_MANY, held, _milliseconds(ttl), ttl=ttl))
    if _quorum() is not None:
        _give_back(held, grips)
    return grips


def extend_many(held: Held, *, ttl: float) -> dict[int, Grip]:
    """As ``extend`` for each row."""
    return _grips(held, _for_each(EXTEND_MANY, held, _milliseconds(ttl), ttl=ttl))


def release_many(held: Held, *, cargo: Sequence[Cargo] = ()) -> dict[int, Grip]:
    """As ``release`` for each row, with the marks that somebody waited."""
    probes.reach("release.before")
    return _grips(held, _for_each(RELEASE_MANY, held, cargo=cargo))


def _grips(held: Held, answers: list[Any]) -> dict[int, Grip]:
    def grip(answer: Any) -> Grip:
        if isinstance(answer, BaseException):
            return Grip.UNREACHABLE
        return Grip.HELD if answer else Grip.BUSY

    return {pk: grip(answer) for (pk, _), answer in zip(held, answers, strict=True)}


def _for_each(
    script: str, held: Held, *words: int, ttl: float | None = None, cargo: Sequence[Cargo] = ()
) -> list[Any]:
    """
    Return what a script answers per row, or an error; in one round trip.

    One call serves all rows. A cluster refuses that, since their keys are in different slots;
    then each row has a call of its own. ``ttl``: what the words ask for, in seconds.
    """
    if not held:
        return []
    carried = Load(cargo)
    try:
        if (quorum := _quorum()) is not None:
            commands = partial(_load_script, script=script, held=held, words=words)
            return ballot.each(quorum, commands, len(held), ttl=ttl, carried=carried)
        answers = _called(script, [held], words, carried)
        if isinstance(answers[0], ResponseError):
            answers = _called(script, [[one] for one in held], words, Load(()))
    except UNREACHABLE as error:
        carried.left_behind(error)
        return [error] * len(held)
    return [a for answer in answers for a in (answer if isinstance(answer, list) else [answer])]


def _called(script: str, groups: Sequence[Held], words: Sequence[int], carried: Load) -> list[Any]:
    pipe = _client().pipeline(transaction=False)
    for group in groups:
        _load_script(pipe, script=script, held=group, words=words)
    carried.load(pipe)
    answers: list[Any] = pipe.execute(raise_on_error=False)
    carried.arrived(answers)
    return answers[: len(groups)]


def _load_script(pipe: Any, *, script: str, held: Held, words: Sequence[int]) -> None:
    name = _namer()
    keys = [name(f"{kind}:{{{pk}}}") for pk, _ in held for kind in ("lock", "waited")]
    tokens = [_token(pk, owner) for pk, owner in held]
    pipe.eval(script, len(keys), *keys, *words, *tokens)


def _own_by_majority(
    pk: int, owner: str, ttl: float | None, *, waited: bool, cargo: Sequence[Cargo]
) -> Grip:
    """Extend our own lock on all servers, or release it (``ttl``: None)."""
    quorum = cast(Quorum, _quorum())
    milliseconds = OVER if ttl is None else _milliseconds(ttl)

    def commands(pipe: Any) -> None:
        _load_script(pipe, script=EXTEND_MANY, held=[(pk, owner)], words=[milliseconds])
        if not waited:
            pipe.delete(_name(f"waited:{{{pk}}}"))

    answers = ballot.each(quorum, commands, 1, ttl=ttl, carried=Load(cargo))
    return _grips([(pk, owner)], answers)[pk]


def _give_back(asked: Held, grips: Mapping[int, Grip]) -> None:
    """
    Release what a minority may have granted, on all servers: also on those that have not answered,
    which may do what they were told later. The marks stay: somebody has met a busy lock.
    """
    held = [one for one in asked if grips[one[0]] is not Grip.HELD]
    if held and (quorum := _quorum()) is not None:
        commands = partial(_load_script, script=EXTEND_MANY, held=held, words=[OVER])
        quorum.ask(commands, enough=lambda answers: True)


def why_unreachable() -> str:
    """
    Return why no lock can be taken right now, or an empty text; in one round trip.

    A server that answers and refuses to write counts as away. The process loses PUSH_TIMEOUT per
    second at the most, since calls ask this, too.
    """
    try:
        if (quorum := _quorum()) is not None:
            held = [(0, "nobody")]  # no row has this number
            commands = partial(_load_script, script=REPLACE_MANY, held=held, words=[1])
            (answer,) = ballot.each(quorum, commands, 1)
            return f"{answer}" if isinstance(answer, Exception) else ""
        with _asking().spending(_budget):
            _asking().redis.set(name_of(0), _token(0, "nobody"), px=1)
    except UNREACHABLE as error:
        return f"{type(error).__name__}: {error}"
    return ""


def clear(pk: int) -> None:
    """Delete the lock, whoever has it: its row was cancelled."""
    if (quorum := _quorum()) is not None:
        quorum.ask(lambda pipe: pipe.delete(name_of(pk)), enough=lambda answers: True)
        return

    def delete() -> Grip:
        _client().delete(name_of(pk))
        return Grip.HELD

    _advice(delete)


def lead(owner: str, *, ttl: float) -> Grip:
    """Take or renew the coordinators' leader lease; it only saves double work."""

    def take() -> Grip:
        lock = _leader(ttl)
        lock.local.token = owner.encode()
        if lock.acquire(blocking=False, token=owner):
            return Grip.HELD
        lock.local.token = owner.encode()
        try:
            lock.extend(ttl, replace_ttl=True)
        except LockError:
            if not _outlives(lock.name, ttl):
                return Grip.BUSY
            _client().set(lock.name, owner, px=_milliseconds(ttl))
        return Grip.HELD

    return _advice(take)


def _outlives(name: str, ttl: float) -> bool:
    """
    Whether a lease claims to last longer than anybody asks for: Redis's clock went back, or it
    has no end. Its leader may be dead, and nobody would act until then.
    """
    left: Any = _client().pttl(name)
    return bool(left == -1 or left > 2 * _milliseconds(ttl))


def resign(owner: str) -> None:
    """Give the leader lease up, so that the next coordinator need not wait for its end."""

    def give() -> Grip:
        lock = _leader(1)
        lock.local.token = owner.encode()
        with suppress(LockError):
            lock.release()
        return Grip.HELD

    _advice(give)


def name_of(pk: int) -> str:
    """Return the lock's key in Redis; raises AttributeError where the cache has no locks."""
    return _name(f"lock:{{{pk}}}")


def leader() -> Seen | None:
    """Return the coordinator that leads, and for how long yet; raises what Redis raises."""
    name = _leader(1).name
    pipe = _client().pipeline(transaction=False)
    pipe.get(name)
    pipe.pttl(name)
    value, left = pipe.execute()
    return None if value is None else Seen(owner=_text(value), ttl=_ttl(left))


def holder(pk: int) -> str | None:
    """Return the owner in the lock's value, or None if it is free; raises what Redis raises."""
    found = seen([pk]).get(pk)
    return found.owner if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A lock as it stands in Redis. ``ttl``: seconds; None: it never ends."""

    owner: str
    ttl: float | None


def seen(pks: Sequence[int]) -> dict[int, Seen]:
    """
    Return the locks of these rows that somebody has, in one trip; raises what Redis raises.

    Of several servers a majority has to name the same owner, and must answer at all (NoQuorum):
    what stands on fewer of them keeps nobody out.
    """
    if not pks:
        return {}

    def commands(pipe: Any) -> None:
        for pk in pks:
            name = name_of(pk)
            pipe.get(name)
            pipe.pttl(name)

    if (quorum := _quorum()) is not None:
        return _seen_by_majority(quorum, commands, pks)
    pipe = _client().pipeline(transaction=False)
    commands(pipe)
    return _seen(pks, pipe.execute(raise_on_error=False))


def _seen(pks: Sequence[int], answers: Any) -> dict[int, Seen]:
    found = {}
    for pk, value, left in zip(pks, answers[::2], answers[1::2], strict=True):
        if isinstance(value, Exception):  # something that is no text stands there
            found[pk] = Seen(owner=str(value), ttl=_ttl(left))
        elif value is not None:
            owner = _text(value).removeprefix(f"{pk}:")
            found[pk] = Seen(owner=owner, ttl=_ttl(left))
    return found


def _seen_by_majority(
    quorum: Quorum, commands: Callable[[Any], None], pks: Sequence[int]
) -> dict[int, Seen]:
    answers = quorum.ask(commands, enough=lambda answers: None not in answers)
    there = [_seen(pks, answer) for answer in answers if isinstance(answer, list)]
    if len(there) < votes.majority(len(answers)):
        raise ballot.NoQuorum(ballot.trouble(answers, quorum))
    found = {}
    for pk in pks:
        held = [(seen[pk].owner, seen[pk].ttl) for seen in there if pk in seen]
        if (agreed := votes.agreed(held, len(answers))) is not None:
            found[pk] = Seen(owner=agreed[0], ttl=agreed[1])
    return found


def _ttl(left: Any) -> float | None:
    return left / 1000 if isinstance(left, int) and left >= 0 else None


def get_ready() -> None:
    """Make the client, which connects when it is used; a forked child connects by itself."""
    _client()
    _quorum()


def forget_clients() -> None:
    """Drop the clients, after a change of settings."""
    wire.close(_client)
    wire.close(_asking)
    _budget.reset()
    if _quorum.cache_info().currsize and (quorum := _quorum()) is not None:
        quorum.close()
    _quorum.cache_clear()


def _advice(ask: Callable[[], Grip]) -> Grip:
    try:
        return ask()
    except UNREACHABLE:
        return Grip.UNREACHABLE


def _name(name: str) -> str:
    """Return a key as cache.lock makes it."""
    return _namer()(name)


def _namer() -> Callable[[str], str]:
    """Return what makes a key of a name, for many of them; all servers have the same keys."""
    cache: Any = caches[conf.get().lock_home]
    make_key, prefix = cache.client.make_key, conf.get().PREFIX
    return lambda name: str(make_key(f"{prefix}:{name}"))


def _leader(ttl: float) -> Lock:
    """The lease of this project: another one under the same PREFIX must not keep it from acting."""
    return _named(f"leader:{seal.sign('leader', '')[:8]}", ttl)


def _named(name: str, ttl: float) -> Lock:
    conf_now = conf.get()
    cache: Any = caches[conf_now.lock_home]
    lock: Lock = cache.lock(
        f"{conf_now.PREFIX}:{name}",
        timeout=_milliseconds(ttl) / 1000,
        blocking=False,
        client=_client(),
        thread_local=False,
    )
    return lock


def _token(pk: int, owner: str) -> str:
    return f"{pk}:{owner}"


def _text(value: Any) -> str:
    # Whatever else stands there is not our token.
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _milliseconds(seconds: float) -> int:
    # SET PX refuses 0, and a lock without an end would outlive its owner.
    return max(int(seconds * 1000), 1)


@lru_cache(maxsize=1)
def _client() -> Redis:
    return _client_of(conf.get().lock_home)


def _client_of(alias: str) -> Redis:
    source: Any = get_redis_connection(alias)
    return wire.own_client(source, timeout=conf.get().LOCK_TIMEOUT)


_budget = wire.Budget()  # of calls that ask whether locks can be had


@lru_cache(maxsize=1)
def _asking() -> wire.Client:
    source: Any = get_redis_connection(conf.get().lock_home)
    return wire.Client.to(source, timeout=conf.get().PUSH_TIMEOUT)


@lru_cache(maxsize=1)
def _quorum() -> Quorum | None:
    """Return the servers that are asked together; None: there is one."""
    aliases = conf.get().lock_caches
    if len(aliases) == 1:
        return None
    return Quorum(aliases, _client_of, timeout=conf.get().LOCK_TIMEOUT)
