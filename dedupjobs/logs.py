"""All log sentences, in one place; a receiver of signals that nobody imports but ``apps``."""

from __future__ import annotations

import logging
from typing import Any

from dedupjobs import signals
from dedupjobs.endings import Failed
from dedupjobs.models import Status

logger = logging.getLogger("dedupjobs")


def connect() -> None:
    """Listen to everything worth a line."""
    for signal, receiver in (
        (signals.job_enqueued, _enqueued),
        (signals.duplicate_detected, _duplicate),
        (signals.mismatch_detected, _mismatch),
        (signals.hand_over_failed, _hand_over_failed),
        (signals.attempt_started, _started),
        (signals.attempt_ended, _ended),
        (signals.job_dead, _dead),
        (signals.lease_lost, _lease_lost),
        (signals.attempt_lost, _attempt_lost),
        (signals.messages_resent, _resent),
        (signals.lock_trouble, _lock_trouble),
        (signals.settle_troubled, _settle_troubled),
        (signals.operated, _operated),
        (signals.slot_skipped, _slot_skipped),
        (signals.coordinator_failed, _coordinator_failed),
        (signals.invalidation_troubled, _invalidation_troubled),
    ):
        signal.connect(receiver, dispatch_uid=f"dedupjobs.logs.{receiver.__name__}")


def _enqueued(sender: str, job: Any, **_: Any) -> None:
    logger.debug("%s: row %s enqueued", sender, job.pk)


def _duplicate(sender: str, job_pk: int, cause: str, detail: str, **_: Any) -> None:
    logger.info("%s: duplicate (%s) of row %s: %s", sender or "delivery", cause, job_pk, detail)


def _mismatch(sender: str, job: Any, differing: tuple[str, ...], policy: str, **_: Any) -> None:
    level = logging.WARNING if policy == "warn" else logging.INFO
    names = ", ".join(differing)
    logger.log(level, "%s: row %s holds the key with another value of %s", sender, job.pk, names)


def _hand_over_failed(sender: str, queue: str, count: int, error: Exception, **_: Any) -> None:
    logger.warning(
        "%s: %s message(s) for queue %r not pushed, the coordinator will: %s",
        sender,
        count,
        queue,
        error,
    )


def _started(sender: str, claim: Any, **_: Any) -> None:
    logger.debug("%s: row %s attempt %s started", sender, claim.job_pk, claim.number)


def _ended(
    sender: str, claim: Any, ending: Any, status: Any, run_time: float | None, **_: Any
) -> None:
    words = type(ending).__name__.lower()
    place = status.lower() if status else "nothing written, another decided"
    level = logging.INFO
    if isinstance(ending, Failed):
        words = f"{words}: {ending.error.type}: {ending.error.message}"
        level = logging.WARNING
    if status is None:
        level = logging.WARNING
    logger.log(
        level,
        "%s: row %s attempt %s %s after %s → %s",
        sender,
        claim.job_pk,
        claim.number,
        words,
        "its kill" if run_time is None else f"{run_time:.3f} s",
        place,
    )


def _dead(sender: str, job_pk: int, reason: str, **_: Any) -> None:
    logger.error(
        "%s: row %s is %s (%s); retry it when the cause is gone",
        sender,
        job_pk,
        Status.DEAD,
        reason,
    )


def _lease_lost(sender: str, fence: int, detail: str, **_: Any) -> None:
    logger.warning("%s: attempt with fence %s lost its lease: %s", sender, fence, detail)


def _attempt_lost(sender: str, lost: Any, cause: str, **_: Any) -> None:
    logger.warning(
        "%s: row %s %s by %s → %s",
        sender,
        lost.job_pk,
        lost.outcome.lower(),
        cause,
        lost.status.lower() if lost.status else "unchanged",
    )


def _resent(queue: str, count: int, cause: str, **_: Any) -> None:
    logger.warning("queue %r: %s message(s) sent again (%s)", queue, count, cause)


def _lock_trouble(sender: str, job_pk: int, grip: Any, **_: Any) -> None:
    logger.info("%s: row %s runs without its Redis lock (%s)", sender, job_pk, grip.value)


def _settle_troubled(sender: str, error: Exception, **_: Any) -> None:
    logger.warning("%s: the database did not answer a settle, trying on: %s", sender, error)


def _operated(sender: str, job_pk: int, action: str, by: str, after: str, **_: Any) -> None:
    logger.info("%s: row %s %s by %s → %s", sender, job_pk, action, by, after.lower())


def _slot_skipped(sender: str, slot: Any, **_: Any) -> None:
    logger.warning("%s: slot %s skipped, an earlier one still waits", sender, slot.isoformat())


def _coordinator_failed(error: Exception, **_: Any) -> None:
    logger.error("coordinator: %s: %s", type(error).__name__, error)


def _invalidation_troubled(sender: str, error: Exception, **_: Any) -> None:
    logger.warning("%s: invalidation: %s: %s", sender, type(error).__name__, error)
