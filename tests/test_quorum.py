"""Locks by a majority of real servers, of which some are killed, stopped, slow or empty."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import pytest
import redis
from django.conf import settings
from django.test.utils import override_settings

from dedupjobs import ballot, clock, counters, lifecycle, locks
from dedupjobs.locks import Grip
from dedupjobs.models import Status
from dedupjobs.quorum import AGAIN, Quorum
from tests import live
from tests.app import jobs
from tests.live import Spawn
from tests.proxy import Proxy
from tests.servers import HOST, Valkey
from tests.waiting import until

PATIENT = 10.0  # LOCK_TIMEOUT of these tests, since the machine may be busy
TIMEOUT = 1.0  # of those that measure what a silent server costs
SOON = 0.4  # seconds in which an answer comes that waits for nobody


@dataclass
class Servers:
    """Lock servers, each behind a proxy, and what stands on them."""

    valkeys: list[Valkey] = field(default_factory=list)
    proxies: list[Proxy] = field(default_factory=list)

    def on_each(self, pk: int = 7) -> list[str | None]:
        """Return the lock's value on each server."""
        return [self.read(at, pk) for at in range(len(self.valkeys))]

    def read(self, at: int, pk: int = 7) -> str | None:
        with self.valkeys[at].client() as client:
            value = client.get(live.lock_name(pk))
        return None if value is None else value.decode()

    def write(self, at: int, owner: str, *, pk: int = 7, milliseconds: int = 60_000) -> None:
        with self.valkeys[at].client() as client:
            client.set(live.lock_name(pk), f"{pk}:{owner}", px=milliseconds)

    def kill(self, *which: int) -> None:
        for at in which:
            self.valkeys[at].kill()

    def signal(self, number: signal.Signals, *which: int) -> None:
        for at in which:
            process = self.valkeys[at].process
            assert process is not None
            process.send_signal(number)


@contextmanager
def lock_servers(number: int, **changes: Any) -> Iterator[Servers]:
    """Start so many servers, and use them for locks."""
    servers = Servers()
    with ExitStack() as stack:
        caches = dict(settings.CACHES)
        for at in range(number):
            valkey = stack.enter_context(Valkey())
            proxy = stack.enter_context(Proxy(valkey.port))
            servers.valkeys.append(valkey)
            servers.proxies.append(proxy)
            url = f"redis://{HOST}:{proxy.port}/0"
            caches[f"locks{at}"] = {
                "BACKEND": "django_redis.cache.RedisCache",
                "LOCATION": url,
            }
        ours = {
            **settings.DEDUPJOBS,
            "LOCK_CACHE": [f"locks{at}" for at in range(number)],
            "LOCK_TIMEOUT": PATIENT,
            **changes,
        }
        stack.enter_context(live.changed(CACHES=caches, DEDUPJOBS=ours))
        yield servers
        servers.signal(signal.SIGCONT, *(at for at, v in enumerate(servers.valkeys) if v.process))


@pytest.fixture
def three() -> Iterator[Servers]:
    with lock_servers(3) as servers:
        yield servers


@pytest.fixture
def brief() -> Iterator[Servers]:
    """Three for which nobody waits long."""
    with lock_servers(3, LOCK_TIMEOUT=TIMEOUT) as servers:
        yield servers


def quorum() -> Quorum:
    found = locks._quorum()
    assert found is not None
    return found


def timed(act: Callable[[], Any]) -> tuple[Any, float]:
    begun = clock.monotonic()
    found = act()
    return found, clock.monotonic() - begun


def usually(act: Callable[[int], Grip], numbers: range, wanted: Grip) -> float:
    """Return the median of what an act takes, in seconds, each time with the wanted answer."""
    found = [timed(lambda number=number: act(number)) for number in numbers]
    assert {grip for grip, _ in found} == {wanted}
    return median(took for _, took in found)


def comes(what: str, act: Callable[[], Any]) -> None:
    until(act, 10 * AGAIN, what=what)


# ---- all are well


def test_lock_has_the_same_name_token_and_end_on_every_server(three: Servers) -> None:
    assert locks.acquire(7, "me", ttl=30) is Grip.HELD
    comes("all have it", lambda: three.on_each() == ["7:me"] * 3)
    for valkey in three.valkeys:
        with valkey.client() as client:
            assert 20_000 < client.pttl(live.lock_name(7)) <= 30_000
    assert locks.acquire(7, "you", ttl=30) is Grip.BUSY
    assert locks.extend(7, "you", ttl=300) is Grip.BUSY
    assert locks.release(7, "you") is Grip.BUSY
    assert locks.holder(7) == "me"
    assert locks.extend(7, "me", ttl=300) is Grip.HELD
    assert locks.seen([7, 8])[7].ttl == pytest.approx(300, abs=10)
    assert locks.release(7, "me") is Grip.HELD
    comes("it is free", lambda: three.on_each() == [None] * 3)
    assert locks.holder(7) is None


def test_lock_of_another_is_replaced_and_cleared_on_every_server(three: Servers) -> None:
    locks.acquire(7, "dead", ttl=30)
    assert locks.replace(7, "me", ttl=30) is Grip.HELD
    comes("all have it", lambda: three.on_each() == ["7:me"] * 3)
    assert locks.release(7, "dead") is Grip.BUSY
    locks.clear(7)
    comes("it is free", lambda: three.on_each() == [None] * 3)


def test_locks_of_several_rows_are_told_apart(three: Servers) -> None:
    locks.acquire(2, "another", ttl=30)
    taken = locks.take_many([(1, "a"), (2, "b"), (3, "c")], ttl=30)
    assert [taken[pk].grip for pk in (1, 2, 3)] == [Grip.HELD, Grip.BUSY, Grip.HELD]
    mine = [(1, "a"), (2, "b"), (3, "c")]
    assert locks.extend_many(mine, ttl=30)[2] is Grip.BUSY
    assert list(locks.replace_many(mine, ttl=30).values()) == [Grip.HELD] * 3
    assert list(locks.release_many(mine).values()) == [Grip.HELD] * 3


@pytest.mark.large
def test_wait_is_as_long_as_since_the_first_delivery_that_met_the_lock_busy(
    three: Servers,
) -> None:
    locks.acquire(7, "me", ttl=30)
    assert locks.take(7, "you", ttl=30).waited == pytest.approx(0, abs=0.5)
    with three.valkeys[1].client() as client:
        name = live.lock_name(7).replace("lock", "waited")
        comes("the mark", lambda: client.pexpire(name, locks.WAITED_TTL - 5_000))
    comes("5 s", lambda: (locks.take(7, "you", ttl=30).waited or 0) >= 5)
    locks.release(7, "me")
    with three.valkeys[1].client() as client:
        assert 0 < client.pttl(name) <= locks.WAITED_TTL - 5_000, "a release keeps it"
    comes("you have it", lambda: locks.take(7, "you", ttl=30).grip is Grip.HELD)
    locks.release(7, "you", waited=False)
    comes("it is forgotten", lambda: locks.take(7, "he", ttl=30).waited is None)


def test_row_has_one_holder_at_a_time_among_many_that_try(three: Servers) -> None:
    inside: dict[int, str] = {}
    clashes, wins = [], []

    def contend(name: str) -> None:
        for turn in range(60):
            owner = f"{name}.{turn}"
            if locks.acquire(7, owner, ttl=30) is Grip.HELD:
                if inside.setdefault(7, owner) != owner:
                    clashes.append(owner)
                wins.append(owner)
                inside.pop(7, None)
                locks.release(7, owner)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(contend, "abcdef"))
    assert not clashes
    assert wins
    assert all(server.trouble is None for server in quorum().servers)


@pytest.mark.large
def test_first_locks_of_many_threads_at_once_are_all_held(three: Servers) -> None:
    barrier = threading.Barrier(8)

    def take(pk: int) -> Grip:
        barrier.wait()
        return locks.acquire(pk, "me", ttl=30)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(take, range(8))) == {Grip.HELD}


def test_forked_child_has_connections_of_its_own(three: Servers) -> None:
    locks.acquire(1, "parent", ttl=30)
    pid = os.fork()
    if pid == 0:
        try:
            well = locks.acquire(2, "child", ttl=30) is Grip.HELD and locks.holder(1) == "parent"
            lines = [line for server in quorum().servers for line in server._idle]
            own = {line.connection.pid for line in lines} == {os.getpid()}
            os._exit(0 if well and own else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert locks.holder(2) == "child"
    assert locks.release(1, "parent") is Grip.HELD


# ---- some are away


@pytest.mark.large
@pytest.mark.parametrize(("number", "dead"), [(3, (0,)), (3, (2,)), (5, (1, 4)), (5, (0, 1))])
def test_minority_that_is_dead_changes_nothing(number: int, dead: tuple[int, ...]) -> None:
    with lock_servers(number) as servers:
        assert locks.acquire(1, "opens the connections", ttl=30) is Grip.HELD
        servers.kill(*dead)
        for pk in range(2, 12):
            assert locks.acquire(pk, "me", ttl=30) is Grip.HELD
            assert locks.acquire(pk, "you", ttl=30) is Grip.BUSY
            assert locks.extend(pk, "me", ttl=30) is Grip.HELD
            assert locks.replace(pk, "you", ttl=30) is Grip.HELD
            assert locks.holder(pk) == "you"
            assert locks.release(pk, "you") is Grip.HELD
            assert locks.holder(pk) is None


@pytest.mark.large
@pytest.mark.parametrize(("number", "dead"), [(3, (0, 1)), (3, (0, 2)), (5, (1, 2, 4))])
def test_minority_that_is_alive_holds_nothing_until_the_others_are_back(
    number: int, dead: tuple[int, ...]
) -> None:
    with lock_servers(number) as servers:
        assert locks.acquire(1, "me", ttl=30) is Grip.HELD
        servers.kill(*dead)
        comes("it is noticed", lambda: locks.extend(1, "me", ttl=30) is Grip.UNREACHABLE)
        assert locks.acquire(2, "me", ttl=30) is Grip.UNREACHABLE
        assert locks.replace(2, "me", ttl=30) is Grip.UNREACHABLE
        assert locks.release(1, "me") is Grip.UNREACHABLE
        with pytest.raises(
            ballot.NoQuorum, match=f"{number // 2 + 1} of {number} .*locks{dead[0]}"
        ):
            locks.holder(1)
        left = [at for at in range(number) if at not in dead]
        comes("nothing is kept", lambda: {servers.read(at, 2) for at in left} == {None})
        for at in dead:
            servers.valkeys[at].restart()
        comes("all are back", lambda: locks.acquire(3, "me", ttl=30) is Grip.HELD)


@pytest.mark.large
def test_stopped_server_keeps_nobody_waiting_and_is_asked_again_once_it_goes_on(
    brief: Servers,
) -> None:
    locks.acquire(1, "opens the connections", ttl=30)
    brief.signal(signal.SIGSTOP, 0)
    assert usually(lambda pk: locks.acquire(pk, "me", ttl=60), range(2, 40), Grip.HELD) < SOON
    server = quorum().servers[0]
    comes("it is left out", lambda: locks.extend(2, "me", ttl=60) and server.trouble)
    brief.signal(signal.SIGCONT, 0)
    comes("it is back", lambda: locks.extend(2, "me", ttl=60) and server.trouble is None)
    locks.acquire(99, "me", ttl=30)
    comes("it is asked", lambda: brief.read(0, 99) == "99:me")


@pytest.mark.large
def test_majority_that_is_stopped_costs_one_timeout_and_then_nothing(brief: Servers) -> None:
    locks.acquire(1, "opens the connections", ttl=30)
    brief.signal(signal.SIGSTOP, 1, 2)
    grip, took = timed(lambda: locks.acquire(2, "me", ttl=30))
    assert grip is Grip.UNREACHABLE
    assert TIMEOUT * 0.9 < took < TIMEOUT * 1.9
    assert usually(lambda _: locks.acquire(2, "me", ttl=30), range(10), Grip.UNREACHABLE) < SOON
    brief.signal(signal.SIGCONT, 1, 2)
    comes("they are back", lambda: locks.acquire(3, "me", ttl=30) is Grip.HELD)


@pytest.mark.large
@pytest.mark.parametrize("holes", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_server_that_takes_connections_and_never_answers_costs_one_timeout_at_most(
    brief: Servers, holes: tuple[int, ...]
) -> None:
    for at in holes:
        brief.proxies[at].black_hole()
    wanted = Grip.HELD if len(holes) == 1 else Grip.UNREACHABLE
    grip, took = timed(lambda: locks.acquire(1, "me", ttl=30))
    assert (grip, took < TIMEOUT * 1.9) == (wanted, True), took
    assert usually(lambda _: locks.acquire(2, "me", ttl=30), range(5), wanted) < SOON
    for at in holes:
        brief.proxies[at].pass_through()
        brief.proxies[at].cut()
    comes("it is back", lambda: locks.extend(2, "me", ttl=30) and not troubles())
    assert locks.acquire(3, "me", ttl=30) is Grip.HELD


def troubles() -> list[Exception]:
    return [server.trouble for server in quorum().servers if server.trouble is not None]


@pytest.mark.large
def test_slow_minority_keeps_nobody_waiting_and_has_its_vote(brief: Servers) -> None:
    locks.acquire(1, "opens the connections", ttl=30)
    brief.proxies[2].delay(0.2)
    assert usually(lambda pk: locks.acquire(pk, "me", ttl=60), range(2, 60), Grip.HELD) < 0.2
    assert not troubles(), "it answers in time"
    comes("it has all", lambda: brief.read(2, 59) == "59:me")
    brief.kill(0)
    comes("its vote counts", lambda: locks.acquire(99, "me", ttl=60) is Grip.HELD)


@pytest.mark.large
def test_connection_that_was_cut_while_nobody_used_it_is_made_anew(three: Servers) -> None:
    def idle() -> list[Any]:
        locks.acquire(1, "opens the connections", ttl=30)
        return [line for server in quorum().servers for line in server._idle]

    comes("all are connected to", lambda: len(idle()) == 3)
    lines = idle()
    for proxy in three.proxies:
        proxy.reset()
    for line in lines:  # once it is not fit, a look would connect it again
        comes("its reset arrives", lambda line=line: not line.is_fit())
    assert locks.acquire(2, "me", ttl=30) is Grip.HELD
    assert not troubles()


@pytest.mark.large
def test_reply_in_pieces_is_read_whole(three: Servers) -> None:
    for proxy in three.proxies:
        proxy.slice(3)
    mine = [(pk, "me") for pk in range(50)]
    assert {one.grip for one in locks.take_many(mine, ttl=30).values()} == {Grip.HELD}
    assert set(locks.release_many(mine).values()) == {Grip.HELD}


# ---- votes that are split, late or lost


@pytest.mark.large
def test_lock_that_others_hold_on_a_minority_is_taken(three: Servers) -> None:
    three.write(1, "dead")
    assert locks.acquire(7, "me", ttl=30) is Grip.HELD
    assert locks.holder(7) == "me"


def test_lock_that_others_hold_on_a_majority_is_busy_and_our_own_part_is_given_back(
    three: Servers,
) -> None:
    three.write(0, "dead")
    three.write(2, "dead")
    assert locks.acquire(7, "me", ttl=30) is Grip.BUSY
    comes("nothing is kept", lambda: three.on_each() == ["7:dead", None, "7:dead"])
    assert locks.holder(7) == "dead"


@pytest.mark.large
def test_lock_that_is_split_among_all_is_nobodys(three: Servers) -> None:
    for at, owner in enumerate(["a", "b", "c"]):
        three.write(at, owner)
    assert locks.holder(7) is None
    assert locks.acquire(7, "me", ttl=30) is Grip.BUSY


def test_lock_granted_later_than_it_lives_is_not_held_and_given_back(three: Servers) -> None:
    locks.acquire(1, "opens the connections", ttl=30)
    for proxy in three.proxies[1:]:
        proxy.delay(0.3)
    assert locks.acquire(7, "me", ttl=0.2) is Grip.UNREACHABLE
    assert locks.acquire(8, "me", ttl=5) is Grip.HELD


@pytest.mark.large
def test_server_that_lost_its_locks_keeps_its_vote_and_the_majority_decides(
    three: Servers,
) -> None:
    locks.acquire(7, "me", ttl=60)
    comes("all have it", lambda: three.on_each() == ["7:me"] * 3)
    three.kill(0)
    three.valkeys[0].restart()
    comes("it is back, empty", lambda: locks.extend(7, "me", ttl=60) and not troubles())
    assert three.on_each() == [None, "7:me", "7:me"]
    assert locks.extend(7, "me", ttl=60) is Grip.HELD
    assert locks.acquire(7, "you", ttl=60) is Grip.BUSY
    comes("nothing is kept", lambda: three.read(0) is None)
    three.kill(1)
    three.valkeys[1].restart()  # within the lock's TTL: what Redis' page advises against
    comes("it is back, empty", lambda: locks.extend(7, "me", ttl=60) and not troubles())
    assert locks.extend(7, "me", ttl=60) is Grip.BUSY, "known to be lost"
    assert locks.acquire(7, "you", ttl=60) is Grip.HELD, "a filter only: the row decides"


def test_servers_that_refuse_to_write_have_no_vote(three: Servers) -> None:
    for valkey in three.valkeys[:2]:
        with valkey.client() as client:
            client.replicaof(HOST, three.valkeys[2].port)
    assert locks.acquire(7, "me", ttl=30) is Grip.UNREACHABLE
    assert "ReadOnlyError" in locks.why_unreachable()
    for valkey in three.valkeys[:2]:
        with valkey.client() as client:
            client.replicaof("NO", "ONE")
    comes("they write", lambda: locks.acquire(8, "me", ttl=30) is Grip.HELD)
    assert locks.why_unreachable() == ""


@pytest.mark.large
def test_late_answer_is_not_taken_for_that_to_the_next_question() -> None:
    with lock_servers(3, LOCK_TIMEOUT=30) as three:
        locks.acquire(1, "opens the connections", ttl=30)
        three.proxies[2].delay(3)  # within which the next question is asked
        three.write(1, "another", pk=8)
        three.write(2, "another", pk=8)
        assert locks.acquire(7, "me", ttl=30) is Grip.HELD, "granted by all, the last one late"
        assert locks.acquire(8, "me", ttl=30) is Grip.BUSY, "the last one decides, and denies"


# ---- cargo and runs


class Parcel:
    """Cargo that says where it went."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def load(self, pipe: Any) -> None:
        pipe.set("parcel", "arrived")

    def left_behind(self, error: BaseException) -> None:
        self.errors.append(error)


def test_cargo_goes_to_the_first_server_alone(three: Servers) -> None:
    parcel = Parcel()
    locks.acquire(7, "me", ttl=30)
    assert locks.extend(7, "me", ttl=30, waited=False, cargo=[parcel]) is Grip.HELD
    assert locks.release(7, "me", cargo=[parcel]) is Grip.HELD
    assert not parcel.errors
    found = []
    for valkey in three.valkeys:
        with valkey.client() as client:
            found.append(client.get("parcel"))
    assert found == [b"arrived", None, None]


def test_cargo_is_left_behind_where_the_first_server_is_away(three: Servers) -> None:
    locks.acquire(7, "me", ttl=30)
    three.kill(0)
    parcel = Parcel()
    assert locks.release_many([(7, "me")], cargo=[parcel]) == {7: Grip.HELD}
    assert len(parcel.errors) == 1


@pytest.mark.large
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("dead", [(), (1,), (0,), (0, 1), (0, 1, 2)])
def test_job_runs_once_however_many_servers_are_dead(three: Servers, dead: tuple[int, ...]) -> None:
    three.kill(*dead)
    outcome = jobs.record.enqueue(tag="a")
    assert live.deliver(live.row_of(outcome)) is Status.SUCCEEDED
    assert live.notes("a") == [""]
    left = [at for at in range(3) if at not in dead]
    comes("no lock is left", lambda: {three.read(at, outcome.job.pk) for at in left} <= {None})


@pytest.mark.large
@pytest.mark.django_db(transaction=True)
def test_counts_of_a_run_stand_on_the_first_server(three: Servers) -> None:
    live.deliver(live.row_of(jobs.record.enqueue(tag="a")))
    counters.pay()
    found = []
    for valkey in three.valkeys:
        with valkey.client() as client:
            found.append(client.exists(counters._key()))
    assert found == [1, 0, 0]


@pytest.mark.large
@pytest.mark.django_db(transaction=True)
def test_worker_runs_what_needs_no_lock_and_waits_for_a_majority_with_the_rest(
    three: Servers, spawn: Spawn
) -> None:
    ways = " ".join(f"redis://{HOST}:{proxy.port}/0" for proxy in three.proxies)
    env = {"DEDUPJOBS_TEST_LOCKS": ways}
    live.start_worker(spawn, env=env, LOCK_CACHE=["locks0", "locks1", "locks2"])
    three.kill(0, 2)
    waits, goes = jobs.record_if_locked.enqueue(tag="a"), jobs.record.enqueue(tag="b")
    live.wait_for(goes)
    until(lambda: lifecycle.is_aside(live.row_of(waits)), live.PATIENCE, what="it is set aside")
    for at in (0, 2):
        three.valkeys[at].restart()
    live.wait_for(waits)
    assert (live.row_of(waits).attempts, live.notes("a"), live.notes("b")) == (1, [""], [""])


@pytest.mark.large
@pytest.mark.parametrize("alias", ["there is none", "memory"])
def test_server_that_is_no_redis_has_no_vote_and_stops_nobody(three: Servers, alias: str) -> None:
    caches = {
        **settings.CACHES,
        "memory": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
    }
    ours = {**settings.DEDUPJOBS, "LOCK_CACHE": ["locks0", alias, "locks2"]}
    with override_settings(CACHES=caches), live.changed(DEDUPJOBS=ours):
        assert locks.acquire(7, "me", ttl=30) is Grip.HELD
        three.kill(0)
        comes("a majority is away", lambda: locks.extend(7, "me", ttl=9) is Grip.UNREACHABLE)
        assert f"{alias}: " in locks.why_unreachable()


def test_server_whose_new_connections_others_have_taken_is_not_away(three: Servers) -> None:
    server = quorum().servers[0]
    server._connecting = True  # for somebody else, and for longer than we may wait
    server.made = 1
    assert server.line_by(clock.monotonic(), made=0) is None
    assert server.trouble is None
    assert server.line_by(clock.monotonic(), made=1) is None
    assert "can not be connected to in time" in str(server.trouble)


@pytest.mark.large
def test_connecting_leaves_no_thread(three: Servers) -> None:
    locks.acquire(7, "me", ttl=30)
    three.kill(1)
    comes("it is noticed", lambda: locks.extend(7, "me", ttl=30) and troubles())
    names = "dedupjobs-locks"
    comes("all end", lambda: not any(t.name.startswith(names) for t in threading.enumerate()))


def test_all_about_a_lock_takes_no_longer_than_one_server_allows(three: Servers) -> None:
    """The majority's answers are read in one wait: delays do not add up."""
    locks.acquire(1, "opens the connections", ttl=30)
    for proxy in three.proxies:
        proxy.delay(2)
    grip, took = timed(lambda: locks.acquire(7, "me", ttl=30))
    assert grip is Grip.HELD
    assert 2 <= took < 3.8


def test_single_server_has_no_quorum() -> None:
    with live.changed(DEDUPJOBS={**settings.DEDUPJOBS, "LOCK_CACHE": "default"}):
        assert locks._quorum() is None
        assert locks.acquire(7, "me", ttl=30) is Grip.HELD
        with redis.Redis.from_url(settings.CACHES["default"]["LOCATION"]) as client:
            assert client.get(live.lock_name(7)) == b"7:me"
        locks.release(7, "me")
