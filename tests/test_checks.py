"""Each system check: triggered once, and silent with good settings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core import checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connection, connections
from django.test.utils import override_settings

from dedupjobs import FOREVER, dispatch, job, registry
from dedupjobs import checks as ours
from dedupjobs.inbox import handlers
from dedupjobs.models import ProcessedJob
from tests import live
from tests.app import events, jobs
from tests.rows import alter, tables_missing
from tests.servers import NOBODY

pytestmark = pytest.mark.django_db

LOCMEM = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
GOOD_SQLITE = {
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
}


def found(*, deploy: bool = False) -> dict[str, checks.CheckMessage]:
    """Run all checks as `manage.py check --database default` does; return ours by id."""
    dispatch.forget_clients()
    try:
        messages = checks.run_checks(include_deployment_checks=deploy, databases=["default"])
    finally:
        dispatch.forget_clients()
    return {str(m.id): m for m in messages if str(m.id).startswith("dedupjobs.")}


def only(identifier: str, **how: Any) -> checks.CheckMessage:
    """Return the message of this id, which must be the only one of ours, and its cure."""
    messages = found(**how)
    assert list(messages) == [identifier]
    message = messages[identifier]
    assert message.hint or identifier == "dedupjobs.E001"
    return message


class Router:
    """Send our tables to another alias."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "elsewhere" if model._meta.app_label == "dedupjobs" else None


@contextmanager
def tables_in(engine: str, options: dict[str, Any]) -> Iterator[None]:
    """Let our tables be in a database of this kind; nothing connects to it."""
    connections.settings["elsewhere"] = {
        **connections.settings["default"],
        "ENGINE": f"django.db.backends.{engine}",
        "NAME": "never connected to",
        "OPTIONS": options,
        "PORT": "",
    }
    try:
        with override_settings(DATABASE_ROUTERS=[Router()]):
            yield
    finally:
        del connections["elsewhere"]
        del connections.settings["elsewhere"]


@contextmanager
def defined(**options: Any) -> Iterator[None]:
    made = registry.job(key="{a}", unique_for=None, name="tests.checked", **options)
    made(take)
    try:
        yield
    finally:
        registry.forget("tests.checked")


def take(*, a: int) -> None:
    """Be a job while a test runs."""


def test_suites_own_settings_pass_every_check() -> None:
    assert found(deploy=True) == {}


def test_command_passes_with_the_databases_checks() -> None:
    call_command("check", databases=["default"])


@pytest.mark.parametrize("engine", ["sqlite3", "postgresql"])
def test_good_database_passes(engine: str) -> None:
    with tables_in(engine, GOOD_SQLITE if engine == "sqlite3" else {}):
        assert found() == {}


# ---- settings


def test_wrong_setting_is_e001_and_keeps_django_from_starting() -> None:
    with override_settings(DEDUPJOBS={"RESEND_AFTR": 1}):
        assert "Did you mean 'RESEND_AFTER'?" in only("dedupjobs.E001").msg
        with pytest.raises(SystemCheckError, match=r"dedupjobs\.E001"):
            call_command("check")


@pytest.mark.parametrize("name", ["DEDUPJOB", "DEDUP_JOBS", "DEDUPEJOBS"])
def test_setting_that_is_nearly_ours_is_w011(name: str) -> None:
    with override_settings(**{name: {"TICK": 2}}):
        assert name in only("dedupjobs.W011").msg


def test_setting_that_only_begins_like_ours_passes() -> None:
    with override_settings(DEDUPJOBS_SERVER="a", JOBS="b"):
        assert found() == {}


def test_django_rq_that_is_not_installed_is_e033() -> None:
    apps = [app for app in settings.INSTALLED_APPS if app != "django_rq"]
    with override_settings(INSTALLED_APPS=apps):
        message = only("dedupjobs.E035")
    assert "no command rqworker" in message.msg


def test_several_wrong_settings_are_all_named() -> None:
    with override_settings(DEDUPJOBS={"TICK": 0, "NO": 1}):
        messages = checks.run_checks()
        assert len([m for m in messages if m.id == "dedupjobs.E001"]) == 2


@pytest.mark.parametrize(
    ("defaults", "words"),
    [
        ({"timeout": -1}, "DEDUPJOBS['DEFAULTS']: timeout=-1; give 0.1 s to 366 days"),
        ({"timeot": 1}, "DEDUPJOBS['DEFAULTS']: unknown option timeot; did you mean 'timeout'?"),
        ({"colour": 1}, "DEDUPJOBS['DEFAULTS']: unknown option colour; known: "),
        ({"on_lost": "retyr"}, "on_lost='retyr' is not one of ('retry', 'hold')"),
        ({7: 1}, "DEDUPJOBS['DEFAULTS']: unknown option 7; known: "),
    ],
)
def test_wrong_default_of_jobs_is_e001_and_is_left_out(
    defaults: dict[Any, Any], words: str
) -> None:
    with override_settings(DEDUPJOBS={"DEFAULTS": {**defaults, "max_attempts": 7}}):
        assert words in only("dedupjobs.E001").msg
        with defined():
            options = registry.get("tests.checked").options
            assert options == registry.Options(max_attempts=7)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"LEADER_TTL": 1, "TICK": 5}, "['LEADER_TTL'] = 1 s is not longer than TICK = 5 s"),
        ({"TICK": 10}, "['LEADER_TTL'] = 10 s is not longer than TICK = 10 s"),
        ({"L1_TTL": 60, "L2_TTL": 30}, "['L2_TTL'] = 30 s is not longer than L1_TTL = 60 s"),
    ],
)
def test_settings_that_do_not_go_together_are_w009(given: dict[str, Any], words: str) -> None:
    with override_settings(DEDUPJOBS=given):
        assert words in only("dedupjobs.W009").msg


# ---- Sentinel

ASKED = {"socket_timeout": 0.5, "retry": None}


@pytest.mark.parametrize("kwargs", [None, {}, {"socket_timeout": 1}, {"retry": None}])
def test_sentinels_that_are_asked_for_long_are_w014(kwargs: Any) -> None:
    queue = {"SENTINELS": [("a", 1)], "MASTER_NAME": "jobs", "DB": 0, "SENTINEL_KWARGS": kwargs}
    with override_settings(RQ_QUEUES={**settings.RQ_QUEUES, "low": queue}):
        assert "RQ_QUEUES['low'] has SENTINELS without" in only("dedupjobs.W014").msg
    queue["SENTINEL_KWARGS"] = ASKED
    with override_settings(RQ_QUEUES={**settings.RQ_QUEUES, "low": queue}):
        assert "dedupjobs.W014" not in found()


def test_cache_whose_sentinels_are_asked_for_long_is_w014() -> None:
    options = {"SENTINELS": [("a", 1)], "CLIENT_CLASS": "django_redis.client.SentinelClient"}
    cache = {**settings.CACHES["default"], "OPTIONS": options}
    with override_settings(CACHES={"default": settings.CACHES["default"], "watched": cache}):
        assert "CACHES['watched'] has SENTINELS without" in only("dedupjobs.W014").msg


@pytest.mark.parametrize(
    ("location", "wrong"),
    [
        ("redis://jobs/1?is_master=0", True),
        (["redis://jobs/1?is_master=0", "redis://jobs/1"], True),
        (["redis://jobs/1?is_master=1", "redis://jobs/1?is_master=0"], False),
        ("redis://jobs/1", False),
    ],
)
def test_cache_that_writes_to_a_replica_is_e032(location: Any, wrong: bool) -> None:
    cache = {**settings.CACHES["default"], "LOCATION": location}
    with override_settings(CACHES={"default": settings.CACHES["default"], "watched": cache}):
        assert ("dedupjobs.E032" in found()) is wrong


# ---- jobs and queues


def test_job_on_an_unknown_queue_is_e002() -> None:
    with defined(queue="nowhere"):
        message = only("dedupjobs.E002").msg
    assert "tests.checked" in message
    assert "'nowhere'" in message
    assert "default, high, low" in message


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"atomic": True, "timeout": 20, "lease": 60}, True),
        ({"atomic": True, "timeout": None}, True),
        ({"atomic": True, "timeout": 19, "lease": 60}, False),
        ({"atomic": False, "timeout": 180}, False),
    ],
    ids=str,
)
def test_atomic_job_that_may_outlive_its_lease_is_e003_on_sqlite(
    options: dict[str, Any], wrong: bool
) -> None:
    with tables_in("sqlite3", GOOD_SQLITE), defined(**options):
        if wrong:
            message = only("dedupjobs.E003").msg
            assert "tests.checked" in message
            assert "20 s" in message
        else:
            assert found() == {}


def test_atomic_job_may_take_its_time_on_a_database_with_row_locks() -> None:
    with tables_in("postgresql", {}), defined(atomic=True, timeout=180):
        assert found() == {}


@pytest.mark.parametrize("queues", [{}, None], ids=["empty", "missing"])
def test_project_without_queues_is_e004(queues: Any) -> None:
    with override_settings(RQ_QUEUES={}):
        if queues is None:
            del settings.RQ_QUEUES
        messages = found()
    assert "dedupjobs.E004" in messages
    assert "RQ_QUEUES" in messages["dedupjobs.E004"].hint
    assert set(messages) <= {"dedupjobs.E002", "dedupjobs.E004"}


@pytest.mark.parametrize("queues", [["default"], "default", 7], ids=str)
def test_queues_of_another_type_are_e004(queues: Any) -> None:
    with override_settings(RQ_QUEUES=queues):
        message = found()["dedupjobs.E004"]
    assert f"RQ_QUEUES is {queues!r}, no dict" in message.msg


@pytest.mark.parametrize("queue", [None, 7, {}, {"URL": 5}, {"URL": "http://127.0.0.1"}], ids=str)
def test_queue_that_gives_no_connection_is_e027(queue: Any) -> None:
    with live.changed(RQ_QUEUES={**settings.RQ_QUEUES, "low": queue}):
        message = only("dedupjobs.E027")
    assert "RQ_QUEUES['low'] gives no connection: " in message.msg
    assert "URL" in message.hint


# ---- cache


def test_lock_cache_that_does_not_exist_is_e005() -> None:
    with override_settings(DEDUPJOBS={"LOCK_CACHE": "locks"}):
        assert "'locks'" in only("dedupjobs.E005").msg


@pytest.mark.parametrize("backend", ["locmem.LocMemCache", "dummy.DummyCache", "redis.RedisCache"])
def test_lock_cache_without_locks_is_e006(backend: str) -> None:
    path = f"django.core.cache.backends.{backend}"
    location = settings.CACHE_URL
    caches = {"default": {"BACKEND": path, "LOCATION": location}}
    with override_settings(CACHES=caches, DEDUPJOBS={"STATUS_CACHE": None}):
        message = only("dedupjobs.E006")
    assert path in message.msg
    assert "django_redis.cache.RedisCache" in message.hint


def test_lock_cache_under_another_alias_passes() -> None:
    caches = {**LOCMEM, "locks": settings.CACHES["default"]}
    ours = {"LOCK_CACHE": "locks", "STATUS_CACHE": "locks"}
    with override_settings(CACHES=caches, DEDUPJOBS=ours):
        assert found() == {}


def test_status_cache_that_does_not_exist_is_e021() -> None:
    with override_settings(DEDUPJOBS={"STATUS_CACHE": "status"}):
        assert "'status'" in only("dedupjobs.E021").msg


@pytest.mark.parametrize("backend", ["locmem.LocMemCache", "dummy.DummyCache", "redis.RedisCache"])
def test_status_cache_of_another_backend_is_e022(backend: str) -> None:
    path = f"django.core.cache.backends.{backend}"
    caches = {**settings.CACHES, "status": {"BACKEND": path, "LOCATION": settings.CACHE_URL}}
    with override_settings(CACHES=caches, DEDUPJOBS={"STATUS_CACHE": "status"}):
        message = only("dedupjobs.E022")
    assert path in message.msg
    assert "django_redis.cache.RedisCache" in message.hint


def test_project_without_a_status_cache_passes() -> None:
    with override_settings(DEDUPJOBS={"STATUS_CACHE": None}):
        assert found() == {}


@pytest.fixture
def invalidating() -> Iterator[None]:
    @job(
        name="checks.invalidating",
        key="a:{a}",
        unique_for=FOREVER,
        invalidates=(("pages", "a:{a}"),),
    )
    def invalidating(a: int) -> None: ...

    yield
    registry.forget("checks.invalidating")


def test_job_that_invalidates_a_cache_that_does_not_exist_is_e023(invalidating: None) -> None:
    assert "'pages'" in only("dedupjobs.E023").msg


def test_job_that_invalidates_a_cache_that_hides_its_errors_is_w008(invalidating: None) -> None:
    hiding = {**settings.CACHES["default"], "OPTIONS": {"IGNORE_EXCEPTIONS": True}}
    with override_settings(CACHES={**settings.CACHES, "pages": hiding}):
        assert "IGNORE_EXCEPTIONS" in only("dedupjobs.W008").msg


# ---- worker


@pytest.mark.parametrize("path", ["no.such.Worker", "dedupjobs.worker.Nothing"])
def test_worker_class_that_can_not_be_imported_is_e007(path: str) -> None:
    with override_settings(RQ={"WORKER_CLASS": path}):
        assert repr(path) in only("dedupjobs.E007").msg


@pytest.mark.parametrize(
    "value", [5, "os.path", "os.path.join", "collections.OrderedDict"], ids=str
)
def test_worker_class_that_is_no_worker_is_e007(value: Any) -> None:
    with override_settings(RQ={"WORKER_CLASS": value}):
        message = only("dedupjobs.E007")
    assert f"{value!r} is no worker of RQ" in message.msg
    assert "DedupWorker" in message.hint


@pytest.mark.parametrize("rq", [None, "rq.Worker", ["rq.Worker"]], ids=str)
def test_rq_setting_of_another_type_is_e007(rq: Any) -> None:
    with override_settings(RQ=rq):
        assert f"RQ is {rq!r}, no dict" in found()["dedupjobs.E007"].msg


@pytest.mark.parametrize(
    "rq", [{}, {"WORKER_CLASS": "rq.Worker"}, {"WORKER_CLASS": "rq.SimpleWorker"}]
)
def test_worker_class_of_stock_is_w001_for_the_coordinator_and_w002_for_pickle(rq: Any) -> None:
    with override_settings(RQ=rq):
        messages = found()
    assert set(messages) == {"dedupjobs.W001", "dedupjobs.W002"}
    assert "dedupjobs_coordinator" in messages["dedupjobs.W001"].hint
    assert "DedupWorker" in messages["dedupjobs.W002"].hint


def test_worker_class_that_is_missing_altogether_is_a_stock_one() -> None:
    with override_settings():
        del settings.RQ
        assert set(found()) == {"dedupjobs.W001", "dedupjobs.W002"}


def test_worker_class_of_ones_own_on_top_of_ours_passes() -> None:
    with override_settings(RQ={"WORKER_CLASS": "tests.test_checks.OwnWorker"}):
        assert found() == {}


def __getattr__(name: str) -> Any:
    """Make the class on first use: the worker's module is not for a process that only checks."""
    if name == "OwnWorker":
        from dedupjobs.worker import DedupWorker

        return type("OwnWorker", (DedupWorker,), {})
    raise AttributeError(name)


# ---- database


def test_database_of_an_unknown_kind_is_e008() -> None:
    with tables_in("dummy", {}):
        assert "unknown" in only("dedupjobs.E008").msg


@pytest.mark.parametrize("mode", [None, "DEFERRED", "deferred"])
def test_sqlite_that_begins_as_a_reader_is_e009(mode: str | None) -> None:
    with tables_in("sqlite3", {**GOOD_SQLITE, "transaction_mode": mode}):
        assert repr(mode) in only("dedupjobs.E009").msg


@pytest.mark.parametrize("mode", ["IMMEDIATE", "immediate", "EXCLUSIVE"])
def test_sqlite_that_begins_as_a_writer_passes(mode: str) -> None:
    with tables_in("sqlite3", {**GOOD_SQLITE, "transaction_mode": mode}):
        assert found() == {}


@pytest.mark.parametrize("command", ["", "PRAGMA synchronous=NORMAL", "PRAGMA journal_mode=DELETE"])
def test_sqlite_without_wal_is_w003(command: str) -> None:
    with tables_in("sqlite3", {**GOOD_SQLITE, "init_command": command}):
        assert "WAL" in only("dedupjobs.W003").msg


def test_sqlite_with_wal_in_another_spelling_passes() -> None:
    with tables_in("sqlite3", {**GOOD_SQLITE, "init_command": "pragma JOURNAL_MODE = wal"}):
        assert found() == {}


@pytest.mark.parametrize("timeout", [{}, {"timeout": 5}], ids=["default", "5"])
def test_sqlite_that_hardly_waits_is_w004(timeout: dict[str, int]) -> None:
    options = {k: v for k, v in GOOD_SQLITE.items() if k != "timeout"} | timeout
    with tables_in("sqlite3", options):
        assert "timeout=5" in only("dedupjobs.W004").msg


@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
def test_isolation_other_than_read_committed_is_e010(level: str) -> None:
    from psycopg import IsolationLevel

    with tables_in("postgresql", {"isolation_level": IsolationLevel[level]}):
        assert level.replace("_", " ") in only("dedupjobs.E010").msg
    with tables_in("postgresql", {"isolation_level": IsolationLevel[level].value}):
        only("dedupjobs.E010")


@pytest.mark.skipif(connection.vendor != "mysql", reason="other databases tell them apart")
def test_jobs_whose_names_mysql_confuses_are_e020() -> None:
    with defined():
        registry.job(key="{a}", unique_for=None, name="tests.Checked")(take)
        try:
            assert "tests.Checked and tests.checked" in only("dedupjobs.E020").msg
        finally:
            registry.forget("tests.Checked")


@pytest.mark.skipif(connection.vendor != "mysql", reason="asks the driver of MySQL")
@pytest.mark.parametrize("level", ["repeatable read", None])
def test_isolation_of_mysqls_own_default_is_e010(level: str | None) -> None:
    with tables_in("mysql", {"isolation_level": level}):
        assert "REPEATABLE READ" in only("dedupjobs.E010").msg
    with tables_in("mysql", {}):
        assert found() == {}


def test_isolation_of_read_committed_passes_however_it_is_written() -> None:
    from psycopg import IsolationLevel

    for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_COMMITTED.value, None):
        with tables_in("postgresql", {"isolation_level": level}):
            assert found() == {}


@pytest.mark.skipif(
    connection.vendor != "mysql", reason="only MySQL has tables of other engines and characters"
)
@pytest.mark.parametrize(
    ("change", "back", "number"),
    [
        ("ENGINE = Aria", "ENGINE = InnoDB", "dedupjobs.E019"),
        (
            "CONVERT TO CHARACTER SET latin1",
            "CONVERT TO CHARACTER SET utf8mb4",
            "dedupjobs.W007",
        ),
    ],
    ids=["engine", "characters"],
)
def test_table_of_mysql_that_is_not_fit_is_named_with_its_cure(
    change: str, back: str, number: str
) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE dedupjobs_fold {change}")
        try:
            message = only(number)
            assert "dedupjobs_fold" in message.msg
            cursor.execute(message.hint)
        finally:
            cursor.execute(f"ALTER TABLE dedupjobs_fold {back}")
    assert found() == {}


# ---- rows, and Redis


def test_rows_that_no_code_can_run_are_w005() -> None:
    alter(jobs.record.enqueue(tag="a").job, name="shop.gone")
    message = only("dedupjobs.W005")
    assert "'shop.gone'" in message.msg
    assert "Known is" not in message.hint


def test_w005_names_the_known_job_that_is_near() -> None:
    alter(jobs.record.enqueue(tag="a").job, name="testapp.jobs.record")
    assert "Known is testapp.record: is that it?" in only("dedupjobs.W005").hint


OUTSIDE = """
from dedupjobs import FOREVER, job

@job(key="a:{a}", unique_for=FOREVER)
def charge(a): ...

@job(key="a:{a}", unique_for=FOREVER, name="shop.named")
def named(a): ...

urlpatterns = []
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A URLconf of no app that has jobs."""
    (tmp_path / "outside.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    with override_settings(ROOT_URLCONF="outside"):
        yield tmp_path / "outside.py"
    sys.modules.pop("outside", None)
    registry.forget("outside.charge")
    registry.forget("shop.named")


def test_job_that_belongs_to_no_app_is_w010(outside: Path) -> None:
    message = only("dedupjobs.W010")
    assert message.msg.startswith("Job outside.charge is named by its module")
    assert "aliases=('outside.charge',)" in message.hint


def test_addresses_that_can_not_be_imported_are_left_to_django(outside: Path) -> None:
    outside.write_text("import no.such.module")
    with pytest.raises(ModuleNotFoundError):  # by Django's check
        found()
    assert not [m for m in ours._jobs_outside_apps() if "outside" in m.msg]


@pytest.mark.parametrize("status", ["SUCCEEDED", "DEAD", "CANCELLED", "HELD"])
def test_rows_that_wait_for_no_worker_pass(status: str) -> None:
    alter(jobs.record.enqueue(tag="a").job, name="shop.gone", status=status)
    assert found() == {}


def test_rows_are_not_looked_at_without_the_database_option() -> None:
    alter(jobs.record.enqueue(tag="a").job, name="shop.gone")
    assert not [m for m in checks.run_checks() if str(m.id).startswith("dedupjobs.")]


def test_tables_that_are_missing_keep_no_check_from_running() -> None:
    with tables_missing():
        assert not {i for i in found() if i.startswith("dedupjobs.E")}
    assert ProcessedJob.objects.count() == 0


def test_redis_that_does_not_answer_is_w006_at_deploy_only() -> None:
    queues = {
        "default": settings.RQ_QUEUES["default"],
        "high": {"URL": f"{NOBODY}/0"},
        "low": settings.RQ_QUEUES["low"],
    }
    with override_settings(RQ_QUEUES=queues):
        assert "'high'" in only("dedupjobs.W006", deploy=True).msg
        assert found() == {}


def test_handler_of_a_consumer_that_nobody_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_handlers", {})
    events.register()
    message = only("dedupjobs.E030")
    assert "takes 'order.*' for consumer 'audit', which INBOX['CONSUMERS'] lacks" in message.msg


def test_webhook_view_of_a_consumer_that_nobody_named() -> None:
    with override_settings(ROOT_URLCONF="tests.wrong_urls"):
        message = only("dedupjobs.E033")
        assert "webhook_view('legder') stands in the URLs" in message.msg
        assert "(there: none)" in message.msg
        with override_settings(DEDUPJOBS={"INBOX": {"CONSUMERS": {"ledger": {"stream": "x"}}}}):
            assert "(there: ledger)" in only("dedupjobs.E033").msg
        with override_settings(DEDUPJOBS={"INBOX": {"CONSUMERS": {"legder": {"stream": "x"}}}}):
            assert found() == {}


@pytest.mark.parametrize(
    ("given", "whose"),
    [
        ({"OUTBOX": {"TARGETS": {"a": {"stream": "s", "cache": "other"}}}}, "Target a has"),
        ({"INBOX": {"CONSUMERS": {"b": {"stream": "s", "cache": "other"}}}}, "Consumer b has"),
    ],
)
def test_stream_on_a_cache_that_is_no_redis(given: dict[str, Any], whose: str) -> None:
    with override_settings(DEDUPJOBS=given):
        message = only("dedupjobs.E034")
        assert f"{whose} its stream on cache 'other', which CACHES lacks" in message.msg
    caches = {**settings.CACHES, "other": LOCMEM["default"]}
    with override_settings(DEDUPJOBS=given, CACHES=caches):
        assert "LocMemCache, no Redis of django-redis" in only("dedupjobs.E034").msg
    caches = {**settings.CACHES, "other": settings.CACHES["default"]}
    with override_settings(DEDUPJOBS=given, CACHES=caches):
        assert found() == {}


def test_target_that_calls_what_can_not_be_imported() -> None:
    given = {"OUTBOX": {"TARGETS": {"a": {"call": "shop.nothing"}}}}
    with override_settings(DEDUPJOBS=given):
        message = only("dedupjobs.E031")
    assert "Target a calls 'shop.nothing', which can not be imported" in message.msg


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("tests.outlet", "can not be called"),
        ("tests.outlet.noted", "can not be called"),
        ("tests.outlet.note_async", "is async"),
        ("tests.outlet.note_in_parts", "is a generator"),
    ],
)
def test_target_that_calls_what_would_do_nothing(path: str, words: str) -> None:
    with override_settings(DEDUPJOBS={"OUTBOX": {"TARGETS": {"a": {"call": path}}}}):
        message = only("dedupjobs.E031")
    assert f"Target a calls {path!r}, which {words}" in message.msg


def test_every_check_has_a_test_here() -> None:
    import inspect
    import re

    shipped = set(re.findall(r'"(dedupjobs\.[EW]\d+)"', inspect.getsource(ours)))
    tested = set(re.findall(r'"(dedupjobs\.[EW]\d+)"', Path(__file__).read_text()))
    assert shipped
    assert shipped <= tested
