"""
Helpers for the tests of a project that uses dedupjobs. Production code has no test mode.

    with self.captureOnCommitCallbacks(execute=True):
        charge.enqueue(order_id=7, amount="9.90")
    run_pending()
"""

from __future__ import annotations

from dedupjobs import clock, lifecycle, runner
from dedupjobs.clock import DbNow
from dedupjobs.models import WAITING

ROUNDS = 1_000  # a job that enqueues itself for ever is a mistake worth an error


def run_pending(*, name: str | None = None) -> int:
    """
    Run all due jobs in this process, without Redis and RQ, and return how many attempts ran.

    Also inside a test's transaction. Jobs that these jobs enqueue run too; retries run once
    their backoff is over. ``name``: only jobs registered under it.
    """
    for ran in range(ROUNDS):
        due = lifecycle.jobs().filter(status__in=WAITING, run_after__lte=DbNow())
        if name is not None:
            due = due.filter(name=name)
        row = due.order_by("run_after", "pk").values_list("pk", "generation").first()
        if row is None:
            return ran
        runner.deliver(*row, owner=clock.token(), lock=False)
    raise AssertionError(f"run_pending() ran {ROUNDS:,} attempts and jobs are still due")
