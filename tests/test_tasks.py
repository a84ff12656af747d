"""dedupjobs as a backend of django.tasks: what the framework promises, and keys on top."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import django
import pytest
from asgiref.sync import async_to_sync
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.test.utils import override_settings
from django.utils import timezone

from dedupjobs import FOREVER, backends, lifecycle, operations, registry
from dedupjobs.backends import DedupBackend, DedupTask, framework, unique_task
from dedupjobs.backends.framework import (
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultMismatch,
    TaskResultStatus,
    task,
    task_backends,
)
from dedupjobs.coordinator import tell_lost
from dedupjobs.exceptions import LeaseLost, NoResult, PayloadMismatch
from dedupjobs.models import Kind, ProcessedJob
from dedupjobs.testing import (
    captured_jobs,
    crash_at,
    frozen_clock,
    inline,
    run_pending,
    zombie,
)
from tests.app import jobs, tasks
from tests.app.models import Ledger
from tests.rows import alter, claimed

pytestmark = pytest.mark.django_db

BACKEND = "dedupjobs.backends.DedupBackend"
LOGGER = framework.HOME
CARRIES_KEYS = django.VERSION >= (6, 1) or django.VERSION < (6, 0)
"""Django 6.0's @task takes no keyword arguments of a backend; 6.1's and the package's do."""


@pytest.fixture(autouse=True)
def _no_job_stays() -> Iterator[None]:
    before = set(registry.names())
    yield
    for name in set(registry.names()) - before:
        registry.forget(name)


def effects(tag: str) -> list[str]:
    return list(Ledger.objects.filter(tag=tag).order_by("pk").values_list("note", flat=True))


def row_of(result: Any) -> ProcessedJob:
    return ProcessedJob.objects.get(pk=int(result.id.split("-")[0]))


def run(specimen: Any, *args: Any, **kwargs: Any) -> Any:
    """Enqueue, run to the end with all retries, and return the result as it is then."""
    result = specimen.enqueue(*args, **kwargs)
    run_pending(retries=True)
    result.refresh()
    return result


# ---- the framework's promises: results


@pytest.mark.parametrize("specimen", [tasks.echo, tasks.echo_async])
def test_task_runs_and_its_result_says_all_of_it(specimen: Any) -> None:
    result = specimen.enqueue(1, two=3)
    assert (result.status, result.is_finished, result.attempts) == ("READY", False, 0)
    assert (result.started_at, result.finished_at) == (None, None)
    with pytest.raises(ValueError, match="not finished"):
        result.return_value  # noqa: B018
    run_pending()
    result.refresh()
    assert (result.status, result.is_finished, result.attempts) == ("SUCCESSFUL", True, 1)
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert result.last_attempted_at == result.started_at
    assert result.return_value == [[1], {"two": 3}]
    assert (result.task, result.args, result.kwargs) == (specimen, [1], {"two": 3})
    assert (result.backend, result.errors) == ("default", [])


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("specimen", [tasks.echo, tasks.echo_async])
def test_async_code_enqueues_and_reads_results(specimen: Any) -> None:
    async def body() -> None:
        result = await specimen.aenqueue(1, two=3)
        await result.arefresh()
        assert result.return_value == [[1], {"two": 3}]
        assert await specimen.aget_result(result.id) == result

    with inline():
        async_to_sync(body)()


def test_result_is_found_by_its_id_and_equal() -> None:
    result = tasks.echo.enqueue(1, two=[3])
    assert tasks.echo.get_result(result.id) == result
    before = dataclasses.asdict(result)
    result.refresh()
    assert dataclasses.asdict(result) == before
    if django.VERSION >= (6, 1):  # earlier ones can not pickle a task
        assert pickle.loads(pickle.dumps(result)) == result


@pytest.mark.parametrize("call", [((1, 2), {}), ((1,), {"b": 2}), ((), {"a": 1, "b": 2})])
def test_arguments_come_back_as_they_were_passed_and_are_the_same_work(call: Any) -> None:
    add = framework.task(add_up)
    result = add.enqueue(*call[0], **call[1])
    found = add.get_result(result.id)
    assert (tuple(found.args), found.kwargs) == call
    keyed = unique_task(key=("a",))(add_up)
    first = keyed.enqueue(a=1, b=2)
    assert keyed.enqueue(*call[0], **call[1]).id == first.id  # and no PayloadMismatch


def add_up(a: int, b: int = 0) -> int:
    return a + b


@pytest.mark.parametrize(
    "wrong", ["", "7", "1-1-", "1-1-0123", "x-y-z", "99999999999999999999-1-a"]
)
def test_unknown_or_forged_id_is_no_result(wrong: str) -> None:
    result = tasks.echo.enqueue()
    for given in (wrong, result.id[:-1] + "x", f"{result.id}0"):
        with pytest.raises(TaskResultDoesNotExist):
            tasks.echo.get_result(given)


def test_result_of_another_task_or_backend_or_of_a_plain_job_is_refused() -> None:
    result = tasks.echo.enqueue()
    with pytest.raises(TaskResultMismatch):
        tasks.record.get_result(result.id)
    with pytest.raises(TaskResultDoesNotExist):
        task_backends["all arguments"].get_result(result.id)
    from dedupjobs.backends import results

    plain = jobs.record.enqueue(tag="a").job
    with pytest.raises(TaskResultDoesNotExist):
        tasks.echo.get_result(results.id_of(plain))


def test_result_of_an_earlier_run_of_a_key_is_gone_once_it_runs_again() -> None:
    first = run(tasks.digest, 7, day="mon")
    assert first.return_value == 1
    second = tasks.digest.enqueue(7, day="mon")
    assert second.id != first.id
    with pytest.raises(TaskResultDoesNotExist, match="run again since"):
        first.refresh()


def test_pruned_result_is_gone() -> None:
    result = run(tasks.mail, 7)
    alter(row_of(result), finished_at=datetime(2020, 1, 1, tzinfo=UTC))
    lifecycle.prune(tasks.mail.module_path, older_than=1, limit=10)
    with pytest.raises(TaskResultDoesNotExist):
        tasks.mail.get_result(result.id)


def test_key_that_outlives_its_pruned_run_still_answers() -> None:
    result = run(tasks.mail, 7)
    alter(row_of(result), finished_at=datetime(2020, 1, 1, tzinfo=UTC))
    lifecycle.prune(tasks.mail.module_path, older_than=1, limit=10)
    again = tasks.mail.enqueue(7)
    assert (again.kind, again.status, again.args) == (Kind.REPLAYED, "SUCCESSFUL", [])
    with pytest.raises(NoResult, match="result was pruned"):
        again.return_value  # noqa: B018


def test_result_of_a_function_whose_arguments_have_changed_has_those_that_are_left() -> None:
    result = tasks.mail.enqueue(7, text="t")
    stored = row_of(result).args.replace('"text":', '"old":')
    alter(row_of(result), args=stored)
    result = tasks.mail.get_result(result.id)
    assert (result.args, result.kwargs) == ([7], {})


def test_result_is_json_as_the_framework_has_it() -> None:
    assert run(tasks.give_tuple).return_value == [1, [2, 3]]


def test_result_that_can_not_be_kept_undoes_no_work() -> None:
    result = run(tasks.give_function)
    assert result.status == "SUCCESSFUL"
    with pytest.raises(NoResult, match="function is not serialisable"):
        result.return_value  # noqa: B018


@pytest.mark.parametrize("argument", [datetime(2026, 1, 1, tzinfo=UTC), {1, 2}, object()])
def test_argument_that_json_lacks_is_refused_as_the_framework_does(argument: Any) -> None:
    with pytest.raises(TypeError, match="Unsupported type"):
        tasks.echo.enqueue(argument)
    assert not ProcessedJob.objects.exists()


@override_settings(USE_TZ=False, TIME_ZONE="Asia/Kathmandu")
def test_moments_are_local_and_naive_without_use_tz() -> None:
    result = run(tasks.echo)
    assert abs(result.finished_at - timezone.now()) < timedelta(minutes=1)
    assert result.enqueued_at.tzinfo is None
    later = tasks.record.using(run_after=timezone.now() + timedelta(hours=1)).enqueue("a")
    assert run_pending() == 0
    assert row_of(later).run_after - lifecycle.database_now() > timedelta(minutes=59)


# ---- the framework's promises: failures are attempts


def test_each_failed_attempt_is_an_error_of_the_result() -> None:
    result = run(tasks.fail, "a", times=2)
    assert (result.status, result.return_value, result.attempts) == ("SUCCESSFUL", 3, 3)
    assert [e.exception_class for e in result.errors] == [ValueError, ValueError]
    assert result.errors[1].traceback.endswith("ValueError: attempt 2\n")
    assert len(set(result.worker_ids)) == 3
    assert result.started_at < result.last_attempted_at


def test_task_that_waits_for_its_retry_is_ready() -> None:
    with frozen_clock():  # its backoff is not over yet
        result = tasks.fail.enqueue("a")
        assert run_pending() == 1
    result.refresh()
    assert (result.status, result.attempts, len(result.errors)) == ("READY", 1, 1)


@pytest.mark.parametrize(
    ("specimen", "kind", "last"),
    [
        (tasks.fail_async, ValueError, "ValueError: async\n"),
        (tasks.leave, SystemExit, "SystemExit: gone\n"),
    ],
)
def test_task_that_raises_has_failed(specimen: Any, kind: type, last: str) -> None:
    result = run(specimen)
    assert (result.status, result.is_finished) == ("FAILED", True)
    with pytest.raises(ValueError, match="Task failed"):
        result.return_value  # noqa: B018
    assert result.errors[0].exception_class is kind
    assert result.errors[0].traceback.endswith(last)
    assert result.finished_at is not None


def test_keyboard_interrupt_goes_through_and_is_no_failure() -> None:
    result = tasks.interrupt.enqueue()
    with pytest.raises(KeyboardInterrupt):
        run_pending()
    result.refresh()
    assert (result.status, result.errors) == ("READY", [])


def test_time_out_is_an_error_of_the_result() -> None:
    result = run(tasks.sleep, 30)
    assert (result.status, len(result.errors)) == ("FAILED", 1)
    assert result.errors[0].exception_class_path == "dedupjobs.exceptions.TimeoutReached"


@pytest.mark.django_db(transaction=True)
def test_lost_attempt_is_an_error_and_the_next_one_succeeds() -> None:
    result = tasks.record.enqueue("a")
    with crash_at("user_code.after"):
        run_pending()
    run_pending()
    result.refresh()
    assert (result.status, result.attempts) == ("SUCCESSFUL", 2)
    assert [e.exception_class_path for e in result.errors] == ["dedupjobs.exceptions.LeaseLost"]
    assert "process die" in result.errors[0].traceback


@pytest.mark.parametrize(
    ("status", "shown"),
    [("RUNNING", "RUNNING"), ("HELD", "READY"), ("CANCELLED", "FAILED"), ("DEAD", "FAILED")],
)
def test_status_of_a_row_in_the_frameworks_words(status: str, shown: str) -> None:
    result = tasks.echo.enqueue()
    alter(row_of(result), status=status)
    result.refresh()
    assert result.status == TaskResultStatus(shown)


# ---- the framework's promises: context, queues, time, priority


def test_task_sees_its_own_result() -> None:
    result = run(tasks.tell_context, "a", more="b")
    assert result.return_value == [result.id, "RUNNING", 1, ["a"], {"more": "b"}]
    result = run(tasks.tell_context_async)
    assert result.return_value == [result.id, 1]


def test_context_counts_attempts() -> None:
    assert run(tasks.count_attempts).return_value == 3


def test_run_after_is_obeyed() -> None:
    with frozen_clock() as now:
        result = tasks.record.using(run_after=now.now + timedelta(hours=1)).enqueue("a")
        assert run_pending() == 0
        now.move(3_600)
        assert run_pending() == 1
    result.refresh()
    assert result.status == "SUCCESSFUL"


@pytest.mark.parametrize(
    ("changes", "queue"),
    [
        ({}, "default"),
        ({"queue_name": "low"}, "low"),
        ({"priority": 10}, "high"),
        ({"priority": 100}, "high"),
        ({"priority": 9}, "default"),
        ({"priority": -1}, "low"),
        ({"priority": 0, "queue_name": "high"}, "high"),
    ],
)
def test_queue_comes_from_the_task_or_its_priority(changes: dict[str, Any], queue: str) -> None:
    result = tasks.record_in_queue.using(**changes).enqueue("a")
    assert row_of(result).queue == queue
    assert tasks.record_in_queue.get_result(result.id).task.queue_name == queue


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"priority": 101}, "whole number between -100 and 100"),
    ({"priority": 1.5}, "whole number between -100 and 100"),
    ({"queue_name": "none"}, "Queue 'none' is not valid"),
    ({"run_after": datetime(2026, 1, 1)}, "aware datetime"),
    ({"priority": 1, "backend": "all arguments"}, "not support setting priority"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_wrong_use_is_refused_as_the_framework_does(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidTask, match=words):
        tasks.record.using(**changes)


def test_task_that_is_no_module_level_function_is_refused() -> None:
    def local() -> None: ...

    for wrong in (local, any, Ledger().save):
        with pytest.raises(InvalidTask, match="module level"):
            task(wrong)


def test_task_is_validated_again_when_it_is_enqueued() -> None:
    elsewhere = tasks.record.using(queue_name="low")
    only = {"default": {"BACKEND": BACKEND, "QUEUES": ["default"]}}
    with override_settings(TASKS=only), pytest.raises(InvalidTask, match="Queue 'low'"):
        elsewhere.enqueue("a")


def test_calling_a_task_calls_its_function() -> None:
    assert tasks.record.call("a", "t") == "t"
    assert async_to_sync(tasks.echo_async.acall)(1) == [[1], {}]
    assert effects("a") == ["t"]
    assert not ProcessedJob.objects.exists()


# ---- the framework's promises: transactions and signals


@pytest.fixture
def heard() -> Iterator[list[tuple[str, str, str]]]:
    """(signal, path, status) of all that the framework's signals tell."""
    told: list[tuple[str, str, str]] = []
    receivers = []
    for name in ("task_enqueued", "task_started", "task_finished"):

        def receive(sender: Any, task_result: Any, name: str = name, **_: Any) -> None:
            assert sender is DedupBackend
            told.append((name, task_result.task.name, str(task_result.status)))

        getattr(framework, name).connect(receive)
        receivers.append((name, receive))
    yield told
    for name, receive in receivers:
        getattr(framework, name).disconnect(receive)


@pytest.mark.django_db(transaction=True)
def test_enqueue_waits_for_the_commit(heard: list[Any]) -> None:
    with inline():
        with transaction.atomic():
            result = tasks.record.enqueue("a")
            assert (effects("a"), heard, result.status) == ([], [], "READY")
        assert effects("a") == [""]
        with transaction.atomic():
            tasks.record.enqueue("b")
            transaction.set_rollback(True)
    assert effects("b") == []
    assert {name for name, *_ in heard} == {"task_enqueued", "task_started", "task_finished"}
    assert len(heard) == 3


@pytest.mark.django_db(transaction=True)
def test_three_signals_are_sent_as_it_goes(heard: list[Any]) -> None:
    with inline():
        tasks.mail.enqueue(7)
        tasks.mail.enqueue(7)  # a duplicate enqueues nothing
    assert sorted(heard) == [
        ("task_enqueued", "mail", "READY"),
        ("task_finished", "mail", "SUCCESSFUL"),
        ("task_started", "mail", "RUNNING"),
    ]


def test_retried_task_is_finished_once(heard: list[Any]) -> None:
    run(tasks.fail, "a")
    assert heard == [("task_started", "fail", "RUNNING")] * 3 + [
        ("task_finished", "fail", "FAILED")
    ]


@pytest.mark.django_db(transaction=True)
def test_task_that_dies_of_a_loss_or_is_cancelled_is_finished(heard: list[Any]) -> None:
    fragile = unique_task(key=None, max_lost=1)(tasks.plain)
    claim = claimed(row_of(fragile.enqueue("a")))
    lost = lifecycle.bury(claim.fence, "gone")
    assert lost is not None
    tell_lost(lost, "death")
    operations.cancel(row_of(tasks.record.enqueue("b")), by="ada")
    assert [(name, status) for name, _, status in heard] == [
        ("task_enqueued", "READY"),
        ("task_finished", "FAILED"),
        ("task_enqueued", "READY"),
        ("task_finished", "FAILED"),
    ]


@pytest.mark.django_db(transaction=True)
def test_frameworks_log_tells_the_story(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger=LOGGER), inline():
        result = tasks.record.enqueue("a")
    lines = [r.getMessage() for r in caplog.records if r.name == LOGGER]
    assert len(lines) == 3
    assert all(result.id in line for line in lines)
    assert not any("None" in line for line in lines)


# ---- keys


def test_second_call_gets_the_result_of_the_first() -> None:
    with inline():
        first = tasks.mail.enqueue(7)
        second = tasks.mail.enqueue(user=7)
    assert (first.created, second.created) == (True, False)
    assert (second.id, second.kind, second.return_value) == (first.id, Kind.REPLAYED, "sent to 7")
    assert "holds this key for ever" in second.reason
    assert effects("mail 7") == [""]


def test_other_arguments_under_a_key_that_is_held_are_refused() -> None:
    tasks.mail.enqueue(7)
    with pytest.raises(PayloadMismatch, match="another value of text "):
        tasks.mail.enqueue(7, text="other")


def test_key_may_be_names_or_a_function_of_the_arguments() -> None:
    assert tasks.digest.enqueue(7, day="mon").created
    assert tasks.digest.enqueue(7, day="tue").created
    assert not tasks.digest.enqueue(7, day="mon").created
    assert tasks.remind.enqueue(7, "2026-11-29T10").created
    with pytest.raises(PayloadMismatch):
        tasks.remind.enqueue(7, "2026-11-29T11")


def test_fingerprint_may_name_those_that_have_to_be_equal() -> None:
    made = unique_task(key="{tag}", fingerprint=("tag",))(tasks.record.func)
    assert made.enqueue("a", text="one").created
    assert made.enqueue("a", text="other").kind is Kind.DUPLICATE


def test_call_that_misfits_is_shown_the_functions_own_arguments() -> None:
    with pytest.raises(TypeError, match=r"mail\(user: 'int', text: 'str' = ''\) -> 'str': missing"):
        tasks.mail.enqueue()
    with pytest.raises(TypeError, match=r"''\) -> 'str': got an unexpected .* 'nobody'"):
        registry.get(tasks.mail.module_path).status(nobody=7)


def test_dead_task_that_keeps_its_key_answers_with_its_failure() -> None:
    run(tasks.fail_and_block, "a")
    again = tasks.fail_and_block.enqueue("a")
    assert (again.kind, again.status, again.created) == (Kind.BLOCKED, "FAILED", False)


def test_task_without_a_key_runs_as_often_as_it_is_called() -> None:
    with inline():
        results = {tasks.record.enqueue("a").id for _ in range(3)}
    assert (len(results), effects("a")) == (3, ["", "", ""])


def test_key_may_be_given_for_one_call() -> None:
    keyed = tasks.record.using(dedup_key="invoice:7")
    assert row_of(keyed.enqueue("a")).key == "invoice:7"
    assert tasks.record.call_key is None
    assert keyed.using(priority=1).call_key == "invoice:7"
    assert tasks.record.using(dedup_key="k" * 3_000).enqueue("a").created


@pytest.mark.parametrize("wrong", ["", " ", 7, b"x", ...])
def test_key_of_a_call_that_is_no_text_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidTask, match=r"dedup_key=.*; give text that makes two calls"):
        tasks.record.using(dedup_key=wrong)


def test_key_of_one_call_is_held_while_active() -> None:
    keyed = tasks.record.using(dedup_key="invoice:7")
    first = keyed.enqueue("a")
    assert (keyed.enqueue("a").id, keyed.enqueue("a").kind) == (first.id, Kind.DUPLICATE)


def test_backend_may_take_equal_arguments_for_the_same_work() -> None:
    elsewhere = tasks.record.using(backend="all arguments")
    with inline():
        first = elsewhere.enqueue("a", text="t")
        assert elsewhere.enqueue("a", "t").id == first.id
        assert elsewhere.enqueue("a", "other").created
    assert effects("a") == ["t", "other"]
    assert elsewhere.get_result(first.id).return_value == "t"
    job = registry.get("tests.app.tasks.record@all arguments")
    assert (job.unique_for, job.options.timeout) == (timedelta(hours=1), 60)


def test_default_key_may_be_a_function_by_its_path() -> None:
    options = {"key": "tests.test_tasks.by_tag", "unique_for": FOREVER}
    with override_settings(TASKS={"default": {"BACKEND": BACKEND, "OPTIONS": options}}), inline():
        assert tasks.record.enqueue("a").created
        assert not tasks.record.enqueue("a").created


def by_tag(tag: str, **_: Any) -> str:
    return tag


@pytest.mark.skipif(not CARRIES_KEYS, reason="Django 6.0's @task takes no key; unique_task does")
def test_decorator_of_the_framework_carries_the_key() -> None:
    keyed = task(dedup_key="plain:{tag}", unique_for=FOREVER)(tasks.plain)
    with inline():
        assert keyed.enqueue("a").created
        assert not keyed.enqueue("a").created


@pytest.mark.skipif(CARRIES_KEYS, reason="this framework's @task takes a key")
def test_decorator_that_can_not_carry_a_key_says_so() -> None:
    with pytest.raises(TypeError, match="dedup_key"):
        task(dedup_key="plain:{tag}")(tasks.plain)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"key": "mail:{nobody}"}, "names 'nobody'; its arguments are: tag$"),
        ({"key": "mail:{_call}"}, "names '_call'; its arguments are: tag$"),
        ({"key": "{tag}", "scope": "nobody"}, "scope='nobody' is no argument; there are: tag$"),
        ({"key": "{tag}", "fingerprint": ("_call",)}, "'_call', which is no argument"),
        ({"key": "same"}, "names no argument"),
        ({"key": "{tag}", "unique_for": -1}, "unique_for=-1"),
        ({"key": "{tag}", "max_attempts": 0}, "max_attempts=0"),
        ({"key": "{tag}", "retries": 3}, "unknown option retries"),
    ],
)
def test_wrong_key_or_option_is_an_invalid_task(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidTask, match=words):
        unique_task(**wrong)(tasks.plain)


def test_unique_task_under_another_backend_is_a_plain_task() -> None:
    immediate = f"{framework.HOME}.backends.immediate.ImmediateBackend"
    with override_settings(TASKS={"default": {"BACKEND": immediate}}):
        made = unique_task(key="plain:{tag}", unique_for=FOREVER, max_attempts=2)(tasks.plain)
        assert not isinstance(made, DedupTask)
        assert made.enqueue("a").status == "SUCCESSFUL"
    assert effects("a") == [""]


# ---- workers


@pytest.mark.django_db(transaction=True)
def test_worker_that_has_not_imported_a_task_finds_it(spawn: Callable[..., Any]) -> None:
    results = [tasks.mail.enqueue(7), tasks.tell_context.enqueue("a"), tasks.echo_async.enqueue(1)]
    elsewhere = tasks.record.using(backend="all arguments").enqueue("b")
    spawn("rqworker", "default", "--burst").wait(40)
    for result in [*results, elsewhere]:
        result.refresh()
        assert result.status == "SUCCESSFUL", result.errors
    assert results[1].return_value[0] == results[1].id


def test_row_never_makes_us_import_what_is_no_apps_module() -> None:
    for name in ("antigravity.geohash", "os.system", "nowhere.at.all", "tests.app.tasks.gone", "x"):
        assert registry.find(name) is None
    assert "antigravity" not in sys.modules


def test_captured_calls_are_those_of_the_tasks_function() -> None:
    with captured_jobs() as calls:
        tasks.mail.enqueue(7)
    assert calls[0].key == "mail:7"
    calls.assert_enqueued(registry.get(tasks.mail.module_path), arguments={"user": 7}, times=1)


def test_assertions_take_tasks_and_their_own_arguments() -> None:
    with inline() as calls:
        tasks.mail.enqueue(7)
        tasks.mail.enqueue(user=7)
        tasks.record.using(backend="all arguments").enqueue("a")
    assert calls[0].arguments == {"user": 7, "text": ""}
    calls.assert_enqueued(tasks.mail, key="mail:7", arguments={"user": 7}, times=1)
    calls.assert_enqueued(tasks.mail.using(priority=10), times=1)
    calls.assert_deduplicated(tasks.mail, times=1)
    calls.assert_enqueued(tasks.record.using(backend="all arguments"), times=1)
    calls.assert_enqueued(tasks.record, times=0)
    with pytest.raises(AssertionError, match=r"mail\(user=7, text=''\) key 'mail:7': CREATED"):
        calls.assert_enqueued(tasks.mail, times=2)


def test_zombie_may_be_of_a_task() -> None:
    with zombie(tasks.mail, 7) as undead:
        assert undead.attempt.job.key == "mail:7"
        with pytest.raises(LeaseLost):
            undead.attempt.check()
    with zombie(tasks.mail.using(dedup_key="invoice"), 7) as undead:
        assert undead.attempt.job.key == "invoice"


# ---- settings

CHECKED: list[tuple[dict[str, Any], str, str]] = [
    ({"OPTIONS": [1]}, "E025", "Give a dict: key, unique_for"),
    ({"OPTIONS": None}, "E025", "Give a dict: key, unique_for"),
    ({"OPTIONS": {"keys": None}}, "E024", "Did you mean 'key'?"),
    ({"OPTIONS": {"colour": 1}}, "E024", "Known: key, unique_for, priorities, modules, job."),
    ({"OPTIONS": {"key": 7}}, "E025", 'Give None, "arguments"'),
    ({"OPTIONS": {"key": "no.such.function"}}, "E025", 'Give None, "arguments"'),
    ({"OPTIONS": {"unique_for": "1h"}}, "E025", "Give FOREVER, seconds"),
    ({"OPTIONS": {"priorities": {"10": "high"}}}, "E025", "Give {lowest priority: queue}"),
    ({"OPTIONS": {"modules": "tests.app"}}, "E025", "['tests.app']. Give module paths"),
    ({"OPTIONS": {"modules": 7}}, "E025", "Give module paths"),
    ({"OPTIONS": {"modules": ["tests.nope"]}}, "E025", "There is no module 'tests.nope'. Give"),
    ({"OPTIONS": {"modules": ["nope.nope", "re"]}}, "E025", "There is no module 'nope.nope'."),
    ({"OPTIONS": {"modules": ["re.nope"]}}, "E025", "There is no module 're.nope'."),
    ({"OPTIONS": {"modules": ["", ".app", 7]}}, "E025", "There is no module '', '.app', 7."),
    ({"OPTIONS": {"job": {"max_attemps": 3}}}, "E025",
     "unknown option max_attemps; did you mean 'max_attempts'? Give options of @job"),
    ({"OPTIONS": {"job": {"timeout": -1}}}, "E025", "timeout=-1; give 0.1 s to 366 days"),
    ({"OPTIONS": {"job": 3}}, "E025", "It is no dict. Give options of @job"),
    ({"OPTIONS": {"priorities": {1: "hihg"}}}, "E026", "Did you mean 'high'?"),
    ({"QUEUES": ["mail"]}, "E026", "Known: default, high, low."),
]  # fmt: skip


@pytest.mark.parametrize(("params", "number", "cure"), CHECKED)
def test_wrong_setting_is_a_check_with_its_cure(
    params: dict[str, Any], number: str, cure: str
) -> None:
    with override_settings(TASKS={"default": {"BACKEND": BACKEND, **params}}):
        found = [m for m in checks.run_checks() if m.id == f"dedupjobs.{number}"]
        assert len(found) == 1
        assert found[0].msg.startswith("TASKS['default']: ")
        assert cure in str(found[0].hint)
        with pytest.raises((ImproperlyConfigured, InvalidTask)):
            tasks.echo.enqueue()


@pytest.mark.parametrize("modules", ["tests.app", 7, ["tests.nope", "nope.nope", "re.nope", ""]])
def test_modules_that_are_none_are_left_to_the_check(modules: Any) -> None:
    options = {"modules": modules}
    with override_settings(TASKS={"default": {"BACKEND": BACKEND, "OPTIONS": options}}):
        backends.load_modules()


@pytest.mark.parametrize(
    ("package", "module", "broken"),
    [
        ("shop_a", "shop_a", "__init__"),
        ("shop_b", "shop_b.tasks", "__init__"),
        ("shop_c", "shop_c.tasks", "tasks"),
    ],
)
def test_error_inside_a_module_that_is_there_stays_what_it_is(
    package: str, module: str, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / package).mkdir()
    for name in ("__init__", "tasks"):
        text = "import nowhere_at_all" if name == broken else ""
        (tmp_path / package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    options = {"modules": [module]}
    with (
        override_settings(TASKS={"default": {"BACKEND": BACKEND, "OPTIONS": options}}),
        pytest.raises(ModuleNotFoundError, match="nowhere_at_all"),
    ):
        backends.load_modules()


def test_right_settings_have_no_finding() -> None:
    assert [
        m
        for m in checks.run_checks()
        if m.id and m.id in ("dedupjobs.E024", "dedupjobs.E025", "dedupjobs.E026")
    ] == []


@pytest.mark.skipif(framework.BUILT_IN, reason="the framework is built into this Django")
@pytest.mark.large
def test_backend_without_the_framework_says_what_to_install() -> None:
    code = """if True:
        import sys, django
        sys.modules["django_tasks"] = None
        django.setup()
        import dedupjobs.backends
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImproperlyConfigured: DedupBackend needs Django 6.0 or later" in done.stderr
    assert "pip install 'dedupjobs[tasks]'" in done.stderr
