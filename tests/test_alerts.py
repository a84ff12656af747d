"""Alerts: looked for, raised and cleared once each, and told."""

from __future__ import annotations

import io
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import django
import pytest
from django.core import mail
from django.core.management import call_command
from django.db import connection, connections
from django.db.backends.sqlite3.base import DatabaseWrapper as SqliteWrapper
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext

from dedupjobs import clock, conf, counters, diagnosis, load, readings, signals, stats
from dedupjobs import job as register
from dedupjobs.alerts import book, couriers, rules, watch
from dedupjobs.alerts.book import News
from dedupjobs.alerts.couriers import deliver
from dedupjobs.alerts.watch import Watch
from dedupjobs.clock import DbNow
from dedupjobs.coordinator import Coordinator
from dedupjobs.models import Alert, AlertNotice, JobAttempt, ProcessedJob, Status
from dedupjobs.models import Watch as LastLook
from dedupjobs.pressure import Level, Load
from tests import live, outlet
from tests.app import jobs
from tests.hook import Hook
from tests.servers import Valkey
from tests.test_quorum import lock_servers
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

# Django 6.0 wants addresses, those before it pairs.
SITI = "siti@example.org"
ADMINS = [SITI] if django.VERSION >= (6, 0) else [("Siti", SITI)]


AT_ONCE = {"RAISE_AFTER": 0.001, "CLEAR_AFTER": 0.001, "REDIS_SLOW": 4}  # a machine may be busy


@contextmanager
def told(**thresholds: Any) -> Iterator[None]:
    """Use these thresholds; a trouble is raised at its second look, and cleared so."""
    patient = {"LOCK_TIMEOUT": 5, "PUSH_TIMEOUT": 5}
    with live.changed(DEDUPJOBS={**live.BRISK, **patient, "ALERTS": {**AT_ONCE, **thresholds}}):
        yield


@pytest.fixture
def heard() -> Iterator[list[News]]:
    """What ``alert_changed`` tells."""
    news: list[News] = []

    def hear(sender: str, alert: News, **_: Any) -> None:
        assert sender == alert.kind
        news.append(alert)

    signals.alert_changed.connect(hear)
    yield news
    signals.alert_changed.disconnect(hear)


def open_ones(kind: str = "") -> list[tuple[str, str]]:
    rows = Alert.objects.filter(is_open=True, kind=kind) if kind else Alert.objects.all()
    return sorted(rows.filter(is_open=True).values_list("kind", "subject"))


def looks(watching: Watch, number: int = 2) -> None:
    for _ in range(number):
        watching.round()


def make_dead(tag: str = "a") -> ProcessedJob:
    row = jobs.record.enqueue(tag=tag).job
    ProcessedJob.objects.filter(pk=row.pk).update(status=Status.DEAD, finished_at=DbNow())
    return row


def mend(row: ProcessedJob) -> None:
    ProcessedJob.objects.filter(pk=row.pk).update(status=Status.SUCCEEDED)


# ---- raised and cleared once each


def test_trouble_is_raised_once_and_cleared_once(heard: list[News]) -> None:
    with told():
        watching, row = Watch(), make_dead()
        looks(watching, 5)
        assert [(n.event, n.kind, n.subject) for n in heard] == [
            ("raised", "dead", "testapp.record")
        ]
        alert = Alert.objects.get()
        assert alert.is_open
        assert alert.words == "1 row of testapp.record DEAD."
        assert alert.raised_at is not None
        mend(row)
        looks(watching, 5)
    assert [n.event for n in heard] == ["raised", "cleared"]
    alert.refresh_from_db()
    assert not alert.is_open
    assert alert.cleared_at is not None
    assert alert.times == 1


def test_trouble_that_comes_again_is_the_same_row(heard: list[News]) -> None:
    with told():
        watching, row = Watch(), make_dead()
        looks(watching)
        mend(row)
        looks(watching)
        make_dead("b")
        looks(watching)
    assert [n.event for n in heard] == ["raised", "cleared", "raised"]
    assert len({n.id for n in heard}) == 3
    assert Alert.objects.get().times == 2


def test_trouble_that_flaps_is_neither_raised_nor_cleared(heard: list[News]) -> None:
    watching, row = Watch(), make_dead()
    with told(RAISE_AFTER=30):
        for _ in range(4):
            looks(watching)
            mend(row)
            looks(watching)
            ProcessedJob.objects.filter(pk=row.pk).update(status=Status.DEAD)
    assert heard == []
    with told(CLEAR_AFTER=30):
        looks(watching)
        for _ in range(4):
            mend(row)
            looks(watching)
            ProcessedJob.objects.filter(pk=row.pk).update(status=Status.DEAD)
            looks(watching)
    assert [n.event for n in heard] == ["raised"]


def test_of_two_coordinators_one_raises_and_one_clears(heard: list[News]) -> None:
    row = make_dead()
    with told():
        watches = [Watch(), Watch()]
        for watching in watches:
            watching.round()
        both_at_once(lambda n: watches[n].round())
        assert [n.event for n in heard] == ["raised"]
        mend(row)
        for watching in watches:
            watching.round()
        both_at_once(lambda n: watches[n].round())
    assert [n.event for n in heard] == ["raised", "cleared"]


def both_at_once(act: Callable[[int], Any]) -> None:
    barrier = threading.Barrier(2, timeout=20)

    def run(number: int) -> None:
        try:
            barrier.wait()
            act(number)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))


def test_open_alert_shows_what_it_is_now() -> None:
    with told():
        watching = Watch()
        make_dead("a")
        looks(watching)
        before = Alert.objects.get()
        make_dead("b")
        looks(watching, 1)
    alert = Alert.objects.get()
    assert alert.words == "2 rows of testapp.record DEAD."
    assert alert.seen_at > before.seen_at


def test_new_coordinator_clears_what_another_has_raised() -> None:
    with told():
        row = make_dead()
        looks(Watch())
        mend(row)
        looks(Watch())
    assert open_ones() == []


# ---- what is looked at


def test_row_past_its_lease_is_stuck() -> None:
    outcome = jobs.record.enqueue(tag="a")
    live.claimed(outcome, lease=1, overdue=40)
    with told(STUCK_FOR=30):
        looks(Watch())
        assert ("stuck", "testapp.record") in open_ones()
    with told(STUCK_FOR=50):
        looks(Watch())
        assert open_ones("stuck") == []


@register(key="mute:{tag}", unique_for=None, name="alerts.mute", stall_after=60)
def mute(*, tag: str) -> None:
    """Is silent after a minute."""


def test_attempt_without_progress_is_silent() -> None:
    claim = live.claimed(mute.enqueue(tag="a"))
    long_ago = {"began_at": DbNow(-900), "active_at": DbNow(-900), "claimed_at": DbNow(-900)}
    JobAttempt.objects.filter(pk=claim.fence).update(
        lease_until=DbNow(60), beat_at=DbNow(), **long_ago
    )
    with told():
        looks(Watch())
    assert ("silent", "alerts.mute") in open_ones()


def test_queue_with_work_and_no_worker_is_named() -> None:
    live.unsent(jobs.record_high.enqueue(tag="a"), run_after=-60)
    with told(NO_WORKER_FOR=30):
        looks(Watch())
    assert ("no_worker", "high") in open_ones()


def test_queue_in_which_nothing_ends_is_stalled_once_it_was_watched_long_enough() -> None:
    live.unsent(jobs.record_high.enqueue(tag="a"), run_after=-60)
    with told(STALLED_FOR=0.3):
        watching = Watch()
        watching.round()
        assert open_ones("stalled") == []
        until(lambda: watching.round() and open_ones("stalled"), 20, every=0.1)
    assert open_ones("stalled") == [("stalled", "high")]


def test_failures_of_a_job_are_told_by_the_summaries_with_their_causes() -> None:
    for tag in "abc":
        live.deliver(live.row_of(jobs.fail.enqueue(tag=tag)))
    with told(RETRIES=3):
        Coordinator().tick()
        looks(Watch())
    alert = Alert.objects.get(kind="retries")
    assert alert.subject == "testapp.fail"
    assert alert.words.startswith("3 runs of testapp.fail did not succeed within 5 min: 3 failed.")


def test_runs_as_long_as_their_lease_are_told() -> None:
    for tag in "abc":
        live.deliver(live.row_of(jobs.record.enqueue(tag=tag)))
    JobAttempt.objects.update(run_time=55.0)
    with told(RUNS=3):
        Coordinator().tick()
        looks(Watch())
        assert open_ones("near_lease") == [("near_lease", "testapp.record")]
        about = ("--job", "testapp.record", "--by", "siti", "--reason", "slow bank")
        call_command("dedupjobs_control", "lease", "10m", *about, stdout=io.StringIO())
        looks(Watch())
        assert open_ones("near_lease") == [], "the lease that is in force counts"


@pytest.mark.parametrize(("on_dead", "words"), [("wait", "wait for them"), ("go_on", "pass them")])
def test_dead_event_is_told_with_what_later_ones_of_its_target_do(on_dead: str, words: str) -> None:
    target = {"stream": "orders", "on_dead": on_dead}
    with outlet.outbox({"TARGETS": {"orders": target}}, LOCK_TIMEOUT=5, ALERTS=AT_ONCE):
        outlet.on_the_way("orders", "DEAD")
        looks(Watch())
        [alert] = Alert.objects.filter(kind="outbox_dead")
    assert f"Later events of their keys {words}" in alert.cure


def test_lock_that_was_lost_is_told_from_its_counter() -> None:
    with told():
        watching = Watch()
        watching.round()
        counters.add("lock_expired_before_completion_total", "testapp.record")
        counters.pay()
        looks(watching)
        assert open_ones("locks_lost") == [("locks_lost", "testapp.record")]
        looks(Watch())
    assert open_ones("locks_lost") == [], "a coordinator that has just begun knows no loss"


def test_storm_of_duplicates_is_told_with_its_cause() -> None:
    jobs.record.enqueue(tag="a")
    with told(DUPLICATES=5):
        watching = Watch()
        watching.round()
        for _ in range(5):
            jobs.record.enqueue(tag="a")
        stats.fold()
        looks(watching)
    alert = Alert.objects.get(kind="duplicates")
    assert alert.words == (
        "5 calls and messages of testapp.record were turned away within 5 min: 5 producer."
    )


def test_redis_that_evicts_and_is_full_is_told() -> None:
    limits = ("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    with Valkey(*limits) as server, live.changed(**live.redis_at(server.url)), told():
        watching = Watch()
        watching.round()
        with server.client() as client:
            for number in range(4_000):
                client.set(f"filler:{number}", "x" * 1_000)
        looks(watching)
        kinds = {kind for kind, _ in open_ones()}
    assert {"redis_evicting", "redis_full"} <= kinds
    assert load.last().score > 0.9, "its memory presses"
    assert load.last().penalised


def test_redis_that_is_away_is_told_and_keeps_nothing_else_from_being_told() -> None:
    with Valkey() as server, live.changed(**live.redis_at(server.url)), told():
        row = make_dead()
        watching = Watch()
        watching.round()
        counters.add("lock_expired_before_completion_total", "testapp.record")
        counters.pay()
        looks(watching)
        server.kill()
        looks(watching)
        down = open_ones("redis_down")
        assert down == [("redis_down", "locks and counters"), ("redis_down", "queue default")]
        assert ("dead", "testapp.record") in open_ones()
        assert open_ones("locks_lost"), "what can not be known is not cleared"
        server.restart()
        mend(row)
        looks(watching)
        assert open_ones("redis_down") == []


@pytest.mark.large
def test_lock_server_that_is_away_is_a_warning_that_becomes_critical_with_the_majority() -> None:
    with lock_servers(3, **live.BRISK, ALERTS=AT_ONCE) as servers:
        watching = Watch()
        servers.kill(1)
        looks(watching)
        alert = Alert.objects.get(kind="redis_down")
        assert (alert.subject, alert.severity) == ("locks locks1", "warning")
        assert "jobs run on" in alert.words
        servers.kill(2)
        looks(watching)
        raised = Alert.objects.filter(kind="redis_down").order_by("subject")
        assert [(one.subject, one.severity) for one in raised] == [
            ("locks locks1", "critical"),
            ("locks locks2", "critical"),
        ]
        assert all("no lock can be had" in one.words for one in raised)
        assert all("on_redis_error" in one.cure for one in raised)


def test_replica_that_is_behind_is_told(replica: Any) -> None:
    with told(REPLICA="replica", REPLICA_LAG=5):
        for behind, found in ((8, ["database replica"]), (0, []), (8, ["database replica"])):
            watching = Watch()
            watching.round()
            at = load.last().at - timedelta(seconds=behind)
            replica.update_or_create(pk=load.THE_ONE, defaults={"at": at})
            looks(watching)
            assert [subject for _, subject in open_ones("replica_lag")] == found
        replica.all().delete()
        looks(watching)
        assert open_ones("replica_lag"), "one that never had our row is behind"


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A second database, an SQLite in memory, with the table that tells its lag."""
    config = {**connections.settings["default"], "NAME": ":memory:", "OPTIONS": {}}
    # Called "default", since the test runner lets no other be asked.
    other = SqliteWrapper(config, "default")
    monkeypatch.setitem(connections.settings, "replica", config)
    connections["replica"] = other
    try:
        with other.schema_editor() as editor:
            editor.create_model(LastLook)
        yield LastLook._base_manager.using("replica")
    finally:
        del connections["replica"]
        other.close()


@pytest.mark.large
def test_replica_that_a_redis_names_and_that_does_not_follow_is_told() -> None:
    with (
        Valkey() as server,
        Valkey("--replicaof", f"127.0.0.1 {server.port}") as replica,
        live.changed(**live.redis_at(server.url)),
        told(REPLICA_LAG=2),
    ):
        watching = Watch()
        with server.client() as client:
            until(lambda: "slave0" in client.info("replication"), 20)
        looks(watching)
        assert open_ones("replica_lag") == []
        assert replica.process is not None
        replica.process.send_signal(signal.SIGSTOP)
        try:
            until(lambda: watching.round() and open_ones("replica_lag"), 30, every=0.2)
        finally:
            replica.process.send_signal(signal.SIGCONT)
        told_of = [subject for _, subject in open_ones("replica_lag")]
        until(lambda: watching.round() and not open_ones("replica_lag"), 30, every=0.2)
    assert "the Redis of queue default" in told_of


@pytest.mark.parametrize("by", [3.0, -3.0])
def test_clock_that_is_off_is_told(by: float, monkeypatch: pytest.MonkeyPatch) -> None:
    real = clock.utcnow
    monkeypatch.setattr(clock, "utcnow", lambda: real() - timedelta(seconds=by))
    with told():
        looks(Watch())
    names = [subject for _, subject in open_ones("clocks")]
    assert "the database" in names
    assert "the Redis of queue default" in names
    words = Alert.objects.get(kind="clocks", subject="the database").words
    assert ("ahead of" if by > 0 else "behind") in words


def test_look_asks_the_same_number_of_questions_whatever_there_is() -> None:
    with told():
        watching = Watch()
        looks(watching)
        with CaptureQueriesContext(connection) as few:
            watching.round()
        for number in range(30):
            jobs.record.enqueue(tag=f"more {number}")
            make_dead(f"dead {number}")
        looks(watching)
        with CaptureQueriesContext(connection) as many:
            watching.round()
    assert len(many) <= len(few) + 2, "one open alert is renewed"


# ---- nobody looks


def test_missing_coordinator_shows_before_anybody_raises_it() -> None:
    with told(NO_COORDINATOR=20):
        assert book.standing() == [], "nothing was ever enqueued"
        jobs.record.enqueue(tag="a")
        (alert,) = book.standing()
        assert alert.kind == "no_coordinator"
        assert alert.pk is None
        Watch().round()
        assert book.standing() == []
        LastLook.objects.update(at=DbNow(-25))
        (alert,) = book.standing()
        assert "the last look was 25 s ago" in alert.words
        assert not Alert.objects.exists(), "looking at it writes nothing"


def test_coordinator_that_does_not_lead_raises_that_none_looks(heard: list[News]) -> None:
    with told(NO_COORDINATOR=20):
        Watch().round()
        LastLook.objects.update(at=DbNow(-25))
        idle = Watch()
        for _ in range(3):
            idle.round(leads=False)
        assert open_ones() == [("no_coordinator", "")]
        looks(Watch(), 3)
        assert open_ones() == []
    assert [n.event for n in heard] == ["raised", "cleared"]


def test_coordinator_that_comes_back_tells_that_none_was_there(heard: list[News]) -> None:
    with told(NO_COORDINATOR=20):
        Watch().round()
        LastLook.objects.update(at=DbNow(-250))
        looks(Watch(), 3)
    assert [(n.event, n.kind) for n in heard] == [
        ("raised", "no_coordinator"),
        ("cleared", "no_coordinator"),
    ]
    assert "250 s ago" in heard[0].words


# ---- told


@pytest.fixture
def hook() -> Iterator[Hook]:
    found = Hook("hook?token=x", (200, {}))
    yield found
    found.close()


def test_webhook_gets_each_raise_and_each_clear_once(hook: Hook) -> None:
    with told(WEBHOOK=hook.url):
        watching, row = Watch(), make_dead()
        looks(watching, 3)
        assert deliver("webhook") == 1
        assert deliver("webhook") == 0
        mend(row)
        looks(watching, 3)
        assert deliver("webhook") == 1
    assert [got["event"] for got in hook.told] == ["raised", "cleared"]
    first = hook.told[0]
    assert first["kind"] == "dead"
    assert first["subject"] == "testapp.record"
    assert first["severity"] == "warning"
    assert first["words"] == "1 row of testapp.record DEAD."
    assert first["cleared_at"] is None
    assert hook.told[1]["cleared_at"] > first["raised_at"]
    assert not AlertNotice.objects.exists()


def test_webhook_that_refuses_is_tried_again_more_and_more_slowly(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook.answers = [(status, {}) for status in (500, 302, 200)]
    with told(WEBHOOK=hook.url):
        make_dead()
        looks(Watch())
        with monkeypatch.context() as patched:
            patched.setattr(couriers, "pause", lambda tries: 60.0)
            assert deliver("webhook") == 0
            notice = AlertNotice.objects.get()
            assert (notice.tries, notice.error) == (1, "Refused: it answered 500")
            assert deliver("webhook") == 0, "not before its time"
        assert len(hook.told) == 1
        for error in ("Refused: it answered 302", ""):
            AlertNotice.objects.update(due_at=DbNow())
            deliver("webhook")
            assert [n.error for n in AlertNotice.objects.all()] == ([error] if error else [])
    assert len(hook.told) == 3
    assert [couriers.pause(n) for n in (0, 1, 2, 8, 9, 50)] == [1, 2, 4, 256, 300, 300]


def test_webhook_that_never_takes_it_is_given_up_and_the_next_notice_goes(
    hook: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    hook.answers = [(500, {})]
    with told(WEBHOOK=hook.url):
        make_dead()
        looks(Watch())
        AlertNotice.objects.update(tries=couriers.TRIES - 1)
        deliver("webhook")
    assert not AlertNotice.objects.exists()
    assert "could not be delivered by webhook and was dropped" in caplog.text


def test_webhook_that_hangs_is_cut_off_and_is_itself_an_alert(hook: Hook) -> None:
    hook.gate.clear()
    with told(WEBHOOK=hook.url, WEBHOOK_TIMEOUT=0.3, UNTOLD_FOR=0.5):
        watching = Watch()
        make_dead()
        looks(watching)
        begun = clock.monotonic()
        assert deliver("webhook") == 0
        assert clock.monotonic() - begun < 10
        until(lambda: watching.round() and open_ones("untold"), 20, every=0.1)
        alert = Alert.objects.get(kind="untold")
        assert alert.subject == "webhook"
        assert "could not be delivered by webhook" in alert.words
        assert alert in book.standing(), "people see it without the webhook"
    with told(WEBHOOK=hook.url, UNTOLD_FOR=0.5):
        hook.gate.set()
        AlertNotice.objects.update(due_at=DbNow())
        assert deliver("webhook") == 2, "both are told once it answers"
        looks(watching, 3)
        assert open_ones("untold") == []


def test_webhook_that_drips_is_cut_off_too() -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            sock, _ = server.accept()
            with sock:
                sock.settimeout(5)
                sock.sendall(b"HTTP/1.1 ")
                while not over.wait(0.05):
                    try:
                        sock.sendall(b"x")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        with told(WEBHOOK=url, WEBHOOK_TIMEOUT=0.5):
            make_dead()
            looks(Watch())
            begun = clock.monotonic()
            assert deliver("webhook") == 0
            assert clock.monotonic() - begun < 10
        over.set()
        thread.join()
    assert AlertNotice.objects.get().error


def test_waiting_notices_are_bounded(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    monkeypatch.setattr(book, "MOST_NOTICES", 3)
    with told(WEBHOOK=hook.url):
        for number in range(6):
            book.announce("dead", rules.Found(subject=f"j{number}", words="w", cure="c"))
    subjects = [json.loads(n.body)["subject"] for n in AlertNotice.objects.order_by("pk")]
    assert subjects == ["j3", "j4", "j5"]


def test_two_couriers_deliver_a_notice_once(hook: Hook) -> None:
    with told(WEBHOOK=hook.url):
        make_dead()
        looks(Watch())
        both_at_once(lambda _: deliver("webhook"))
    assert len(hook.told) == 1


def test_admins_get_mail_of_each_raise_and_clear() -> None:
    with told(), override_settings(ADMINS=ADMINS):
        watching, row = Watch(), make_dead()
        looks(watching)
        mend(row)
        looks(watching)
        assert deliver("mail") == 2
    assert [m.subject.removeprefix("[Django] ") for m in mail.outbox] == [
        "dedupjobs: dead (testapp.record) raised",
        "dedupjobs: dead (testapp.record) cleared",
    ]
    assert "1 row of testapp.record DEAD." in mail.outbox[0].body
    assert mail.outbox[0].to == ["siti@example.org"]


def test_nobody_gets_mail_where_it_is_off() -> None:
    with told(MAIL=False), override_settings(ADMINS=ADMINS):
        make_dead()
        looks(Watch())
    assert not AlertNotice.objects.exists()


def test_log_says_what_was_raised_and_cleared(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dedupjobs")
    with told():
        watching, row = Watch(), make_dead()
        looks(watching)
        mend(row)
        looks(watching)
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("alert ")]
    assert said == [
        "alert dead testapp.record raised: 1 row of testapp.record DEAD.",
        "alert dead testapp.record cleared: 1 row of testapp.record DEAD.",
    ]


def test_receiver_that_raises_keeps_nothing_from_being_told(hook: Hook) -> None:
    def burst(**_: Any) -> None:
        raise RuntimeError("mine")

    signals.alert_changed.connect(burst)
    try:
        with told(WEBHOOK=hook.url):
            make_dead()
            looks(Watch())
            assert deliver("webhook") == 1
    finally:
        signals.alert_changed.disconnect(burst)


# ---- shown


def test_dashboard_shows_open_alerts_and_says_that_all_is_not_well(admin_client: Client) -> None:
    url = "/admin/dedupjobs/dashboard/"
    with told():
        watching, row = Watch(), make_dead()
        Coordinator().tick()
        looks(watching)
        page = admin_client.get(url).content.decode()
        assert "Alert:" in page
        assert "1 row of testapp.record DEAD." in page
        assert "Look at the error, then retry or purge them." in page
        assert "All is well." not in page
        mend(row)
        looks(watching)
        assert "1 row of testapp.record DEAD." not in admin_client.get(url).content.decode()
        listed = admin_client.get("/admin/dedupjobs/alert/").content.decode()
    assert "1 row of testapp.record DEAD." in listed, "the list keeps what was cleared"


def test_dashboard_draws_the_pressure(admin_client: Client) -> None:
    with told():
        load.note(Load(delay=33.0), Level(score=0.51), "somebody")
        Coordinator().tick()
        page = admin_client.get("/admin/dedupjobs/dashboard/").content.decode()
    assert "Pressure" in page
    assert "0.51" in page


def test_metrics_count_open_alerts_by_kind_and_have_the_score() -> None:
    with told():
        assert sample("pressure_score") is None
        make_dead()
        looks(Watch())
        load.note(Load(), Level(score=0.25), "somebody")
        assert sample("alerts", "dead") == 1
        assert sample("alerts", "held") == 0
        assert sample("alerts", "no_coordinator") == 0
        assert sample("pressure_score") == 0.25
        LastLook.objects.update(at=DbNow(-90))
        assert sample("alerts", "no_coordinator") == 1
        assert sample("pressure_score") is None


def sample(name: str, *labels: str) -> float | None:
    families = {family.name: family for family in readings.collect()}
    return families[name].samples.get(labels) if name in families else None


def test_doctor_names_open_alerts_with_their_cure() -> None:
    with told():
        make_dead()
        looks(Watch())
        found = [f for f in diagnosis.examine() if f.about == "alerts"]
    assert [(f.level, f.words) for f in found] == [
        ("warning", "dead: 1 row of testapp.record DEAD."),
        ("ok", "nobody is told but the log and the admin: neither ADMINS nor a webhook is set"),
    ]
    assert found[0].cure


def command(*options: str) -> tuple[int, str]:
    out = io.StringIO()
    try:
        call_command("dedupjobs_alerts", *options, stdout=out)
    except SystemExit as ended:
        return int(ended.code or 0), out.getvalue()
    return 0, out.getvalue()


def test_command_lists_what_is_open_by_its_exit_code_too() -> None:
    with told(NO_COORDINATOR=20):
        assert command() == (0, "No alert is open.\n")
        row = make_dead()
        looks(Watch())
        code, out = command()
        assert code == 1
        assert out.startswith("WARNING  dead (testapp.record) since 20")
        assert "     → Look at the error" in out
        (facts,) = [json.loads(text) for text in command("--json")[1].splitlines()]
        assert (facts["kind"], facts["subject"]) == ("dead", "testapp.record")
        mend(row)
        looks(Watch())
        assert command()[0] == 0
        code, out = command("--all")
        assert code == 0
        assert ", cleared 20" in out
        LastLook.objects.update(at=DbNow(-25))
        assert command()[0] == 2


def test_command_tells_that_no_coordinator_is_there(hook: Hook) -> None:
    with told(NO_COORDINATOR=20, WEBHOOK=hook.url):
        Watch().round()
        LastLook.objects.update(at=DbNow(-25))
        assert command("--tell")[0] == 2
        assert command("--tell")[0] == 2
    assert [got["kind"] for got in hook.told] == ["no_coordinator"], "once"


# ---- what stretches by the pressure


def test_retry_is_stretched_by_the_pressure_and_not_without() -> None:
    delays = []
    for score, penalised in ((0.0, False), (1.0, False), (1.0, True)):
        load.note(Load(), Level(score=score, penalised=penalised), "somebody")
        load.forget()
        row = live.row_of(jobs.fail_once.enqueue(tag=f"{score} {penalised}"))
        live.deliver(row)
        row.refresh_from_db()
        ended = JobAttempt.objects.get(job=row).ended_at
        delays.append((row.run_after - ended).total_seconds())
    assert delays == pytest.approx([2.0, 4.0, 8.0], abs=0.5)


def test_old_pressure_stretches_nothing() -> None:
    load.note(Load(), Level(score=1.0), "somebody")
    assert load.retry(2.0) == 4.0
    LastLook.objects.update(at=DbNow(-load.OLD - 1))
    load.forget()
    assert load.retry(2.0) == 2.0


def test_worker_rests_after_a_failure_and_a_success_resets_it() -> None:
    load.note(Load(), Level(score=1.0), "somebody")
    live.deliver(live.row_of(jobs.record.enqueue(tag="a")))
    assert load.rest() == 0.0
    live.deliver(live.row_of(jobs.fail.enqueue(tag="b")))
    assert load.rest() == conf.limits().PAUSE
    live.deliver(live.row_of(jobs.record.enqueue(tag="c")))
    assert load.rest() == 0.0


@live.with_sqlite
def test_dedup_worker_rests_between_two_fetches_of_failing_jobs(spawn: live.Spawn) -> None:
    load.note(Load(delay=999.0), Level(score=1.0), "somebody")
    for tag in "abcd":
        jobs.fail_for_good.enqueue(tag=tag)
    pressure = {"PAUSE": 0.8, "DELAY_FROM": 0.001, "DELAY_TO": 0.002}
    live.start_worker(spawn, PRESSURE=pressure, ALERTS={"EVERY": 1000, "NO_COORDINATOR": 2000})
    until(lambda: JobAttempt.objects.filter(outcome="FAILED").count() == 4, live.PATIENCE)
    ended = sorted(JobAttempt.objects.values_list("ended_at", flat=True))
    began = sorted(JobAttempt.objects.values_list("claimed_at", flat=True))
    gaps = [(b - e).total_seconds() for e, b in zip(ended, began[1:], strict=False)]
    assert all(gap >= 0.75 for gap in gaps), gaps


def test_tick_is_stretched_within_what_the_leader_lease_allows() -> None:
    load.note(Load(), Level(score=1.0), "somebody")
    with told():
        assert load.tick(0.2) == 0.4
        assert load.tick(0.4) == 0.5


# ---- beside the ticks


def test_webhook_that_hangs_delays_neither_a_tick_nor_a_look(hook: Hook) -> None:
    hook.gate.clear()
    with told(WEBHOOK=hook.url, WEBHOOK_TIMEOUT=30, EVERY=0.05):
        make_dead()
        outcome = jobs.record_high.enqueue(tag="due")
        live.unsent(outcome)
        with coordinating():
            until(lambda: AlertNotice.objects.filter(tries=1).exists(), live.PATIENCE)
            seen = load.last().at
            until(lambda: load.last().at > seen, live.PATIENCE, what="the next look")
            live.unsent(outcome)
            until(
                lambda: ProcessedJob.objects.filter(
                    pk=outcome.job.pk, dispatched_at__isnull=False
                ).exists(),
                live.PATIENCE,
                what="the next tick hands over",
            )
            assert hook.told == []
            hook.gate.set()
    assert not [t for t in threading.enumerate() if t.name.startswith("dedupjobs-watch")]


@live.with_sqlite
def test_worker_tells_a_webhook_and_one_that_hangs_holds_no_job_up(
    hook: Hook, spawn: live.Spawn
) -> None:
    hook.gate.clear()
    make_dead()
    once = {**AT_ONCE, "EVERY": 0.1, "WEBHOOK": hook.url, "WEBHOOK_TIMEOUT": 60}
    live.start_worker(spawn, LOCK_TIMEOUT=5, ALERTS=once)
    with live.brisk():
        until(lambda: AlertNotice.objects.filter(tries=1).exists(), live.PATIENCE)
        live.wait_for(jobs.record.enqueue(tag="meanwhile"))
        assert hook.told == []
        hook.gate.set()
        until(lambda: hook.told, live.PATIENCE)
    assert [(got["event"], got["kind"]) for got in hook.told] == [("raised", "dead")]


@contextmanager
def coordinating() -> Iterator[None]:
    """Run a coordinator in a thread."""
    over = threading.Event()

    def run() -> None:
        try:
            Coordinator().run(over.wait)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(live.PATIENCE)
    assert not thread.is_alive()


def test_look_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    done = threading.Event()

    def step() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("odd")
        done.set()

    with told(EVERY=0.01):
        over = threading.Event()
        join = watch._loop("test", step, over)
        assert done.wait(20)
        over.set()
        join(20)
    assert "coordinator: ValueError" in caplog.text
    assert conf.alerts().EVERY == 3
