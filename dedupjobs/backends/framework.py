"""The framework of tasks: Django's own from 6.0 on, the package ``django-tasks`` on 5.2."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import django
from django.core.exceptions import ImproperlyConfigured

BUILT_IN = django.VERSION >= (6, 0)
HOME = "django.tasks" if BUILT_IN else "django_tasks"


def _module(path: str) -> Any:
    try:
        return import_module(path)
    except ImportError as error:
        raise ImproperlyConfigured(
            f"DedupBackend needs Django 6.0 or later, or, on this Django {django.__version__}, the "
            "package django-tasks (pip install 'dedupjobs[tasks]'), with \"django_tasks\" in "
            f"INSTALLED_APPS: {error}"
        ) from error


_tasks = _module(HOME)
_base = _module(f"{HOME}.base")
_exceptions = _module(f"{HOME}.exceptions")
_signals = _module(f"{HOME}.signals")

task: Any = _tasks.task
task_backends: Any = _tasks.task_backends
BaseTaskBackend: Any = _module(f"{HOME}.backends.base").BaseTaskBackend
Task: Any = _base.Task
TaskContext: Any = _base.TaskContext
TaskError: Any = _base.TaskError
TaskResult: Any = _base.TaskResult
TaskResultStatus: Any = _base.TaskResultStatus
InvalidTask: Any = getattr(_exceptions, "InvalidTask" if BUILT_IN else "InvalidTaskError")
TaskResultDoesNotExist: Any = _exceptions.TaskResultDoesNotExist
TaskResultMismatch: Any = _exceptions.TaskResultMismatch
task_enqueued: Any = _signals.task_enqueued
task_finished: Any = _signals.task_finished
task_started: Any = _signals.task_started
normalize_json: Any = _module(
    "django.utils.json" if BUILT_IN else "django_tasks.utils"
).normalize_json
