"""Running what is due, in the test's own process and transaction: ``run_pending``, ``inline``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import connections, transaction
from django.db.models import Exists, F, OuterRef

from dedupjobs import asides, clock, controls, lifecycle, registry, runner
from dedupjobs.clock import DbNow
from dedupjobs.dispatch import Delivery
from dedupjobs.models import WAITING, AttemptOutcome, Status
from dedupjobs.testing.calls import Calls, handing_over_to, recorded
from dedupjobs.testing.stage import locks_are_missed, only_in_tests, without_redis

ROUNDS = 1_000  # a job that enqueues itself for ever is a mistake worth an error


def run_pending(*, name: str | None = None, retries: bool = False) -> int:
    """
    Run all due jobs in this process, without Redis and RQ, and return how many attempts ran.

    Also inside a test's transaction. Jobs that these jobs enqueue run too; retries run once
    their backoff is over, or at once with ``retries``. ``name``: only jobs registered under it.
    """
    controls.current(at_most=0.0)
    if not locks_are_missed() and lifecycle.aside(lifecycle.NO_LOCKS).exists():
        lifecycle.release(lifecycle.NO_LOCKS, most=ROUNDS)  # none is taken
    asides.Sweep().do(rooms=True, most=ROUNDS)
    ran = 0
    for _ in range(ROUNDS):
        row = _first_due(name) or (_first_retry(name) if retries else None)
        if row is None:
            return ran
        ran += _runs(*row)
    raise AssertionError(f"run_pending() ran {ROUNDS:,} attempts and jobs are still due")


def _runs(pk: int, generation: int) -> bool:
    """Run a row; False: it may not run now, and was set aside."""
    row = lifecycle.jobs().filter(pk=pk)
    lock = locks_are_missed() and registry.options_of(row.get().name).takes_lock
    status = runner.deliver(pk, generation, owner=clock.token(), lock=lock)
    return status is not None or not row.filter(dispatched_at=lifecycle.BEYOND).exists()


def _first_due(name: str | None) -> tuple[int, int] | None:
    due = _named(lifecycle.jobs().filter(status__in=WAITING, run_after__lte=DbNow()), name)
    due = due.exclude(dispatched_at=lifecycle.BEYOND)  # it would be refused again
    return due.order_by("run_after", "pk").values_list("pk", "generation").first()  # type: ignore[no-any-return]


def _first_retry(name: str | None) -> tuple[int, int] | None:
    """Return a job whose last attempt has failed, and let its backoff be over."""
    newest = lifecycle.attempts().filter(job=OuterRef("pk"), number=OuterRef("attempts"))
    failed = newest.filter(outcome__in=(AttemptOutcome.FAILED, AttemptOutcome.TIMED_OUT))
    rows = _named(lifecycle.jobs().filter(Exists(failed), status=Status.RETRYING), name)
    rows = rows.exclude(dispatched_at=lifecycle.BEYOND)
    row = rows.order_by("run_after", "pk").values_list("pk", "generation").first()
    if row is not None:
        lifecycle.jobs().filter(pk=row[0], status=Status.RETRYING).update(
            run_after=DbNow(), version=F("version") + 1
        )
    return row  # type: ignore[no-any-return]


def _named(rows: Any, name: str | None) -> Any:
    return rows if name is None else rows.filter(name=name)


@contextmanager
def inline() -> Iterator[Calls]:
    """
    Run jobs as soon as they are committed, in this process: same rows, same attempts, no Redis.

    Keys are unique and failures are retried, at once instead of after their backoff; a call with
    ``run_after`` waits. In a TestCase, whose own transaction never ends, a job runs as soon as no
    ``atomic()`` of yours is open: when it is enqueued, when captureOnCommitCallbacks() executes,
    at the next call, and at the end of the block. Gives the block's Calls. Also a decorator.
    """
    only_in_tests("inline()")
    line = _Line()
    with without_redis(), recorded() as calls, handing_over_to(line.take):
        yield calls
        line.run()


class _Line:
    """Runs what is due, one after the other: a job that enqueues another one ends first."""

    def __init__(self) -> None:
        self._running = False

    def take(self, deliveries: Sequence[Delivery]) -> None:
        if not deliveries:
            return
        if _all_is_committed():
            self.run()
        else:
            transaction.on_commit(self.run, using=lifecycle.alias())

    def run(self) -> None:
        if self._running or not _all_is_committed():
            return
        self._running = True
        try:
            run_pending(retries=True)
        finally:
            self._running = False


def _all_is_committed() -> bool:
    """Whether no transaction is open but those that TestCase wraps around a test."""
    blocks = connections[lifecycle.alias()].atomic_blocks
    return all(getattr(block, "_from_testcase", False) for block in blocks)
