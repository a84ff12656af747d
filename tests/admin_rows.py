"""Rows as the admin finds them, and people with the permissions that a test wants."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.urls import reverse

from dedupjobs import clock, lifecycle
from dedupjobs.clock import DbNow
from dedupjobs.models import (
    FINAL,
    BulkOperation,
    BulkRefusal,
    JobAttempt,
    Operation,
    ProcessedJob,
    Status,
)

PERMISSIONS = ("view", "retry", "cancel", "hold", "free", "purge", "arguments")


def address(page: str, *args: Any) -> str:
    """Return the address of a page of jobs."""
    return reverse(f"admin:dedupjobs_processedjob_{page}", args=args)


def make(status: Status = Status.PENDING, **columns: Any) -> ProcessedJob:
    """Make a row of ``testapp.record`` in a status, as the arrows would leave it."""
    token = clock.token()
    row = ProcessedJob(
        **{
            "key_hash": token.ljust(64, "0"),
            "key": f"record:{token}",
            "name": "testapp.record",
            "queue": "default",
            "status": status,
            "args": '{"tag":"a","text":""}',
            "fingerprint": "f" * 64,
            "run_after": DbNow(),
            "created_at": DbNow(),
            "enqueued_at": DbNow(),
            "finished_at": DbNow() if status in FINAL else None,
            **columns,
        }
    )
    row.save(force_insert=True)
    if status == Status.RUNNING:
        try_of(row)
    return ProcessedJob.objects.get(pk=row.pk)


def try_of(row: ProcessedJob, **columns: Any) -> JobAttempt:
    """Make the row's next attempt; without ``outcome`` it is open, leased for a minute."""
    number = row.attempts + 1
    ProcessedJob.objects.filter(pk=row.pk).update(attempts=number)
    row.attempts = number
    attempt = JobAttempt(
        **{
            "job": row,
            "number": number,
            "generation": row.generation,
            "owner": f"owner-{row.pk}-{number}",
            "lease_until": DbNow(60),
            "beat_at": DbNow(),
            "began_at": DbNow(),
            "claimed_at": DbNow(),
            "host": "worker-1",
            "pid": 4711,
            **columns,
        }
    )
    attempt.save(force_insert=True)
    return JobAttempt.objects.get(pk=attempt.pk)


def expired(row: ProcessedJob, *, seconds: float = 30) -> JobAttempt:
    """Let the open attempt's lease of a minute have ended ``seconds`` ago."""
    now = lifecycle.database_now()
    JobAttempt.objects.filter(job=row, outcome=None).update(
        lease_until=now - timedelta(seconds=seconds),
        beat_at=now - timedelta(seconds=seconds + 60),
    )
    return JobAttempt.objects.get(job=row, outcome=None)


def person(name: str, *permissions: str, staff: bool = True) -> User:
    """Make a user with these permissions on jobs."""
    user = User.objects.create_user(name, is_staff=staff)
    codenames = [f"{what}_processedjob" for what in permissions]
    found = Permission.objects.filter(codename__in=codenames)
    assert len(found) == len(codenames)
    user.user_permissions.set(found)
    return user


def fresh(row: ProcessedJob) -> ProcessedJob:
    return ProcessedJob.objects.get(pk=row.pk)


def everything() -> list[Any]:
    """Return all that our tables and Django's log hold."""
    tables = (ProcessedJob, JobAttempt, Operation, BulkOperation, BulkRefusal, LogEntry)
    return [list(table.objects.order_by("pk").values()) for table in tables]
