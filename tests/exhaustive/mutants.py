"""
The guards of the model, each with the smallest kind of job and bounds that misses it.

Some stand behind one another, and are dropped together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.exhaustive import explorer
from tests.exhaustive.explorer import Report
from tests.exhaustive.state import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """Guards to drop together, and what the job and the bounds must be for a check to see it."""

    guards: frozenset[str]
    where: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " + ".join(sorted(self.guards))

    def configurations(self) -> Iterator[Config]:
        """Yield the configuration that is said to miss the guards, then all others."""
        yield Config(**{"calls": 1, "operations": 0, "faults": 0, **self.where})
        modes = (self.where.get("mode", "plain"),)
        yield from explorer.configurations(explorer.BOUNDS[:3], modes)


def caught(mutant: Mutant, deadline: float) -> Report:
    """Explore without the guards until a check sees it."""
    return explorer.without(mutant.guards, mutant.configurations(), deadline)


_FAULT = {"faults": 1}
_TWO_FAULTS = {"faults": 2}
_CALLS = {"calls": 2}
_RERUN = {"policy": "rerun", "calls": 2}
_REPLACE = {"policy": "replace", "calls": 2}
_BLOCK = {"on_dead": "block"}
_HOLD = {"on_lost": "hold"}
_ASKED = {"operations": 1}

_TABLE: list[tuple[str, dict[str, Any]]] = [
    ("claim_waiting", _FAULT),
    ("claim_due", _FAULT),
    ("claim_generation", {**_RERUN, "faults": 1}),
    ("claim_args_after", _REPLACE),
    ("claim_fence_after", _FAULT),
    ("claim_one_tx", _FAULT),
    ("begin_open", _FAULT),
    ("begin_commits", {"mode": "atomic", "faults": 1}),
    ("beat_open", _FAULT),
    ("settle_open settle_mine", _TWO_FAULTS),
    ("settle_open settle_running", _TWO_FAULTS),
    ("settle_one_tx", _FAULT),
    ("complete_rerun", _RERUN),
    ("give_up_rerun", _RERUN),
    ("stop_rerun", {**_RERUN, "extra": True}),
    ("stop_drops", {**_RERUN, **_ASKED}),
    ("reclaim_rerun", {**_RERUN, "faults": 2}),
    ("block_keeps", {**_RERUN, **_BLOCK}),
    ("block_rests", {**_RERUN, **_BLOCK}),
    ("takeup_generation", _RERUN),
    ("takeup_budgets", _RERUN),
    ("takeup_clears", {**_RERUN, **_ASKED}),
    ("complete_clears", _ASKED),
    ("give_up_clears", _ASKED),
    ("stop_clears reopen_clears", {**_CALLS, **_ASKED}),
    ("reclaim_clears", {**_ASKED, "faults": 2}),
    ("park_clears unhold_clears", {"operations": 2}),
    ("reopen_budgets", _CALLS),
    ("reopen_window", {**_CALLS, "unique_for": "forever"}),
    ("reopen_block", {**_CALLS, **_BLOCK}),
    ("reopen_guard", {**_CALLS, **_ASKED}),
    ("reopen_succeeded_generation", _CALLS),
    ("reopen_other_generation", _CALLS),
    ("reopen_same_generation", _CALLS),
    ("held_blocks", {**_CALLS, **_HOLD, "faults": 1}),
    ("replace_untried", {**_REPLACE, "faults": 1}),
    ("replace_guard", _REPLACE),
    ("rerun_guard", _RERUN),
    ("rerun_waiting", _RERUN),
    ("rerun_tried", {**_RERUN, "faults": 1}),
    ("fail_counts", {}),
    ("give_up_max", {}),
    ("snooze_uncounted", {"extra": True}),
    ("interrupt_uncounted", _FAULT),
    ("unclaim_uncounted", _FAULT),
    ("interrupt_on_lost", {**_HOLD, "faults": 1}),
    ("interrupt_begun", {**_HOLD, "faults": 1}),
    ("reclaim_open", _TWO_FAULTS),
    ("reclaim_lease", _FAULT),
    ("reclaim_job reclaim_open", _TWO_FAULTS),
    ("reclaim_one_tx", _TWO_FAULTS),
    ("reclaim_counts", _FAULT),
    ("reclaim_max", _TWO_FAULTS),
    ("reclaim_on_lost", {**_HOLD, "faults": 1}),
    ("reclaim_returned", _FAULT),
    ("reclaim_uncounted", _FAULT),
    ("reclaim_stop", {**_ASKED, "faults": 1}),
    ("hold_first", {**_HOLD, **_ASKED, **_CALLS, "faults": 1}),
    ("two_witnesses", _FAULT),
    ("bury_owner", _TWO_FAULTS),
    ("bury_reaped", {}),
    ("atomic_interrupts", {"mode": "atomic", "faults": 1}),
    ("inner_interrupts", {"mode": "inner", "faults": 1}),
    ("requests_bind claim_unasked", _ASKED),
    ("requests_bind", _ASKED),
    ("dispatch_cleared resend", {}),
    ("resend", _FAULT),
    ("cancel_waiting", _ASKED),
    ("cancel_rerun", {**_RERUN, **_ASKED}),
    ("hold_waiting", _ASKED),
    ("retry_final", _ASKED),
    ("retry_clears stop_clears", {"operations": 2}),
    ("retry_budgets", _ASKED),
    ("unhold_clears", {**_HOLD, "operations": 2, "faults": 1}),
    ("unhold_budgets", {"operations": 2}),
    ("operator_version", {**_REPLACE, **_ASKED}),
    ("bump_reopen", {**_CALLS, "operations": 2}),
    ("bump_replace", {**_REPLACE, **_ASKED}),
    ("bump_rerun", {**_RERUN, **_ASKED}),
]

MUTANTS = [Mutant(guards=frozenset(names.split()), where=where) for names, where in _TABLE]

_OPEN = "an open attempt is its row's newest, and the row RUNNING"

NO_CHECK = {
    "claim_unasked": "no waiting row has a request, since every arrow to one obeys it",
    "claim_lookup": "a claim that nobody found is returned by the coordinator",
    "settle_open, settle_running, settle_mine": "each says what the other two say",
    "settle_rollback": _OPEN,
    "reclaim_job": _OPEN,
    "stop_clears, reopen_clears, retry_clears": "a cancelled row opens by one of the latter",
    "reopen_rerun": "no row that a call may reopen has a waiting rerun",
    "reopen_attempted": "a generation without an attempt has no effect to be known by",
    "replace_new_id": "a message names its row; RQ would refuse the same id twice",
    "unsure_read": "the attempt's write-once outcome refuses the second settle",
    "unsure_settles": "an attempt left open is reclaimed",
    "dispatch_cleared": "the message that the row still names counts as lost in time",
    "resend_known": "a second message finds nothing to take",
    "retry_takes": "the end of the next run takes the rerun up",
    "bump_claim, bump_other": "an operator's arrow asks for the status, too",
}
"""
Guards that no check misses when they alone are gone, and why: each costs time, not safety. The
comparison with the code and the named tests of the suite hold the code to them all the same.
"""
