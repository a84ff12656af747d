"""
What a worker calls for a message of many rows: claim them together, run them, settle their ends.

Each row has its own attempt, lease, fence and Redis lock, and each ending passes the one door that
a single one passes; only the statements and round trips are shared. What could not be claimed
with the others is run by itself afterwards, as a message of one row is.

    one after the other   the ending is written before the next job starts, and the next one begun
                          by the same statement
    gathered              batch="group": successes wait GATHERED seconds at most, to be written
                          together; claimed counts as begun
    in one transaction    atomic jobs, but not on SQLite, which has one writer: a savepoint each

Rows whose turn has not come after PATIENT seconds go back, uncounted, for any worker to take.

Read on in ``members``, ``running``, ``shared``; they share ``course`` and ``desk``.
"""

from __future__ import annotations

from dedupjobs import counters, interrupts, lifecycle, runner
from dedupjobs.batches import running
from dedupjobs.batches.members import claimed, wanted_of
from dedupjobs.lifecycle import Wanted
from dedupjobs.runner import Rows

__all__ = ["run", "together"]


def run(deliveries: list[list[int]]) -> None:
    """Run the rows of an RQ message, ``[[pk, generation], …]``, together where they may be."""
    runner.serve(deliveries, together)


def together(rows: Rows, owner: str) -> None:
    """Run what can be claimed at once as a batch, and the rest one by one."""
    if runner.in_transaction():
        runner.one_by_one(rows, owner)
        return
    wanted = wanted_of(rows, owner)
    with counters.gathering():
        members = claimed(wanted, owner)
        if members:
            running.run(members)
    done = {member.claim.owner for member in members}
    for row in wanted:
        if row.owner in done:
            continue
        if interrupts.shutting_down.is_set():
            _leave(wanted)
            return
        runner.deliver(row.pk, row.generation, owner=row.owner)


def _leave(wanted: list[Wanted]) -> None:
    """Let the coordinator hand those over again that still wait; their messages end with us."""
    rows = lifecycle.jobs().filter(pk__in=[row.pk for row in wanted], dispatch_id__isnull=False)
    ids = rows.values_list("dispatch_id", flat=True).distinct()
    lifecycle.mark_unsent([str(dispatch_id) for dispatch_id in ids])
