"""
What happened, told after it was committed. Receivers can not harm a job: we send robustly.

Every signal has ``sender`` (the job's registered name) and the keyword arguments named here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from django.dispatch import Signal

logger = logging.getLogger("dedupjobs.signals")


class LockEvent(StrEnum):
    """What became of a row's Redis lock."""

    ACQUIRED = "acquired"
    BUSY = "busy"
    RENEWED = "renewed"
    RELEASED = "released"
    KEPT = "kept until the retry"
    EXPIRED = "expired"  # gone or another's before the attempt's end; told once per attempt
    TAKEN_OVER = "taken over"
    UNREACHABLE = "unreachable"


class StepEvent(StrEnum):
    """What became of a call of ``attempt.step()``."""

    DONE = "done"
    STORED = "stored"  # an earlier attempt has done it: its result was given back
    LOOKED_UP = "looked up"  # its check has found that an earlier attempt has done it
    FAILED = "failed"
    IN_DOUBT = "in doubt"


job_changed = Signal()  # changes (lifecycle.Change): a key answers otherwise than before
job_invalidated = Signal()  # message (invalidation.Message): heard from any process, maybe late
invalidation_troubled = Signal()  # error
job_enqueued = Signal()  # job (row), kind
# Of messages also: queue, traceparent.
duplicate_detected = Signal()  # job_pk, cause (models.Cause), detail
insert_lost = Signal()  # job (row): another call's INSERT of this key came first
mismatch_detected = Signal()  # job (row), differing (names), policy
hand_over_failed = Signal()  # queue, count, error
delivery_received = Signal()  # job_pk, generation: a worker looks at a message; no name yet
stranger_met = Signal()  # message (its description, of another project), handed_on (False: dropped)
lock_moved = Signal()  # job_pk, event (LockEvent), claim (None: before it, or without one)
attempt_started = Signal()  # claim
attempt_ended = Signal()  # claim, ending, status (None: somebody else had decided), run_time
step_ended = Signal()  # claim, step (name), event (StepEvent), took (seconds; None: nothing ran)
job_dead = Signal()  # job_pk, key, reason ("failures", "lost")
lease_lost = Signal()  # fence, detail
attempt_lost = Signal()  # lost (lifecycle.Lost), cause ("lease", "death")
messages_resent = Signal()  # queue, count, cause ("lost", "wiped"), waited (seconds, on average)
settle_troubled = Signal()  # claim, error
operated = Signal()  # job_pk, action, by, after (an operator's arrow)
slot_skipped = Signal()  # slot: the job's previous one still waits
control_changed = Signal()  # control (row), what ("added", "ended"), by
call_turned_away = Signal()  # control (its number; None: on_redis_error), key
set_aside = Signal()  # job_pk, words: a due row may not run yet, and waits without a message
recalled = Signal()  # count: rows that were set aside may run
coordinator_failed = Signal()  # error
event_published = Signal()  # event (envelope.Event); sender: its name; of targets with signal=True
events_relayed = Signal()  # count; sender: the target
event_refused = Signal()  # event, tries, dead, error; sender: the target, which did not take it
target_away = Signal()  # error; sender: the target, which takes nothing at present
events_again = Signal()  # cause ("wiped", "asked"); sender: the target, to which all go again
event_taken = Signal()  # event (None: unreadable), fate (inbox.Fate), error; sender: the consumer
group_made = Signal()  # stream; sender: the consumer, whose group was not there
consumer_troubled = Signal()  # error; sender: the consumer
alert_changed = Signal()  # alert (alerts.book.News); sender: its kind
notice_dropped = Signal()  # channel, error: an alert's notice that could not be delivered


_ours: dict[Signal, dict[str, Callable[..., None]]] = {}


def hear(signal: Signal, receiver: Callable[..., None]) -> None:
    """
    Call one of our own functions before a signal's receivers, as if it were one.

    Without the look for its receivers, which costs more than most of them do.
    """
    name = f"{receiver.__module__}.{receiver.__qualname__}"
    _ours.setdefault(signal, {})[name] = receiver


def tell(signal: Signal, name: str, **facts: Any) -> None:
    """Send ``signal`` for the job called ``name``; a receiver that raises is ignored."""
    for receiver in _ours.get(signal, {}).values():
        try:
            receiver(sender=name, **facts)
        except Exception:
            logger.exception("%s failed", receiver.__qualname__)
    if signal.receivers:
        signal.send_robust(sender=name, **facts)
