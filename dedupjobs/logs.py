"""
All log sentences, in one place; a receiver of signals that nobody imports but ``apps``.

A sentence is for people; its facts stand beside it in ``record.dedupjobs`` (see ``fields``), with
``transition`` (received, locked, processing, completed, duplicate, failed, retrying, lost, dead,
held, cancelled, enqueued) or ``lock`` (what became of a lock) saying which event it was. Neither
has arguments, results or the texts of a job's errors: those stand in the tables, for those who
may see them. Whatever comes from outside is one visible line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from django.db import InterfaceError, OperationalError
from redis.exceptions import RedisError

from dedupjobs import conf, controls, fields, locks, signals
from dedupjobs.endings import Ending, Failed, Interrupted, Lapsed, Parked, Snoozed, Stopped
from dedupjobs.lifecycle import Claim, Lost
from dedupjobs.models import Control, ProcessedJob, Severity, Status
from dedupjobs.signals import LockEvent, StepEvent
from dedupjobs.visible import line

logger = logging.getLogger("dedupjobs")
lock_logger = logging.getLogger("dedupjobs.locks")

INFRASTRUCTURE = (RedisError, ConnectionError, TimeoutError, OperationalError, InterfaceError)


def connect() -> None:
    """Listen to everything worth a line."""
    receivers: tuple[tuple[Any, Callable[..., None]], ...] = (
        (signals.job_enqueued, _enqueued),
        (signals.duplicate_detected, _duplicate),
        (signals.mismatch_detected, _mismatch),
        (signals.hand_over_failed, _hand_over_failed),
        (signals.delivery_received, _received),
        (signals.lock_moved, _lock_moved),
        (signals.attempt_started, _started),
        (signals.attempt_ended, _ended),
        (signals.step_ended, _step_ended),
        (signals.job_dead, _dead),
        (signals.lease_lost, _lease_lost),
        (signals.attempt_lost, _attempt_lost),
        (signals.messages_resent, _resent),
        (signals.stranger_met, _stranger),
        (signals.settle_troubled, _settle_troubled),
        (signals.operated, _operated),
        (signals.slot_skipped, _slot_skipped),
        (signals.control_changed, _control_changed),
        (signals.call_turned_away, _turned_away),
        (signals.set_aside, _set_aside),
        (signals.coordinator_failed, _coordinator_failed),
        (signals.event_refused, _event_refused),
        (signals.target_away, _target_away),
        (signals.events_again, _events_again),
        (signals.event_taken, _event_taken),
        (signals.group_made, _group_made),
        (signals.consumer_troubled, _consumer_troubled),
        (signals.alert_changed, _alert_changed),
        (signals.notice_dropped, _notice_dropped),
        (signals.invalidation_troubled, _invalidation_troubled),
    )
    for signal, receiver in receivers:
        signals.hear(signal, receiver)


def _say(level: int, facts: dict[str, Any], sentence: str, *words: Any) -> None:
    logger.log(level, sentence, *words, extra={fields.ATTRIBUTE: facts})


def _listens(level: int) -> bool:
    return logger.isEnabledFor(level)


def _what(error: BaseException) -> str:
    """Return an error in a line; with its text only where no job has written that."""
    name = type(error).__name__
    return f"{name}: {line(error, 500)}" if isinstance(error, INFRASTRUCTURE) else name


# ---- calls


def _enqueued(sender: str, job: ProcessedJob, kind: Any, **_: Any) -> None:
    if _listens(logging.DEBUG):
        facts = {**_of_row(job), "transition": "enqueued", "kind": str(kind)}
        _say(logging.DEBUG, facts, "%s: row %s enqueued", line(sender), job.pk)


def _duplicate(sender: str, job_pk: int, cause: str, **_: Any) -> None:
    # Not louder: there may be thousands a second, and each is as it should be.
    if _listens(logging.INFO):
        facts = {
            **fields.of_job(sender, job_pk),
            **fields.of_process(),
            "transition": "duplicate",
            "cause": str(cause),
        }
        words = line(sender) or "delivery", str(cause), job_pk
        _say(logging.INFO, facts, "%s: duplicate (%s) of row %s", *words)


def _mismatch(
    sender: str, job: ProcessedJob, differing: tuple[str, ...], policy: str, **_: Any
) -> None:
    level = logging.WARNING if policy == "warn" else logging.INFO
    names = line(", ".join(differing))
    sentence = "%s: row %s holds the key with another value of %s"
    _say(level, {**_of_row(job), "differing": names}, sentence, line(sender), job.pk, names)


def _of_row(job: ProcessedJob) -> dict[str, Any]:
    return {
        **fields.of_job(job.name, job.pk, job.key_hash, job.key),
        "queue": line(job.queue),
        **fields.of_process(),
    }


def _hand_over_failed(sender: str, queue: str, count: int, error: Exception, **_: Any) -> None:
    facts = {"job": line(sender), "queue": line(queue), "count": count, **fields.of_process()}
    sentence = "%s: %s message(s) for queue %r not pushed, the coordinator will: %s"
    _say(logging.WARNING, facts, sentence, line(sender), count, line(queue), _what(error))


# ---- attempts


def _received(job_pk: int, generation: int, **_: Any) -> None:
    if _listens(logging.DEBUG):
        facts = {"row": job_pk, **fields.of_process(), "transition": "received"}
        _say(logging.DEBUG, facts, "row %s (generation %s) received", job_pk, generation)


_LOCK_LEVELS = {LockEvent.EXPIRED: logging.WARNING, LockEvent.UNREACHABLE: logging.INFO}


def _lock_moved(sender: str, job_pk: int, event: LockEvent, claim: Claim | None, **_: Any) -> None:
    level = _LOCK_LEVELS.get(event, logging.DEBUG)
    if not lock_logger.isEnabledFor(level):
        return
    facts = fields.of_claim(claim) if claim else fields.of_job(sender, job_pk)
    facts |= {"lock": str(event), "lock_key": _lock_key(job_pk)}
    if event in (LockEvent.ACQUIRED, LockEvent.TAKEN_OVER):
        facts["transition"] = "locked"
    words = line(sender) or "delivery", job_pk, str(event)
    lock_logger.log(level, "%s: lock of row %s %s", *words, extra={fields.ATTRIBUTE: facts})


def _lock_key(pk: int) -> str:
    try:
        return locks.name_of(pk)
    except AttributeError:  # a cache that has no locks
        return ""


def _started(sender: str, claim: Claim, **_: Any) -> None:
    if _listens(logging.DEBUG):
        facts = {**fields.of_claim(claim), "transition": "processing"}
        words = line(sender), claim.job_pk, claim.number
        _say(logging.DEBUG, facts, "%s: row %s attempt %s started", *words)


def _step_ended(
    sender: str, claim: Claim, step: str, event: StepEvent, took: float | None, **_: Any
) -> None:
    level = logging.WARNING if event is StepEvent.IN_DOUBT else logging.DEBUG
    if _listens(level):
        facts = {**fields.of_claim(claim), "step": line(step), "event": str(event), "took": took}
        words = line(sender), claim.job_pk, claim.number, line(step), str(event)
        _say(level, facts, "%s: row %s attempt %s step %r %s", *words)


def _ended(
    sender: str,
    claim: Claim,
    ending: Ending,
    status: Status | None,
    run_time: float | None,
    **_: Any,
) -> None:
    quiet = status is not None and not isinstance(ending, Failed | Parked | Lapsed)
    level = logging.INFO if quiet else logging.WARNING
    if not _listens(level):
        return
    facts = {
        **fields.of_claim(claim),
        "transition": _transition(ending, status),
        "status": str(status) if status else None,
        "run_time": run_time,
    }
    words = type(ending).__name__.lower()
    if isinstance(ending, Failed):
        facts["error"] = line(ending.error.type)
        words = f"{words} with {facts['error']}"
    place = status.lower() if status else "nothing written, another decided"
    took = "when it was killed" if run_time is None else f"after {run_time:.3f} s"
    sentence = "%s: row %s attempt %s %s %s → %s"
    _say(level, facts, sentence, line(sender), claim.job_pk, claim.number, words, took, place)


def _transition(ending: Ending, status: Status | None) -> str:
    if status is None:
        return "lost"
    by_status = {Status.RETRYING: "retrying", Status.HELD: "held", Status.CANCELLED: "cancelled"}
    match ending:
        case Failed():
            return by_status.get(status, "failed")
        case Snoozed() | Interrupted() | Parked() | Stopped():
            return by_status.get(status, "retrying")
    return "completed"


def _dead(sender: str, job_pk: int, key: str, reason: str, **_: Any) -> None:
    facts = {
        **fields.of_job(sender, job_pk, key=key),
        **fields.of_process(),
        "transition": "dead",
        "reason": reason,
    }
    sentence = "%s: row %s is %s (%s); retry it when the cause is gone"
    _say(logging.ERROR, facts, sentence, line(sender), job_pk, Status.DEAD, reason)


def _lease_lost(sender: str, fence: int, detail: str, **_: Any) -> None:
    facts = {"job": line(sender), "fence": fence, **fields.of_process()}
    sentence = "%s: attempt with fence %s lost its lease: %s"
    _say(logging.WARNING, facts, sentence, line(sender), fence, detail)


def _attempt_lost(sender: str, lost: Lost, cause: str, **_: Any) -> None:
    facts = {
        **fields.of_job(sender, lost.job_pk, key=lost.key),
        **fields.of_process(),
        "fence": lost.fence,
        "transition": "held" if lost.status == Status.HELD else "lost",
        "outcome": str(lost.outcome),
        "cause": cause,
    }
    place = lost.status.lower() if lost.status else "unchanged"
    words = line(sender), lost.job_pk, lost.outcome.lower(), cause, place
    _say(logging.WARNING, facts, "%s: row %s %s by %s → %s", *words)


# ---- what serves them


def _resent(queue: str, count: int, cause: str, **_: Any) -> None:
    facts = {"queue": line(queue), "count": count, "cause": cause, **fields.of_process()}
    sentence = "queue %r: %s message(s) sent again (%s)"
    _say(logging.WARNING, facts, sentence, line(queue), count, cause)


def _stranger(message: str, handed_on: bool, **_: Any) -> None:
    facts = {"handed_on": handed_on, **fields.of_process()}
    sentence = "a message of another project %s: %r; give each project a queue of its own"
    done = "was handed on to the next worker" if handed_on else "found no worker of its own"
    _say(logging.INFO if handed_on else logging.WARNING, facts, sentence, done, line(message))


def _settle_troubled(sender: str, claim: Claim | None, error: Exception, **_: Any) -> None:
    facts = fields.of_claim(claim) if claim else {"job": line(sender)}
    sentence = "%s: the database did not answer a settle, trying on: %s"
    _say(logging.WARNING, facts, sentence, line(sender), _what(error))


_PLACES = {Status.HELD: "held", Status.CANCELLED: "cancelled", Status.DEAD: "dead"}


def _operated(sender: str, job_pk: int, action: str, by: str, after: str, **_: Any) -> None:
    facts = {
        **fields.of_job(sender, job_pk),
        "action": action,
        "by": line(by),
        "status": str(after),
    }
    if transition := _PLACES.get(Status(after)) if after in Status.values else None:
        facts["transition"] = transition
    words = line(sender), job_pk, action, line(by), after.lower()
    _say(logging.INFO, facts, "%s: row %s %s by %s → %s", *words)


def _control_changed(control: Control, what: str, by: str, **_: Any) -> None:
    words = line(controls.spoken(control), 300)
    facts = {"control": control.pk, "what": words, "by": line(by), **fields.of_process()}
    sentence = "control %s (%s) %s by %s"
    _say(logging.INFO, facts, sentence, control.pk, words, what, line(by))


def _turned_away(sender: str, control: int | None, **_: Any) -> None:
    # Not louder: in an incident there are thousands a second, and each is as somebody wants it.
    if _listens(logging.INFO):
        facts = {"job": line(sender), "control": control, **fields.of_process()}
        whose = "on_redis_error" if control is None else f"control {control}"
        _say(logging.INFO, facts, "%s: call turned away by %s", line(sender), whose)


def _set_aside(sender: str, job_pk: int, words: str, **_: Any) -> None:
    if _listens(logging.INFO):
        facts = {**fields.of_job(sender, job_pk), **fields.of_process()}
        sentence = "%s: row %s set aside: %s"
        _say(logging.INFO, facts, sentence, line(sender), job_pk, line(words, 300))


def _slot_skipped(sender: str, slot: Any, **_: Any) -> None:
    facts = {"job": line(sender), "slot": slot.isoformat(), **fields.of_process()}
    sentence = "%s: slot %s skipped, an earlier one still waits"
    _say(logging.WARNING, facts, sentence, line(sender), slot.isoformat())


def _coordinator_failed(error: Exception, **_: Any) -> None:
    _say(logging.ERROR, fields.of_process(), "coordinator: %s", _what(error))


def _invalidation_troubled(sender: str, error: Exception, **_: Any) -> None:
    facts = {"job": line(sender), **fields.of_process()}
    _say(logging.WARNING, facts, "%s: invalidation: %s", line(sender), _what(error))


# ---- events


def _of_event(event: Any) -> dict[str, Any]:
    facts = {"event": line(event.id), "event_name": line(event.name), **fields.of_process()}
    return {**facts, "event_key": line(event.key)} if conf.get().LOG_KEYS else facts


def _event_refused(sender: str, event: Any, tries: int, dead: bool, **_: Any) -> None:
    facts = {"target": line(sender), "tries": tries, "dead": dead, **_of_event(event)}
    level = logging.ERROR if dead else logging.WARNING
    place = "DEAD; retry or drop it when the cause is gone" if dead else "tried again"
    words = line(event.name), line(event.id), tries, line(sender), place
    _say(level, facts, "event %s %s: try %s at target %s failed → %s", *words)


def _target_away(sender: str, error: Exception, **_: Any) -> None:
    facts = {"target": line(sender), **fields.of_process()}
    sentence = "target %s takes no events, they wait: %s"
    _say(logging.WARNING, facts, sentence, line(sender), line(error, 500))


def _events_again(sender: str, cause: str, **_: Any) -> None:
    facts = {"target": line(sender), "cause": cause, **fields.of_process()}
    sentence = "target %s: events are sent once more (%s); consumers know them by their ids"
    _say(logging.WARNING, facts, sentence, line(sender), cause)


_FATES = {"failed": logging.WARNING, "held": logging.ERROR, "unknown": logging.INFO}


def _event_taken(sender: str, event: Any, fate: str, error: str, **_: Any) -> None:
    level = _FATES.get(str(fate), logging.DEBUG)
    if _listens(level):
        facts = {"consumer": line(sender), "fate": str(fate), **_of_event(event)}
        why = f": {error.partition(':')[0]}" if error else ""
        words = line(sender), line(event.name), line(event.id), str(fate), line(why)
        _say(level, facts, "consumer %s: event %s %s %s%s", *words)


def _group_made(sender: str, stream: str, **_: Any) -> None:
    facts = {"consumer": line(sender), "stream": line(stream), **fields.of_process()}
    sentence = (
        "consumer %s: stream %r had no group of this name, because it is new or Redis was wiped; "
        "made one that reads from the begin. What was applied before is known by its mark."
    )
    _say(logging.WARNING, facts, sentence, line(sender), line(stream))


def _consumer_troubled(sender: str, error: Exception, **_: Any) -> None:
    facts = {"consumer": line(sender), **fields.of_process()}
    _say(logging.WARNING, facts, "consumer %s: %s", line(sender), _what(error))


def _alert_changed(sender: str, alert: Any, **_: Any) -> None:
    level = logging.INFO
    if alert.is_open:
        level = logging.ERROR if alert.severity == Severity.CRITICAL else logging.WARNING
    facts = {
        "alert": sender,
        "subject": line(alert.subject),
        "event": alert.event,
        "severity": alert.severity,
        **fields.of_process(),
    }
    words = sender, line(alert.subject), alert.event, line(alert.words, 500)
    _say(level, facts, "alert %s %s %s: %s", *words)


def _notice_dropped(channel: str, error: Exception, **_: Any) -> None:
    facts = {"channel": channel, **fields.of_process()}
    sentence = "an alert could not be delivered by %s and was dropped: %s"
    _say(logging.ERROR, facts, sentence, channel, line(error, 300))
