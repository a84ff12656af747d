"""Which probes exist, and which role comes by them while a stage runs."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "dedupjobs"

HORSE = (
    *("lock.before", "lock.after", "claim.before", "claim.row_won", "claim.uncommitted"),
    *("claim.committed", "user_code.before", "user_code.after", "beat.before", "beat.done"),
    *("fenced.locked", "settle.before", "settle.between", "settle.uncommitted"),
    *("settle.committed", "release.before", "step.before", "step.after_started"),
    *("step.after_code", "step.uncommitted", "step.after_recorded"),
)
COORDINATOR = (
    *("mark_sent.before", "push.before", "push.after"),
    *("reclaim.before", "reclaim.between", "reclaim.uncommitted", "reclaim.committed"),
    *("relay.before", "relay.after"),
)
CONSUMER = ("inbox.marked", "inbox.handled", "inbox.committed", "inbox.ack")
ENQUEUER = (
    *("enqueue.read", "enqueue.inserted", "reopen.before", "replace.before", "rerun.before"),
    *("push.before", "push.after", "mark_unsent.before", "cache.leased", "cache.loaded"),
)
PARENT = ("reclaim.before", "reclaim.between", "reclaim.uncommitted", "reclaim.committed")

ABOUT_LOCKS = ("lock.before", "lock.after", "release.before")
# Between statements that are one on PostgreSQL.
BETWEEN = ("claim.row_won", "claim.uncommitted", "enqueue.read")

UNCALLED = {
    "begin.before": "batches begin so; tests/test_batch_kills.py kills them there",
    "set_aside.before": "rarely; tests/test_controls.py ends a worker there",
    "bulk.page": "a person starts it; tests/test_admin_bulk.py kills it there",
}


def all_points(locks: str = "one") -> set[str]:
    """Return every probe in the package, but those that no role here comes by."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        found |= set(re.findall(r'probes\.reach\("([a-z_.]+)"\)', path.read_text()))
    return found - set(UNCALLED) - set(_never(locks))


def _never(locks: str) -> tuple[str, ...]:
    return ABOUT_LOCKS if locks == "none" else ()


def by_role(worker: str, database: str, locks: str = "one") -> list[tuple[str, str]]:
    """Return the pairs of role and point at which a stage with such workers can be struck."""
    runner = "worker" if worker == "rq.SimpleWorker" else "horse"
    passed = (*(BETWEEN if database == "postgresql" else ()), *_never(locks))
    pairs = [(runner, point) for point in HORSE if point not in passed]
    pairs += [("coordinator", point) for point in COORDINATOR]
    pairs += [("enqueuer", point) for point in ENQUEUER if point not in passed]
    pairs += [("consumer", point) for point in CONSUMER]
    if "dedupjobs" in worker:
        pairs += [("worker", point) for point in PARENT]
    return pairs
