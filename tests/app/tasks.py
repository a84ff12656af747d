"""Specimen tasks of django.tasks, each showing one thing."""

from __future__ import annotations

import time
from typing import Any

from dedupjobs import FOREVER, current_attempt
from dedupjobs.backends import unique_task
from dedupjobs.backends.framework import task
from tests.app.jobs import note


@task
def echo(*args: Any, **kwargs: Any) -> Any:
    return [list(args), kwargs]


@task()
async def echo_async(*args: Any, **kwargs: Any) -> Any:
    return [list(args), kwargs]


@task
def record(tag: str, text: str = "") -> str:
    note(tag, text)
    return text


@task
def record_in_queue(tag: str) -> None:
    note(tag)


@unique_task(key=None, max_attempts=3, backoff=0.1)
def fail(tag: str, times: int = 1_000) -> int:
    """Fail the first ``times`` attempts."""
    number = current_attempt().number
    note(tag, str(number))
    if number <= times:
        raise ValueError(f"attempt {number}")
    return number


@unique_task(key=None, max_attempts=1)
async def fail_async() -> None:
    raise ValueError("async")


@unique_task(key=None, max_attempts=1)
def leave() -> None:
    raise SystemExit("gone")


@unique_task(key=None, max_attempts=1)
def interrupt() -> None:
    raise KeyboardInterrupt


@task
def give_function() -> Any:
    return give_function.func


@task
def give_tuple() -> Any:
    return (1, (2, 3))


@unique_task(key=None, max_attempts=1, timeout=0.2)
def sleep(seconds: float) -> None:
    time.sleep(seconds)


@task(takes_context=True)
def tell_context(context: Any, *tags: str, **more: str) -> Any:
    result = context.task_result
    return [result.id, str(result.status), context.attempt, result.args, result.kwargs]


@task(takes_context=True)
async def tell_context_async(context: Any) -> Any:
    return [context.task_result.id, context.attempt]


@unique_task(key=None, takes_context=True, backoff=0.1)
def count_attempts(context: Any) -> int:
    if context.attempt < 3:
        raise ValueError(context.attempt)
    return context.attempt


@unique_task(key="mail:{user}", unique_for=FOREVER)
def mail(user: int, text: str = "") -> str:
    note(f"mail {user}", text)
    return f"sent to {user}"


@unique_task(key=("user", "day"))
def digest(user: int, *, day: str) -> int:
    note(f"digest {user}", day)
    return current_attempt().number


@unique_task(key=lambda user, when: f"{user}-{when[:10]}", unique_for=FOREVER)
def remind(user: int, when: str) -> None:
    note(f"remind {user}", when)


@unique_task(key="block:{tag}", unique_for=FOREVER, max_attempts=1, on_dead="block")
def fail_and_block(tag: str) -> None:
    raise ValueError(tag)


def plain(tag: str) -> None:
    """Be made a task by the tests."""
    note(tag)
