"""The commands that answer people: explain, stats, doubts, doctor."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, timedelta
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import override_settings

from dedupjobs import (
    clock,
    counters,
    diagnosis,
    lifecycle,
    operations,
    runner,
    stats,
    wire,
)
from dedupjobs.coordinator import Coordinator
from dedupjobs.diagnosis import FAILURE, OK, WARNING, Finding
from dedupjobs.management import asked
from dedupjobs.models import JobAttempt, ProcessedJob, Status
from dedupjobs.story.events import events_of
from tests import live, outlet
from tests.app import jobs
from tests.rows import alter_attempt, claimed, expire
from tests.servers import Valkey
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _patient() -> Iterator[None]:
    with live.brisk(LOCK_TIMEOUT=10, PUSH_TIMEOUT=10):
        counters.forget_clients()
        yield
    counters.forget_clients()


@pytest.fixture
def own_redis() -> Iterator[Valkey]:
    """A server of our own, which queues, locks and counts are on."""
    patient = {"DEDUPJOBS": {"LOCK_TIMEOUT": 10, "PUSH_TIMEOUT": 10}}
    with Valkey() as server, live.changed(**live.redis_at(server.url), **patient):
        yield server


@contextmanager
def struck(server: Valkey, fault: str) -> Iterator[None]:
    """Let it be stopped or hang in the block, in which waits for it are short."""
    assert server.process is not None
    if fault == "stopped":
        server.kill()
    else:
        server.process.send_signal(signal.SIGSTOP)
    try:
        with live.changed(DEDUPJOBS={"LOCK_TIMEOUT": 0.3, "PUSH_TIMEOUT": 0.3}):
            yield
    finally:
        if fault == "hanging":
            server.process.send_signal(signal.SIGCONT)


def printed(*command: str) -> str:
    out = io.StringIO()
    call_command(*command, stdout=out)
    return out.getvalue()


def refused(*command: str) -> CommandError:
    with pytest.raises(CommandError) as caught:
        printed(*command)
    assert "\n  File" not in str(caught.value)
    return caught.value


def run(row: Any) -> Status | None:
    fresh = ProcessedJob.objects.get(pk=getattr(row, "job", row).pk)
    return runner.deliver(fresh.pk, fresh.generation, owner=clock.token())


# ---- explain


def test_story_is_told_newest_last_with_the_sentence_why() -> None:
    row = jobs.fail.enqueue(tag="a", times=1).job
    jobs.fail.enqueue(tag="a", times=1)
    run(row)
    stats.fold()
    operations.hold(ProcessedJob.objects.get(), by="siti", reason="look at it")
    operations.unhold(ProcessedJob.objects.get(), by="siti", reason="go on")
    run(row)
    story = printed("dedupjobs_explain", "fail:a").splitlines()
    assert story[0] == "testapp.fail fail:a"
    assert story[2].startswith("  SUCCEEDED, version ")
    assert "2 attempt(s), 1 duplicate(s)" in story[2]
    told = [line[len("  2026-11-30 00:00:00.000 UTC  ") :] for line in story if " UTC  " in line]
    order = [
        "enqueued for the first time",
        "duplicate: asked for again while active",
        "error of attempt 1: builtins.ValueError: attempt 1 of a",
        "hold by siti, RETRYING → HELD: look at it",
        "unhold by siti, HELD → PENDING: go on",
        "attempt 2: succeeded",
    ]
    places = [next(i for i, line in enumerate(told) if line.startswith(words)) for words in order]
    assert places == sorted(places)
    times = [line[:26] for line in story if " UTC  " in line]
    assert times == sorted(times)
    assert story[-4] == "Lock: nobody has it"
    assert story[-2].startswith("Why: succeeded in attempt 2 at ")
    assert story[-1] == (
        "Next: It holds its key for ever: calls with it are answered with this success."
    )


def test_story_is_found_by_key_id_hash_and_rq_id() -> None:
    row = jobs.record.enqueue(tag="a").job
    for what in ("record:a", str(row.pk), row.key_hash, row.dispatch_id):
        assert printed("dedupjobs_explain", what).startswith("testapp.record record:a\n")


def test_story_as_json_has_no_arguments() -> None:
    row = jobs.record.enqueue(tag="a", text="rahasia").job
    run(row)
    found = json.loads(printed("dedupjobs_explain", "record:a", "--json"))
    assert found["row"] == row.pk
    assert found["status"] == "SUCCEEDED"
    assert found["why"]["level"] == "good"
    assert [event["at"] for event in found["events"]] == sorted(e["at"] for e in found["events"])
    assert "rahasia" not in json.dumps(found)


def test_progress_stands_in_the_story_of_ended_and_running_attempts() -> None:
    row = jobs.record.enqueue(tag="a").job
    alter_attempt(lost := claimed(row), progress='[9, null, "was here"]')
    lifecycle.reclaim(lost.fence, beat_at=expire(lost), ahead_of=None, reason="no beat")
    running = claimed(ProcessedJob.objects.get())
    alter_attempt(running, progress='[5, 14, "going\\n\\u202e"]')
    story = printed("dedupjobs_explain", "record:a")
    assert "progress of attempt 1, as of its last beat: 9 · was here\n" in story
    assert "progress of attempt 2, as of its last beat: 5 of 14 · going\\n\\u202e\n" in story
    assert re.search(r"Why: running .*; progress: 5 of 14 · going\\n\\u202e\n", story)


@pytest.mark.parametrize(
    ("outcome", "generation", "words"),
    [
        ("FAILED", 1, ["retry after 60 s"]),
        ("HELD", 1, ["held for 60 s"]),
        ("LOST", 1, ["next attempt after 60 s"]),
        ("SUCCEEDED", 2, []),  # its key was enqueued anew
        ("FAILED", 2, []),
    ],
)
def test_pause_between_two_attempts_is_called_what_it_was(
    outcome: str, generation: int, words: list[str]
) -> None:
    row = jobs.record.enqueue(tag="a").job
    at = row.created_at + timedelta(seconds=1)
    first = JobAttempt(number=1, generation=1, outcome=outcome, claimed_at=at, ended_at=at)
    later = at + timedelta(minutes=1)
    second = JobAttempt(number=2, generation=generation, claimed_at=later)
    for attempt in (first, second):
        attempt.beat_at = attempt.lease_until = attempt.claimed_at
    told = events_of(row, [first, second], [], [], later)
    assert [event.words for event in told if event.kind == "pause"] == words


def test_story_of_an_unknown_job_names_the_known_one_that_is_near() -> None:
    row = jobs.record.enqueue(tag="a").job
    ProcessedJob.objects.filter(pk=row.pk).update(name="testapp.jobs.record")
    assert "Known is testapp.record:" in printed("dedupjobs_explain", "record:a")
    ProcessedJob.objects.filter(pk=row.pk).update(name="nothing.like.it")
    assert "Known is" not in printed("dedupjobs_explain", "record:a")


def test_late_ending_stands_in_the_story() -> None:
    claim = claimed(jobs.record.enqueue(tag="a").job)
    lost = lifecycle.reclaim(claim.fence, beat_at=expire(claim), ahead_of=None, reason="no beat")
    assert lost is not None
    lifecycle.note_late(claim.fence, "SUCCEEDED")  # type: ignore[arg-type]
    story = printed("dedupjobs_explain", "record:a")
    assert "attempt 1 ended after all: SUCCEEDED" in story
    assert "reason of attempt 1: no beat" in story


def test_unknown_key_names_those_that_begin_like_it() -> None:
    jobs.record.enqueue(tag="order-17")
    error = refused("dedupjobs_explain", "record:order-71")
    assert "No job has the key or id 'record:order-71'" in str(error)
    assert "record:order-17" in str(error)
    assert error.returncode == 1
    assert "begin like it" not in str(refused("dedupjobs_explain", "zz"))


@pytest.mark.parametrize(
    "what", ["", " ", "-1", "0", "9" * 40, "a\x00b", "\ud800", "%", "x" * 9_999]
)
def test_odd_key_is_answered_in_a_sentence(what: str) -> None:
    jobs.record.enqueue(tag="a")
    command = (
        ["dedupjobs_explain", "--", what] if what.startswith("-") else ["dedupjobs_explain", what]
    )
    assert "No job has the key or id" in str(refused(*command))


def test_key_of_several_jobs_asks_for_one_of_their_ids() -> None:
    for tenant in ("one", "two"):
        jobs.record_for_tenant.enqueue(tenant=tenant, tag="a")
    error = refused("dedupjobs_explain", "tenant:a")
    assert error.returncode == 2
    for row in ProcessedJob.objects.all():
        assert f"  {row.pk}  testapp.record_for_tenant  PENDING  {row.scope}" in str(error)


def test_key_with_a_line_break_prints_no_line_of_its_own() -> None:
    row = jobs.record.enqueue(tag="a\nWhy: forged").job
    lines = printed("dedupjobs_explain", str(row.pk)).splitlines()
    assert lines[0] == "testapp.record record:a\\nWhy: forged"
    assert sum(line.startswith("Why:") for line in lines) == 1


@pytest.mark.parametrize("fault", ["stopped", "hanging"])
def test_story_is_told_soon_while_redis_is_away(own_redis: Valkey, fault: str) -> None:
    row = jobs.record.enqueue(tag="a").job
    with struck(own_redis, fault):
        begun = time.monotonic()
        story = printed("dedupjobs_explain", str(row.pk))
        assert time.monotonic() - begun < 5
    assert "Lock: can not be asked (" in story
    assert "RQ: can not be asked (" in story
    assert "Why: handed over to queue default" in story


# ---- stats


def test_stats_show_queues_jobs_and_duplicates() -> None:
    run(jobs.record.enqueue(tag="a"))
    jobs.record.enqueue(tag="a")
    run(jobs.fail.enqueue(tag="b"))
    jobs.record_high.enqueue(tag="c")
    stats.fold()
    counters.pay()
    lines = printed("dedupjobs_stats").splitlines()
    assert [line for line in lines if not line.startswith("  ")] == [
        "Queues", "Jobs", "Duplicates", "Retries", "Else",
    ]  # fmt: skip
    words = [line.split() for line in lines]
    assert next(w for w in words if w[:1] == ["high"])[:3] == ["high", "1", "0"]
    assert next(w for w in words if w[:1] == ["testapp.record"])[:2] == ["testapp.record", "1"]
    assert ["testapp.record", "replay", "1"] in words
    assert ["error", "testapp.fail", "1"] in words


def test_stats_as_json_are_the_metrics() -> None:
    run(jobs.record.enqueue(tag="a"))
    counters.pay()
    found = json.loads(printed("dedupjobs_stats", "--json"))
    assert found["up"] == {"database": True, "redis": True}
    sample = {"outcome": "SUCCEEDED", "job": "testapp.record", "value": 1}
    assert found["metrics"]["attempts_total"] == [sample]
    took = found["metrics"]["job_processing_duration_seconds"][0]
    assert took["buckets"]["+Inf"] == 1


@pytest.mark.parametrize("fault", ["stopped", "hanging"])
def test_stats_say_soon_that_redis_is_away(own_redis: Valkey, fault: str) -> None:
    jobs.record.enqueue(tag="a")
    out = io.StringIO()
    with struck(own_redis, fault):
        begun = time.monotonic()
        with pytest.raises(SystemExit) as ended:
            call_command("dedupjobs_stats", stdout=out)
        assert time.monotonic() - begun < 5
    assert ended.value.code == 1
    assert out.getvalue().startswith("The redis does not answer; its figures are left out.\n")
    assert "default" in out.getvalue()


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "1e9"])
def test_stats_refuse_an_odd_pace(given: str) -> None:
    error = refused("dedupjobs_stats", f"--watch={given}")
    assert "give from 0.1 to 86,400 seconds" in str(error)
    assert error.returncode == 2


@pytest.mark.large
def test_watched_stats_come_again_until_they_are_stopped(process_env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "django", "dedupjobs_stats", "--watch", "0.1", "--json"]
    with subprocess.Popen(
        command, env=process_env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        seen = [json.loads(watching.stdout.readline())["up"] for _ in range(3)]
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=20)
    assert seen == [{"database": True, "redis": True}] * 3
    assert (watching.returncode, errors) == (0, "")


# ---- doubts


def _lose(claim: Any) -> None:
    lost = lifecycle.reclaim(claim.fence, beat_at=expire(claim), ahead_of=None, reason="no beat")
    assert lost is not None


def test_doubts_are_lost_attempts_whose_job_succeeded_and_late_endings() -> None:
    twice = claimed(jobs.record.enqueue(tag="twice").job)
    _lose(twice)
    run(ProcessedJob.objects.get(key="record:twice"))
    late = claimed(jobs.record_high.enqueue(tag="late").job)
    _lose(late)
    lifecycle.note_late(late.fence, "FAILED")  # type: ignore[arg-type]
    _lose(claimed(jobs.record.enqueue(tag="waits").job))  # nothing has run twice yet
    run(jobs.record.enqueue(tag="fine"))
    lines = printed("dedupjobs_doubts", "--since", "1h").splitlines()
    assert len(lines) == 3
    assert (
        f"record:twice  row {twice.job_pk} attempt 1: LOST on here; attempt 2 succeeded" in lines[0]
    )
    assert "high:late" in lines[1]
    assert "attempt 1: LOST on here, and yet it ended as FAILED" in lines[1]
    assert lines[2].startswith("2 attempt(s) in doubt since ")
    assert printed("dedupjobs_doubts", "--since", "1h", "--job", "testapp.record").count("\n") == 2


def test_doubts_as_csv_and_json_have_one_line_each() -> None:
    claim = claimed(jobs.record.enqueue(tag="=HYPERLINK(1)").job)
    _lose(claim)
    run(ProcessedJob.objects.get())
    ProcessedJob.objects.update(key="=HYPERLINK(1)")
    (row,) = csv.DictReader(io.StringIO(printed("dedupjobs_doubts", "--since", "1h", "--csv")))
    assert (row["key"], row["attempt"], row["succeeded_in"]) == ("'=HYPERLINK(1)", "1", "2")
    (line,) = printed("dedupjobs_doubts", "--since", "1h", "--json").splitlines()
    assert json.loads(line)["outcome"] == "LOST"


def test_doubts_are_those_since_then_and_bounded_and_all_are_found() -> None:
    for number in range(7):
        claim = claimed(jobs.record.enqueue(tag=str(number)).job)
        _lose(claim)
        run(ProcessedJob.objects.get(pk=claim.job_pk))
    day_ago = lifecycle.database_now() - timedelta(days=1)
    alter_attempt(claim, ended_at=day_ago)
    assert printed("dedupjobs_doubts", "--since", "1h").count("succeeded") == 6
    assert printed("dedupjobs_doubts", "--since", "2d").count("succeeded") == 7
    assert printed("dedupjobs_doubts", "--since", "2d", "--limit", "3").count("succeeded") == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--since", "yesterday"], "give a time span such as 90m"),
        (["--since", ""], "give a time span"),
        (["--since", "-5h"], "give a time span"),
        (["--since", "2026-02-30"], "give a time span"),
        (["--since", "2999-01-01"], "that is yet to come"),
        (["--since", "a\nb"], "give a time span"),
        (["--since", "1h", "--job", "testapp.recrod"], "Did you mean testapp.record?"),
        (["--since", "1h", "--limit", "0"], "at least 1"),
    ],
)
def test_odd_question_for_doubts_is_refused_in_a_sentence(arguments: list[str], words: str) -> None:
    arguments = [f"{arguments[0]}={arguments[1]}", *arguments[2:]]
    error = refused("dedupjobs_doubts", *arguments)
    assert words in str(error)
    assert error.returncode == 2


def test_moments_are_read_as_utc_unless_they_say_otherwise() -> None:
    now = lifecycle.database_now()
    assert asked.since("90m", now) == now - timedelta(minutes=90)
    assert asked.since("999999999w", now) == now - timedelta(seconds=asked.LONGEST)
    day = (now - timedelta(days=3)).date()
    for text, hour in ((f"{day}", 0), (f"{day}T12:00", 12), (f"{day}T12:00+05:00", 7)):
        found = asked.since(text, now)
        assert (found.tzinfo, found.hour) == (UTC, hour)


# ---- doctor


def examined() -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in diagnosis.examine():
        found.setdefault(finding.about, []).append(finding)
    return found


def trouble(found: dict[str, list[Finding]], about: str) -> Finding:
    """Return the one finding about something that is not well."""
    (one,) = [finding for finding in found[about] if finding.level != OK]
    assert one.cure
    return one


def test_doctor_finds_nothing_where_all_is_well() -> None:
    Coordinator().tick()
    out = printed("dedupjobs_doctor")
    assert "→" not in out
    assert set(examined()) == {
        "checks", "versions", "registry", "serializers", "migrations", "indexes", "pools",
        "redis", "persistence", "clocks", "coordinator", "workers", "events", "alerts",
    }  # fmt: skip


def test_doctor_misses_the_coordinator_and_the_workers() -> None:
    jobs.record.enqueue(tag="a")
    out = io.StringIO()
    with pytest.raises(SystemExit) as ended:
        call_command("dedupjobs_doctor", stdout=out)
    assert ended.value.code == 2
    assert "ERROR  coordinator: a coordinator has left no sign" in out.getvalue()
    assert "ERROR  workers: nobody listens to queue default" in out.getvalue()
    assert "     → manage.py rqworker default" in out.getvalue()


def test_doctor_counts_events_that_wait_and_warns_of_those_that_need_a_person() -> None:
    outlet.on_the_way("late", age=90)
    outlet.on_the_way("dead", "DEAD")
    outlet.on_the_way("gone", "DELIVERED")
    outlet.on_the_way("new")
    outlet.taken_in("shop", "HELD")
    outlet.taken_in("mail", "RETRYING")
    found = {}
    for finding in examined()["events"]:
        words, *age = re.split(r"(\d+) s", finding.words.partition(";")[0])
        found[words, bool(age) and int(age[0]) >= 90] = finding
    assert {about: finding.level for about, finding in found.items()} == {
        ("0 event(s) wait for target dead", False): WARNING,
        ("0 event(s) wait for target gone", False): OK,
        ("1 event(s) wait for target late, the oldest for ", True): WARNING,
        ("1 event(s) wait for target new, the oldest for ", False): OK,
        ("0 message(s) of consumer shop wait", False): WARNING,
        ("1 message(s) of consumer mail wait", False): OK,
    }
    assert all(f.cure for f in found.values() if f.level == WARNING)


def test_doctor_as_json_has_code_and_cures() -> None:
    out = io.StringIO()
    with pytest.raises(SystemExit):
        call_command("dedupjobs_doctor", "--json", stdout=out)
    found = json.loads(out.getvalue())
    assert found["code"] == 2
    assert all(f["cure"] for f in found["findings"] if f["level"] != OK)


def test_doctor_tells_a_wrong_setting_and_nothing_else() -> None:
    with override_settings(DEDUPJOBS={"TICKS": 1}):
        (finding,) = diagnosis.examine()
    assert finding.level == FAILURE
    assert "Did you mean 'TICK'?" in finding.words


def test_doctor_repeats_what_the_checks_say() -> None:
    with live.changed(RQ={"WORKER_CLASS": "rq.Worker"}):
        found = examined()
    ids = {finding.words[:14] for finding in found["checks"]}
    assert ids == {"dedupjobs.W001", "dedupjobs.W002"}
    assert all(finding.level == WARNING for finding in found["checks"])


def test_doctor_sees_a_migration_that_is_pending() -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_migrations SET app = 'gone' WHERE app = 'dedupjobs'")
    try:
        finding = trouble(examined(), "migrations")
        assert finding.words == "pending: 0001_initial"
        assert "migrate dedupjobs" in finding.cure
    finally:
        with connection.cursor() as cursor:
            cursor.execute("UPDATE django_migrations SET app = 'dedupjobs' WHERE app = 'gone'")


def test_doctor_sees_an_index_that_is_missing() -> None:
    index = next(i for i in ProcessedJob._meta.indexes if i.name == "dedupjobs_age")
    with connection.schema_editor() as editor:
        editor.remove_index(ProcessedJob, index)
    try:
        assert "lacks dedupjobs_age" in trouble(examined(), "indexes").words
    finally:
        with connection.schema_editor() as editor:
            editor.add_index(ProcessedJob, index)


def test_doctor_compares_the_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    real = clock.utcnow
    monkeypatch.setattr(clock, "utcnow", lambda: real() - timedelta(seconds=90))
    about = [finding for finding in examined()["clocks"] if finding.level == WARNING]
    assert len(about) == 3
    assert all("s ahead of this machine's" in finding.words for finding in about)


def test_doctor_blames_no_clock_for_a_slow_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = timedelta()

    def slow(ask: Callable[..., Any]) -> Callable[..., Any]:
        """Let each answer come three seconds later, with the time at which it is given."""

        def answer(*args: Any) -> Any:
            nonlocal passed
            passed += timedelta(seconds=3)
            found = ask(*args)
            return found + (passed.total_seconds() if isinstance(found, float) else passed)

        return answer

    now, monotonic = clock.utcnow, clock.monotonic
    monkeypatch.setattr(clock, "utcnow", lambda: now() + passed)
    monkeypatch.setattr(clock, "monotonic", lambda: monotonic() + passed.total_seconds())
    monkeypatch.setattr(lifecycle, "database_now", slow(lifecycle.database_now))
    monkeypatch.setattr(wire, "time_of", slow(wire.time_of))
    assert [finding.level for finding in diagnosis._clocks()] == [OK] * 3


def test_doctor_sees_eviction_memory_and_a_disk_that_is_full(own_redis: Valkey) -> None:
    with own_redis.client() as admin:
        admin.config_set("maxmemory-policy", "allkeys-lru")
        admin.config_set("maxmemory", int(admin.info("memory")["used_memory"]) + 20_000)
        found = examined()
        assert "allkeys-lru" in trouble(found, "eviction").words
        assert {f.level for f in found["memory"]} == {WARNING}
        admin.config_set("maxmemory", 0)
        shutil.rmtree(own_redis.home)  # where it would save
        admin.bgsave()
        until(
            lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err",
            what="a save that failed",
        )
        levels = {finding.level for finding in examined()["persistence"]}
        assert FAILURE in levels


def test_doctor_sees_a_replica_where_the_primary_should_be(own_redis: Valkey) -> None:
    with own_redis.client() as admin:
        admin.replicaof("127.0.0.1", 1)
    found = [finding for finding in examined()["redis"] if finding.level == FAILURE]
    assert len(found) == 2  # of locks, and of the queues
    assert all("is a replica of 127.0.0.1, and takes no writes" in one.words for one in found)


@pytest.mark.parametrize("fault", ["stopped", "hanging"])
@pytest.mark.large
def test_doctor_says_soon_that_redis_is_away(own_redis: Valkey, fault: str) -> None:
    with struck(own_redis, fault):
        begun = time.monotonic()
        found = examined()
        assert time.monotonic() - begun < 10
    assert {finding.level for finding in found["redis"]} == {FAILURE}
    assert found["migrations"][0].level == OK


@pytest.mark.large
def test_doctor_says_that_the_database_is_away(process_env: dict[str, str]) -> None:
    """S-111: a health command reports it and ends with another code than 0."""
    away = {"DEDUPJOBS_TEST_DB_NAME": "/nonexistent/db.sqlite3"}
    if connection.vendor != "sqlite":
        away = {
            "DEDUPJOBS_TEST_POSTGRESQL": "127.0.0.1:1",
            "DEDUPJOBS_TEST_MARIADB": "127.0.0.1:1",
        }
    done = subprocess.run(
        [sys.executable, "-m", "django", "dedupjobs_doctor"],
        env={**process_env, **away}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "ERROR  migrations: the database does not answer" in done.stdout
    assert "Traceback" not in done.stderr


def test_doctor_names_what_rq_would_not_read_and_pools_that_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queues = {**django_settings.RQ_QUEUES}
    queues["low"] = {**queues["low"], "SERIALIZER": "rq.serializers.JSONSerializer"}
    with override_settings(RQ_QUEUES=queues):
        assert "queue 'low' names a SERIALIZER" in trouble(examined(), "serializers").words
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", {"pool": True})
    assert "RQ's workers fork" in next(diagnosis._pools()).words


@pytest.mark.parametrize(
    ("version", "bounds", "fit"),
    [
        ("5.2.19", ">=5.2,<6.2", True),
        ("6.1.3", ">=5.2,<6.2", True),
        ("6.2", ">=5.2,<6.2", False),
        ("5.1.9", ">=5.2,<6.2", False),
        ("3.0.0rc1", ">=3.0,<4", True),
        ("7", ">=8.0", False),
    ],
)
def test_versions_are_compared_as_numbers(version: str, bounds: str, fit: bool) -> None:
    assert diagnosis.fits(version, bounds) is fit
