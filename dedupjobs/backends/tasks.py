"""A task with a key, and the result that its calls give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from dedupjobs import keys, registry
from dedupjobs.backends.framework import InvalidTask, Task, TaskResult, task_backends
from dedupjobs.exceptions import JobDefinitionError, NoResult
from dedupjobs.models import Kind

AS_CONFIGURED: Any = ...
"""Stands for what OPTIONS says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupTask(Task):
    """
    A task with a key. ``dedup_key`` and ``unique_for``: as ``@job`` has ``key`` and
    ``unique_for``; ``job_options``: pairs of its other options; ``call_key``: stands for the whole
    key of some calls.
    """

    dedup_key: Any = AS_CONFIGURED
    unique_for: Any = AS_CONFIGURED
    job_options: tuple[tuple[str, Any], ...] = ()
    call_key: str | None = None

    def using(self, *, dedup_key: str | None = None, **changes: Any) -> Any:
        """As ``Task.using``. ``dedup_key``: the whole key of the calls that follow, as text."""
        changed = Task.using(self, **changes)
        return changed if dedup_key is None else replace(changed, call_key=_whole_key(dedup_key))


def _whole_key(given: Any) -> str:
    try:
        return registry.whole_key(given, "dedup_key")
    except JobDefinitionError as error:
        raise InvalidTask(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupTaskResult(TaskResult):
    """
    A result that says what its call did: ``kind`` and ``reason`` are those of the Outcome.

    Read by its id, it says neither.
    """

    kind: Kind | None = field(default=None, compare=False)
    reason: str = field(default="", compare=False)

    @property
    def created(self) -> bool:
        """Whether a run follows because of this call alone."""
        return self.kind is Kind.CREATED

    @property
    def return_value(self) -> Any:
        """What the task returned; ValueError if it did not succeed, NoResult if it was not kept."""
        if isinstance(self._return_value, keys.NotKept):
            reason = self._return_value.reason
            raise NoResult(f"{self.task.module_path} has succeeded, but its {reason}")
        return TaskResult.return_value.fget(self)


def unique_task(
    *,
    key: Any,
    unique_for: Any = AS_CONFIGURED,
    backend: str = "default",
    queue_name: str = "default",
    priority: int = 0,
    takes_context: bool = False,
    **job_options: Any,
) -> Callable[[Callable[..., Any]], Any]:
    """
    Make a task with a key, on every version of the framework; Django 6.0's ``@task`` takes none.

    ``job_options``: other options of ``@job``, for example ``max_attempts``. Under a backend that
    is not ours it makes a plain task.
    """

    def make(func: Callable[..., Any]) -> Any:
        kind: Any = task_backends[backend].task_class
        ours = {
            "dedup_key": key,
            "unique_for": unique_for,
            "job_options": tuple(sorted(job_options.items())),
        }
        return kind(
            func=func,
            priority=priority,
            queue_name=queue_name,
            backend=backend,
            takes_context=takes_context,
            run_after=None,
            **(ours if issubclass(kind, DedupTask) else {}),
        )

    return make
