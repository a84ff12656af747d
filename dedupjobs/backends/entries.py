"""A task as a job: its name, its arguments, and what a worker calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from django.apps import apps
from django.utils.module_loading import import_string

from dedupjobs import keys, registry
from dedupjobs.backends import results
from dedupjobs.backends.arguments import SHAPE, signature_of
from dedupjobs.backends.framework import TaskContext, normalize_json
from dedupjobs.backends.tasks import DedupTask
from dedupjobs.context import current_attempt
from dedupjobs.registry import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What a task and its backend's OPTIONS say of its job."""

    key: Any
    unique_for: Any
    options: Mapping[str, Any]


def name_of(task: Any) -> str:
    """Return the name of a task's job: its path, and its backend if that is not the default."""
    return task.module_path if task.backend == "default" else f"{task.module_path}@{task.backend}"


def register(name: str, task: Any, declared: Declared) -> Job[..., Any]:
    """Make a job of a task."""
    run, signature = _entry(task), signature_of(task)
    run.__dict__.update(task=task, declared=declared, __signature__=signature)
    window = {} if declared.key is None else {"unique_for": declared.unique_for}
    passed = tuple(keys.visible(signature).parameters)
    made: Job[..., Any] = registry.job(
        key=_of_arguments(declared.key),
        name=name,
        **{"fingerprint": passed, **window, **declared.options},
    )(run)
    return made


def is_same(job: Job[..., Any], task: Any, declared: Declared) -> bool:
    """Whether this job was made of a task like this one."""
    made_of = getattr(job.func, "task", None)
    return (
        made_of is not None
        and (made_of.func, made_of.takes_context) == (task.func, task.takes_context)
        and getattr(job.func, "declared", None) == declared
    )


def task_of(name: str) -> Any:
    """Return the task that a job was made of, as its module has it; None: it is no task's."""
    job = registry.find(name)
    task = getattr(job.func, "task", None) if job else None
    if task is None:
        return None
    try:
        there = import_string(task.module_path)
    except ImportError:
        return task
    is_it = isinstance(there, DedupTask) and there.func == task.func
    return there if is_it and there.backend == task.backend else task


def load(name: str) -> None:
    """Import the module of a task whose row was found, if it belongs to an installed app."""
    path, _, alias = name.partition("@")
    module, _, function = path.rpartition(".")
    if not module or apps.get_containing_app_config(module) is None:
        return
    found: Any = getattr(import_module(module), function, None)
    if isinstance(found, DedupTask) and alias not in ("", found.backend):
        found.using(backend=alias)


# ---- the call


def all_arguments(**arguments: Any) -> Any:
    """Be the key that is all arguments."""
    return arguments


def _of_arguments(key: Any) -> Any:
    """Return a key that is not made of SHAPE."""
    if not callable(key):
        return key

    @functools.wraps(key)
    def made(**arguments: Any) -> Any:
        arguments.pop(SHAPE, None)
        return key(**arguments)

    return made


def _entry(task: Any) -> Callable[..., Any]:
    """Return what a worker calls. Its context is read before a coroutine has an event loop."""
    func = task.func
    context = _context if task.takes_context else tuple

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop(SHAPE, None)
        returned = func(*context(), *args, **kwargs)
        return _awaited(returned) if inspect.iscoroutine(returned) else _normal(returned)

    return run


async def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return _normal(await coroutine)


def _context() -> tuple[Any, ...]:
    row = current_attempt().job
    return (TaskContext(task_result=results.result_of(task_of(row.name), row)),)


def _normal(value: Any) -> Any:
    """Return a result as the framework has it; what JSON lacks is left to our own notation."""
    try:
        return normalize_json(value)
    except (TypeError, ValueError):
        return value
