"""Changes that are told to all processes: who hears, what is ignored, and what happens without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from typing import Any

import psutil
import pytest
import redis
from django.conf import settings
from django.core.cache import caches
from django.core.management import CommandError, call_command
from django.test import override_settings

from dedupjobs import (
    FOREVER,
    bump_stamp,
    cache,
    cache_stamp,
    exceptions,
    invalidation,
    job,
    lifecycle,
    locks,
    on_invalidate,
    operations,
    registry,
    signals,
)
from dedupjobs.clock import DbNow
from dedupjobs.exceptions import ArgumentError
from dedupjobs.invalidation import Message
from dedupjobs.lifecycle import Change
from dedupjobs.locks import Grip
from dedupjobs.models import Kind, ProcessedJob, Status
from dedupjobs.testing import run_pending
from tests import live
from tests.app import jobs
from tests.proxy import Proxy
from tests.servers import HOST, NOBODY, Valkey
from tests.settings import WORKER_NUMBER
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

# A server's databases share their channels, so each process of the suite has a prefix of its own.
PREFIX = f"heard{WORKER_NUMBER}"
LONG = {"L1_TTL": 600, "PUSH_TIMEOUT": 10, "LISTEN": "never", "PREFIX": PREFIX}
PATIENCE = 30


@pytest.fixture(autouse=True)
def _patient() -> Iterator[None]:
    invalidation.counts.clear()
    invalidation._owed.take(())  # what an earlier test could not send would be heard here
    with live.changed(DEDUPJOBS=LONG):
        yield


@pytest.fixture
def told(_patient: None) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What was announced since the last question."""
    with redis.Redis.from_url(settings.CACHE_URL) as client, client.pubsub() as subscription:
        subscription.subscribe(invalidation.channel())
        until(lambda: subscription.get_message(timeout=1), what="subscribed")

        def heard() -> list[dict[str, Any]]:
            found = []
            while (item := subscription.get_message(timeout=0.3)) is not None:
                found.append(json.loads(item["data"]))
            return found

        yield heard


class Listener:
    """The listener of a process, in a thread that a test can end."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self.gaps = 0
        self.heard: list[Message] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        until(lambda: self.gaps, PATIENCE, what="the listener is connected")

    def _run(self) -> None:
        for raw in invalidation.messages(self._stop.is_set, poll=0.05):
            if raw is None:
                self.gaps += 1
                cache.expire_all()
            elif (message := invalidation.handle(raw)) is not None:
                self.heard.append(message)

    def end(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@contextmanager
def listening() -> Iterator[Listener]:
    made = Listener()
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def listener() -> Iterator[Listener]:
    with listening() as made:
        yield made


def row_of(outcome: Any) -> ProcessedJob:
    return ProcessedJob.objects.get(pk=outcome.job.pk)


def change_of(row: ProcessedJob) -> Change:
    return Change.of(row, row.status)


# ---- what is told


def test_each_change_of_a_key_is_told_once_after_it_was_committed(told: Any) -> None:
    outcome = jobs.fail_for_good.enqueue(tag="a", text="secret")
    assert told() == []  # a key that nobody can know
    run_pending()
    operations.retry(row_of(outcome), by="op")
    run_pending()
    operations.cancel(row_of(jobs.record.enqueue(tag="b")), by="op")
    jobs.fail_for_good.enqueue(tag="a", text="secret")
    messages = told()
    assert [(m["name"].split(".")[1], m["event"]) for m in messages] == [
        ("fail_for_good", "DEAD"),
        ("fail_for_good", "PENDING"),
        ("fail_for_good", "DEAD"),
        ("record", "CANCELLED"),
        ("fail_for_good", "PENDING"),
    ]
    row = row_of(outcome)
    assert {m["key"] for m in messages if m["event"] == "DEAD"} == {row.key_hash}
    assert messages[-1]["version"] == row.version
    assert messages[0].keys() == {"scheme", "key", "name", "scope", "version", "event", "seal"}
    assert "secret" not in json.dumps(messages)


def test_a_rollback_tells_nothing(told: Any) -> None:
    from django.db import transaction

    row = row_of(jobs.record.enqueue(tag="a"))
    with transaction.atomic():
        operations.hold(row, by="op")
        transaction.set_rollback(True)
    assert told() == []


def test_rows_that_are_pruned_are_told(told: Any) -> None:
    row = row_of(jobs.record.enqueue(tag="a", text="x"))
    run_pending()
    assert jobs.record.result(tag="a") == "x"
    told()
    call_command("dedupjobs_prune", "--purge", stdout=StringIO())
    assert [(m["key"], m["event"]) for m in told()] == [(row.key_hash, "SUCCEEDED")]
    with pytest.raises(exceptions.NoResult, match="pruned"):
        jobs.record.result(tag="a")
    assert jobs.record.enqueue(tag="a", text="x").kind is Kind.REPLAYED


def test_job_that_was_lost_is_told(told: Any) -> None:
    from dedupjobs import coordinator

    outcome = jobs.record.enqueue(tag="a")
    claim = live.claimed(outcome)
    lost = lifecycle.bury(claim.fence, "its process died")
    assert lost is not None
    coordinator.tell_lost(lost, "death")
    assert [m["event"] for m in told()] == ["RETRYING"]


# ---- who hears


def test_process_that_listens_believes_nothing_old_once_it_has_heard(listener: Listener) -> None:
    row = row_of(jobs.record.enqueue(tag="a"))
    assert jobs.record.status(tag="a") is Status.PENDING
    ProcessedJob.objects.filter(pk=row.pk).update(status=Status.HELD, version=row.version + 1)
    assert jobs.record.status(tag="a") is Status.PENDING  # nobody has told
    row.refresh_from_db()
    with redis.Redis.from_url(settings.CACHE_URL) as client:
        client.publish(invalidation.channel(), invalidation.encode(change_of(row)))
    until(lambda: jobs.record.status(tag="a") is Status.HELD, PATIENCE, what="it was heard")


def test_handlers_get_each_message_and_one_that_raises_harms_no_other(listener: Listener) -> None:
    got: list[Message] = []

    def broken(message: Message) -> None:
        raise ValueError("broken")

    on_invalidate("testapp.record")(broken)
    on_invalidate("testapp.record")(got.append)
    try:
        outcome = jobs.record.enqueue(tag="a")
        run_pending()
        until(lambda: got, PATIENCE, what="the second handler is called")
    finally:
        del invalidation._handlers["testapp.record"]
    assert (got[0].key, got[0].event) == (outcome.job.key_hash, "SUCCEEDED")
    assert invalidation.counts["handler failed"] == 1


def test_django_signal_is_sent_for_each_message(listener: Listener) -> None:
    got = []

    def note(sender: str, message: Message, **_: Any) -> None:
        got.append((sender, message.event))

    signals.job_invalidated.connect(note)
    try:
        jobs.record.enqueue(tag="a")
        run_pending()
        until(lambda: got, PATIENCE, what="the signal is sent")
    finally:
        signals.job_invalidated.disconnect(note)
    assert got == [("testapp.record", "SUCCEEDED")]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"no json", "malformed"),
        (b"\xff\xfe", "malformed"),
        (b"[]", "malformed"),
        (b"{}", "malformed"),
        (b"null", "malformed"),
        (b"[" * 100_000, "malformed"),
        (b'{"scheme": 2, "seal": ""}', "other scheme"),
        (b'{"scheme": 1, "seal": 7}', "malformed"),
    ],
)
def test_message_that_is_none_of_ours_is_counted_and_ignored(raw: bytes, why: str) -> None:
    assert invalidation.handle(raw) is None
    assert dict(invalidation.counts) == {why: 1}


@pytest.mark.parametrize("field", ["key", "name", "scope", "version", "event"])
def test_message_that_somebody_has_changed_is_counted_and_ignored(field: str) -> None:
    message = json.loads(invalidation.encode(change_of(row_of(jobs.record.enqueue(tag="a")))))
    message[field] = 7 if field == "version" else "other"
    assert invalidation.handle(json.dumps(message)) is None
    assert dict(invalidation.counts) == {"forged": 1}


def test_listener_survives_what_is_none_of_ours(listener: Listener) -> None:
    with redis.Redis.from_url(settings.CACHE_URL) as client:
        for raw in (b"no json", b'{"scheme": 2, "seal": ""}', b"[]"):
            client.publish(invalidation.channel(), raw)
    jobs.record.enqueue(tag="a")
    run_pending()
    until(lambda: listener.heard, PATIENCE, what="the true message is heard")
    assert invalidation.counts["malformed"] == 2


def test_listener_that_lost_its_connection_comes_back_and_believes_nothing_old() -> None:
    port = int(settings.CACHE_URL.split(":")[2].split("/")[0])
    with Proxy(port) as proxy:
        through = live.redis_at(f"redis://{HOST}:{proxy.port}")["CACHES"]
        with live.changed(DEDUPJOBS=LONG, CACHES=through), listening() as listener:
            row = row_of(jobs.record.enqueue(tag="a"))
            assert jobs.record.status(tag="a") is Status.PENDING
            ProcessedJob.objects.filter(pk=row.pk).update(status=Status.HELD)
            proxy.cut()
            until(lambda: listener.gaps >= 2, PATIENCE, what="it is connected again")
            until(lambda: jobs.record.status(tag="a") is Status.HELD, PATIENCE)

            def heard() -> bool:
                invalidation.announce([change_of(row)])
                return bool(listener.heard)

            until(heard, PATIENCE, what="it hears again")


@pytest.mark.large
@pytest.mark.timeout(900)
def test_hundred_thousand_messages_at_once_are_handled_in_bounded_memory(
    listener: Listener,
) -> None:
    raw = invalidation.encode(change_of(row_of(jobs.record.enqueue(tag="a"))))
    before = psutil.Process().memory_info().rss
    with redis.Redis.from_url(settings.CACHE_URL) as client:
        for _ in range(100):
            pipe = client.pipeline(transaction=False)
            for _ in range(1_000):
                pipe.publish(invalidation.channel(), raw)
            pipe.execute()
    # What a server drops because we are slow is a gap, after which nothing old is believed.
    until(
        lambda: invalidation.counts["heard"] == 100_000 or listener.gaps > 1,
        PATIENCE * 20,
        what="all are handled, or the server has cut us off",
    )
    assert psutil.Process().memory_info().rss - before < 64 * 2**20


@pytest.mark.large
@pytest.mark.parametrize("when", ["lazy", "never"])
def test_process_listens_from_its_first_read_unless_it_must_not(when: str) -> None:
    script = (
        "import django; django.setup()\n"
        "import threading\n"
        "from tests.app import jobs\n"
        "names = lambda: [t.name for t in threading.enumerate()]\n"
        "before = 'dedupjobs-listener' in names()\n"
        "jobs.record.status(tag='a')\n"
        "print(before, 'dedupjobs-listener' in names())\n"
    )
    assert in_process(script, LISTEN=when) == f"False {when == 'lazy'}"


@pytest.mark.large
def test_child_of_a_fork_listens_again_and_one_of_a_worker_does_not() -> None:
    script = (
        "import django; django.setup()\n"
        "import os, sys, threading\n"
        "from dedupjobs import invalidation\n"
        "from tests.app import jobs\n"
        "if sys.argv[1] == 'worker': invalidation.never_listen()\n"
        "names = lambda: [t.name for t in threading.enumerate()]\n"
        "jobs.record.status(tag='a')\n"
        "from django.db import connections; connections.close_all()\n"
        "sys.stdout.flush()\n"
        "if os.fork() == 0:\n"
        "    before = 'dedupjobs-listener' in names()\n"
        "    jobs.record.status(tag='a')\n"
        "    print(before, 'dedupjobs-listener' in names(), flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    assert in_process(script, "web") == "False True"
    assert in_process(script, "worker") == "False False"


def in_process(script: str, *arguments: str, **ours: Any) -> str:
    """Run a script in a process of its own, and return its last line."""
    from django.db import connection

    env = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DEDUPJOBS_TEST_DB_NAME": str(connection.settings_dict["NAME"]),
        "DEDUPJOBS_TEST_SETTINGS": json.dumps(ours),
        "PYTHONPATH": os.getcwd(),
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


# ---- a Redis that is away


def test_change_that_redis_did_not_take_is_told_with_the_next_one(told: Any) -> None:
    first, second = (row_of(jobs.record.enqueue(tag=tag)) for tag in "ab")
    away = live.redis_at(NOBODY)["CACHES"]
    with override_settings(CACHES=away):
        caches.close_all()
        cache.client.cache_clear()
        assert invalidation.announce([change_of(first)]).owed == 1
    caches.close_all()
    cache.client.cache_clear()
    cache.budget.reset()
    assert invalidation.announce([change_of(second)]).owed == 0
    assert {m["key"] for m in told()} == {first.key_hash, second.key_hash}


# ---- the application's own entries


@pytest.fixture
def pages() -> Iterator[Any]:
    @job(
        name="test.pages",
        key="order:{order}",
        unique_for=FOREVER,
        max_attempts=2,
        backoff=3_600,
        invalidates=("order:{order}:page", ("default", "orders")),
    )
    def pages(order: int, fails: bool = False) -> None:
        if fails:
            raise ValueError("no")

    yield pages
    registry.forget("test.pages")


def test_job_deletes_the_entries_that_depend_on_it_when_it_ends_and_when_it_is_queued_again(
    pages: Any,
) -> None:
    def fill() -> None:
        caches["default"].set_many({"order:7:page": "old", "orders": "old", "order:8:page": "old"})

    def left() -> set[str]:
        return set(caches["default"].get_many(["order:7:page", "orders", "order:8:page"]))

    fill()
    outcome = pages.enqueue(order=7, fails=True)
    assert "order:7:page" in left()
    run_pending()  # fails, and waits for its retry
    assert row_of(outcome).status == Status.RETRYING
    assert "order:7:page" in left()
    run_pending(retries=True)
    assert row_of(outcome).status == Status.DEAD
    assert left() == {"order:8:page"}
    fill()
    operations.retry(row_of(outcome), by="op")
    assert left() == {"order:8:page"}


@pytest.mark.parametrize(
    "wrong", [("{nothing}",), ("a:{order!r}",), ("",), (("default", 7),), ("{order",)]
)
def test_entry_that_can_not_be_named_is_refused_with_job_and_value(wrong: Any) -> None:
    with pytest.raises(exceptions.JobDefinitionError, match=r"test\.wrong.*invalidates"):
        job(name="test.wrong", key="a:{order}", unique_for=60, invalidates=wrong)(lambda order: 1)


def test_application_cache_that_fails_is_told_and_harms_no_job(pages: Any) -> None:
    errors = []

    def note(sender: str, error: Exception, **_: Any) -> None:
        errors.append(error)

    signals.invalidation_troubled.connect(note)
    outcome = pages.enqueue(order=7)
    away = live.redis_at(NOBODY)["CACHES"]
    try:
        with override_settings(CACHES={**away, "status": settings.CACHES["default"]}):
            run_pending()
    finally:
        signals.invalidation_troubled.disconnect(note)
    assert row_of(outcome).status == Status.SUCCEEDED
    assert len(errors) == 2


def test_arguments_that_can_not_be_read_any_more_keep_no_change_from_being_told(
    pages: Any, told: Any
) -> None:
    row = row_of(pages.enqueue(order=7))
    run_pending()
    told()
    for args in ('{"order":{"$":"enum","t":"gone:Gone","v":"X"}}', '{"other":1}', "no json"):
        change = replace(change_of(ProcessedJob.objects.get(pk=row.pk)), args=args)
        invalidation.announce([change])
    assert [m["key"] for m in told()] == [row.key_hash] * 3


# ---- group stamps


def test_stamp_of_a_group_stays_until_it_is_bumped() -> None:
    first = cache_stamp("catalog:2026")
    assert cache_stamp("catalog:2026") == first
    assert cache_stamp("catalog:2027") != first
    second = bump_stamp("catalog:2026")
    assert second != first
    assert cache_stamp("catalog:2026") == second


@pytest.mark.parametrize("wrong", ["", " ", None, 7])
def test_group_or_job_that_is_no_name_is_refused(wrong: Any) -> None:
    for ask in (cache_stamp, bump_stamp):
        with pytest.raises(ArgumentError, match=f"group={wrong!r}; give the group's name"):
            ask(wrong)
    with pytest.raises(ArgumentError, match="give the job's name"):
        on_invalidate(wrong)


def test_decorator_of_handlers_without_a_job_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"give the job's name: @on_invalidate\(\"shop"):

        @on_invalidate
        def forget(message: Message) -> None: ...


def test_stamp_that_redis_has_lost_is_never_an_old_one() -> None:
    first = cache_stamp("catalog")
    with redis.Redis.from_url(settings.CACHE_URL) as client:
        client.flushdb()
    assert cache_stamp("catalog") != first


def test_without_redis_no_stamp_matches_and_a_bump_is_an_error() -> None:
    with live.changed(CACHES=live.redis_at(NOBODY)["CACHES"]):
        assert cache_stamp("catalog") != cache_stamp("catalog")
        with pytest.raises(redis.exceptions.ConnectionError):
            bump_stamp("catalog")


# ---- commands


def invalidate(*arguments: str) -> dict[str, Any]:
    out = StringIO()
    call_command("dedupjobs_invalidate", *arguments, "--json", stdout=out)
    return json.loads(out.getvalue())


def test_invalidate_command_reaches_entries_and_listeners(listener: Listener) -> None:
    for tag in "abc":
        jobs.record.enqueue(tag=tag)
        run_pending()
        jobs.record.status(tag=tag)
    until(lambda: len(listener.heard) == 3, PATIENCE, what="the successes are heard")
    assert invalidate("--all", "--dry-run") == {"jobs": 3, "dry_run": True}
    assert invalidate("--key", "record:a") == {
        "jobs": 1, "dry_run": False, "entries": 1, "listeners": 1
    }  # fmt: skip
    assert invalidate("--name", "testapp.record")["entries"] == 2
    until(lambda: len(listener.heard) == 7, PATIENCE, what="the commands are heard")


def test_invalidate_command_chooses_by_status_scope_and_age() -> None:
    jobs.record_for_tenant.enqueue(tenant="t1", tag="a")
    jobs.record_for_tenant.enqueue(tenant="t2", tag="a")
    jobs.record.enqueue(tag="a")
    run_pending(name="testapp.record")
    assert invalidate("--scope", "t1")["jobs"] == 1
    assert invalidate("--status", "PENDING")["jobs"] == 2
    assert invalidate("--older-than", "0")["jobs"] == 1
    assert invalidate("--older-than", "60")["jobs"] == 0
    ProcessedJob.objects.filter(name="testapp.record").update(finished_at=DbNow(-3 * 60))
    assert invalidate("--older-than", "2m")["jobs"] == 1
    assert invalidate("--older-than", "4m")["jobs"] == 0
    assert invalidate("--status", "PENDING", "--scope", "t2")["jobs"] == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Say which jobs"),
        (["--all", "--scope", "t"], "Say which jobs"),
        (["--name", "no.such"], r"no\.such"),
        (["--status", "DONE"], "DONE.*SUCCEEDED"),
        (["--key", "record:zz"], "record:zz"),
        (["--older-than", "-1"], "-1"),
    ],
)
def test_invalidate_command_names_what_it_can_not_use(arguments: list[str], says: str) -> None:
    with pytest.raises(CommandError, match=says):
        invalidate(*arguments)


def test_invalidate_command_says_if_redis_did_not_take_it() -> None:
    jobs.record.enqueue(tag="a")
    away = live.redis_at(NOBODY)["CACHES"]
    with (
        live.changed(DEDUPJOBS=LONG, CACHES=away),
        pytest.raises(CommandError, match="did not take"),
    ):
        invalidate("--all")


@pytest.mark.parametrize("command", ["dedupjobs_invalidate", "dedupjobs_listen"])
def test_commands_say_if_there_is_no_status_cache(command: str) -> None:
    arguments = ["--all"] if command == "dedupjobs_invalidate" else []
    with (
        override_settings(DEDUPJOBS={"STATUS_CACHE": None}),
        pytest.raises(CommandError, match="STATUS_CACHE"),
    ):
        call_command(command, *arguments)


@pytest.mark.large
def test_listen_command_prints_each_change_calls_its_handlers_and_ends_on_a_signal(
    spawn: Any,
) -> None:
    import signal as signals_of_unix

    process = spawn(
        "dedupjobs_listen", "--json", "--exec", "tests.app.heard.note", "--exec",
        "tests.app.heard.broken", DEDUPJOBS_TEST_SETTINGS=json.dumps({"PREFIX": PREFIX}),
    )  # fmt: skip
    until(lambda: '"connected"' in process.output, PATIENCE, what="it is connected")
    outcome = jobs.record.enqueue(tag="a")
    run_pending()
    until(lambda: "SUCCEEDED" in process.output, PATIENCE, what="the success is printed")
    assert outcome.job.key_hash in process.output
    until(lambda: live.notes("heard") == ["SUCCEEDED"], PATIENCE, what="the handler is called")
    until(lambda: "ValueError: broken" in process.output, PATIENCE, what="the other one is told")
    process.signal(signals_of_unix.SIGINT)
    assert process.wait(PATIENCE) == 0
    assert "Traceback" not in process.output


@pytest.mark.parametrize("path", ["no.such.thing", "tests.app.heard.NOTHING"])
def test_listen_command_names_a_handler_that_it_can_not_call(path: str) -> None:
    with pytest.raises(CommandError, match=path.replace(".", r"\.")):
        call_command("dedupjobs_listen", "--exec", path)


# ---- with the release of a lock


def news_of(row: ProcessedJob) -> invalidation.News:
    return invalidation.News([change_of(row)])


def test_what_redis_did_not_take_travels_with_the_next_release_of_a_lock(told: Any) -> None:
    first, second = (jobs.record.enqueue(tag=tag).job for tag in "ab")
    told()
    news_of(first).left_behind(redis.ConnectionError("away"))
    locks.acquire(second.pk, "me", ttl=60)
    assert locks.release(second.pk, "me", cargo=[news_of(second)]) is Grip.HELD
    assert [message["key"] for message in told()] == [first.key_hash, second.key_hash]
    assert invalidation._owed.take(()) == []


def test_news_that_a_read_only_redis_refuses_are_told_once_it_takes_them() -> None:
    with Valkey() as server, live.changed(**live.redis_at(server.url), DEDUPJOBS=LONG):
        row = jobs.record.enqueue(tag="a").job
        locks.acquire(row.pk, "me", ttl=60)
        cache.client().redis.set(entry := cache.entry_key(row.key_hash), "?somebody reads")
        with server.client() as admin:
            admin.replicaof("127.0.0.1", "1")
            assert locks.release(row.pk, "me", cargo=[news_of(row)]) is Grip.UNREACHABLE
            admin.replicaof("NO", "ONE")
        assert cache.client().redis.get(entry) == b"?somebody reads"
        assert locks.release(row.pk, "me", cargo=[invalidation.News()]) is Grip.HELD
        assert cache.client().redis.get(entry) is None
