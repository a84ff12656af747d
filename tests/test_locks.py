"""The Redis lock is advice: taken, busy, lost, stolen or out of reach, the row decides."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from django.conf import settings
from django.core.cache import cache
from django.test.utils import override_settings

from dedupjobs import (
    FOREVER,
    batches,
    clock,
    current_attempt,
    invalidation,
    job,
    lifecycle,
    locks,
    probes,
    runner,
    signals,
    stats,
)
from dedupjobs.lifecycle import Change, Place
from dedupjobs.locks import Grip
from dedupjobs.models import AttemptOutcome, ProcessedJob, Status
from tests import live
from tests.app import jobs
from tests.app.jobs import note
from tests.proxy import Proxy
from tests.rows import together
from tests.servers import HOST, Valkey, free_port
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

SUCCEEDED = AttemptOutcome.SUCCEEDED


@pytest.fixture(autouse=True)
def _patient() -> Iterator[None]:
    """A busy machine must not look like a fault."""
    with live.brisk(LOCK_TIMEOUT=10, PUSH_TIMEOUT=10):
        yield


@pytest.fixture
def client() -> Iterator[redis.Redis]:
    with live.cache_client() as made:
        yield made


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """Between us and the shared server, which itself stays well."""
    port = int(settings.CACHES["default"]["LOCATION"].rpartition(":")[2].partition("/")[0])
    with Proxy(port) as made, live.changed(**live.redis_at(f"redis://{HOST}:{made.port}")):
        yield made


@contextmanager
def at(point: str, act: Callable[[], Any]) -> Iterator[list[Any]]:
    """Call ``act`` when a run reaches the point; yield the list of what it returned."""
    returned: list[Any] = []

    def hook(reached: str) -> None:
        if reached == point:
            returned.append(act())

    probes.hook = hook
    try:
        yield returned
    finally:
        probes.hook = None


def run(outcome: Any) -> None:
    """Run the row in this process, as its message would."""
    row = live.row_of(outcome)
    runner.run([[row.pk, row.generation]])


# ---- taking and giving


def test_lock_has_cache_locks_key_the_rows_and_owners_token_and_an_end(
    client: redis.Redis,
) -> None:
    assert locks.acquire(7, "me", ttl=30) is Grip.HELD
    name = cache.lock("dedupjobs:lock:{7}").name
    assert name == live.lock_name(7)
    assert client.get(name) == "7:me"
    assert 20_000 < client.pttl(name) <= 30_000
    assert locks.holder(7) == "me"
    assert locks.release(7, "me") is Grip.HELD
    assert locks.holder(7) is None


def test_lock_of_another_is_busy_and_neither_renewed_nor_released(client: redis.Redis) -> None:
    locks.acquire(7, "me", ttl=30)
    assert locks.acquire(7, "you", ttl=30) is Grip.BUSY
    assert locks.extend(7, "you", ttl=300) is Grip.BUSY
    assert locks.release(7, "you") is Grip.BUSY
    assert locks.holder(7) == "me"
    assert client.pttl(live.lock_name(7)) <= 30_000
    assert locks.acquire(8, "you", ttl=30) is Grip.HELD, "each row has its own"


def test_lock_replaced_belongs_to_the_new_owner_alone() -> None:
    locks.acquire(7, "dead", ttl=30)
    assert locks.replace(7, "me", ttl=30) is Grip.HELD
    assert locks.release(7, "dead") is Grip.BUSY
    assert locks.holder(7) == "me"


def test_lock_taken_by_a_command_whose_reply_was_lost_is_known_as_our_own(proxy: Proxy) -> None:
    locks.acquire(1, "opens the connection", ttl=1)
    proxy.swallow_reply_to(b"7:me")
    assert locks.acquire(7, "me", ttl=30) is Grip.UNREACHABLE
    assert proxy.swallowed.is_set()
    assert locks.acquire(7, "me", ttl=30) is Grip.HELD
    assert locks.acquire(7, "you", ttl=30) is Grip.BUSY


def test_command_whose_reply_was_lost_is_not_repeated(proxy: Proxy) -> None:
    for _ in range(2):  # the first release may have to load its script
        locks.acquire(7, "me", ttl=30)
        locks.release(7, "me")
    locks.acquire(7, "me", ttl=30)
    proxy.swallow_reply_to(b"7:me")
    assert locks.release(7, "me") is Grip.UNREACHABLE
    assert locks.holder(7) is None
    assert locks.acquire(7, "you", ttl=30) is Grip.HELD


@pytest.mark.parametrize("ttl", [0, -1, 0.0004, -0.0, 1e-9, 366 * 86_400])
def test_lock_with_an_odd_ttl_still_has_an_end(client: redis.Redis, ttl: float) -> None:
    name = live.lock_name(7)
    for take in (locks.acquire, locks.replace):
        assert take(7, "me", ttl=ttl) is Grip.HELD
        assert client.pttl(name) != -1, "it would never end"
        client.delete(name)
    locks.acquire(7, "me", ttl=30)
    assert locks.extend(7, "me", ttl=ttl) is Grip.HELD
    assert client.pttl(name) != -1
    if ttl > 1:
        assert locks.acquire(7, "you", ttl=30) is Grip.BUSY


def test_lock_is_renewed_and_released_from_other_threads(client: redis.Redis) -> None:
    locks.acquire(7, "me", ttl=9)
    assert together(lambda: locks.extend(7, "me", ttl=60)) == [Grip.HELD]
    assert client.pttl(live.lock_name(7)) > 10_000
    assert together(lambda: locks.release(7, "me")) == [Grip.HELD]
    assert locks.holder(7) is None


def test_lock_taken_by_many_threads_at_once_is_held_by_one() -> None:
    takers = [lambda n=n: locks.acquire(7, f"owner {n}", ttl=30) for n in range(8)]
    grips = together(*takers)
    assert sorted(grip.value for grip in grips) == ["busy"] * 7 + ["held"]
    assert locks.holder(7) == f"owner {grips.index(Grip.HELD)}"


def test_leader_lease_is_renewed_by_its_holder_and_busy_for_others(client: redis.Redis) -> None:
    assert locks.lead("first", ttl=9) is Grip.HELD
    (name,) = client.keys(":1:dedupjobs:leader:*")
    assert locks.lead("second", ttl=60) is Grip.BUSY
    assert client.pttl(name) <= 9_000
    assert locks.lead("first", ttl=60) is Grip.HELD
    assert client.pttl(name) > 10_000
    client.delete(name)
    assert locks.lead("second", ttl=60) is Grip.HELD
    assert locks.lead("first", ttl=60) is Grip.BUSY


@pytest.mark.parametrize("left", [3_600_000, None], ids=["an hour", "no end"])
def test_lease_of_a_leader_that_outlives_what_anybody_asks_for_is_taken(
    client: redis.Redis, left: int | None
) -> None:
    # What a dead leader leaves behind on a server whose clock went back by an hour.
    assert locks.lead("dead", ttl=10) is Grip.HELD
    (name,) = client.keys(":1:dedupjobs:leader:*")
    client.set(name, "dead", px=left)
    assert locks.lead("heir", ttl=10) is Grip.HELD
    assert locks.lead("dead", ttl=10) is Grip.BUSY
    assert client.pttl(name) <= 10_000


def test_leader_of_another_project_under_the_same_prefix_keeps_nobody_from_leading() -> None:
    assert locks.lead("ours", ttl=60) is Grip.HELD
    with override_settings(SECRET_KEY="another project's"):
        assert locks.lead("theirs", ttl=60) is Grip.HELD
        assert locks.lead("another of theirs", ttl=60) is Grip.BUSY


def test_lock_works_with_a_client_that_decodes_its_replies() -> None:
    decoding = {
        "default": {
            **settings.CACHES["default"],
            "OPTIONS": {"CONNECTION_POOL_KWARGS": {"decode_responses": True}},
        }
    }
    with live.changed(CACHES=decoding):
        assert locks.acquire(7, "me", ttl=30) is Grip.HELD
        assert locks.acquire(7, "me", ttl=30) is Grip.HELD
        assert locks.acquire(7, "you", ttl=30) is Grip.BUSY
        assert locks.extend(7, "me", ttl=60) is Grip.HELD
        assert locks.holder(7) == "me"
        assert locks.release(7, "me") is Grip.HELD
        assert locks.lead("first", ttl=30) is Grip.HELD
        assert locks.lead("first", ttl=30) is Grip.HELD
        outcome = jobs.record.enqueue(tag="decoded")
        run(outcome)
        assert live.outcomes(outcome) == [SUCCEEDED]
        assert live.locks_left() == []


# ---- what a run makes of it


def test_run_holds_its_lock_for_its_lease_and_gives_it_up_at_the_end(client: redis.Redis) -> None:
    outcome = jobs.wait.enqueue(tag="held", release="/")
    pk = outcome.job.pk
    name = live.lock_name(pk)
    with at("user_code.before", lambda: (client.get(name), client.pttl(name))) as seen:
        run(outcome)
    ((value, ttl),) = seen
    assert value == f"{pk}:{live.attempt(outcome).owner}"
    assert 0 < ttl <= 2_000, "the lease of the job"
    assert live.locks_left() == []


def test_busy_lock_before_a_waiting_row_is_a_leftover_and_is_replaced(
    client: redis.Redis,
) -> None:
    outcome = jobs.record.enqueue(tag="leftover")
    pk = outcome.job.pk
    client.set(live.lock_name(pk), f"{pk}:dead", px=60_000)
    with at("user_code.before", lambda: locks.holder(pk)) as holders:
        run(outcome)
    assert holders == [live.attempt(outcome).owner]
    assert live.outcomes(outcome) == [SUCCEEDED]
    assert live.locks_left() == []


def test_busy_lock_before_a_running_row_has_the_delivery_dropped(client: redis.Redis) -> None:
    outcome = jobs.record.enqueue(tag="running")
    row = live.row_of(outcome)
    claim = lifecycle.claim(row.pk, row.generation, owner=clock.token(), place=Place())
    assert claim is not None
    locks.acquire(row.pk, claim.owner, ttl=60)
    run(outcome)
    assert live.outcomes(outcome) == [None]
    assert locks.holder(row.pk) == claim.owner
    assert live.notes("running") == []


def test_free_lock_before_a_running_row_has_the_delivery_dropped_and_its_lock_given_up() -> None:
    outcome = jobs.record.enqueue(tag="running")
    live.claimed(outcome, lease=60, overdue=-60)
    run(outcome)
    assert live.outcomes(outcome) == [None]
    assert live.locks_left() == []


@pytest.mark.parametrize("thief", [None, "thief"])
def test_lock_lost_or_stolen_in_mid_run_changes_nothing(
    client: redis.Redis, thief: str | None
) -> None:
    outcome = jobs.record.enqueue(tag="stolen")
    pk = outcome.job.pk

    def steal() -> None:
        client.delete(live.lock_name(pk))
        if thief:
            locks.acquire(pk, thief, ttl=60)

    with at("user_code.before", steal):
        run(outcome)
    assert live.outcomes(outcome) == [SUCCEEDED]
    assert live.notes("stolen") == [""]
    assert locks.holder(pk) == thief, "another's lock is left alone"


@pytest.mark.parametrize(
    "write",
    [
        lambda client, name: client.set(name, pickle.dumps(jobs.note)),
        lambda client, name: client.rpush(name, "no string"),
    ],
    ids=["pickle", "list"],
)
def test_garbage_in_the_place_of_a_lock_is_no_code_and_stops_no_job(
    client: redis.Redis, write: Callable[..., Any]
) -> None:
    outcome = jobs.record.enqueue(tag="garbage")
    write(client, live.lock_name(outcome.job.pk))
    run(outcome)
    assert live.outcomes(outcome) == [SUCCEEDED]
    assert live.notes("garbage") == [""]


@pytest.mark.parametrize("trouble", ["refuse", "black_hole"])
@pytest.mark.parametrize("point", ["lock.before", "user_code.before", "user_code.after"])
def test_redis_out_of_reach_before_in_or_after_a_run_leaves_it_to_the_row(
    proxy: Proxy, trouble: str, point: str
) -> None:
    outcome = jobs.record.enqueue(tag="dark")

    def break_redis() -> None:
        getattr(proxy, trouble)()
        if trouble == "refuse":
            proxy.cut()

    with live.brisk(LOCK_TIMEOUT=0.3):
        with at(point, break_redis):
            run(outcome)
        assert live.outcomes(outcome) == [SUCCEEDED]
        run(outcome)
    assert live.outcomes(outcome) == [SUCCEEDED], "once, also without a lock"


def test_redis_out_of_reach_at_a_failure_leaves_the_row_retrying(proxy: Proxy) -> None:
    outcome = jobs.wish.enqueue(tag="dark", what="retry")
    proxy.refuse()
    proxy.cut()
    run(outcome)
    assert live.row_of(outcome).status == Status.RETRYING
    assert live.outcomes(outcome) == [AttemptOutcome.FAILED]


@pytest.mark.parametrize("what", ["retry", "snooze"])
def test_lock_after_a_failure_stays_until_the_retry_is_due(client: redis.Redis, what: str) -> None:
    outcome = jobs.wish.enqueue(tag=what, what=what)
    run(outcome)
    ttl = client.pttl(live.lock_name(outcome.job.pk))
    assert 30_000 < ttl <= 60_000, "the delay that the job asked for"
    run(outcome)
    assert len(live.outcomes(outcome)) == 1, "not before it is due"
    live.unsent(outcome)
    run(outcome)
    assert live.outcomes(outcome)[1:] == [SUCCEEDED], "the row is due, whatever the lock says"
    assert live.locks_left() == []


def test_web_and_worker_with_different_key_prefixes_run_a_job_once() -> None:
    def prefixed(prefix: str) -> Any:
        return {"CACHES": {"default": {**settings.CACHES["default"], "KEY_PREFIX": prefix}}}

    with live.changed(**prefixed("web")):
        outcome = jobs.record.enqueue(tag="prefix")
        assert locks.acquire(outcome.job.pk, "web", ttl=60) is Grip.HELD
    with live.changed(**prefixed("worker")):
        assert locks.holder(outcome.job.pk) is None
        run(outcome)
        assert live.outcomes(outcome) == [SUCCEEDED]
    with live.changed(**prefixed("web")):
        assert locks.holder(outcome.job.pk) == "web"
        run(outcome)
    assert live.outcomes(outcome) == [SUCCEEDED]


def test_deliveries_of_one_row_under_two_prefixes_at_once_run_it_once() -> None:
    """Locks that do not see each other, as without any lock: the claim lets one through."""
    outcome = jobs.record.enqueue(tag="race")
    row = live.row_of(outcome)
    arrived = threading.Barrier(3)

    def meet(point: str) -> None:
        if point == "claim.before":
            arrived.wait(live.PATIENCE)

    probes.hook = meet
    try:
        delivered = together(
            *[
                lambda: runner.deliver(row.pk, row.generation, owner=clock.token(), lock=False)
                for _ in range(3)
            ]
        )
    finally:
        probes.hook = None
    assert sorted(map(str, delivered)) == ["None", "None", str(Status.SUCCEEDED)]
    assert live.outcomes(outcome) == [SUCCEEDED]
    until(lambda: live.notes("race") == [""])


# ---- a job with children


@job(key="forked:{tag}", unique_for=FOREVER)
def fork_and_look(*, tag: str, how: str) -> None:
    """Have a child that leaves as ``how`` says, then note who holds the lock."""
    if (child := os.fork()) == 0:
        if how == "raise":
            raise ValueError("in the child")
        if how == "sys.exit":
            sys.exit(0)
        return
    os.waitpid(child, 0)
    note(tag, str(locks.holder(current_attempt().job.pk)))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("how", ["return", "raise", "sys.exit"])
def test_job_that_forks_does_not_give_up_its_parents_lock(how: str) -> None:
    outcome = fork_and_look.enqueue(tag=how, how=how)
    run(outcome)
    assert live.notes(how) == [live.attempt(outcome).owner], "held until its own end"
    assert live.outcomes(outcome) == [SUCCEEDED]
    assert live.locks_left() == []


# ---- Redis in cluster mode


@pytest.fixture
def cluster() -> Iterator[Valkey]:
    """One node that holds all slots, and refuses commands whose keys lie in several."""
    port = str(free_port())  # the usual one, 10,000 above its own, may not exist
    mode = ("--cluster-enabled", "yes", "--cluster-databases", "256", "--cluster-port", port)
    # Valkey's clusters alone have the databases of this suite.
    with Valkey(*mode, bundled=True) as server, server.client() as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        until(lambda: b"cluster_state:ok" in _state(client), what="the cluster is up")
        yield server


def _state(client: redis.Redis) -> bytes:
    return bytes(client.execute_command("CLUSTER", "INFO"))


@pytest.mark.large
def test_locks_and_the_ledger_work_on_a_redis_that_refuses_keys_of_several_slots(
    cluster: Valkey,
) -> None:
    events: list[Any] = []

    def hear(event: Any, **_: Any) -> None:
        events.append(str(event))

    signals.lock_moved.connect(hear)
    caches = live.redis_at(cluster.url)["CACHES"]
    try:
        with live.changed(CACHES=caches):
            assert locks.acquire(7, "me", ttl=30) is Grip.HELD
            assert locks.extend(7, "me", ttl=60) is Grip.HELD
            assert locks.replace(7, "you", ttl=60) is Grip.HELD
            assert locks.release(7, "you") is Grip.HELD
            assert locks.lead("me", ttl=30) is Grip.HELD
            locks.resign("me")
            outcome = jobs.record.enqueue(tag="cluster")
            jobs.record.enqueue(tag="cluster")
            run(outcome)
            run(outcome)
            assert live.outcomes(outcome) == [SUCCEEDED]
            assert stats.fold().duplicates == 2
    finally:
        signals.lock_moved.disconnect(hear)
    assert events == ["acquired", "released", "acquired"]


@pytest.mark.large
def test_many_locks_and_many_news_go_to_such_a_redis_one_by_one(cluster: Valkey) -> None:
    held = [(pk, f"owner {pk}") for pk in range(1, 6)]
    with live.changed(CACHES=live.redis_at(cluster.url)["CACHES"]):
        assert {taken.grip for taken in locks.take_many(held, ttl=30).values()} == {Grip.HELD}
        assert set(locks.extend_many(held, ttl=60).values()) == {Grip.HELD}
        assert set(locks.replace_many(held, ttl=60).values()) == {Grip.HELD}
        assert set(locks.release_many(held).values()) == {Grip.HELD}
        outcomes = jobs.record.enqueue_many([{"tag": f"batch {n}"} for n in range(5)])
        batches.run([[outcome.job.pk, 1] for outcome in outcomes])
        assert live.locks_left() == []
        assert {str(jobs.record.status(tag=f"batch {n}")) for n in range(5)} == {"SUCCEEDED"}
        rows = ProcessedJob.objects.order_by("pk")
        changes = [Change.of(row, row.status, version=row.version + 1) for row in rows]
        assert invalidation.announce(changes).entries == 5
        assert invalidation.announce(changes).owed == 0
    assert set(ProcessedJob.objects.values_list("status", flat=True)) == {SUCCEEDED}


@pytest.mark.large
def test_worker_whose_queues_are_on_a_cluster_says_so_and_ends(
    cluster: Valkey, spawn: live.Spawn
) -> None:
    worker = spawn("rqworker", "default", **{**live.env_of(), "DEDUPJOBS_TEST_REDIS": cluster.url})
    assert worker.wait(live.PATIENCE) != 0
    assert "cluster mode" in worker.output
    assert "Traceback" not in worker.output
