"""
A job has changed: tell all processes, so that none believes what it read before.

One message per change on <PREFIX>:invalidations, after the commit. It is JSON:

    {"scheme": 1, "key": <key hash>, "name": …, "scope": …, "version": …, "event": <status>,
     "seal": <signature>}

and never has a value or arguments. ``version``: the row's is at least this. Messages may be lost,
and nothing depends on them but speed: L1_TTL bounds what a process believes without them.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from django.core.cache import caches
from django.db import close_old_connections
from django_redis import get_redis_connection
from redis.exceptions import ClusterCrossSlotError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from dedupjobs import cache, clock, conf, controls, registry, seal, signals, wire
from dedupjobs.cache import Stamp
from dedupjobs.exceptions import ArgumentError
from dedupjobs.lifecycle import Change
from dedupjobs.models import FINAL, Status
from dedupjobs.wire import UNREACHABLE

SCHEME = 1
PURPOSE = "invalidation"
CONTROLS = "CONTROLS"  # the event of a message that is about no key: controls have changed
OWED = 10_000  # changes that this process keeps for a Redis that is away
PAGE = 500  # changes per pipeline
PATIENCE = 5.0  # seconds that a page may take where no request waits
STAMP_TTL = 30 * 86_400  # seconds; a stamp that is gone is replaced by a new one
HEARTBEAT = 5.0  # seconds of silence after which the listener asks whether Redis is still there
FIRST_PAUSE, LAST_PAUSE = 0.1, 5.0  # seconds between two tries to connect

_in_order = json.JSONEncoder(sort_keys=True).encode

H = TypeVar("H", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What a listener learns of a change. ``key``: its hash. ``event``: the status it has now."""

    key: str
    name: str
    scope: str
    version: int
    event: str

    def fields(self) -> dict[str, Any]:
        """Return what stands in it, by name."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """
    How far an announcement came: entries of Redis that went, listeners that got it, and changes
    that Redis did not take yet.

    The number of listeners is no proof: one may be about to read, or to lose its connection.
    """

    entries: int = 0
    listeners: int = 0
    owed: int = 0

    def __add__(self, other: Reached) -> Reached:
        return Reached(
            entries=self.entries + other.entries,
            listeners=max(self.listeners, other.listeners),
            owed=self.owed + other.owed,
        )


# ---- telling


@dataclass(slots=True)
class _Owed:
    """Changes that Redis did not take yet, by key; the newest one says it all."""

    changes: dict[str, Change] = field(default_factory=dict)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def take(self, news: Iterable[Change]) -> list[Change]:
        with self.guard:
            taken = {**self.changes, **{change.key_hash: change for change in news}}
            self.changes = {}
        return list(taken.values())

    def keep(self, changes: Sequence[Change]) -> None:
        with self.guard:
            for change in changes[: OWED - len(self.changes)]:
                self.changes.setdefault(change.key_hash, change)


_owed = _Owed()


def announce(changes: Sequence[Change], *, patient: bool = False) -> Reached:
    """
    Tell everybody that these rows have changed, in one round trip per PAGE; never raises.

    Call it after the commit. What Redis does not take now is sent with the next one; it is never
    wrong to send it again. ``patient``: a page may take PATIENCE; nobody waits for an answer.
    """
    for change in changes:
        cache.expire(change.key_hash)
        _delete_application_keys(change)
    if not cache.is_on():
        return Reached()
    if _gathering.news is not None:
        _gathering.news.changes.extend(changes)
        return Reached()
    return _announce(changes, patient=patient)


@dataclass(slots=True)
class News:
    """Changes that are still to be told: by ``send``, or as cargo where ``travels``."""

    changes: list[Change] = field(default_factory=list)

    @property
    def travels(self) -> bool:
        """Whether a pipeline of the locks goes to the server that must know."""
        return conf.get().lock_home == conf.get().STATUS_CACHE

    def load(self, pipe: Any) -> None:
        """Add the commands to a pipeline, for what Redis did not take before, too."""
        taken = _owed.take(self.changes)
        self.changes = taken[:PAGE]
        _owed.keep(taken[PAGE:])
        _add_to(pipe, self.changes)

    def left_behind(self, error: BaseException) -> None:
        """Tell it with the next change: it is never wrong to tell it again."""
        _slots.note(error)
        _owed.keep(self.changes)

    def send(self) -> None:
        """Tell all now, in a round trip of its own."""
        if self.changes:
            _announce(self.changes, patient=False)


@dataclass(slots=True)
class _Slots:
    """Whether the server has refused a script about several keys, as a cluster does."""

    are_several: bool = False

    def note(self, error: BaseException) -> bool:
        """Whether that is what this error says."""
        refuses = isinstance(error, ClusterCrossSlotError)
        self.are_several = self.are_several or refuses
        return refuses


_slots = _Slots()


@dataclass  # without slots, which all threads would share
class _Gathering(threading.local):
    news: News | None = None


_gathering = _Gathering()


@contextmanager
def gathering() -> Iterator[News]:
    """Leave what this thread announces in the block to the caller, who must pass it on."""
    _gathering.news = news = News()
    try:
        yield news
    finally:
        _gathering.news = None


def _announce(changes: Sequence[Change], *, patient: bool) -> Reached:
    reached, waiting = Reached(), _owed.take(changes)
    while waiting:
        page, waiting = waiting[:PAGE], waiting[PAGE:]
        try:
            with _patiently() if patient else cache.client().spending(cache.budget):
                reached += _send(page)
        except UNREACHABLE:
            _owed.keep(page + waiting)
            return reached + Reached(owed=len(page) + len(waiting))
    return reached


def _patiently() -> AbstractContextManager[None]:
    return cache.client().deadline(PATIENCE)


def _send(changes: Sequence[Change]) -> Reached:
    try:
        replies = _pipeline(changes).execute()
    except (RedisConnectionError, ResponseError) as error:
        # A restart has cut an idle connection, or a cluster has refused to take all together.
        if isinstance(error, ResponseError) and not _slots.note(error):
            raise
        replies = _pipeline(changes).execute()
    if isinstance(replies[0], list):
        (replies,) = replies
    return Reached(entries=sum(replies[0::2]), listeners=max(replies[1::2], default=0))


def _pipeline(changes: Sequence[Change]) -> Any:
    pipe = cache.client().redis.pipeline(transaction=False)
    _add_to(pipe, changes)
    return pipe


def _add_to(pipe: Any, changes: Sequence[Change]) -> None:
    """Add commands whose replies are, in turns, entries that were dropped and listeners."""
    if len(changes) > 1 and not _slots.are_several:
        _add_together(pipe, changes)
        return
    for change in changes:
        stamp = str(Stamp(change.job_pk, change.version))
        pipe.eval(cache.DROP, 1, cache.entry_key(change.key_hash), stamp)
        pipe.publish(channel(), encode(change))


# KEYS: entries. ARGV[1]: the channel; then a stamp per entry; then a message per entry.
# Returns how many entries were dropped, and how many listeners heard of it.
TELL_MANY = """
local number, dropped, heard = #KEYS, 0, 0
for i = 1, number do
    local stamp, there = ARGV[1 + i], redis.call('get', KEYS[i])
    if there and not (string.sub(there, 1, 2) == '1|'
            and string.sub(there, 3, 2 + #stamp) >= stamp) then
        dropped = dropped + redis.call('del', KEYS[i])
    end
    heard = math.max(heard, redis.call('publish', ARGV[1], ARGV[1 + number + i]))
end
return {dropped, heard}
"""


def _add_together(pipe: Any, changes: Sequence[Change]) -> None:
    """As one command, for a third of the time that the single ones take."""
    entries = [cache.entry_key(change.key_hash) for change in changes]
    stamps = [str(Stamp(change.job_pk, change.version)) for change in changes]
    messages = [encode(change) for change in changes]
    pipe.eval(TELL_MANY, len(entries), *entries, channel(), *stamps, *messages)


def announce_controls() -> bool:
    """Tell all processes to read the controls again; False: Redis has not taken it."""
    if not cache.is_on():
        return False
    message = Message(key="", name="", scope="", version=0, event=CONTROLS)
    try:
        with cache.client().deadline(conf.get().LOCK_TIMEOUT):
            cache.client().redis.publish(channel(), _signed(message))
    except UNREACHABLE:
        return False  # they read the table within seconds
    return True


def channel() -> str:
    """Return the name of the channel that changes are told on."""
    return f"{conf.get().PREFIX}:invalidations"


def encode(change: Change) -> str:
    """Return the message about a change, signed."""
    message = Message(
        key=change.key_hash,
        name=change.name,
        scope=change.scope,
        version=change.version,
        event=change.event,
    )
    return _signed(message)


def _signed(message: Message) -> str:
    text = _text(message)
    return f'{text[:-1]}, "scheme": {SCHEME}, "seal": "{seal.sign(PURPOSE, text)}"}}'


def decode(raw: bytes | str) -> Message | None:
    """Return a message as one of us has sent it, or None; counts why it was ignored."""
    try:
        fields = json.loads(raw)
        scheme, signature = fields.pop("scheme"), fields.pop("seal")
        if scheme != SCHEME:
            counts["other scheme"] += 1
            return None
        message = Message(**fields)
        if not seal.is_genuine(PURPOSE, _text(message), signature):
            counts["forged"] += 1
            return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        counts["malformed"] += 1
        return None
    return message


def _text(message: Message) -> str:
    return _in_order(message.fields())


counts: Counter[str] = Counter()
"""Messages that this process has heard, by what became of them; and lost connections."""


def _delete_application_keys(change: Change) -> None:
    """Delete what the job says depends on it, once it is final or queued again."""
    if change.event not in (*FINAL, Status.PENDING):
        return
    job = registry.find(change.name)
    if job is None or not change.args:
        return
    try:
        entries = list(job.invalidated_keys(change.args))
    except Exception as error:  # stored arguments that this process can not read any more
        signals.tell(signals.invalidation_troubled, change.name, error=error)
        return
    for alias, key in entries:
        try:
            caches[alias].delete(key)
        except Exception as error:
            signals.tell(signals.invalidation_troubled, change.name, error=error)


# ---- group stamps


def cache_stamp(group: str) -> str:
    """
    Return the present stamp of a group of cache entries: put it into their keys.

    ``bump_stamp(group)`` retires all of them at once. Without Redis each call returns another
    stamp, which nothing was stored under.
    """
    key = _stamp_key(group)
    try:
        with cache.client().spending(cache.budget):
            there = cache.client().redis.get(key)
            if there is None:
                cache.client().redis.set(key, clock.token(), nx=True, ex=STAMP_TTL)
                there = cache.client().redis.get(key)
        return there.decode() if isinstance(there, bytes) else str(there)
    except UNREACHABLE:
        return clock.token()


def bump_stamp(group: str) -> str:
    """Retire all entries of a group, and return its new stamp; raises RedisError if it can not."""
    fresh = clock.token()
    with cache.client().deadline(conf.get().PUSH_TIMEOUT):
        cache.client().redis.set(_stamp_key(group), fresh, ex=STAMP_TTL)
    return fresh


def _stamp_key(group: str) -> str:
    if not _is_text(group):
        raise ArgumentError(f"group={group!r}; give the group's name, as 'catalog:2026'")
    return f"{conf.get().PREFIX}:stamp:{group}"


# ---- hearing

_handlers: dict[str, list[Callable[[Message], Any]]] = {}


def on_invalidate(name: str) -> Callable[[H], H]:
    """
    Call the decorated function with each Message about the job called ``name``, in this process.

    It runs in the listener's thread, one message after the other. An error is logged, and the
    listener goes on.
    """
    if not _is_text(name):
        raise ArgumentError(
            f'on_invalidate({name!r}); give the job\'s name: @on_invalidate("shop.charge")'
        )

    def register(handler: H) -> H:
        _handlers.setdefault(name, []).append(handler)
        return handler

    return register


def _is_text(given: Any) -> bool:
    return isinstance(given, str) and bool(given.strip())


def handle(raw: bytes | str) -> Message | None:
    """Do what a message asks for in this process."""
    message = decode(raw)
    if message is None:
        return None
    counts["heard"] += 1
    if message.event == CONTROLS:
        controls.ring()
        return message
    cache.expire(message.key)
    signals.tell(signals.job_invalidated, message.name, message=message)
    for handler in _handlers.get(message.name, ()):
        try:
            handler(message)
        except Exception as error:
            counts["handler failed"] += 1
            signals.tell(signals.invalidation_troubled, message.name, error=error)
    if _handlers.get(message.name):
        close_old_connections()
    return message


def messages(stop: Callable[[], bool], *, poll: float = 1.0) -> Iterator[bytes | str | None]:
    """
    Yield what is told, as it comes, and None after each (re)connection, where some may be missed.

    Connects again until ``stop()``, which is asked every ``poll`` seconds and after each message.
    """
    pause = FIRST_PAUSE
    while not stop():
        try:
            with _subscription() as told:
                told.subscribe(channel())
                for raw in _heard(told, stop, poll):
                    pause = FIRST_PAUSE
                    yield raw
        except UNREACHABLE:
            counts["connections lost"] += 1
            controls.hear(False)
            yield None
            clock.sleep(pause * clock.uniform(0.5, 1.0))
            pause = min(pause * 2, LAST_PAUSE)


def _heard(told: Any, stop: Callable[[], bool], poll: float) -> Iterator[bytes | str | None]:
    asked = answered = clock.monotonic()
    while not stop():
        item = told.get_message(timeout=poll)
        now = clock.monotonic()
        if item is not None:
            answered = now
        if item is None:
            if now - answered > 2 * HEARTBEAT:
                raise OSError("Redis does not answer the listener")
            if now - max(asked, answered) > HEARTBEAT:
                told.ping()
                asked = now
        elif item["type"] == "subscribe":
            controls.hear(True)
            yield None
        elif item["type"] == "message":
            yield item["data"]


def _subscription() -> Any:
    source: Any = get_redis_connection(conf.get().STATUS_CACHE)
    client: Any = wire.own_client(source, timeout=HEARTBEAT)
    return client.pubsub()


@dataclass(slots=True)
class _Listener:
    """One daemon thread per process that hears of changes."""

    guard: threading.Lock = field(default_factory=threading.Lock)
    join: Callable[[float], None] | None = None
    forbidden: bool = False

    def start(self) -> None:
        with self.guard:
            if self.join is None and not self.forbidden:
                self.join = clock.start(_listen, name="dedupjobs-listener")


_listener = _Listener()


def ensure_listening() -> None:
    """Start this process's listener, unless it runs or the project wants none."""
    if _listener.join is None and cache.is_on() and conf.get().LISTEN != "never":
        _listener.start()


def never_listen() -> None:
    """Keep this process, and those that it forks, from listening: a worker's parent has no use."""
    _listener.forbidden = True


def _listen() -> None:
    for raw in messages(lambda: False):
        if raw is None:
            cache.expire_all()
            controls.ring()
        else:
            handle(raw)


def follow_controls(stop: Callable[[], bool]) -> None:
    """Ring this worker's bell whenever controls change, or may have, until ``stop()``."""
    for raw in messages(stop):
        message = None if raw is None else decode(raw)
        if raw is None or (message is not None and message.event == CONTROLS):
            controls.ring()


def _after_fork() -> None:
    global _listener, _owed  # noqa: PLW0603 - a thread does not survive a fork
    _listener = _Listener(forbidden=_listener.forbidden)
    _owed = _Owed()


os.register_at_fork(after_in_child=_after_fork)
