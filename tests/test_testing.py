"""The helpers for other projects' tests: inline runs, captured calls, crashes, a clock."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from asgiref.sync import async_to_sync
from django.conf import settings
from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase
from django.test.utils import override_settings

from dedupjobs import cache, current_attempt, job, lifecycle, probes, registry
from dedupjobs.exceptions import LeaseLost, OutsideTests, PayloadMismatch
from dedupjobs.models import AttemptOutcome, JobAttempt, Kind, ProcessedJob, Status
from dedupjobs.testing import (
    Calls,
    assert_deduplicated,
    assert_enqueued,
    captured_jobs,
    crash_at,
    frozen_clock,
    inline,
    run_pending,
    simulate_redis_loss,
    zombie,
)
from tests.app import guarded, jobs
from tests.app.models import Ledger
from tests.rows import job_row
from tests.shop import Project


def effects(tag: str) -> int:
    return Ledger.objects.filter(tag=tag).count()


def outcomes(row: ProcessedJob) -> list[str | None]:
    found = JobAttempt.objects.filter(job=row).order_by("number")
    return list(found.values_list("outcome", flat=True))


# ---- inline


class InlineInTestCase(TestCase):
    """Where the test's own transaction never ends."""

    def test_job_runs_at_once_and_its_duplicates_do_not(self) -> None:
        with inline() as calls:
            first = jobs.record.enqueue(tag="a")
            assert effects("a") == 1
            assert jobs.record.enqueue(tag="a").kind == Kind.REPLAYED
        assert effects("a") == 1
        assert first.result() == ""
        calls.assert_enqueued(jobs.record, key="record:a", times=1)
        calls.assert_deduplicated(jobs.record, key="record:a", times=1)

    def test_failures_are_retried_at_once_by_further_attempts(self) -> None:
        with inline():
            outcome = jobs.fail.enqueue(tag="a", times=2)
        assert job_row(outcome.job).status == Status.SUCCEEDED
        assert outcomes(outcome.job) == ["FAILED", "FAILED", "SUCCEEDED"]

    def test_job_that_never_succeeds_is_dead_after_its_attempts(self) -> None:
        with inline():
            outcome = jobs.fail.enqueue(tag="a")
        assert job_row(outcome.job).status == Status.DEAD
        assert outcomes(outcome.job) == ["FAILED"] * 3

    def test_job_waits_for_the_end_of_your_own_transaction(self) -> None:
        with inline():
            with transaction.atomic():
                jobs.record.enqueue(tag="a")
                assert effects("a") == 0
            jobs.record.enqueue(tag="b")
            assert (effects("a"), effects("b")) == (1, 1)
            with transaction.atomic():
                jobs.record.enqueue(tag="c")
        assert effects("c") == 1

    def test_job_of_a_transaction_that_was_rolled_back_never_runs(self) -> None:
        with inline() as calls:
            with transaction.atomic():
                jobs.record.enqueue(tag="a")
                transaction.set_rollback(True)
            jobs.record.enqueue(tag="b")
        assert (effects("a"), effects("b")) == (0, 1)
        calls.assert_enqueued(jobs.record, arguments={"tag": "a"}, times=0)

    def test_job_runs_when_captured_hooks_are_executed(self) -> None:
        with inline():
            with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
                jobs.record.enqueue(tag="a")
            assert effects("a") == 1

    def test_job_that_enqueues_another_ends_first(self) -> None:
        with inline():
            guarded.chain.enqueue(depth=3)
        assert list(Ledger.objects.values_list("note", flat=True)) == list("321")

    def test_call_for_later_and_a_snooze_wait(self) -> None:
        with inline():
            jobs.record.using(run_after=60).enqueue(tag="a")
            snoozed = jobs.wish.enqueue(tag="b", what="snooze")
        assert effects("a") == 0
        assert job_row(snoozed.job).status == Status.RETRYING

    @inline()
    def test_whole_test_may_be_inline(self) -> None:
        jobs.record.enqueue(tag="a")
        assert effects("a") == 1


class InlineInTransactionTestCase(TransactionTestCase):
    """Where commits happen."""

    def test_job_runs_after_its_commit(self) -> None:
        with inline():
            with transaction.atomic():
                jobs.record_atomically.enqueue(tag="a")
                assert effects("a") == 0
            assert effects("a") == 1

    def test_retries_and_uniqueness_hold_here_too(self) -> None:
        with inline() as calls:
            outcome = jobs.fail.enqueue(tag="a", times=1)
            jobs.fail.enqueue(tag="a", times=1)
        assert outcomes(outcome.job) == ["FAILED", "SUCCEEDED"]
        calls.assert_deduplicated(jobs.fail, times=1)

    def test_what_another_test_knew_of_a_key_is_forgotten(self) -> None:
        with inline():
            outcome = jobs.record.enqueue(tag="a")
            assert jobs.record.status(tag="a") == Status.SUCCEEDED
            assert cache.peek(outcome.job.key_hash) is not None
        ProcessedJob.objects.all().delete()  # as between two tests
        with inline():
            assert jobs.record.enqueue(tag="a").kind == Kind.CREATED


@pytest.mark.django_db
def test_endless_chain_of_jobs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dedupjobs.testing.running.ROUNDS", 5)
    with pytest.raises(AssertionError, match="ran 5 attempts"), inline():
        guarded.chain.enqueue(depth=100)


@pytest.mark.django_db(transaction=True)
def test_async_code_is_served_inline() -> None:
    async def body() -> None:
        outcome = await jobs.record_async.aenqueue(tag="a")
        assert await outcome.aresult() == "async a"

    with inline() as calls:
        async_to_sync(body)()
    calls.assert_enqueued(jobs.record_async, times=1)


# ---- no Redis


@pytest.fixture
def black_hole() -> Iterator[socket.socket]:
    """A server that takes connections and never answers; the settings point to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        with override_settings(
            RQ_QUEUES={"default": {"URL": url}},
            CACHES={"default": {**settings.CACHES["default"], "LOCATION": url}},
            DEDUPJOBS={"LISTEN": "always"},
        ):
            yield server


def assert_nobody_came(server: socket.socket) -> None:
    with pytest.raises(BlockingIOError):
        server.accept()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("helper", [inline, captured_jobs, simulate_redis_loss])
def test_no_helper_talks_to_redis(helper: object, black_hole: socket.socket) -> None:
    with helper():  # type: ignore[operator]
        jobs.record.enqueue(tag="a")
        jobs.record.enqueue(tag="a")
        jobs.fail.enqueue_many([{"tag": "b", "times": 1}, {"tag": "b", "times": 1}])
        run_pending(retries=True)
        jobs.record.enqueue(tag="a")
        assert jobs.record.status(tag="a") == Status.SUCCEEDED
        assert jobs.record.run_now(tag="now").result() == ""
    assert_nobody_came(black_hole)


@pytest.mark.django_db
@pytest.mark.parametrize("backend", ["locmem.LocMemCache", "dummy.DummyCache"])
def test_project_may_test_with_another_cache(backend: str) -> None:
    caches = {"default": {"BACKEND": f"django.core.cache.backends.{backend}"}}
    with override_settings(CACHES=caches), inline() as calls:
        jobs.record.enqueue(tag="a")
        jobs.record.enqueue(tag="a")
    assert effects("a") == 1
    calls.assert_deduplicated(jobs.record)


@pytest.mark.django_db(transaction=True)
def test_job_survives_the_loss_of_redis() -> None:
    with simulate_redis_loss():
        outcome = jobs.record.enqueue(tag="a")
    assert job_row(outcome.job).dispatched_at is None  # so the coordinator hands it over
    assert run_pending() == 1
    assert job_row(outcome.job).status == Status.SUCCEEDED


@contextmanager
def loss_around(helper: Callable[[], AbstractContextManager[Calls]]) -> Iterator[None]:
    with simulate_redis_loss(), helper():
        yield


@contextmanager
def loss_inside(helper: Callable[[], AbstractContextManager[Calls]]) -> Iterator[None]:
    with helper(), simulate_redis_loss():
        yield


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("loss", [loss_around, loss_inside])
@pytest.mark.parametrize("helper", [inline, captured_jobs])
def test_locks_are_missed_in_the_loss_of_redis_whatever_other_block_is_open(
    loss: Callable[..., AbstractContextManager[None]],
    helper: Callable[[], AbstractContextManager[Calls]],
) -> None:
    with loss(helper):
        assert jobs.refuse_unlocked.enqueue(tag="refused").kind is Kind.BLOCKED
        outcome = jobs.record_if_locked.enqueue(tag="waits")
        jobs.record.enqueue(tag="by the rows")
        jobs.record_freely.enqueue(tag="free")
        run_pending()
        assert run_pending() == 0
        assert job_row(outcome.job).status == Status.PENDING
        assert (effects("by the rows"), effects("free")) == (1, 1)
    run_pending()
    assert job_row(outcome.job).status == Status.SUCCEEDED


@pytest.mark.django_db(transaction=True)
def test_job_that_waited_for_redis_runs_inline_once_the_loss_is_over() -> None:
    with inline():
        with simulate_redis_loss():
            jobs.record_if_locked.enqueue(tag="waits")
        assert effects("waits") == 0
        jobs.record.enqueue(tag="next")
        assert effects("waits") == 1
        assert jobs.refuse_unlocked.enqueue(tag="a").created


@pytest.mark.django_db(transaction=True)
def test_job_that_waits_for_redis_counts_as_no_attempt_that_ran() -> None:
    with simulate_redis_loss():
        jobs.record_if_locked.enqueue(tag="waits")
        assert run_pending() == 0


@pytest.mark.django_db(transaction=True)
def test_retry_that_waits_for_redis_is_tried_once() -> None:
    made = job(
        key="{tag}", unique_for=None, name="tests.flaky", on_redis_error="wait", backoff=60
    )  # fmt: skip
    flaky = made(jobs.fail.func)
    try:
        outcome = flaky.enqueue(tag="a", times=1)
        run_pending()
        with simulate_redis_loss():
            assert run_pending(retries=True) == 0
        assert run_pending(retries=True) == 1
        assert job_row(outcome.job).status == Status.SUCCEEDED
    finally:
        registry.forget("tests.flaky")


# ---- captured calls


@pytest.mark.django_db
def test_captured_calls_write_rows_and_run_nothing(
    django_capture_on_commit_callbacks: object,
) -> None:
    with captured_jobs() as calls, django_capture_on_commit_callbacks(execute=True):  # type: ignore[operator]
        jobs.record.enqueue(tag="a", text="t")
        jobs.record.using(queue_name="low").enqueue(tag="a", text="t")
        jobs.record_always.enqueue_many([{"tag": "b"}, {"tag": "c"}])
    assert [(c.job.name, c.kind) for c in calls] == [
        ("testapp.record", Kind.CREATED),
        ("testapp.record", Kind.DUPLICATE),
        ("testapp.record_always", Kind.CREATED),
        ("testapp.record_always", Kind.CREATED),
    ]
    assert calls[0].arguments == {"tag": "a", "text": "t"}
    assert effects("a") == 0
    assert run_pending() == 3


@pytest.mark.django_db
def test_captured_call_that_is_refused_is_noted_with_its_outcome() -> None:
    with captured_jobs() as calls:
        jobs.record.enqueue(tag="a", text="one")
        with pytest.raises(PayloadMismatch):
            jobs.record.enqueue(tag="a", text="two")
    calls.assert_deduplicated(jobs.record, key="record:a", times=1)


@pytest.mark.django_db
def test_assertions_look_at_the_innermost_open_block() -> None:
    with captured_jobs():
        jobs.record.enqueue(tag="a")
        with captured_jobs():
            jobs.record.enqueue(tag="b")
            assert_enqueued(jobs.record, key="record:b", arguments={"tag": "b"}, times=1)
            assert_enqueued(jobs.record, key="record:a", times=0)
        assert_enqueued(jobs.record, key="record:a")
        assert_enqueued(jobs.record, key="record:b")
        jobs.record.enqueue(tag="b")
        assert_deduplicated(jobs.record, key="record:b", times=1)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"key": "record:b"}, "testapp.record with key 'record:b' to be enqueued at least once"),
        ({"arguments": {"tag": "b"}}, "testapp.record(tag='b') to be enqueued at least once"),
        ({"times": 2}, "testapp.record to be enqueued 2 times, found 1"),
        ({"times": 0}, "testapp.record to be enqueued 0 times, found 1"),
    ],
)
def test_assertion_that_fails_lists_the_calls(wanted: dict[str, object], found: str) -> None:
    with captured_jobs() as calls:
        jobs.record.enqueue(tag="a")
    with pytest.raises(AssertionError) as failure:
        calls.assert_enqueued(jobs.record, **wanted)  # type: ignore[arg-type]
    assert found in str(failure.value)
    assert "testapp.record(tag='a', text='') key 'record:a': CREATED" in str(failure.value)


@pytest.mark.django_db
def test_missing_duplicate_fails_the_assertion() -> None:
    with captured_jobs() as calls:
        jobs.record.enqueue(tag="a")
    with pytest.raises(AssertionError, match=r"calls of testapp\.record to be turned away"):
        calls.assert_deduplicated(jobs.record)


@pytest.mark.parametrize("wrong", ["testapp.record", jobs.record.func, None, [jobs.record]])
def test_what_is_no_job_is_refused_with_what_to_give(wrong: object) -> None:
    cure = "Give the job itself, what @job has made of the function, or a task"
    calls = Calls()
    with pytest.raises(TypeError, match=cure) as error:
        calls.assert_enqueued(wrong)
    assert str(error.value).startswith(f"assert_enqueued() was given {wrong!r}. ")
    with pytest.raises(TypeError, match=cure):
        calls.assert_deduplicated(wrong)
    with pytest.raises(TypeError, match=cure), zombie(wrong, tag="a"):
        pass


def test_assertion_without_a_block_says_what_to_do() -> None:
    with pytest.raises(OutsideTests, match="Call it inside"):
        assert_enqueued(jobs.record)


# ---- crashes


@pytest.mark.django_db(transaction=True)
def test_job_whose_process_dies_after_its_effect_runs_again() -> None:
    outcome = jobs.record.enqueue(tag="a")
    with crash_at("user_code.after"):
        run_pending()
    assert (effects("a"), outcomes(outcome.job)) == (1, ["LOST"])
    assert job_row(outcome.job).status == Status.RETRYING
    assert run_pending() == 1
    assert (effects("a"), outcomes(outcome.job)) == (2, ["LOST", "SUCCEEDED"])


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("point", ["user_code.after", "settle.between", "settle.uncommitted"])
def test_atomic_job_whose_process_dies_before_its_commit_has_one_effect(point: str) -> None:
    outcome = jobs.record_atomically.enqueue(tag="a")
    with crash_at(point):
        run_pending()
    assert effects("a") == 0
    run_pending()
    assert (effects("a"), outcomes(outcome.job)) == (1, ["LOST", "SUCCEEDED"])


@pytest.mark.django_db(transaction=True)
def test_crash_behind_the_commit_of_the_ending_changes_nothing() -> None:
    outcome = jobs.record.enqueue(tag="a")
    with crash_at("settle.committed"):
        run_pending()
    assert (run_pending(), effects("a"), outcomes(outcome.job)) == (0, 1, ["SUCCEEDED"])


@pytest.mark.django_db(transaction=True)
def test_crash_inside_user_code_is_no_failure_of_the_job() -> None:
    outcome = guarded.record_fenced.enqueue(tag="a")
    with crash_at("fenced.locked"):
        run_pending()
    assert (effects("a"), outcomes(outcome.job)) == (0, ["LOST"])


@pytest.mark.django_db
def test_crash_of_an_enqueue_leaves_nothing() -> None:
    with crash_at("enqueue.inserted"), transaction.atomic():
        jobs.record.enqueue(tag="a")
    assert not ProcessedJob.objects.exists()
    assert probes.hook is None


@pytest.mark.django_db
def test_crash_that_did_not_happen_fails_the_test() -> None:
    with pytest.raises(AssertionError, match="did not reach this point"), crash_at("claim.before"):
        pass


@pytest.mark.django_db
def test_crash_at_an_unknown_point_names_the_nearest() -> None:
    with (
        pytest.raises(ValueError, match=r"did you mean 'user_code\.after'"),
        crash_at("user.after"),
    ):
        pass


# ---- zombies


@pytest.mark.django_db
@pytest.mark.parametrize("job", [guarded.record_fenced, guarded.record_checked])
def test_zombie_shows_whether_a_guard_works(job: object) -> None:
    with zombie(job, tag="a"), pytest.raises(LeaseLost):  # type: ignore[arg-type]
        job(tag="a")  # type: ignore[operator]
    assert effects("a") == 0
    assert run_pending() == 1  # the attempt that has taken over
    assert effects("a") == 1


@pytest.mark.django_db
def test_zombie_of_a_job_without_a_guard_writes() -> None:
    with zombie(jobs.record, tag="a"):
        jobs.record(tag="a")
    assert effects("a") == 1


@pytest.mark.django_db
def test_zombie_may_lose_its_lease_in_the_middle() -> None:
    with zombie(guarded.record_fenced, tag="a", taken_over=False) as one:
        assert current_attempt() is one.attempt
        current_attempt().check()
        one.take_over()
        with pytest.raises(LeaseLost):
            current_attempt().check()
    assert outcomes(ProcessedJob.objects.get()) == [AttemptOutcome.LOST]


@pytest.mark.django_db
def test_zombie_of_a_key_that_is_taken_says_so() -> None:
    outcome = jobs.record.enqueue(tag="a")
    with (
        pytest.raises(AssertionError, match=f"row {outcome.job.pk}, PENDING"),
        zombie(jobs.record, tag="a"),
    ):
        pass


# ---- the clock


@pytest.mark.django_db
def test_backoff_is_over_when_the_clock_is_moved() -> None:
    with frozen_clock() as now:
        outcome = jobs.wish.enqueue(tag="a", what="retry")
        assert run_pending() == 1
        assert run_pending() == 0
        now.move(59.9)
        assert run_pending() == 0
        now.move(timedelta(seconds=0.1))
        assert run_pending() == 1
    assert job_row(outcome.job).status == Status.SUCCEEDED


@pytest.mark.django_db
def test_window_ends_and_debounce_waits_by_the_frozen_clock() -> None:
    with frozen_clock() as now:
        jobs.record_hourly.enqueue(tag="a")
        run_pending()
        assert jobs.record_hourly.enqueue(tag="a").kind == Kind.REPLAYED
        now.move(3_600)
        assert jobs.record_hourly.enqueue(tag="a").kind == Kind.CREATED


@pytest.mark.django_db
def test_rows_have_the_moment_of_the_frozen_clock() -> None:
    at = datetime(2026, 2, 28, 23, 59, 59, 999_000, tzinfo=UTC)
    with frozen_clock(at) as now:
        outcome = jobs.record.enqueue(tag="a")
        now.move(0.001)
        run_pending()
        assert lifecycle.database_now() == datetime(2026, 3, 1, tzinfo=UTC)
    row = job_row(outcome.job)
    assert (row.created_at, row.finished_at) == (at, datetime(2026, 3, 1, tzinfo=UTC))
    assert abs(lifecycle.database_now() - datetime.now(UTC)) < timedelta(minutes=1)


@pytest.mark.django_db(transaction=True)
def test_waiting_for_a_result_moves_the_frozen_clock() -> None:
    with frozen_clock() as now, captured_jobs():
        begun, stood = time.monotonic(), now.now
        outcome = jobs.record.enqueue(tag="a")
        with pytest.raises(TimeoutError):
            outcome.result(timeout=60)
        moved, passed = (now.now - stood).total_seconds(), time.monotonic() - begun
    assert moved > 0
    assert moved + passed >= 60


@pytest.mark.django_db
def test_clock_takes_aware_datetimes_and_goes_forward() -> None:
    with pytest.raises(ValueError, match="aware"), frozen_clock(datetime(2026, 1, 1)):
        pass
    with frozen_clock() as now, pytest.raises(ValueError, match="only goes forward"):
        now.move(-1)


# ---- pytest


def test_fixtures_give_what_the_helpers_give(
    dedupjobs_inline: Calls, django_db_blocker: object
) -> None:
    jobs.record.enqueue(tag="a")
    dedupjobs_inline.assert_enqueued(jobs.record)
    assert effects("a") == 1
    assert connection.in_atomic_block


def test_captured_fixture_and_clock_go_together(
    dedupjobs_captured: Calls, dedupjobs_clock: object
) -> None:
    jobs.record.using(run_after=10).enqueue(tag="a")
    assert run_pending() == 0
    dedupjobs_clock.move(10)  # type: ignore[attr-defined]
    assert run_pending() == 1
    dedupjobs_captured.assert_enqueued(jobs.record, times=1)


@pytest.mark.django_db(transaction=True)
def test_fixture_leaves_a_transactional_test_transactional(dedupjobs_inline: Calls) -> None:
    assert not connection.in_atomic_block
    jobs.record.enqueue(tag="a")
    assert effects("a") == 1


# ---- other test runners

SHOP_TESTS = """
from django.core import mail
from django.db import transaction
from django.test import TestCase, TransactionTestCase
from dedupjobs.testing import captured_jobs, inline
from shop.jobs import send_receipt


class InTestCase(TestCase):
    def setUp(self):
        self.calls = self.enterContext(inline())

    def test_view_that_is_asked_twice_sends_one_receipt(self):
        for _ in range(2):
            self.client.get("/pay/7/")
        self.assertEqual([m.subject for m in mail.outbox], ["Receipt 7"])
        self.calls.assert_deduplicated(send_receipt, key="receipt:7", times=1)


class InTransactionTestCase(TransactionTestCase):
    def test_receipt_waits_for_the_commit(self):
        with inline():
            with transaction.atomic():
                self.client.get("/pay/8/")
                self.assertEqual(mail.outbox, [])
            self.assertEqual(len(mail.outbox), 1)

    @captured_jobs()
    def test_nothing_runs_where_calls_are_captured(self):
        self.client.get("/pay/8/")
        self.assertEqual(mail.outbox, [])
"""
SHOP_VIEWS = """
from django.http import JsonResponse
from shop.jobs import send_receipt

def pay(request, order_id):
    send_receipt.enqueue(order_id)
    return JsonResponse({})
"""
SHOP_JOBS = """
from dedupjobs import FOREVER, job
from django.core.mail import send_mail

@job(key="receipt:{order_id}", unique_for=FOREVER)
def send_receipt(order_id):
    send_mail(f"Receipt {order_id}", "Thank you.", None, ["ada@example.com"])
"""


@pytest.fixture
def shop(tmp_path: Path, black_hole: socket.socket) -> Project:
    """A project with tests of its own, whose Redis takes connections and never answers."""
    url = f"redis://127.0.0.1:{black_hole.getsockname()[1]}/0"
    made = Project(tmp_path, "shop", "django_rq", "dedupjobs")
    caches = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url}}
    made.put(
        "shop/settings.py",
        f"CACHES = {caches!r}\nRQ_QUEUES = {{'default': {{'URL': {url!r}}}}}\n"
        'RQ = {"WORKER_CLASS": "dedupjobs.worker.DedupWorker"}\n'
        'DATABASES["default"]["OPTIONS"] = {"transaction_mode": "IMMEDIATE", "timeout": 20}\n',
    )
    made.put("shop/tests.py", SHOP_TESTS)
    made.put("shop/views.py", SHOP_VIEWS)
    made.put("shop/jobs.py", SHOP_JOBS)
    return made


@pytest.mark.large
@pytest.mark.django_db
@pytest.mark.parametrize("runner", ["manage.py test", "manage.py test --parallel 2", "pytest -n 2"])
def test_projects_own_test_runner_needs_no_redis(
    shop: Project, runner: str, black_hole: socket.socket
) -> None:
    if runner.startswith("pytest"):
        told = shop.run("-m", "pytest", "-q", "-n", "2", "--ds", "shop.settings", "shop/tests.py")
        assert "3 passed" in told
    else:
        shop.run(*runner.split())
    assert_nobody_came(black_hole)


# ---- outside tests

HELPERS = {
    "inline()": "testing.inline()",
    "captured_jobs()": "testing.captured_jobs()",
    "crash_at()": "testing.crash_at('claim.before')",
    "zombie()": "testing.zombie(None)",
    "simulate_redis_loss()": "testing.simulate_redis_loss()",
    "frozen_clock()": "testing.frozen_clock()",
}
OUTSIDE = """
    import django
    django.setup()
    from dedupjobs import exceptions, testing
    for call in {calls!r}:
        try:
            with eval(call):
                print("entered", call)
        except exceptions.OutsideTests as error:
            print(str(error).split()[0])
    try:
        testing.assert_enqueued(None)
    except exceptions.OutsideTests as error:
        print(str(error).split()[0])
"""


def test_helper_outside_a_test_is_a_clear_error() -> None:
    code = textwrap.dedent(OUTSIDE.format(calls=list(HELPERS.values())))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n")[:-1] == [*HELPERS, "assert_enqueued()"], done.stderr


def test_plugin_imports_no_django_before_it_is_asked() -> None:
    code = (
        "import sys, dedupjobs.pytest_plugin; "
        "print([m for m in sys.modules if m.partition('.')[0] in ('django', 'redis', 'rq')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
