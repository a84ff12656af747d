"""
Helpers for the tests of a project that uses dedupjobs. Production code has no test mode.

    with inline() as calls:                       # jobs run as soon as they are committed
        self.client.post("/pay/7/")
        self.client.post("/pay/7/")
    calls.assert_enqueued(charge, key="payment:7", times=1)
    calls.assert_deduplicated(charge, key="payment:7")

None of them needs Redis; ``docs/testing.md`` shows each. All but ``run_pending`` change the whole
process while their block runs, and so refuse to work outside a test (OutsideTests).
"""

from __future__ import annotations

from dedupjobs.testing.calls import (
    Calls,
    Enqueued,
    assert_deduplicated,
    assert_enqueued,
    captured_jobs,
)
from dedupjobs.testing.faults import Crashed, Zombie, crash_at, simulate_redis_loss, zombie
from dedupjobs.testing.moments import FrozenClock, frozen_clock
from dedupjobs.testing.running import inline, run_pending

__all__ = [
    "Calls",
    "Crashed",
    "Enqueued",
    "FrozenClock",
    "Zombie",
    "assert_deduplicated",
    "assert_enqueued",
    "captured_jobs",
    "crash_at",
    "frozen_clock",
    "inline",
    "run_pending",
    "simulate_redis_loss",
    "zombie",
]
