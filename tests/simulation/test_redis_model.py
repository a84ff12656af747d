"""The model of Redis against a real Valkey, both behind redis-py: equal answers, equal contents."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.conf import settings as django_settings
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from redis.exceptions import LockError, RedisError
from redis.lock import Lock

from tests.simulation import stage
from tests.simulation.redis_connection import pool
from tests.simulation.redis_model import Store

KEYS = ("a", "b", "c")
TOLERANCE = 9_000  # milliseconds that the real server's time may have run on, on a busy machine

keys = st.sampled_from(KEYS)
items = st.sampled_from(("x", "y", "z", "1"))
many = st.lists(items, min_size=1, max_size=3)
numbers = st.integers(-4, 4)
lives = st.sampled_from((30, 100, 400))  # seconds; no sum of passages comes near one of them
ends = st.sampled_from(("LEFT", "RIGHT"))


class Both(RuleBasedStateMachine):
    """Asks both the same, and compares."""

    @initialize()
    def start(self) -> None:
        self.now = 1_000_000
        self.store = Store(lambda: self.now)
        stage._outside, self.outside = self.store, stage._outside
        self.model = redis.Redis(connection_pool=pool(1))
        self.real = redis.Redis.from_url(django_settings.RQ_URL, protocol=2)
        self.real.flushdb()

    def teardown(self) -> None:
        if hasattr(self, "real"):
            stage._outside = self.outside
            self.real.flushdb()
            self.real.close()

    def both(self, ask: Callable[[redis.Redis], Any]) -> None:
        real, model = _answer(ask, self.real), _answer(ask, self.model)
        assert model == real

    # ---- strings and keys

    @rule(key=keys, value=items, life=st.none() | lives, nx=st.booleans())
    def set(self, key: str, value: str, life: int | None, nx: bool) -> None:
        self.both(lambda r: r.set(key, value, ex=life, nx=nx))

    @rule(key=keys, value=items, life=lives)
    def set_milliseconds(self, key: str, value: str, life: int) -> None:
        self.both(lambda r: r.set(key, value, px=life * 1000, nx=True))

    @rule(key=keys)
    def get(self, key: str) -> None:
        self.both(lambda r: r.get(key))

    @rule(some=st.lists(keys, min_size=1, max_size=2))
    def delete(self, some: list[str]) -> None:
        self.both(lambda r: r.delete(*some))

    @rule(some=st.lists(keys, min_size=1, max_size=2))
    def exists(self, some: list[str]) -> None:
        self.both(lambda r: r.exists(*some))

    @rule(key=keys, life=lives | st.just(0))
    def expire(self, key: str, life: int) -> None:
        self.both(lambda r: r.expire(key, life))

    @rule(key=keys, life=lives)
    def pexpire(self, key: str, life: int) -> None:
        self.both(lambda r: r.pexpire(key, life * 1000))

    @rule(old=keys, new=keys)
    def rename(self, old: str, new: str) -> None:
        self.both(lambda r: r.rename(old, new))

    @rule(seconds=st.sampled_from((60, 150)))
    def pass_time(self, seconds: int) -> None:
        """Let time run: the real server's keys are brought that much nearer to their end."""
        self.now += seconds * 1000
        for key in KEYS:
            left = self.real.pttl(key)
            if left >= 0:
                self.real.pexpire(key, left - seconds * 1000)

    @rule()
    def forget_all(self) -> None:
        self.real.flushdb()
        self.model.flushall()

    # ---- hashes, lists, sets, sorted sets

    @rule(key=keys, field=items, value=items)
    def hset(self, key: str, field: str, value: str) -> None:
        self.both(lambda r: r.hset(key, mapping={field: value, "w": value}))
        self.both(lambda r: r.hget(key, field))

    @rule(key=keys)
    def hgetall(self, key: str) -> None:
        self.both(lambda r: r.hgetall(key))

    @rule(key=keys, field=st.sampled_from(("n", "m")), by=numbers)
    def hincrby(self, key: str, field: str, by: int) -> None:
        self.both(lambda r: r.hincrby(key, field, by))

    @rule(key=keys, values=many)
    def rpush(self, key: str, values: list[str]) -> None:
        self.both(lambda r: r.rpush(key, *values))

    @rule(key=keys, values=many)
    def lpush(self, key: str, values: list[str]) -> None:
        self.both(lambda r: r.lpush(key, *values))

    @rule(key=keys, first=numbers, last=numbers)
    def lrange(self, key: str, first: int, last: int) -> None:
        self.both(lambda r: r.lrange(key, first, last))

    @rule(key=keys, first=numbers, last=numbers)
    def ltrim(self, key: str, first: int, last: int) -> None:
        self.both(lambda r: r.ltrim(key, first, last))

    @rule(key=keys, count=numbers, value=items)
    def lrem(self, key: str, count: int, value: str) -> None:
        self.both(lambda r: r.lrem(key, count, value))

    @rule(key=keys, value=items, longest=st.integers(0, 3))
    def lpos(self, key: str, value: str, longest: int) -> None:
        self.both(lambda r: r.lpos(key, value, maxlen=longest))

    @rule(old=keys, new=keys, here=ends, there=ends)
    def lmove(self, old: str, new: str, here: str, there: str) -> None:
        self.both(lambda r: r.lmove(old, new, here, there))

    @rule(key=keys)
    def lpop(self, key: str) -> None:
        self.both(lambda r: r.lpop(key))
        self.both(lambda r: r.llen(key))

    @rule(key=keys, values=many)
    def sadd(self, key: str, values: list[str]) -> None:
        self.both(lambda r: r.sadd(key, *values))

    @rule(key=keys, member=items, score=numbers)
    def zadd(self, key: str, member: str, score: int) -> None:
        self.both(lambda r: r.zadd(key, {member: score}))

    @rule(key=keys, member=items)
    def zrem(self, key: str, member: str) -> None:
        self.both(lambda r: r.zrem(key, member))

    @rule(key=keys, low=numbers)
    def zrangebyscore(self, key: str, low: int) -> None:
        self.both(lambda r: r.zrangebyscore(key, low, "+inf"))

    # ---- what is built of them

    @rule(key=keys, token=items, life=lives)
    def lock(self, key: str, token: str, life: int) -> None:
        self.both(lambda r: _lock(r, key, life).acquire(blocking=False, token=token))

    @rule(key=keys, token=items)
    def release(self, key: str, token: str) -> None:
        self.both(lambda r: _held(r, key, 1, token).release())

    @rule(key=keys, token=items, life=lives, replaces=st.booleans())
    def extend(self, key: str, token: str, life: int, replaces: bool) -> None:
        self.both(lambda r: _held(r, key, life, token).extend(life, replace_ttl=replaces))

    @rule(key=keys, value=items, life=lives, whole=st.booleans())
    def pipeline(self, key: str, value: str, life: int, whole: bool) -> None:
        def ask(r: redis.Redis) -> Any:
            pipe = r.pipeline(transaction=whole)
            pipe.rpush(key, value)
            pipe.hincrby("b", "n", 2)
            pipe.expire(key, life)
            pipe.lrange(key, 0, -1)
            return [_shape(reply) for reply in pipe.execute(raise_on_error=False)]

        self.both(ask)

    @invariant()
    def lives_are_equal(self) -> None:
        for key in KEYS if hasattr(self, "real") else ():
            real, model = self.real.pttl(key), self.model.pttl(key)
            assert (real < 0 and real == model) or abs(model - real) < TOLERANCE, key


def _lock(client: redis.Redis, key: str, life: int) -> Lock:
    return client.lock(key, timeout=life, blocking=False, thread_local=False)


def _held(client: redis.Redis, key: str, life: int, token: str) -> Lock:
    lock = _lock(client, key, life)
    lock.local.token = token.encode()
    return lock


def _answer(ask: Callable[[redis.Redis], Any], client: redis.Redis) -> Any:
    try:
        return ask(client)
    except RedisError as error:
        return _shape(error)


def _shape(reply: Any) -> Any:
    """Of an error only its kind matters: its first word, or its class for a lock."""
    if isinstance(reply, LockError):
        return type(reply)
    return str(reply).split(" ", 1)[0] if isinstance(reply, Exception) else reply


Both.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    report_multiple_bugs=False,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class TestModelOfRedis(Both.TestCase):
    """Random commands, the same for both."""


@pytest.fixture
def model() -> Iterator[tuple[redis.Redis, Store]]:
    """A client of the model whose time is the real one, and the model."""
    store = Store(lambda: round(time.time() * 1000))
    outside, stage._outside = stage._outside, store
    yield redis.Redis(connection_pool=pool(1)), store
    stage._outside = outside


def test_keys_expire_in_the_model_as_they_do_in_valkey(
    redis_client: redis.Redis, model: tuple[redis.Redis, Store]
) -> None:
    clients = (redis_client, model[0])
    for client in clients:
        client.set("string", "x", px=60)
        client.rpush("list", "x")
        client.pexpire("list", 60)
        client.hset("hash", "f", "1")
        client.pexpire("hash", 60)
        client.hincrby("hash", "f", 1)  # a change leaves the end where it is
        client.set("kept", "x", px=60)
        client.set("kept", "y")  # a new value has no end
    time.sleep(0.2)
    answers = [
        (
            client.get("string"),
            client.set("string", "y", nx=True),
            client.lrange("list", 0, -1),
            client.rpush("list", "z"),
            client.pttl("list"),
            client.hgetall("hash"),
            client.exists("hash"),
            client.get("kept"),
            client.pttl("kept"),
            client.rename("string", "renamed"),
        )
        for client in clients
    ]
    assert answers[0] == answers[1]


def test_the_model_answers_time_info_and_ping(model: tuple[redis.Redis, Store]) -> None:
    client, _ = model
    assert abs(client.time()[0] - time.time()) < TOLERANCE / 1000
    assert client.ping() is True
    assert client.info("server")["redis_version"]
