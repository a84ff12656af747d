"""
Every change of a job's status, in the order a job meets them. Nothing else writes them.

    enqueue                                             ┌────────── reopen ◄───────────┐
       │                                                ▼                              │
       └──► PENDING ──claim──► RUNNING ──complete──────────────────────► SUCCEEDED ────┤
              ▲ ▲              │  ▲ │ ├──give_up, reclaim, bury────────► DEAD ─────────┤
              │ │              │  │ │ └──stop, (cancel)────────────────► CANCELLED ────┘
              │ └──interrupt,──┤  │ └────park, reclaim, (hold)─────────► HELD
              │    unclaim     │  └claim─┐
              │                └─────────┴── RETRYING ◄── fail, snooze, reclaim, bury
              └─── retry, unhold ◄── DEAD, CANCELLED, RETRYING, HELD

Each arrow is a guarded UPDATE whose row count says who won. Endings lock the *attempt* first,
then the *job*, in one transaction: ``outcome IS NULL`` on the attempt is the one door that every
ending passes. 0 rows: somebody else decided; then nothing is written, and None is returned.
A rerun that waits when a run ends turns each arrow to a final status into one to PENDING.

Read on in ``calls``, ``claims``, ``settling``, ``losses``, ``operators``, ``retention``; they share
``rows`` and ``leaving``. ``batches`` does for many rows at once what ``claims`` and ``settling`` do
for one. ``stepping`` writes which parts of a run are done, ``sending`` which rows have a message.
``statements`` makes the SQL of the busiest arrows cheap; it decides nothing.
"""

from __future__ import annotations

from dedupjobs.lifecycle import claims, settling
from dedupjobs.lifecycle.batches import (
    Apart,
    Done,
    Terms,
    Wanted,
    beat_kin,
    beat_many,
    began,
    claim_many,
    complete_many,
    end_attempt,
    move_jobs,
    return_many,
)
from dedupjobs.lifecycle.calls import Answer, enqueue, enqueue_many
from dedupjobs.lifecycle.claims import (
    OPEN,
    Gate,
    Grant,
    Place,
    Pulse,
    Refusal,
    Refused,
    beat,
    begin,
    claim,
    claimed_by,
    lock_open,
    look,
    renew,
)
from dedupjobs.lifecycle.losses import Lost, bury, reclaim
from dedupjobs.lifecycle.operators import (
    cancel,
    cancel_alike,
    hold,
    hold_alike,
    limit,
    limit_alike,
    retry,
    retry_alike,
    unhold,
    unhold_alike,
)
from dedupjobs.lifecycle.retention import Pruned, free_tombstones, held, prunable, prune, purge
from dedupjobs.lifecycle.rows import (
    Change,
    Claim,
    alias,
    assert_unbroken,
    attempts,
    codes,
    database_now,
    jobs,
    mark_transaction,
    names,
    seconds_until_due,
    skip_locked,
    steps,
    values_of,
    waited_in_vain,
)
from dedupjobs.lifecycle.sending import (
    BEYOND,
    NO_LOCKS,
    PAUSE_MARKS,
    ROOM_MARKS,
    aside,
    forget_mark,
    is_aside,
    mark_sent,
    mark_sent_together,
    mark_unsent,
    marks,
    new_dispatch_id,
    release,
    set_aside,
    set_aside_unsent,
)
from dedupjobs.lifecycle.settling import (
    NO_NOTE,
    Note,
    complete,
    fail,
    give_up,
    interrupt,
    note_late,
    outcome_of,
    park,
    snooze,
    stop,
    unclaim,
)
from dedupjobs.lifecycle.statements import insert_for_each
from dedupjobs.lifecycle.stepping import (
    Entry,
    decide_step,
    end_step,
    enter_step,
    has_entry,
    steps_of,
)

__all__ = [  # noqa: RUF022 - in the order a job meets them
    "alias", "jobs", "attempts", "steps", "names", "database_now", "seconds_until_due",
    "skip_locked", "values_of", "insert_for_each",
    "codes", "waited_in_vain", "mark_transaction", "assert_unbroken",
    "Answer", "enqueue", "enqueue_many",
    "Change", "Claim", "Place", "Grant", "Refusal", "Refused", "Gate", "OPEN",
    "claim", "claimed_by", "begin",
    "Pulse", "beat", "look", "lock_open", "renew",
    "Note", "NO_NOTE", "complete", "fail", "give_up", "snooze", "interrupt", "unclaim", "stop",
    "park", "outcome_of", "note_late",
    "Entry", "steps_of", "enter_step", "end_step", "has_entry", "decide_step",
    "Terms", "Wanted", "claim_many", "began", "beat_many", "beat_kin", "Done", "complete_many",
    "Apart", "end_attempt", "move_jobs", "return_many",
    "Lost", "bury", "reclaim",
    "cancel", "hold", "retry", "unhold", "limit",
    "cancel_alike", "hold_alike", "retry_alike", "unhold_alike", "limit_alike",
    "Pruned", "prunable", "free_tombstones", "held", "prune", "purge",
    "new_dispatch_id", "mark_sent", "mark_sent_together", "mark_unsent",
    "BEYOND", "PAUSE_MARKS", "NO_LOCKS", "ROOM_MARKS", "is_aside", "set_aside", "set_aside_unsent",
    "aside", "release", "marks", "forget_mark",
]  # fmt: skip


def get_ready() -> None:
    """Compile the statements of a run that succeeds; asks the database nothing."""
    claims.get_ready()
    settling.get_ready()
