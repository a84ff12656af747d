"""Jobs that run by the clock: one row per slot, whatever coordinators, pauses and clocks do."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any

import pytest
import redis
from django.core.management import CommandError, call_command
from django.db import OperationalError
from django.test import override_settings

from dedupjobs import FOREVER, clock, dispatch, keys, lifecycle, locks, probes, registry, signals
from dedupjobs import job as register
from dedupjobs import schedule as schedule_module
from dedupjobs.coordinator import Coordinator
from dedupjobs.exceptions import ArgumentError
from dedupjobs.lifecycle import Place
from dedupjobs.models import ProcessedJob, Status
from dedupjobs.schedule import Schedule
from dedupjobs.testing import run_pending
from tests.app import jobs
from tests.app.models import Ledger
from tests.rows import together

pytestmark = pytest.mark.django_db

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@pytest.fixture(autouse=True)
def _patient(settings: Any) -> Iterator[None]:
    """Let a busy machine take its time with each push."""
    settings.DEDUPJOBS = {"PUSH_TIMEOUT": 30, "LOCK_TIMEOUT": 30}
    dispatch.forget_clients()
    locks.forget_clients()
    yield
    dispatch.forget_clients()
    locks.forget_clients()


@contextmanager
def registered(*functions: str) -> Iterator[Any]:
    """Import the module of specimens, and let the registry know of it only what is named."""
    before = set(registry.names())
    sys.modules.pop("tests.app.scheduled", None)
    module = importlib.import_module("tests.app.scheduled")
    wanted = {getattr(module, function).name for function in functions}
    for name in set(registry.names()) - before - wanted:
        registry.forget(name)
    yield module
    for name in wanted:
        registry.forget(name)
    sys.modules.pop("tests.app.scheduled", None)


@pytest.fixture
def scheduled() -> Iterator[Any]:
    """Jobs of every minute, one for each way to catch up."""
    with registered("latest", "skip", "every_one", "windowed") as module:
        yield module


@pytest.fixture
def by_second() -> Iterator[Any]:
    """A job of every second."""
    with registered("each_second") as module:
        yield module.each_second


@pytest.fixture
def nightly() -> Iterator[Any]:
    """A job of half past two at night."""
    with registered("nightly") as module:
        yield module.nightly


@pytest.fixture
def skipped() -> Iterator[list[tuple[str, datetime]]]:
    """What ``slot_skipped`` has told."""
    told: list[tuple[str, datetime]] = []

    def hear(sender: str, slot: datetime, **_: Any) -> None:
        told.append((sender, slot))

    signals.slot_skipped.connect(hear)
    yield told
    signals.slot_skipped.disconnect(hear)


def rows(job: Any) -> list[ProcessedJob]:
    return list(ProcessedJob.objects.filter(name=job.name).order_by("pk"))


def slots_of(job: Any) -> list[datetime]:
    """Return the slots that have rows, in the order in which they got them."""
    return [keys.decode(row.args)["slot"] for row in rows(job)]


def run_all() -> None:
    """Let everything that waits succeed, as workers would."""
    while run_pending():
        pass


# ---- one row per slot


def test_job_that_never_ran_starts_with_its_next_slot(scheduled: Any) -> None:
    schedule = Schedule()
    assert schedule.tick(NOON + timedelta(seconds=30)) == 0
    assert schedule.tick(NOON + timedelta(seconds=59)) == 0
    assert rows(scheduled.latest) == []
    schedule.tick(NOON + timedelta(seconds=61))
    assert slots_of(scheduled.latest) == [NOON + MINUTE]


def test_tick_that_comes_twice_in_a_slot_enqueues_it_once(scheduled: Any) -> None:
    schedule = Schedule()
    schedule.tick(NOON)
    for second in (60, 61, 100, 119):
        schedule.tick(NOON + timedelta(seconds=second))
    assert slots_of(scheduled.latest) == [NOON + MINUTE]


def test_job_gets_its_slot_as_an_aware_datetime_in_utc(scheduled: Any) -> None:
    schedule = Schedule()
    schedule.tick(NOON)
    schedule.tick(NOON + MINUTE)
    run_all()
    assert Ledger.objects.get(tag="latest").note == "2026-05-01T12:01:00+00:00 UTC"


@pytest.mark.django_db(transaction=True)
def test_four_schedules_that_restart_all_the_time_make_one_row_a_slot(scheduled: Any) -> None:
    moments = [NOON + timedelta(seconds=20 * i) for i in range(12)]

    def crash_loop() -> None:
        for moment in moments:
            Schedule().tick(moment)  # a fresh one has seen nothing
            schedule.tick(moment)

    schedule = Schedule()
    schedule.tick(NOON)
    together(*[crash_loop] * 4)
    run_all()
    due = [NOON + i * MINUTE for i in (1, 2, 3)]
    assert sorted(slots_of(scheduled.every_one)) == due
    assert [(row.generation, row.attempts) for row in rows(scheduled.every_one)] == [(1, 1)] * 3
    assert Ledger.objects.filter(tag="all").count() == 3


@pytest.mark.django_db(transaction=True)
@override_settings(DEDUPJOBS={"LEADER_TTL": 0.001, "FOLD_EVERY": 1000, "RECLAIM_EVERY": 1000})
@pytest.mark.large
def test_four_coordinators_whose_leader_lease_is_too_short_make_one_row_a_slot(
    by_second: Any,
) -> None:
    end = time.monotonic() + 3.2

    def ticks() -> None:
        while time.monotonic() < end:
            coordinator = Coordinator()
            coordinator.tick()
            coordinator.tick()

    Schedule().tick(lifecycle.database_now())
    by_second.enqueue(slot=_floor(lifecycle.database_now()))  # it has run before
    together(*[ticks] * 4)
    made = sorted(slots_of(by_second))
    assert len(made) >= 3
    assert made == [made[0] + timedelta(seconds=i) for i in range(len(made))]
    assert {row.generation for row in rows(by_second)} == {1}


def _floor(moment: datetime) -> datetime:
    return moment.replace(microsecond=0)


@pytest.mark.django_db(transaction=True)
def test_tick_of_a_coordinator_enqueues_what_is_due_and_pushes_it(
    scheduled: Any, redis_client: redis.Redis
) -> None:
    first = Coordinator()
    first.tick()
    scheduled.latest.enqueue(slot=NOON)
    run_all()
    redis_client.delete("rq:queue:default")
    restarted = Coordinator(owner=first.owner)
    assert restarted.tick().scheduled == 1  # the newest of the slots since then
    newest = rows(scheduled.latest)[-1]
    assert redis_client.lrange("rq:queue:default", 0, -1) == [str(newest.dispatch_id).encode()]


# ---- pauses


@pytest.mark.parametrize("restarted", [False, True], ids=["same process", "restarted"])
@pytest.mark.parametrize(
    ("name", "made"),
    [("latest", [6]), ("skip", []), ("every_one", [2, 3, 4, 5, 6])],
    ids=["latest", "skip", "all"],
)
def test_slots_that_passed_in_a_pause_are_caught_up_by_policy(
    scheduled: Any, name: str, made: list[int], restarted: bool
) -> None:
    job = getattr(scheduled, name)
    schedule = Schedule()
    schedule.tick(NOON)
    schedule.tick(NOON + MINUTE)
    assert slots_of(job) == [NOON + MINUTE]
    run_all()
    resumed = Schedule() if restarted else schedule
    resumed.tick(NOON + 6 * MINUTE + timedelta(seconds=40))
    assert slots_of(job)[1:] == [NOON + i * MINUTE for i in made]


def test_skipping_job_takes_a_slot_that_is_only_just_late(scheduled: Any) -> None:
    schedule = Schedule()
    schedule.tick(NOON)
    schedule.tick(NOON + 5 * MINUTE + timedelta(seconds=3))
    assert slots_of(scheduled.skip) == [NOON + 5 * MINUTE]


def test_pause_of_more_slots_than_a_tick_makes_loses_none_where_all_run(
    by_second: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_module, "MOST", 20)
    first = Schedule()
    first.tick(NOON)
    first.tick(NOON + timedelta(seconds=1))
    resumed = Schedule()
    made = [resumed.tick(NOON + timedelta(seconds=50)) for _ in range(4)]
    assert made == [20, 20, 9, 0]
    assert slots_of(by_second) == [NOON + timedelta(seconds=i + 1) for i in range(50)]


def test_leader_that_comes_back_runs_no_slot_again_that_another_one_has_run(
    scheduled: Any,
) -> None:
    away, there = Schedule(), Schedule()
    for schedule in (away, there):
        schedule.tick(NOON)
    for i in range(1, 6):
        there.tick(NOON + i * MINUTE)
        run_all()
    assert Ledger.objects.filter(tag="window").count() == 5
    _let_windows_end(scheduled.windowed)
    away.tick(NOON + 5 * MINUTE)
    run_all()
    assert Ledger.objects.filter(tag="window").count() == 5
    assert {row.generation for row in rows(scheduled.windowed)} == {1}


def _let_windows_end(job: Any) -> None:
    """An hour passes, after which old slots hold their keys no more."""
    over = lifecycle.database_now() - MINUTE
    ProcessedJob.objects.filter(name=job.name).update(unique_until=over)


def test_slot_that_a_person_enqueued_again_brings_no_history_back(scheduled: Any) -> None:
    schedule = Schedule()
    schedule.tick(NOON)
    schedule.tick(NOON + MINUTE)
    scheduled.every_one.enqueue(slot=NOON - timedelta(minutes=30))  # by hand
    Schedule().tick(NOON + 2 * MINUTE)
    assert sorted(slots_of(scheduled.every_one)) == [
        NOON - 30 * MINUTE,
        NOON + MINUTE,
        NOON + 2 * MINUTE,
    ]


def test_pruned_job_starts_with_its_next_slot(scheduled: Any) -> None:
    schedule = Schedule()
    schedule.tick(NOON)
    schedule.tick(NOON + MINUTE)
    run_all()
    lifecycle.prune(scheduled.every_one.name, older_than=-1, limit=10)
    restarted = Schedule()
    restarted.tick(NOON + 5 * MINUTE)
    assert slots_of_those_with_arguments(scheduled.every_one) == []
    restarted.tick(NOON + 6 * MINUTE)
    assert slots_of_those_with_arguments(scheduled.every_one) == [NOON + 6 * MINUTE]


def slots_of_those_with_arguments(job: Any) -> list[datetime]:
    return [keys.decode(row.args)["slot"] for row in rows(job) if row.args]


# ---- a predecessor that is stuck, and other trouble


@pytest.mark.parametrize("status", [Status.RUNNING, Status.RETRYING])
def test_stuck_predecessor_collects_one_waiting_row_and_the_rest_is_told(
    scheduled: Any, skipped: list[tuple[str, datetime]], status: Status
) -> None:
    schedule = Schedule()
    schedule.tick(NOON)
    schedule.tick(NOON + MINUTE)
    stuck = rows(scheduled.latest)[0]
    if status == Status.RUNNING:
        claim = lifecycle.claim(stuck.pk, 1, owner=clock.token(), place=Place())
        assert claim is not None
    else:
        ProcessedJob.objects.filter(pk=stuck.pk).update(status=status)
    for i in range(2, 7):
        schedule.tick(NOON + i * MINUTE)
    waiting = [row for row in rows(scheduled.latest) if row.status in ("PENDING", "RETRYING")]
    assert len(waiting) == 1
    passed_by = [slot for name, slot in skipped if name == scheduled.latest.name]
    first = 3 if status == Status.RUNNING else 2
    assert passed_by == [NOON + i * MINUTE for i in range(first, 7)]
    # Others are not held up.
    assert slots_of(scheduled.every_one) == [NOON + i * MINUTE for i in range(1, 7)]


def test_schedule_goes_on_once_the_stuck_predecessor_has_ended(scheduled: Any) -> None:
    schedule = Schedule()
    for i in range(5):
        schedule.tick(NOON + i * MINUTE)
    assert len(rows(scheduled.latest)) == 1
    run_all()
    schedule.tick(NOON + 5 * MINUTE)
    assert slots_of(scheduled.latest) == [NOON + MINUTE, NOON + 5 * MINUTE]


def key_that_fails(slot: datetime) -> str:
    raise ValueError("no key today")


def without_slot(*, day: int) -> None:
    """Not what the coordinator calls."""


def with_slot(*, slot: datetime) -> None:
    """As the coordinator calls it."""


@pytest.mark.parametrize(
    ("key", "function"), [(key_that_fails, with_slot), ("r:{day}", without_slot)]
)
def test_job_that_can_not_be_enqueued_stops_no_other(
    scheduled: Any, key: Any, function: Callable[..., None]
) -> None:
    told: list[str] = []

    def hear(sender: str, error: Exception, **_: Any) -> None:
        told.append(f"{sender}: {type(error).__name__}")

    signals.coordinator_failed.connect(hear)
    register(key=key, unique_for=FOREVER, every=60, name="aaa.broken")(function)
    try:
        schedule = Schedule()
        schedule.tick(NOON)
        schedule.tick(NOON + MINUTE)
    finally:
        registry.forget("aaa.broken")
        signals.coordinator_failed.disconnect(hear)
    assert slots_of(scheduled.latest) == [NOON + MINUTE]
    assert [text.partition(":")[0] for text in told] == ["aaa.broken"]


def test_slot_whose_insert_failed_is_enqueued_by_the_next_tick(scheduled: Any) -> None:
    schedule = Schedule()
    schedule.tick(NOON)
    probes.hook = _fail_once
    try:
        with pytest.raises(OperationalError):
            schedule.tick(NOON + MINUTE)
    finally:
        probes.hook = None
    schedule.tick(NOON + MINUTE + timedelta(seconds=2))
    for name in ("latest", "skip", "every_one", "windowed"):
        assert slots_of(getattr(scheduled, name)) == [NOON + MINUTE], name


def _fail_once(point: str) -> None:
    if point == "enqueue.inserted":
        probes.hook = None
        raise OperationalError("the server went away")


# ---- what a tick costs


def test_twenty_cron_jobs_cost_a_tick_little() -> None:
    for i in range(20):
        register(key="c:{slot}", unique_for=FOREVER, cron=f"{i} 2 * * *", name=f"cron.{i}")(
            with_slot
        )
    try:
        schedule = Schedule()
        schedule.tick(NOON)
        begun = time.process_time()
        schedule.tick(NOON + timedelta(seconds=1))
        spent = time.process_time() - begun
    finally:
        for i in range(20):
            registry.forget(f"cron.{i}")
    assert spent < 0.5  # a tick comes every second


# ---- zones


@pytest.mark.parametrize("use_tz", [True, False])
@pytest.mark.parametrize(
    ("zone", "first", "second"),
    [
        ("Europe/Berlin", "2026-03-29T01:00:00+00:00", "2026-03-30T00:30:00+00:00"),
        ("Australia/Sydney", "2026-03-28T15:30:00+00:00", "2026-03-29T15:30:00+00:00"),
        ("UTC", "2026-03-29T02:30:00+00:00", "2026-03-30T02:30:00+00:00"),
    ],
)
def test_cron_is_read_in_time_zone_and_the_slot_stays_utc(
    nightly: Any, zone: str, first: str, second: str, use_tz: bool
) -> None:
    with override_settings(TIME_ZONE=zone, USE_TZ=use_tz):
        schedule = Schedule()
        schedule.tick(datetime(2026, 3, 28, 15, tzinfo=UTC))
        for moment in (first, second):
            schedule.tick(datetime.fromisoformat(moment) - timedelta(seconds=1))
            before = len(rows(nightly))
            schedule.tick(datetime.fromisoformat(moment))
            assert len(rows(nightly)) == before + 1
            run_all()
        assert set(Ledger.objects.filter(tag="nightly").values_list("note", flat=True)) == {
            f"{first} UTC",
            f"{second} UTC",
        }


def test_doubled_hour_makes_one_row(nightly: Any) -> None:
    with override_settings(TIME_ZONE="Europe/Berlin"):
        schedule = Schedule()
        schedule.tick(datetime(2026, 10, 24, 12, tzinfo=UTC))
        for minute in range(0, 180, 10):
            schedule.tick(datetime(2026, 10, 25, tzinfo=UTC) + timedelta(minutes=minute))
            run_all()
        assert slots_of(nightly) == [datetime(2026, 10, 25, 0, 30, tzinfo=UTC)]


@pytest.mark.parametrize("use_tz", [True, False])
def test_run_after_of_another_zone_is_stored_as_the_same_moment(use_tz: bool) -> None:
    with override_settings(TIME_ZONE="Australia/Sydney", USE_TZ=use_tz):
        for i, text in enumerate(["2036-03-30T03:30:00+02:00", "2036-10-26T02:30:00+01:00"]):
            moment = datetime.fromisoformat(text)
            row = jobs.record.using(run_after=moment).enqueue(tag=f"later {i}").job
            stored = ProcessedJob.objects.get(pk=row.pk).run_after
            assert (stored, stored.utcoffset()) == (moment, timedelta(0))
        assert run_pending() == 0


def test_run_after_without_a_zone_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no time zone; give an aware datetime"):
        jobs.record.using(run_after=datetime(2036, 1, 1))


# ---- the command


def listed(*args: str) -> list[str]:
    out = StringIO()
    call_command("dedupjobs_schedule", *args, stdout=out)
    return out.getvalue().splitlines()


def test_command_lists_the_next_slots_in_utc_and_local_time(nightly: Any) -> None:
    now = lifecycle.database_now()
    with override_settings(TIME_ZONE="Europe/Berlin"):
        title, *slots = listed("--count", "2")
    assert title == "testapp.nightly: cron '30 2 * * *' in Europe/Berlin, catch_up='latest'"
    for line, days in zip(slots, (1, 2), strict=True):
        utc, local = line.strip().split("  ")
        moment = datetime.strptime(f"{utc} +0000", "%Y-%m-%d %H:%M:%S UTC %z")
        assert now < moment <= now + timedelta(days=days, hours=1)
        assert local.split()[1] in ("02:30:00", "03:00:00")
        assert local.split()[2] in ("CET", "CEST")


def test_command_lists_three_slots_of_each_job_by_default(scheduled: Any) -> None:
    lines = listed()
    assert len(lines) == 4 * (1 + 3)
    assert lines[0] == "testapp.every_one: every 60 s, catch_up='all'"
    assert all(":00 UTC" in line for line in lines if line.startswith(" "))


def test_command_says_so_where_no_job_runs_by_the_clock() -> None:
    assert listed() == ["No job has every= or cron=."]


def test_command_refuses_a_count_below_one() -> None:
    with pytest.raises(CommandError, match="--count 0: give a whole number of at least 1"):
        listed("--count", "0")


def test_command_writes_nothing(scheduled: Any) -> None:
    listed()
    assert not ProcessedJob.objects.exists()
