"""
``django.tasks`` on dedupjobs: existing ``@task`` code gets keys, retries, reclaim and attempts.

    TASKS = {"default": {"BACKEND": "dedupjobs.backends.DedupBackend"}}

Each task is a job of its own, named by its path. Django 6.0 and later have the framework built
in; on 5.2 it is the package ``django-tasks``. See ``docs/tasks.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from importlib import import_module
from typing import Any

from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.utils import timezone
from django.utils.module_loading import import_string

from dedupjobs import registry
from dedupjobs.backends import arguments, entries, options, receivers, results
from dedupjobs.backends.framework import (
    BaseTaskBackend,
    InvalidTask,
    TaskResultDoesNotExist,
    normalize_json,
    task_backends,
)
from dedupjobs.backends.tasks import AS_CONFIGURED, DedupTask, DedupTaskResult, unique_task
from dedupjobs.exceptions import JobDefinitionError
from dedupjobs.models import Kind
from dedupjobs.registry import Job, Variant

__all__ = ["DedupBackend", "DedupTask", "DedupTaskResult", "unique_task"]

TURNED_AWAY = (Kind.DUPLICATE, Kind.REPLAYED, Kind.BLOCKED)


class DedupBackend(BaseTaskBackend):
    """
    Runs tasks as jobs. OPTIONS:

    * ``key``: of tasks that name none: None (no deduplication, the default), "arguments" (equal
      arguments are the same work), or a function of the arguments, or its path
    * ``unique_for``: how long a success holds a key; None, the default: only while active
    * ``priorities``: {lowest priority: queue}; without it, priorities are refused
    * ``modules``: to import at start, for tasks outside installed apps
    * ``job``: options of ``@job`` for all tasks
    """

    task_class = DedupTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, dict(params))
        self.given: Any = params.get("OPTIONS", {})
        # Where it is no dict, a check tells.
        self.options: Mapping[str, Any] = self.given if isinstance(self.given, Mapping) else {}
        self.supports_priority = bool(self.options.get("priorities"))

    def validate_task(self, task: Any) -> None:
        """As the framework does; and the task is known as a job from here on."""
        super().validate_task(task)
        self._job(task)

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> DedupTaskResult:
        """
        Enqueue after the commit, if the key is free; else the result is that of the run there is.

        JobConflict, PayloadMismatch: as the job's options say; JobConflict also where a live
        control turns the call away.
        """
        if wrong := next(self.check(), None):
            raise ImproperlyConfigured(f"{wrong.msg} {wrong.hint}")
        self.validate_task(task)
        given, named = normalize_json(list(args)), normalize_json(dict(kwargs))
        variant = Variant(
            job=self._job(task),
            queue=self._queue(task),
            run_after=_aware(task.run_after),
            key=task.call_key,
        )
        outcome = variant.enqueue(*given, **named, **arguments.shape_of(given, named))
        if outcome.job.pk is None:  # a live control has turned it away: there is nothing to show
            outcome.raise_for_conflict()
        result = results.result_of(task, outcome.job, outcome)
        if outcome.kind not in TURNED_AWAY:
            receivers.tell_enqueued(type(self), result)
        return result

    def get_result(self, result_id: str) -> DedupTaskResult:
        """Return a result by its id, as the rows have it now."""
        row = results.row_of(result_id)
        task = entries.task_of(row.name) if row else None
        if row is None or task is None or task.backend != self.alias:
            raise TaskResultDoesNotExist(
                f"{result_id!r}: there is no such result here, or it was pruned, or its key has "
                "run again since: a key keeps the result of its newest run"
            )
        return results.result_of(task, row)

    def check(self, **_: Any) -> Iterator[checks.Error]:
        """Yield what is wrong with this backend's settings."""
        return options.problems(self.alias, self.given, self.queues)

    # ---- a task as a job

    def _job(self, task: Any) -> Job[..., Any]:
        name = entries.name_of(task)
        declared = self._declared(task)
        known = registry.loaded(name)
        if known is not None and entries.is_same(known, task, declared):
            return known
        try:
            return entries.register(name, task, declared)
        except JobDefinitionError as error:
            raise InvalidTask(str(error)) from error

    def _declared(self, task: Any) -> entries.Declared:
        key, window, job = task.dedup_key, task.unique_for, self.options.get("job")
        if key is AS_CONFIGURED:
            key = self._default_key()
        if window is AS_CONFIGURED:
            window = self.options.get("unique_for")
        return entries.Declared(
            key=key,
            unique_for=None if key is None else window,
            options={**(job if isinstance(job, Mapping) else {}), **dict(task.job_options)},
        )

    def _default_key(self) -> Any:
        key = self.options.get("key")
        if key == options.ALL_ARGUMENTS:
            return entries.all_arguments
        return import_string(key) if isinstance(key, str) else key

    def _queue(self, task: Any) -> str:
        levels = self.options.get("priorities") or {}
        fitting = [level for level in levels if level <= task.priority]
        return str(levels[max(fitting)] if task.priority and fitting else task.queue_name)


def _aware(moment: datetime | None) -> datetime | None:
    if moment is None or moment.tzinfo is not None:
        return moment
    return timezone.make_aware(moment, timezone.get_default_timezone())


def load_modules() -> None:
    """Import what OPTIONS["modules"] of our backends name."""
    for alias in settings.TASKS:
        backend: Any = task_backends[alias]
        if isinstance(backend, DedupBackend):
            for module in options.modules(backend.options):
                import_module(module)


registry.finders.append(entries.load)
receivers.connect()
