"""A delivery in this process: what each ending of a job becomes, and what faults do to it."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.conf import settings
from django.db import OperationalError, connection, transaction
from django.db.backends.signals import connection_created
from django.test.utils import override_settings

from dedupjobs import (
    FOREVER,
    Exponential,
    clock,
    current_attempt,
    hardening,
    job,
    keys,
    levers,
    lifecycle,
    locks,
    registry,
    runner,
    signals,
    testing,
)
from dedupjobs.clock import DbNow
from dedupjobs.endings import Lapsed
from dedupjobs.exceptions import ArgumentError, NoCurrentAttempt
from dedupjobs.levers import Wish
from dedupjobs.models import JobAttempt, ProcessedJob, Status
from dedupjobs.registry import Job
from dedupjobs.testing import run_pending
from tests import live, sessions
from tests.app import jobs
from tests.app.models import Ledger
from tests.rows import (
    Held,
    Side,
    alter,
    at,
    claimed,
    job_row,
)
from tests.sessions import needs_row_locks, needs_server
from tests.waiting import until

pytestmark = pytest.mark.django_db
committing = pytest.mark.django_db(transaction=True)


def run(specimen: Job[..., Any], **arguments: Any) -> JobAttempt:
    """Enqueue, deliver once, and return the attempt, with its job."""
    row = specimen.enqueue(**arguments).job
    deliver(row)
    return JobAttempt.objects.select_related("job").get(job=row, number=row.attempts + 1)


def deliver(row: ProcessedJob, owner: str = "") -> Status | None:
    """Run the row as a worker would, without Redis."""
    now = job_row(row)
    return runner.deliver(now.pk, now.generation, owner=owner or clock.token(), lock=False)


def name_of(value: Any) -> str | None:
    """Name a specimen in a test's id."""
    return value.name if isinstance(value, Job) else None


def ledger(tag: str = "a") -> list[str]:
    return list(Ledger.objects.filter(tag=tag).order_by("pk").values_list("note", flat=True))


# ---- success, and results


def test_job_that_returns_succeeds_with_its_result() -> None:
    attempt = run(jobs.record, tag="a", text="x")
    assert (attempt.outcome, attempt.job.status) == ("SUCCEEDED", "SUCCEEDED")
    assert keys.decode(attempt.job.result or "") == "x"
    assert attempt.run_time is not None
    assert attempt.queue_delay is not None
    assert ledger() == ["x"]


def test_async_job_is_awaited() -> None:
    attempt = run(jobs.record_async, tag="a")
    assert keys.decode(attempt.job.result or "") == "async a"


def test_async_job_that_raises_has_failed() -> None:
    attempt = run(jobs.fail_async, tag="a")
    assert (attempt.outcome, attempt.error_message) == ("FAILED", "no luck with a")
    assert attempt.job.status == "RETRYING"


@pytest.mark.parametrize(("what", "value"), [("zero", 0), ("none", None)])
def test_result_that_is_false_is_a_result(what: str, value: Any) -> None:
    attempt = run(jobs.give_back, tag="a", what=what)
    assert attempt.job.status == "SUCCEEDED"
    assert keys.decode(attempt.job.result or "") == value
    assert attempt.reason == ""


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("file", "can not be stored as JSON"),
        ("lambda", "builtins.function"),
        ("generator", "builtins.generator"),
        ("huge", "MAX_RESULT is 65,536"),
        ("unprintable", "_Unprintable"),
    ],
)
def test_result_that_can_not_be_stored_is_a_success_without_one(what: str, why: str) -> None:
    attempt = run(jobs.give_back, tag="a", what=what)
    assert (attempt.outcome, attempt.job.status) == ("SUCCEEDED", "SUCCEEDED")
    assert keys.decode(attempt.job.result or "") == keys.NotKept(attempt.reason)
    assert attempt.reason.startswith("result was not stored: ")
    assert why in attempt.reason
    assert attempt.job.failures == 0
    assert run_pending() == 0


@job(key="deep:{tag}", unique_for=FOREVER)
def return_endless(*, tag: str) -> Any:
    endless: list[Any] = []
    endless.append(endless)
    return endless


def test_result_that_contains_itself_is_a_success_without_one() -> None:
    attempt = run(return_endless, tag="a")
    assert attempt.job.status == "SUCCEEDED"
    assert attempt.reason.startswith("result was not stored: ")


def test_success_of_a_key_for_a_while_holds_it_from_its_end() -> None:
    attempt = run(jobs.record_hourly, tag="a")
    assert attempt.job.unique_until is not None
    held = (attempt.job.unique_until - lifecycle.database_now()).total_seconds()
    assert 3500 < held <= 3600


@job(key="centuries:{tag}", unique_for=FOREVER)
def replaced_by_centuries(*, tag: str) -> None: ...


@pytest.mark.parametrize("days", [400, 3_000_000])
def test_success_holds_its_key_for_any_window_that_the_decorator_takes(days: int) -> None:
    try:
        made = job(key="long:{tag}", unique_for=timedelta(days=days), name="tests.long")(
            replaced_by_centuries.func
        )
    except TypeError:
        return  # refused where it was written
    try:
        attempt = run(made, tag="a")
        assert (attempt.outcome, attempt.job.status) == ("SUCCEEDED", "SUCCEEDED")
        assert attempt.job.unique_until is not None
        assert not made.enqueue(tag="a").created
    finally:
        registry.forget("tests.long")


# ---- failure


def test_job_that_fails_is_retried_until_its_budget_is_used() -> None:
    row = jobs.fail.enqueue(tag="a").job
    for failures, status in enumerate(["RETRYING", "RETRYING", "DEAD"], 1):
        alter(row, run_after=DbNow())
        assert deliver(row) == status
        assert job_row(row).failures == failures
    assert ledger() == ["1", "2", "3"]  # max_attempts=3, exactly
    alter(row, run_after=DbNow())
    assert deliver(row) is None
    assert run_pending() == 0
    dead = job_row(row)
    assert dead.error == "builtins.ValueError: attempt 3 of a"
    assert dead.finished_at is not None
    assert set(JobAttempt.objects.values_list("outcome", flat=True)) == {"FAILED"}


def test_job_that_fails_at_first_succeeds_later_and_loses_its_error() -> None:
    row = jobs.fail.enqueue(tag="a", times=1).job
    deliver(row)
    assert job_row(row).error != ""
    until(run_pending, what="the retry is due after its backoff of 0.1 s")
    assert (job_row(row).status, job_row(row).error) == ("SUCCEEDED", "")


def test_row_may_allow_more_attempts_than_its_job() -> None:
    row = jobs.fail_for_good.enqueue(tag="a").job
    alter(row, max_attempts=2)
    assert deliver(row) == Status.RETRYING
    alter(row, run_after=DbNow())
    assert deliver(row) == Status.DEAD


def test_snoozes_and_losses_do_not_use_up_the_attempts() -> None:
    row = jobs.fail_for_good.enqueue(tag="a").job
    lifecycle.snooze(claimed(row), after=0)
    lifecycle.bury(claimed(row).fence, "dead")
    assert deliver(row) == Status.DEAD
    assert (job_row(row).attempts, job_row(row).failures, job_row(row).lost_count) == (3, 1, 1)


@job(
    key="backoff:{tag}",
    unique_for=FOREVER,
    max_attempts=50,
    backoff=Exponential(base=10, factor=2, cap=60, jitter=False),
)
def fail_with_backoff(*, tag: str) -> None:
    raise ValueError(tag)


def test_waits_between_attempts_grow_up_to_the_cap() -> None:
    row = fail_with_backoff.enqueue(tag="a").job
    waits = []
    for _ in range(5):
        alter(row, run_after=DbNow())
        deliver(row)
        waits.append((job_row(row).run_after - lifecycle.database_now()).total_seconds())
    assert waits == pytest.approx([10, 20, 40, 60, 60], abs=2)


@pytest.mark.parametrize(
    "answer", [float("nan"), float("inf"), 1e300, -1, None, "soon", ZeroDivisionError()], ids=repr
)
def test_backoff_that_is_broken_does_not_keep_a_failure_from_being_recorded(answer: Any) -> None:
    def broken(failures: int, uniform: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    made = job(key="b:{tag}", unique_for=FOREVER, name="tests.broken", backoff=broken)(
        fail_with_backoff.func
    )
    try:
        attempt = run(made, tag="a")
        assert (attempt.outcome, attempt.job.status) == ("FAILED", "RETRYING")
        wait = attempt.job.run_after - lifecycle.database_now()
        assert timedelta(seconds=-60) < wait <= timedelta(days=366)
    finally:
        registry.forget("tests.broken")


def test_attempt_that_failed_keeps_what_was_raised_as_text() -> None:
    attempt = run(jobs.fail_for_good, tag="a")
    assert attempt.error_class == "builtins.ValueError"
    assert attempt.error_message == "no luck with a"
    assert "fail_for_good" in attempt.traceback
    assert attempt.outcome == "FAILED"


@pytest.mark.parametrize("specimen", [jobs.give_up, jobs.retry_on_os_errors], ids=name_of)
def test_error_that_is_not_to_be_retried_makes_the_job_dead_at_once(
    specimen: Job[..., Any],
) -> None:
    attempt = run(specimen, tag="a")
    assert (attempt.outcome, attempt.job.status, attempt.job.failures) == ("FAILED", "DEAD", 1)


@pytest.mark.parametrize(
    ("what", "error_class", "message"),
    [
        ("nul", "builtins.ValueError", "a\\x00b \\ud800"),
        ("str", "tests.app.jobs._MuteError", "<str() raised RuntimeError>"),
        ("recursion", "builtins.RecursionError", "maximum recursion depth"),
        ("group", "builtins.ExceptionGroup", "many (2 sub-exceptions)"),
        ("huge", "builtins.ValueError", "xxx"),
    ],
)
def test_odd_error_is_recorded_as_a_failure(what: str, error_class: str, message: str) -> None:
    attempt = run(jobs.raise_oddly, tag="a", what=what)
    assert (attempt.outcome, attempt.job.status) == ("FAILED", "DEAD")
    assert attempt.error_class == error_class
    assert attempt.error_message.startswith(message)
    assert len(attempt.error_message) <= 2_000
    assert 0 < len(attempt.traceback) <= 16 * 1024
    assert "\x00" not in attempt.traceback


@job(key="chain:{tag}", unique_for=FOREVER, max_attempts=1)
def raise_oddest(*, tag: str, what: str) -> None:
    if what == "needs arguments":
        raise _NeedyError(1, 2)
    if what == "local class":

        class LocalError(Exception):
            pass

        raise LocalError("local")
    if what == "holds a lock":
        raise ValueError(threading.Lock())
    error = ValueError("first")
    for number in range(500):
        try:
            raise KeyError(number) from error
        except KeyError as caught:
            error = caught  # type: ignore[assignment]
    raise error


class _NeedyError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize("what", ["needs arguments", "local class", "holds a lock", "long chain"])
def test_error_that_could_not_be_pickled_is_recorded_as_a_failure(what: str) -> None:
    attempt = run(raise_oddest, tag="a", what=what)
    assert (attempt.outcome, attempt.job.status) == ("FAILED", "DEAD")
    assert attempt.error_message
    assert len(attempt.traceback) <= 16 * 1024


@pytest.mark.parametrize("how", ["sys.exit(0)", "sys.exit(1)", "GeneratorExit", "BaseException"])
def test_job_that_leaves_by_a_base_exception_has_failed(how: str) -> None:
    attempt = run(jobs.leave, tag="a", how=how)
    assert (attempt.outcome, attempt.job.status) == ("FAILED", "DEAD")
    assert ledger() == [how]


@job(key="interrupt:{tag}", unique_for=FOREVER)
def interrupt(*, tag: str) -> None:
    if current_attempt().number == 1:
        raise KeyboardInterrupt


def test_keyboard_interrupt_is_passed_on_and_the_job_waits_again_uncounted() -> None:
    row = interrupt.enqueue(tag="a").job
    with pytest.raises(KeyboardInterrupt):
        deliver(row)
    assert JobAttempt.objects.get().outcome == "INTERRUPTED"
    assert (job_row(row).status, job_row(row).failures) == ("PENDING", 0)
    assert deliver(row) == Status.SUCCEEDED


# ---- wishes


@pytest.mark.parametrize(
    ("what", "status", "outcome", "failures"),
    [
        ("retry", "RETRYING", "FAILED", 1),
        ("snooze", "RETRYING", "SNOOZED", 0),
        ("cancel", "CANCELLED", "CANCELLED", 0),
    ],
)
def test_job_that_asks_for_something_gets_it(
    what: str, status: str, outcome: str, failures: int
) -> None:
    attempt = run(jobs.wish, tag="a", what=what)
    row = attempt.job
    assert (row.status, attempt.outcome, row.failures) == (status, outcome, failures)
    if what == "cancel":
        assert (row.error, attempt.reason) == ("no need", "no need")
        return
    wait = (row.run_after - lifecycle.database_now()).total_seconds()
    assert 50 < wait <= 60
    alter(row, run_after=DbNow())
    assert deliver(row) == Status.SUCCEEDED


@pytest.mark.parametrize(
    ("asked", "status", "outcome"),
    [
        ({"cancel_requested": True}, "CANCELLED", "CANCELLED"),
        ({"hold_requested": True}, "HELD", "HELD"),
    ],
    ids=["cancel", "hold"],
)
def test_job_that_checks_obeys_what_an_operator_asked(
    asked: dict[str, bool], status: str, outcome: str
) -> None:
    attempt = run(check_in, tag="a", asked=asked)
    assert (attempt.job.status, attempt.outcome) == (status, outcome)
    assert attempt.job.failures == 0
    assert "on request" in attempt.job.error


@job(key="check:{tag}", unique_for=FOREVER)
def check_in(*, tag: str, asked: dict[str, bool]) -> None:
    alter(current_attempt().job, **asked)
    for _ in range(2_000):
        current_attempt().check()
        threading.Event().wait(0.01)
    raise AssertionError("check() did not notice within 20 s")


# ---- what does not fit


@dataclass
class Picky:
    """A type that refuses today what it took yesterday."""

    why: str

    def __post_init__(self) -> None:
        if self.why == "assert":
            raise AssertionError(self.why)
        raise SystemExit(self.why)


def test_name_that_no_code_has_is_held_and_runs_once_the_code_is_there() -> None:
    row = jobs.record.enqueue(tag="a").job
    alter(row, name="testapp.not_deployed_yet")
    assert deliver(row) == Status.HELD
    held = job_row(row)
    assert "testapp.not_deployed_yet" in held.error
    assert (held.failures, JobAttempt.objects.get().outcome) == (0, "HELD")
    alter(row, name="testapp.record")
    lifecycle.unhold(row.pk, held.version)
    assert run_pending() == 1
    assert job_row(row).status == "SUCCEEDED"


@pytest.mark.parametrize(
    "args",
    [
        {"tag": "a", "gone": 1},
        {"text": "tag is missing"},
        {"tag": {"$": "enum", "t": "no.such.module:Colour", "v": "RED"}},
        {"tag": {"$": "decimal", "v": "not a number"}},
        {"tag": {"$": "dataclass", "t": "tests.test_runner:Picky", "v": {"why": "assert"}}},
        {"tag": {"$": "dataclass", "t": "tests.test_runner:Picky", "v": {"why": "exit"}}},
    ],
    ids=["one too many", "one missing", "unknown type", "broken value", "picky type", "exit"],
)
def test_arguments_that_no_longer_fit_are_held_and_run_once_the_code_takes_them(args: Any) -> None:
    row = jobs.record.enqueue(tag="a").job
    alter(row, args=json.dumps(args))
    assert deliver(row) == Status.HELD
    held = job_row(row)
    assert "no longer fit" in held.error
    assert (held.failures, JobAttempt.objects.get().outcome) == (0, "HELD")
    assert ledger() == []
    alter(row, args=keys.encode({"tag": "a"}))
    lifecycle.unhold(row.pk, held.version)
    assert run_pending() == 1
    assert ledger() == [""]


def test_argument_that_the_code_has_gained_since_takes_its_default() -> None:
    row = jobs.record.enqueue(tag="a", text="x").job
    alter(row, args=keys.encode({"tag": "a"}))
    assert deliver(row) == Status.SUCCEEDED
    assert ledger() == [""]


# ---- messages


def test_message_for_a_row_that_is_gone_does_nothing() -> None:
    assert runner.deliver(2**40, 1, owner="me", lock=False) is None


def test_message_that_comes_twice_runs_once_and_the_second_is_told_as_duplicate() -> None:
    heard: list[str] = []

    def hear(cause: str, **_: Any) -> None:
        heard.append(cause)

    row = jobs.record.enqueue(tag="a").job
    signals.duplicate_detected.connect(hear)
    try:
        runner.run([[row.pk, 1], [row.pk, 1]])
    finally:
        signals.duplicate_detected.disconnect(hear)
    assert ledger() == [""]
    assert heard == ["redelivery"]


def test_message_of_several_rows_runs_each() -> None:
    rows = [jobs.record.enqueue(tag=tag).job for tag in "abc"]
    runner.run([[row.pk, row.generation] for row in rows])
    assert [job_row(row).status for row in rows] == ["SUCCEEDED"] * 3
    owners = JobAttempt.objects.order_by("pk").values_list("owner", flat=True)
    first = owners[0].partition(".")[0]
    assert list(owners) == [f"{first}.{n}" for n in range(3)]


@pytest.mark.parametrize(
    "forged",
    ["os.system", {"pk": 1}, [1, 1], [[1]], [[1, 1, 1]], [["1", 1]], [[True, 1]], [[-1, 1]],
     [[2**63, 1]], None, [[1, 99]] * 1_001],
    ids=lambda forged: str(forged)[:20],
)  # fmt: skip
def test_message_that_names_no_rows_is_refused(forged: Any) -> None:
    with pytest.raises(ArgumentError, match="is no list of"):
        runner.run(forged)


def test_worker_under_debug_keeps_no_statement_of_earlier_jobs(settings: Any) -> None:
    settings.DEBUG = True
    kept = []
    for tag in "abc":
        runner.run([[jobs.record.enqueue(tag=tag).job.pk, 1]])
        kept.append(len(connection.queries))
    assert kept[2] == kept[1] > 0


@committing
def test_delivery_takes_the_lock_and_frees_it(transactional_db: None) -> None:
    row = jobs.record.enqueue(tag="a").job
    held: list[int] = []

    def count(**_: Any) -> None:
        held.append(lock_count())

    signals.attempt_started.connect(count)
    locks.forget_clients()
    try:
        with override_settings(DEDUPJOBS={"LOCK_TIMEOUT": 10}):  # on a busy machine as well
            assert runner.deliver(row.pk, 1, owner="me") == Status.SUCCEEDED
    finally:
        signals.attempt_started.disconnect(count)
        locks.forget_clients()
    assert (held, lock_count()) == ([1], 0)


def lock_count() -> int:
    with redis.Redis.from_url(settings.CACHE_URL) as client:
        return len(client.keys("*:lock:*"))


def test_receivers_that_fail_harm_no_job() -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("a receiver's own fault")

    told = (signals.attempt_started, signals.attempt_ended, signals.job_dead)
    for each in told:
        each.connect(fail)
    try:
        assert run(jobs.record, tag="a").job.status == "SUCCEEDED"
        assert run(jobs.fail_for_good, tag="a").job.status == "DEAD"
    finally:
        for each in told:
            each.disconnect(fail)


# ---- the attempt, seen from inside


@job(key="inside:{tag}", unique_for=None, max_attempts=9, backoff=0.1)
def look_around(*, tag: str, fails: bool = False) -> list[Any]:
    attempt = current_attempt()
    seen = [
        attempt.number,
        attempt.fence,
        attempt.idempotency_key(),
        attempt.idempotency_key("card"),
        attempt.job.pk,
    ]
    if fails and attempt.number == 1:
        jobs.note(tag, keys.encode_value(seen))
        raise ValueError("later")
    return seen


def test_idempotency_key_is_equal_over_attempts_and_new_in_the_next_generation() -> None:
    row = look_around.enqueue(tag="a", fails=True).job
    deliver(row)
    first = keys.decode(ledger()[0])
    alter(row, run_after=DbNow())
    deliver(row)
    second = keys.decode(job_row(row).result or "")
    look_around.enqueue(tag="a", fails=True)
    deliver(row)
    third = keys.decode(job_row(row).result or "")
    assert (first[0], second[0], third[0]) == (1, 2, 3)
    assert first[1] < second[1] < third[1]
    assert first[2:4] == second[2:4]
    assert first[2] != first[3]
    assert not set(second[2:4]) & set(third[2:4])
    assert first[4] == row.pk


def test_current_attempt_outside_a_job_is_an_error_that_says_why() -> None:
    with pytest.raises(NoCurrentAttempt, match="only inside a job"):
        current_attempt()
    run(jobs.record, tag="a")
    with pytest.raises(NoCurrentAttempt):
        current_attempt()


# ---- time-outs


@committing
@pytest.mark.parametrize("how", ["sleep", "swallow Exception"])
def test_job_that_runs_too_long_is_cut_off(transactional_db: None, how: str) -> None:
    attempt = run(jobs.hang, tag="a", how=how)
    assert (attempt.outcome, attempt.job.status) == ("TIMED_OUT", "DEAD")
    assert "0.5 s" in attempt.error_message
    assert attempt.run_time is not None
    assert 0.4 < attempt.run_time < 5
    assert ledger() == [how]


@needs_server
@committing
def test_job_that_waits_in_sql_too_long_is_cut_off_and_its_query_is_cancelled(
    transactional_db: None,
) -> None:
    attempt = run(jobs.hang, tag="a", how="sql")
    assert (attempt.outcome, attempt.job.status) == ("TIMED_OUT", "DEAD")
    query = jobs.LONG_QUERY[connection.vendor]
    until(lambda: not sessions.running(query), what="the query has ended on the server")


@job(key="deaf:{tag}", unique_for=FOREVER, timeout=0.5, max_attempts=1)
def query_with_a_deaf_driver(*, tag: str) -> None:
    """Let no signal in while the query runs, as mysqlclient does and PyMySQL does not."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT SLEEP(20)")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})


@pytest.mark.skipif(connection.vendor != "mysql", reason="the other drivers let signals in")
@committing
def test_job_that_waits_in_sql_too_long_is_cut_off_although_its_driver_lets_no_signal_in(
    transactional_db: None,
) -> None:
    attempt = run(query_with_a_deaf_driver, tag="a")
    assert (attempt.outcome, attempt.job.status) == ("TIMED_OUT", "DEAD")
    assert attempt.run_time is not None
    assert attempt.run_time < 10


@committing
def test_alarm_of_somebody_else_goes_on_after_a_job_that_timed_out(transactional_db: None) -> None:
    # pytest-timeout's, as RQ's would be.
    handler = signal.getsignal(signal.SIGALRM)
    before, _ = signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        run(jobs.hang, tag="a", how="sleep")
        assert 40 < signal.getitimer(signal.ITIMER_REAL)[0] < 60
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, before)


@job(key="late:{tag}", unique_for=FOREVER, timeout=0.2, max_attempts=3, backoff=0.1)
def time_out_once(*, tag: str) -> None:
    if current_attempt().number == 1:
        threading.Event().wait(30)


@job(key="final:{tag}", unique_for=FOREVER, timeout=0.2, give_up_on=(TimeoutError,))
def time_out_for_good(*, tag: str) -> None:
    threading.Event().wait(30)


@committing
def test_time_out_is_retried(transactional_db: None) -> None:
    attempt = run(time_out_once, tag="a")
    assert (attempt.outcome, attempt.job.status) == ("TIMED_OUT", "RETRYING")
    until(run_pending, what="the retry is due")
    assert job_row(attempt.job).status == "SUCCEEDED"


@committing
def test_time_out_that_the_job_gives_up_on_makes_it_dead(transactional_db: None) -> None:
    attempt = run(time_out_for_good, tag="a")
    assert (attempt.outcome, attempt.job.status, attempt.job.failures) == ("TIMED_OUT", "DEAD", 1)


@job(key="swallows:{tag}", unique_for=FOREVER, timeout=0.2)
def swallow_timeout(*, tag: str) -> str:
    try:
        threading.Event().wait(30)
    except BaseException:
        return "swallowed"
    return "not cut off"


@committing
def test_job_that_swallows_its_time_out_and_returns_has_succeeded(transactional_db: None) -> None:
    attempt = run(swallow_timeout, tag="a")
    assert attempt.job.status == "SUCCEEDED"
    assert keys.decode(attempt.job.result or "") == "swallowed"


@committing
def test_atomic_job_that_swallows_its_time_out_is_rolled_back(transactional_db: None) -> None:
    attempt = run(jobs.swallow_timeout_atomically, tag="a")
    assert (attempt.outcome, attempt.job.status) == ("TIMED_OUT", "DEAD")
    assert ledger() == []


# ---- atomic jobs


@committing
def test_atomic_job_commits_its_effect_with_its_success(transactional_db: None) -> None:
    attempt = run(jobs.record_atomically, tag="a")
    assert attempt.job.status == "SUCCEEDED"
    assert ledger() == [""]


@committing
def test_atomic_job_that_fails_leaves_no_effect(transactional_db: None) -> None:
    attempt = run(jobs.record_atomically, tag="a", fails=True)
    assert (attempt.outcome, attempt.job.status) == ("FAILED", "RETRYING")
    assert attempt.error_message == "after the effect"
    assert ledger() == []


@committing
@pytest.mark.parametrize("point", ["settle.before", "settle.between", "settle.uncommitted"])
def test_atomic_job_whose_connection_breaks_while_it_settles_is_interrupted_and_runs_once(
    transactional_db: None, point: str
) -> None:
    row = jobs.record_atomically.enqueue(tag="a").job
    with at(point, break_connection):
        assert deliver(row) == Status.PENDING
    assert JobAttempt.objects.get().outcome == "INTERRUPTED"
    assert (job_row(row).failures, ledger()) == (0, [])
    assert deliver(row) == Status.SUCCEEDED
    assert ledger() == [""]


def break_connection() -> None:
    raise OperationalError("the connection is gone")


@job(key="refused:{tag}", unique_for=FOREVER, atomic=True, timeout=15, max_attempts=1)
def break_rule_at_commit(*, tag: str) -> None:
    """Leave a row that points nowhere, which the database refuses at COMMIT."""
    jobs.note(tag)
    JobAttempt.objects.filter(owner="victim").update(job_id=2**40)


@committing
def test_atomic_job_whose_commit_the_database_refuses_has_failed(transactional_db: None) -> None:
    claimed(jobs.record.enqueue(tag="victim").job, owner="victim")
    attempt = run(break_rule_at_commit, tag="a")
    assert (attempt.outcome, attempt.job.status) == ("FAILED", "DEAD")
    assert "IntegrityError" in attempt.error_class
    assert ledger() == []


@needs_row_locks
@committing
def test_atomic_job_whose_lease_was_lost_leaves_no_effect_and_is_noted_late(
    transactional_db: None,
) -> None:
    row = atomic_but_slow.enqueue(tag="a").job
    assert deliver(row) is None
    attempt = JobAttempt.objects.get()
    assert (attempt.outcome, attempt.late_ending) == ("LOST", "SUCCEEDED")
    assert ledger() == []
    assert job_row(row).status == "RETRYING"


@needs_row_locks
@committing
def test_atomic_job_that_swallows_a_deadlock_has_failed_and_leaves_no_effect(
    transactional_db: None,
) -> None:
    """MariaDB rolls the whole transaction back, and takes what follows as another one."""
    ours, theirs = (Ledger.objects.create(tag=tag).pk for tag in ("ours", "theirs"))
    attempt = run(swallow_deadlock, tag="a", ours=ours, theirs=theirs)
    assert (attempt.outcome, attempt.job.status, attempt.job.failures) == ("FAILED", "RETRYING", 1)
    assert attempt.error_class in (
        "dedupjobs.exceptions.TransactionLost",  # MariaDB's, from us
        "django.db.utils.InternalError",  # PostgreSQL's: it takes nothing more
    )
    assert ledger() == []
    alter(attempt.job, run_after=DbNow())
    assert deliver(attempt.job) == Status.SUCCEEDED
    assert ledger() == ["effect"]


@job(key="deadlock:{tag}", unique_for=FOREVER, atomic=True, timeout=15, backoff=0.1)
def swallow_deadlock(*, tag: str, ours: int, theirs: int) -> None:
    """Write, be a deadlock's victim at first, and go on as if nothing had happened."""
    jobs.note(tag, "effect")
    if current_attempt().number > 1:
        return
    lock(ours)
    has_theirs = threading.Event()
    rival = Side(lock_both, theirs, ours, has_theirs)
    assert has_theirs.wait(10)
    sessions.until_one_waits()
    with suppress(OperationalError):
        lock(theirs)
        raise AssertionError("the rival was the victim")
    rival.result()


def lock_both(first: int, second: int, has_first: threading.Event) -> None:
    """Lock both; whoever meets us in the opposite order is the victim."""
    with transaction.atomic():
        if connection.vendor == "postgresql":  # which ends the one that loses patience first
            connection.cursor().execute("SET LOCAL deadlock_timeout = '1min'")
        Ledger.objects.bulk_create(Ledger(tag="weighty") for _ in range(100))
        lock(first)
        has_first.set()
        lock(second)


def lock(pk: int) -> None:
    assert list(Ledger.objects.select_for_update().filter(pk=pk))


@job(key="slow:{tag}", unique_for=FOREVER, atomic=True, timeout=15, name="tests.atomic_but_slow")
def atomic_but_slow(*, tag: str) -> None:
    """Be given up for lost by another connection before the first write."""
    Side(lifecycle.bury, current_attempt().fence, "taken").result()
    jobs.note(tag)


# ---- a lease that is lost while the code runs


@job(key="zombie:{tag}", unique_for=FOREVER, max_attempts=1)
def lose_lease(*, tag: str, then: str) -> str:
    """Be given up for dead in mid-run, then go on as if nothing had happened."""
    attempt = current_attempt()
    if attempt.number > 1:
        jobs.note(tag, "second")
        return "second"
    lifecycle.bury(attempt.fence, "taken for dead")
    if then == "second runs":
        deliver(attempt.job)
    elif then == "second is claimed":
        claimed(attempt.job, owner="second")
    elif then == "fail":
        raise ValueError("late")
    elif then == "exit":
        raise SystemExit
    return "first"


@pytest.mark.parametrize(
    ("then", "late"), [("return", "SUCCEEDED"), ("fail", "FAILED"), ("exit", "FAILED")]
)
def test_attempt_that_was_given_up_writes_nothing_but_its_late_ending(then: str, late: str) -> None:
    row = lose_lease.enqueue(tag="a", then=then).job
    assert deliver(row) is None
    attempt = JobAttempt.objects.get()
    assert (attempt.outcome, attempt.late_ending) == ("LOST", late)
    assert attempt.reason == "taken for dead"
    after = job_row(row)
    assert (after.status, after.result, after.failures) == ("RETRYING", None, 0)


def test_zombie_that_ends_after_its_successor_changes_nothing() -> None:
    row = lose_lease.enqueue(tag="a", then="second runs").job
    assert deliver(row) is None
    assert keys.decode(job_row(row).result or "") == "second"
    assert list(JobAttempt.objects.order_by("number").values_list("outcome", "late_ending")) == [
        ("LOST", "SUCCEEDED"),
        ("SUCCEEDED", ""),
    ]


def test_zombie_that_ends_before_its_successor_changes_nothing() -> None:
    row = lose_lease.enqueue(tag="a", then="second is claimed").job
    assert deliver(row) is None
    assert job_row(row).status == "RUNNING"
    [second] = lifecycle.claimed_by("second")
    assert lifecycle.complete(second, '"second"', unique_for=FOREVER) == Status.SUCCEEDED


@job(key="vigilant:{tag}", unique_for=FOREVER)
def check_after_loss(*, tag: str) -> None:
    lifecycle.bury(current_attempt().fence, "taken for dead")
    for _ in range(2_000):
        current_attempt().check()
        threading.Event().wait(0.01)
    raise AssertionError("check() did not notice within 20 s")


def test_job_that_checks_stops_when_its_lease_is_lost() -> None:
    endings: list[Any] = []

    def hear(ending: Any, status: Any, **_: Any) -> None:
        endings.append((ending, status))

    row = check_after_loss.enqueue(tag="a").job
    signals.attempt_ended.connect(hear)
    try:
        assert deliver(row) is None
    finally:
        signals.attempt_ended.disconnect(hear)
    assert endings == [(Lapsed(), None)]
    assert JobAttempt.objects.get().outcome == "LOST"


@committing
def test_job_that_runs_for_many_leases_beats_and_keeps_its_attempt(
    transactional_db: None, tmp_path: Any
) -> None:
    row = beat_long.enqueue(tag="a").job
    assert deliver(row) == Status.SUCCEEDED
    assert JobAttempt.objects.get().outcome == "SUCCEEDED"


@job(key="long:{tag}", unique_for=FOREVER, lease=0.6)
def beat_long(*, tag: str) -> None:
    """Run until the lease has been renewed five times, and be never expired on the way."""
    fence = current_attempt().fence
    seen = set()

    def five_beats() -> bool:
        attempt = JobAttempt.objects.get(pk=fence)
        seen.add(attempt.beat_at)
        return len(seen) > 5

    until(five_beats, what="five beats")


# ---- children


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@committing
@pytest.mark.parametrize("how", ["return", "sys.exit", "raise", "subprocess"])
def test_child_that_the_job_has_forked_changes_nothing(transactional_db: None, how: str) -> None:
    attempt = run(jobs.fork, tag="a", how=how)
    assert (attempt.outcome, attempt.job.status) == ("SUCCEEDED", "SUCCEEDED")
    assert ledger() == ["parent"]
    assert JobAttempt.objects.count() == 1
    assert attempt.late_ending == ""


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@committing
def test_child_that_an_atomic_job_has_forked_changes_nothing(transactional_db: None) -> None:
    attempt = run(fork_atomically, tag="a")
    assert attempt.job.status == "SUCCEEDED"
    assert ledger() == ["parent"]


@job(key="forks:{tag}", unique_for=FOREVER, atomic=True, timeout=15)
def fork_atomically(*, tag: str) -> None:
    jobs.fork.func(tag=tag, how="return")


# ---- the database goes away


@pytest.fixture
def reconnected(transactional_db: None) -> Iterator[None]:
    """Leave no broken connection to the next test."""
    yield
    connection.close()


@job(key="severed:{tag}", unique_for=FOREVER, backoff=0.1)
def lose_connection(*, tag: str, how: str) -> str:
    """Lose the connection in mid-run, and notice it or not."""
    if current_attempt().number == 1:
        sessions.terminate(sessions.own())
        if how == "query":
            jobs.note(tag)
    return how


@job(key="severed:{tag}", unique_for=FOREVER, atomic=True, timeout=15)
def lose_connection_atomically(*, tag: str, how: str) -> str:
    jobs.note(tag)
    return lose_connection.func(tag=tag, how=how)


@needs_server
@committing
def test_connection_that_is_killed_between_two_jobs_is_replaced(reconnected: None) -> None:
    rows = [jobs.record.enqueue(tag=tag).job for tag in "ab"]
    first, second = [(row.pk, row.generation) for row in rows]
    assert runner.deliver(*first, owner="one", lock=False) == Status.SUCCEEDED
    sessions.terminate(sessions.own())
    assert runner.deliver(*second, owner="two", lock=False) == Status.SUCCEEDED
    assert [job_row(row).attempts for row in rows] == [1, 1]
    assert ledger("b") == [""]


@needs_server
@committing
@pytest.mark.parametrize("first", [True, False], ids=["first message", "later message"])
def test_connection_that_is_killed_before_a_message_is_looked_at_is_replaced(
    reconnected: None, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    hardened = threading.Event()
    if not first:
        hardened.set()
    monkeypatch.setattr(hardening, "_hardened", hardened)  # as in a process that has just begun
    row = jobs.record.enqueue(tag="a").job
    sessions.terminate(sessions.own())
    runner.run([[row.pk, 1]])
    assert job_row(row).status == "SUCCEEDED"


@needs_server
@committing
def test_connection_that_is_killed_in_mid_job_is_replaced_to_write_the_success(
    reconnected: None,
) -> None:
    attempt = run(lose_connection, tag="a", how="nothing")
    assert (attempt.outcome, attempt.job.status, attempt.job.attempts) == (
        "SUCCEEDED",
        "SUCCEEDED",
        1,
    )


@needs_server
@committing
def test_connection_that_is_killed_under_a_jobs_query_is_a_failure_that_is_recorded(
    reconnected: None,
) -> None:
    attempt = run(lose_connection, tag="a", how="query")
    assert (attempt.outcome, attempt.job.status, attempt.job.failures) == ("FAILED", "RETRYING", 1)
    assert "OperationalError" in attempt.error_class
    until(run_pending, what="the retry is due")
    assert job_row(attempt.job).status == "SUCCEEDED"


@needs_server
@committing
@pytest.mark.parametrize(
    ("how", "outcome"), [("nothing", {"INTERRUPTED"}), ("query", {"FAILED", "INTERRUPTED"})]
)
def test_connection_that_is_killed_under_an_atomic_job_leaves_no_effect(
    reconnected: None, how: str, outcome: set[str]
) -> None:
    attempt = run(lose_connection_atomically, tag="a", how=how)
    assert attempt.outcome in outcome
    assert ledger() == []
    alter(attempt.job, run_after=DbNow())
    assert deliver(attempt.job) == Status.SUCCEEDED
    assert ledger() == [""]


@committing
@pytest.mark.parametrize("point", ["claim.before", "claim.uncommitted", "claim.committed"])
@pytest.mark.usefixtures("step_by_step")
def test_claim_that_breaks_at_any_point_is_made_once(reconnected: None, point: str) -> None:
    row = jobs.record.enqueue(tag="a").job
    with at(point, break_connection):
        assert deliver(row) == Status.SUCCEEDED
    assert JobAttempt.objects.count() == 1
    assert ledger() == [""]


@committing
@pytest.mark.parametrize(
    "point", ["settle.before", "settle.between", "settle.uncommitted", "settle.committed"]
)
@pytest.mark.parametrize(
    ("specimen", "status"), [(jobs.record, "SUCCEEDED"), (jobs.fail, "RETRYING")], ids=name_of
)
@pytest.mark.usefixtures("step_by_step")
def test_ending_whose_writing_breaks_at_any_point_is_written_once(
    reconnected: None, point: str, specimen: Job[..., Any], status: str
) -> None:
    row = specimen.enqueue(tag="a").job
    with at(point, break_connection):
        assert deliver(row) == status
    after = job_row(row)
    assert (after.status, after.attempts) == (status, 1)
    assert after.failures == (0 if status == "SUCCEEDED" else 1)
    assert len(ledger()) == 1
    assert JobAttempt.objects.get().late_ending == ""


@needs_server
@committing
@pytest.mark.usefixtures("step_by_step")
def test_claim_whose_commit_has_no_reply_is_found_by_its_owner(reconnected: None) -> None:
    row = jobs.record.enqueue(tag="a").job
    with live.through_proxy() as proxy:
        with at("claim.uncommitted", lambda: proxy.swallow_reply_to(b"COMMIT")):
            assert deliver(row) == Status.SUCCEEDED
        assert proxy.swallowed.is_set()
    assert JobAttempt.objects.count() == 1
    assert ledger() == [""]


@needs_server
@committing
@pytest.mark.parametrize("specimen", [jobs.record, jobs.record_atomically], ids=name_of)
@pytest.mark.usefixtures("step_by_step")
def test_success_whose_commit_has_no_reply_is_written_once(
    reconnected: None, specimen: Job[..., Any]
) -> None:
    row = specimen.enqueue(tag="a").job
    with live.through_proxy() as proxy:
        with at("settle.uncommitted", lambda: proxy.swallow_reply_to(b"COMMIT")):
            assert deliver(row) == Status.SUCCEEDED
        assert proxy.swallowed.is_set()
    assert (JobAttempt.objects.get().outcome, ledger()) == ("SUCCEEDED", [""])


@needs_server
@committing
@pytest.mark.parametrize(
    ("specimen", "status", "outcome"),
    [
        (jobs.record, "SUCCEEDED", "SUCCEEDED"),
        (jobs.record_atomically, "PENDING", "INTERRUPTED"),
    ],
    ids=name_of,
)
@pytest.mark.usefixtures("step_by_step")
def test_success_whose_commit_never_arrived_is_written_again_or_rolled_back(
    reconnected: None, specimen: Job[..., Any], status: str, outcome: str
) -> None:
    row = specimen.enqueue(tag="a").job
    own = sessions.own()
    with at("settle.uncommitted", lambda: sessions.terminate(own)):
        assert deliver(row) == status
    assert JobAttempt.objects.get().outcome == outcome
    if status == "PENDING":
        assert ledger() == []
        assert deliver(row) == Status.SUCCEEDED
    assert ledger() == [""]


@pytest.fixture
def short_lock_waits(transactional_db: None) -> Iterator[None]:
    """Let the database end each wait for a lock after a second."""

    def limit(**_: Any) -> None:
        sessions.limit_lock_waits(1)

    connection_created.connect(limit)
    connection.close()
    yield
    connection_created.disconnect(limit)
    connection.close()


@job(key="brief:{tag}", unique_for=FOREVER, lease=0.6)
def record_briefly(*, tag: str) -> None:
    jobs.note(tag)


@job(key="brief:{tag}", unique_for=FOREVER, lease=0.6, atomic=True, timeout=0.1)
def record_briefly_atomically(*, tag: str) -> None:
    jobs.note(tag)


@needs_row_locks
@committing
@pytest.mark.parametrize(
    ("specimen", "status", "outcome"),
    [
        (record_briefly, "SUCCEEDED", "SUCCEEDED"),
        (record_briefly_atomically, "PENDING", "INTERRUPTED"),
    ],
    ids=name_of,
)
def test_ending_that_waits_for_its_row_longer_than_the_database_lets_it_is_tried_again(
    short_lock_waits: None, specimen: Job[..., Any], status: str, outcome: str
) -> None:
    """MariaDB ends a wait after 50 s by itself, PostgreSQL where lock_timeout is set."""
    # More than the check for SQLite allows: what is slow here is not its function.
    longer = Wish(kind="timeout", aim="job", target=specimen.name, value=15)
    levers.add(longer, by="me", reason="test")
    row = specimen.enqueue(tag="a").job
    business = Held(row)
    troubles: list[Exception] = []

    def hear(error: Exception, **_: Any) -> None:
        troubles.append(error)
        if len(troubles) == 3:
            business.commit()

    signals.settle_troubled.connect(hear)
    try:
        with at("user_code.after", business.__enter__):
            assert deliver(row) == status
    finally:
        signals.settle_troubled.disconnect(hear)
        business.commit()
    assert len(troubles) == 3
    assert JobAttempt.objects.get().outcome == outcome
    assert ledger() == ([""] if status == "SUCCEEDED" else [])


# ---- run_pending, inside a test's own transaction


def test_run_pending_runs_what_is_due_inside_a_test_case_and_counts_it() -> None:
    jobs.record.enqueue(tag="a")
    alter(jobs.record.enqueue(tag="b").job, run_after=DbNow(60))
    jobs.record_always.enqueue(tag="c")
    assert connection.in_atomic_block
    assert run_pending() == 2
    assert set(Ledger.objects.values_list("tag", flat=True)) == {"a", "c"}
    assert run_pending() == 0


def test_run_pending_may_be_limited_to_a_job() -> None:
    jobs.record.enqueue(tag="a")
    jobs.record_always.enqueue(tag="c")
    assert run_pending(name="testapp.record") == 1
    assert ledger("c") == []


def test_run_pending_after_hooks_were_captured_runs_the_whole_chain(
    django_capture_on_commit_callbacks: Any, redis_client: redis.Redis
) -> None:
    with django_capture_on_commit_callbacks(execute=True) as callbacks:
        chain.enqueue(tag="a", length=3)
    assert callbacks
    assert redis_client.llen("rq:queue:default") == 1
    assert run_pending() == 3
    assert ledger() == ["3", "2", "1"]


@job(key=("tag", "length"), unique_for=FOREVER)
def chain(*, tag: str, length: int) -> None:
    jobs.note(tag, str(length))
    if length > 1:
        chain.enqueue(tag=tag, length=length - 1)


def test_run_pending_of_an_atomic_job_that_fails_keeps_the_tests_own_work() -> None:
    Ledger.objects.create(tag="test")
    attempt = run(jobs.record_atomically, tag="a", fails=True)
    assert attempt.job.status == "RETRYING"
    assert ledger("test") == [""]
    assert ledger() == []


def test_run_pending_of_a_job_that_times_out_keeps_the_tests_transaction() -> None:
    Ledger.objects.create(tag="test")
    assert run(jobs.hang, tag="a", how="sleep").job.status == "DEAD"
    assert ledger("test") == [""]


def test_run_pending_of_a_job_that_enqueues_itself_for_ever_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(testing.running, "ROUNDS", 10)
    ever.enqueue(number=0)
    with pytest.raises(AssertionError, match="ran 10 attempts and jobs are still due"):
        run_pending()


@job(key=None)
def ever(*, number: int) -> None:
    ever.enqueue(number=number + 1)


def test_job_with_a_broken_query_in_a_test_case_fails_and_leaves_the_transaction_usable() -> None:
    attempt = run(break_query, tag="a")
    assert (attempt.outcome, attempt.job.status) == ("FAILED", "DEAD")


@job(key="broken:{tag}", unique_for=FOREVER, max_attempts=1)
def break_query(*, tag: str) -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT nonsense FROM nowhere")
