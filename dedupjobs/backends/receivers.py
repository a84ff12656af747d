"""Passing on what happens to tasks, as the framework's three signals."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from dedupjobs import lifecycle, signals
from dedupjobs.backends import entries, results
from dedupjobs.backends.framework import task_enqueued, task_finished, task_started
from dedupjobs.backends.tasks import DedupTaskResult
from dedupjobs.models import FINAL, Status


def connect() -> None:
    """Tell from now on what workers, coordinators and people do to tasks."""
    signals.hear(signals.attempt_started, _started)
    signals.hear(signals.attempt_ended, _ended)
    signals.hear(signals.job_dead, _dead)
    signals.hear(signals.operated, _operated)


def tell_enqueued(sender: type, result: DedupTaskResult) -> None:
    """Tell after the commit, since nothing is enqueued before it."""

    def tell() -> None:
        task_enqueued.send(sender, task_result=result)

    transaction.on_commit(tell, using=lifecycle.alias(), robust=True)


def _started(sender: str, claim: Any, **_: Any) -> None:
    _tell(task_started, sender, claim.job_pk)


def _ended(sender: str, claim: Any, status: Any, **_: Any) -> None:
    if status in FINAL:
        _tell(task_finished, sender, claim.job_pk)


def _dead(sender: str, job_pk: int, reason: str, **_: Any) -> None:
    if reason == "lost":  # after failures its attempt has ended, which was told
        _tell(task_finished, sender, job_pk)


def _operated(sender: str, job_pk: int, after: Any, **_: Any) -> None:
    if after == Status.CANCELLED:
        _tell(task_finished, sender, job_pk)


def _tell(signal: Any, name: str, job_pk: int) -> None:
    task = entries.task_of(name)
    row = lifecycle.jobs().filter(pk=job_pk).first() if task else None
    if row is not None:
        signal.send(type(task.get_backend()), task_result=results.result_of(task, row))
