"""Somebody writes what he likes into Redis: nothing of it runs, and work goes on."""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.core.management.base import SystemCheckError
from django.test import Client
from redis import Redis
from rq.job import Job as RqJob

import dedupjobs
from dedupjobs import cache, counters, dispatch, readings, stats
from dedupjobs.coordinator import Coordinator
from dedupjobs.exceptions import ArgumentError
from dedupjobs.foreign import Guarded, Serializer, guarded
from dedupjobs.models import DuplicateCount
from tests import live
from tests.app import jobs
from tests.app.traps import bomb, call
from tests.live import PATIENCE, Spawn, with_sqlite
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

ENTRY = dispatch.ENTRY
PAST = 1_000_000_000
NOBODY = [[[10**9, 1]]]  # rows that a message of ours names, and nobody has


@pytest.fixture
def traps(tmp_path: Path) -> Path:
    """The folder in which whatever runs leaves a mark."""
    return tmp_path


@pytest.fixture
def web() -> Iterator[HTTPServer]:
    """A server that notes who asks it."""

    class Noting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.server.asked.append(self.path)  # type: ignore[attr-defined]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Noting)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def message(name: str, data: bytes, **extras: Any) -> tuple[str, dict[str, Any]]:
    """Return an RQ id and a hash, as a producer writes them."""
    plain = {
        "data": data,
        "status": "queued",
        "origin": "default",
        "created_at": "2026-11-30T00:00:00.000000Z",
        "enqueued_at": "2026-11-30T00:00:00.000000Z",
        "timeout": "180",
        "result_ttl": "60",
    }
    return name.replace(" ", "-").replace(",", ""), {**plain, **extras}


def push(client: Redis, name: str, fields: dict[str, Any]) -> None:
    client.hset(f"rq:job:{name}", mapping=fields)
    client.rpush("rq:queue:default", name)


def pickles(home: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return messages that are pickles, or carry one."""
    ours = call(ENTRY, NOBODY)
    return [
        message("data", bomb(home, "data")),
        message("meta", ours, meta=bomb(home, "meta")),
        message("result", ours, result=bomb(home, "result")),
        message("both", bomb(home, "both data"), meta=bomb(home, "both meta")),
        message("old protocol", pickle.dumps([bomb(home, "old")], protocol=0)),
    ]


def forgeries(home: Path, web: str) -> list[tuple[str, dict[str, Any]]]:
    """Return messages that name functions, in every way that RQ would follow."""
    ours = call(ENTRY, NOBODY)
    trap, shell = "tests.app.traps.spring", f"mkdir {home}/shell"
    hooks = ("success", "failure", "stopped")
    return [
        message("path", call(trap, [])),
        message("system", call("os.system", [shell])),
        message("dict for arguments", call("os.system", {shell: 1})),
        message("text for arguments", call(trap, "a")),
        message("nothing for arguments", call(trap, "")),
        message("instance", call("format", [], instance="a")),
        message("dict for the call", json.dumps({trap: 1, "b": 2, "c": 3, "d": 4}).encode()),
        message("ours on an instance", call(ENTRY, NOBODY, instance="a")),
        *(message(f"{hook} hook", ours, **{f"{hook}_callback_name": trap}) for hook in hooks),
        message("refused, with a hook", call("os.system", []), failure_callback_name=trap),
        message("bad arguments, with a hook", call(ENTRY, [1]), failure_callback_name=trap),
        message(
            "web hooks",
            ours,
            webhooks=json.dumps(
                [
                    {"url": web, "job_status": status, "method": "GET", "timeout": 2}
                    for status in ("finished", "failed")
                ]
            ),
        ),
    ]


RUBBISH = [
    message("no time", call(ENTRY, NOBODY), created_at="yesterday", meta="{}"),
    message("no number", call(ENTRY, NOBODY), result_ttl="soon"),
    message("no status", call(ENTRY, NOBODY), status="odd", meta="{}"),
    message("no text", b"\xff\xfe\x00"),
    message("deep", b"[" * 100_000),
    message("deep and packed", zlib.compress(b"[" * 100_000)),
    message("cut", zlib.compress(call(ENTRY, NOBODY))[:-5]),
    message("deep meta", call(ENTRY, NOBODY), meta=b"[" * 100_000),
    message("long", call(ENTRY, ["x" * 2_000_000])),
    message("no dependencies", call(ENTRY, NOBODY), dependency_ids="odd"),
    ("empty", {"status": "queued"}),
    ("no id of RQ's", {"status": "queued", "data": call(ENTRY, NOBODY)}),
]


@pytest.mark.large
@with_sqlite
@pytest.mark.parametrize("when", ["before the worker", "while it waits"])
def test_nothing_that_somebody_puts_into_the_queue_runs_and_the_worker_goes_on(
    spawn: Spawn, traps: Path, web: HTTPServer, when: str
) -> None:
    url = f"http://127.0.0.1:{web.server_port}/"
    hostile = [*pickles(traps), *forgeries(traps, url), *RUBBISH]
    trap = {"DEDUPJOBS_TEST_TRAP": str(traps)}
    with live.rq_client() as client:
        if when == "before the worker":
            for one in hostile:
                push(client, *one)
            worker = live.start_worker(spawn, env=trap)
        else:
            worker = live.start_worker(spawn, env=trap)
            for one in hostile:
                live.wait_for(jobs.record.enqueue(tag=one[0]))
                until(lambda: client.hget(_worker_key(client), "state") == "idle", PATIENCE)
                push(client, *one)
                until(lambda: client.llen("rq:queue:default") == 0, PATIENCE)
    live.wait_for(jobs.record.enqueue(tag="last"))
    assert worker.is_alive(), worker.output[-2000:]
    assert [path.name for path in traps.iterdir()] == []
    assert web.asked == []  # type: ignore[attr-defined]


def _worker_key(client: Redis) -> str:
    return str(next(iter(client.smembers("rq:workers"))))


@pytest.mark.large
@with_sqlite
def test_nothing_in_rqs_books_runs_when_a_worker_puts_them_in_order(
    spawn: Spawn, traps: Path
) -> None:
    ours = call(ENTRY, NOBODY)
    trap = "tests.app.traps.spring"
    with live.rq_client() as client:
        for registry in ("wip", "finished", "failed", "deferred", "scheduled", "canceled", "ready"):
            for name, fields in (
                message(f"{registry} meta", ours, status="started", meta=bomb(traps, registry)),
                message(f"{registry} data", bomb(traps, f"{registry}2"), status="started"),
                message(f"{registry} hook", ours, status="started", failure_callback_name=trap),
                message(f"{registry} time", ours, status="started", created_at="odd"),
            ):
                client.hset(f"rq:job:{name}", mapping=fields)
                member = f"{name}:execution" if registry == "wip" else name
                client.zadd(f"rq:{registry}:default", {member: PAST})
        _forge_family(client, traps)
    worker = live.start_worker(
        spawn, "default", "--with-scheduler", env={"DEDUPJOBS_TEST_TRAP": str(traps)}
    )
    live.wait_for(jobs.record.enqueue(tag="last"))
    worker.wait_for_output("cleaning registries", PATIENCE)
    with live.rq_client() as client:
        until(lambda: client.zcard("rq:wip:default") == 0, PATIENCE, what="maintenance is done")
    assert worker.is_alive()
    assert [path.name for path in traps.iterdir()] == []


@pytest.mark.large
@with_sqlite
def test_ids_that_rq_could_not_have_written_stop_no_worker(spawn: Spawn) -> None:
    strange = [b"\xff\xfe", "x y", "a:b:c", ""]
    with live.rq_client() as client:
        for name in ("workers", "workers:default", "groups", "queues", "group:forged"):
            client.sadd(f"rq:{name}", *strange)
        for name in ("wip", "failed", "finished", "deferred", "ready", "canceled", "scheduled"):
            client.zadd(f"rq:{name}:default", dict.fromkeys(strange, PAST))
        client.rpush("rq:queue:default:intermediate", *strange)
    worker = live.start_worker(spawn)
    live.wait_for(jobs.record.enqueue(tag="first"))
    live.wait_for(jobs.record.enqueue(tag="last"))
    assert worker.is_alive()


def _forge_family(client: Redis, traps: Path) -> None:
    """Put messages where RQ looks for groups, dependents and lost messages."""
    ours = call(ENTRY, NOBODY)
    for name in ("group", "dependent", "intermediate"):
        client.hset(f"rq:job:{name}", mapping=message(name, ours, meta=bomb(traps, name))[1])
    client.sadd("rq:groups", "forged")
    client.sadd("rq:group:forged", "group")
    push(client, *message("parent", ours))
    client.sadd("rq:job:parent:dependents", "dependent")
    client.rpush("rq:queue:default:intermediate", "intermediate")
    client.set("rq:queue:default:intermediate:first_seen:intermediate", "2026-01-01T00:00:00.0Z")


@pytest.mark.large
@with_sqlite
def test_pickles_in_the_place_of_our_own_keys_are_never_loaded(spawn: Spawn, traps: Path) -> None:
    outcome = jobs.record.enqueue(tag="mine")
    row = live.row_of(outcome)
    with live.cache_client() as client:
        forged = {
            live.lock_name(row.pk): "lock",
            cache.entry_key(row.key_hash): "entry",
            ":1:dedupjobs:{counters}": "counters",
        }
        for key, name in forged.items():
            client.set(key, bomb(traps, name))
        client.publish("dedupjobs:invalidations", bomb(traps, "channel"))
    assert jobs.record.status(tag="mine") == "PENDING"
    worker = live.start_worker(spawn)
    live.wait_for(outcome)
    assert worker.is_alive()
    assert jobs.record.enqueue(tag="mine").kind == "REPLAYED"
    assert [path.name for path in traps.iterdir()] == []


@pytest.mark.parametrize("field", [b"data", b"exc_info"])
def test_message_that_swells_when_it_is_unpacked_is_not_unpacked(field: bytes) -> None:
    packed = zlib.compress(b"x" * 50_000_000)
    raw = {b"data": zlib.compress(call(ENTRY, NOBODY)), b"status": b"queued", field: packed}
    job = guarded(RqJob)("swells", connection=Redis())
    tracemalloc.start()
    try:
        job.restore(raw)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 10_000_000
    assert isinstance(job, Guarded)
    assert "unpacked" in job.rubbish


def test_message_of_ours_is_restored_as_rq_does_it() -> None:
    data = zlib.compress(call(ENTRY, NOBODY))
    raw = {b"data": data, b"status": b"failed", b"exc_info": zlib.compress(b"Traceback")}
    job = guarded(RqJob)("ours", connection=Redis(), serializer=Serializer)
    job.restore(raw)
    assert isinstance(job, Guarded)
    assert job.rubbish == ""
    assert (job.func_name, job.args) == (ENTRY, NOBODY)


# ---- lines of the log


@pytest.mark.large
@with_sqlite
@pytest.mark.parametrize("kind", ["of ours", "of ours with extras", "foreign"])
def test_message_writes_no_line_of_its_own_into_the_workers_log(spawn: Spawn, kind: str) -> None:
    lines = {"description": "a\nERROR forged line\x1b[2J\u202e"}
    data = call(ENTRY, NOBODY) if kind.startswith("of ours") else call("os.getcwd", [])
    if kind == "of ours with extras":
        lines["exc_info"] = "b\nERROR forged line"
    worker = live.start_worker(spawn)
    with live.rq_client() as client:
        for number in range(2):
            push(client, *message(f"loud{number}", data, **lines))
            live.wait_for(jobs.record.enqueue(tag=f"after {number}"))
            until(lambda: client.hget(_worker_key(client), "state") == "idle", PATIENCE)
    assert "forged line" in worker.output
    assert [line for line in worker.output.splitlines() if line.startswith("ERROR")] == []
    assert "\x1b[2J" not in worker.output
    assert "\u202e" not in worker.output


# ---- secrets


PASSWORD = "correct-horse"


def _commands() -> str:
    """Return all that our commands and checks say."""
    said = io.StringIO()
    for command in ("dedupjobs_doctor", "dedupjobs_stats", "dedupjobs_duplicates", "check"):
        options: dict[str, Any] = {"deploy": True} if command == "check" else {}
        with suppress(SystemExit):
            try:
                call_command(command, stdout=said, stderr=said, **options)
            except (SystemCheckError, CommandError) as error:
                said.write(str(error))
    return said.getvalue()


@pytest.mark.parametrize(
    "url",
    [
        f"redis://shop:{PASSWORD}@127.0.0.1:1/0",
        f"redis://shop:{PASSWORD}@127.0.0.1:{{port}}/0",
        f"redis://:{PASSWORD}/x@127.0.0.1:1/0",
        f"redis://shop:{PASSWORD}@127.0.0.1:{PASSWORD}/0",
    ],
    ids=["unreachable", "refused", "cut by a slash", "as a port"],
)
def test_no_command_page_or_error_shows_a_password(
    url: str, admin_client: Client, caplog: pytest.LogCaptureFixture, settings: Any
) -> None:
    port = settings.RQ_URL.partition("127.0.0.1:")[2].partition("/")[0]
    queues = {name: {"URL": url.format(port=port)} for name in settings.RQ_QUEUES}
    given: dict[str, Any] = {"RQ_QUEUES": queues}
    if "x@" not in url and url.count(PASSWORD) == 1:
        backend = "django_redis.cache.RedisCache"
        given["CACHES"] = {"default": {"BACKEND": backend, "LOCATION": url.format(port=port)}}
    token = {"DEDUPJOBS": {**settings.DEDUPJOBS, "METRICS_TOKEN": PASSWORD, "PUSH_TIMEOUT": 0.1}}
    with live.changed(**given, **token):
        try:
            row = jobs.record.enqueue(tag="a").job
            pages = ["dashboard/", "processedjob/", f"processedjob/{row.pk}/change/"]
            said = "".join(
                admin_client.get(f"/admin/dedupjobs/{page}").content.decode() for page in pages
            )
            said += admin_client.get("/metrics").content.decode() + _commands()
        except ValueError as error:  # redis-py's own, about a URL that is none
            said = _commands() + type(error).__name__
    assert "redis" in said.lower()
    assert PASSWORD not in said
    assert PASSWORD not in caplog.text
    assert settings.SECRET_KEY not in said


@pytest.mark.parametrize("value", [f"{PASSWORD}\x00", f"{PASSWORD}\ud800"])
def test_argument_that_can_not_be_stored_is_named_without_its_text(value: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        jobs.record.enqueue(tag="a", text=value)
    assert "text" in str(refused.value)
    assert PASSWORD not in str(refused.value)


def test_secrets_are_compared_in_constant_time_only() -> None:
    digested = set()
    secret = re.compile(r"METRICS_TOKEN|SECRET_KEY|\bsignature\b(?!\.)|\btoken\.encode")
    for path in Path(dedupjobs.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and secret.search(ast.unparse(node)):
                equals = {type(op) for op in node.ops} & {ast.Eq, ast.NotEq, ast.In, ast.NotIn}
                assert not equals, f"{path.name}:{node.lineno}: {ast.unparse(node)}"
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "compare_digest":
                digested.add(path.name)
    assert {"prometheus.py", "seal.py"} <= digested


@with_sqlite
def test_all_doors_work_with_a_client_that_decodes_its_replies(settings: Any) -> None:
    options = {"CONNECTION_POOL_KWARGS": {"decode_responses": True}}
    decoding = {"default": {**settings.CACHES["default"], "OPTIONS": options}}
    with live.changed(CACHES=decoding):
        outcome = jobs.record.enqueue(tag="a")
        assert jobs.record.enqueue(tag="a").kind == "DUPLICATE"
        assert jobs.record.status(tag="a") == "PENDING"
        assert live.work_off() == 1
        live.wait_for(outcome)
        cache.forget_clients()  # as another process asks, and again, of Redis
        for _ in range(2):
            assert jobs.record.status(tag="a") == "SUCCEEDED"
            cache._forget_l1()
        assert jobs.record.enqueue(tag="a").kind == "REPLAYED"
        Coordinator().tick()
        counters.pay()
        found = {family.name: family.samples for family in readings.collect()}
        assert sum(found["attempts_total"].values()) == 1
        assert found["redis_up"] == {(): 1}
        stats.flush()
        stats.fold()
        assert DuplicateCount.objects.filter(name="testapp.record").exists()


def test_bomb_of_these_tests_goes_off_where_it_is_loaded(traps: Path) -> None:
    pickle.loads(bomb(traps, "data"))
    assert [path.name for path in traps.iterdir()] == ["data"]
