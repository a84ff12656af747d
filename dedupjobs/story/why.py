"""
Why a job is where it is, and what happens next, in two sentences. Pure: facts in, words out.

    waiting for retry 3 of 4 at 14:02:10 (delay 31 s, drawn from up to 40 s); last error OSError
    held: the worker was lost during attempt 2, and the job says on_lost="hold"
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.utils.translation import gettext as _

from dedupjobs.models import AttemptOutcome, Status
from dedupjobs.story.spoken import moment, span

SHOWN = 300  # characters of an error or a progress that stand in a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """The newest attempt."""

    number: int
    outcome: str | None
    where: str
    claimed_at: datetime
    beat_at: datetime
    lease_until: datetime
    began: bool = True
    active_at: datetime | None = None
    ended_at: datetime | None = None
    error_class: str = ""
    progress: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that the sentences need; moments are aware, durations seconds."""

    status: str
    now: datetime
    run_after: datetime
    name: str = ""
    queue: str = "default"
    dispatched_at: datetime | None = None
    failures: int = 0
    lost_count: int = 0
    max_attempts: int = 5
    max_lost: int = 3
    error: str = ""
    newest: Try | None = None
    longest_delay: float | None = None
    jitter: bool = False
    stall_after: float | None = None
    on_lost: str = "retry"
    on_dead: str = "reopen"
    cancel_requested: bool = False
    hold_requested: bool = False
    rerun_waits: bool = False
    debounced_until: datetime | None = None
    finished_at: datetime | None = None
    unique_until: datetime | None = None
    tombstone: bool = False
    known: bool = True
    near: str = ""
    tick: float = 1.0
    resend_after: float = 30.0
    aside: str = ""

    @property
    def open_one(self) -> Try | None:
        """The attempt that has not ended."""
        return self.newest if self.newest and self.newest.outcome is None else None

    @property
    def due(self) -> bool:
        return self.run_after <= self.now

    def ago(self, at: datetime) -> str:
        return span((self.now - at).total_seconds())

    def at(self, at: datetime) -> str:
        return moment(at, self.now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """``level``: "good", "calm", "wait", "warn" or "bad"."""

    now: str
    next: str
    level: str


def explain(s: Situation) -> Why:
    """Return the sentences for a situation."""
    why = _OF[Status(s.status)](s)
    if not s.known:
        unknown = _("No job of this name is known here: a worker without it parks the row.")
        why = Why(now=why.now, next=f"{why.next} {unknown}{_meant(s)}", level="warn")
    if s.rerun_waits:
        waits = _("Another run with newer arguments waits and follows.")
        why = Why(now=why.now, next=f"{why.next} {waits}", level=why.level)
    return why


def _meant(s: Situation) -> str:
    if not s.near:
        return ""
    meant = _(
        ' Known is %(near)s: if that is it, let it keep this name, too: aliases=("%(name)s",).'
    )
    return meant % {"near": s.near, "name": s.name}


def is_stuck(s: Situation) -> bool:
    """Return whether the open attempt's lease has expired."""
    return s.status == Status.RUNNING and s.open_one is not None and s.open_one.lease_until < s.now


def is_silent(s: Situation) -> bool:
    """Return whether it beats, but shows no activity for stall_after."""
    if s.open_one is None or s.stall_after is None or is_stuck(s):
        return False
    last = s.open_one.active_at or s.open_one.claimed_at
    return (s.now - last).total_seconds() > s.stall_after


# ---- waiting


def _pending(s: Situation) -> Why:
    before = _before(s)
    if not s.due and s.debounced_until is not None:
        now = _("waiting for calls to stop: due at %(at)s, at the latest at %(latest)s") % {
            "at": s.at(s.run_after),
            "latest": s.at(s.debounced_until),
        }
        return Why(now=before + now, next=_handed_over_then(s), level="wait")
    if not s.due:
        now = _("waiting until %(at)s, as it was asked to") % {"at": s.at(s.run_after)}
        return Why(now=before + now, next=_handed_over_then(s), level="wait")
    return _due(s, before)


def _due(s: Situation, before: str) -> Why:
    if s.aside:
        now = _("due for %(ago)s and set aside: %(why)s")
        return Why(
            now=before + now % {"ago": s.ago(s.run_after), "why": s.aside},
            next=_("It gets its message once that is over; waiting costs it no attempt."),
            level="wait",
        )
    if s.dispatched_at is None:
        now = _("due for %(ago)s and not handed over to queue %(queue)s yet")
        late = (s.now - s.run_after).total_seconds() > max(10 * s.tick, 10)
        return Why(
            now=before + now % {"ago": s.ago(s.run_after), "queue": s.queue},
            next=_(
                "The coordinator hands it over in its next round, every %(tick)s. If this lasts, "
                "no coordinator runs, or Redis can not be reached."
            )
            % {"tick": span(s.tick)},
            level="warn" if late else "wait",
        )
    now = _("handed over to queue %(queue)s %(ago)s ago, waiting for a worker")
    return Why(
        now=before + now % {"ago": s.ago(s.dispatched_at), "queue": s.queue},
        next=_(
            "A worker of that queue takes it. If the message gets lost, it is sent again after "
            "%(after)s."
        )
        % {"after": span(s.resend_after)},
        level="wait",
    )


def _before(s: Situation) -> str:
    """Return what an earlier attempt says about a row that is pending again."""
    if s.newest and s.newest.outcome == AttemptOutcome.INTERRUPTED:
        return _("interrupted in attempt %(number)s; ") % {"number": s.newest.number}
    if s.newest and s.newest.outcome == AttemptOutcome.RETURNED:
        return _("given back before attempt %(number)s began; ") % {"number": s.newest.number}
    return ""


def _handed_over_then(s: Situation) -> str:
    return _("The coordinator hands it over then.")


def _retrying(s: Situation) -> Why:
    if s.due and s.aside:
        return _due(s, "")
    return Why(
        now=_why_again(s),
        next=_due(s, "").next if s.due else _handed_over_then(s),
        level="wait",
    )


def _why_again(s: Situation) -> str:
    outcome = s.newest.outcome if s.newest else None
    facts = {"at": s.at(s.run_after), "number": s.newest.number if s.newest else 0}
    if outcome == AttemptOutcome.SNOOZED:
        return _("snoozed by itself in attempt %(number)s until %(at)s") % facts
    if outcome in (AttemptOutcome.LOST, AttemptOutcome.RETURNED):
        lost = _("the worker was lost during attempt %(number)s (%(lost)s of %(most)s); due again")
        return lost % {**facts, "lost": s.lost_count, "most": s.max_lost}
    waiting = _(
        "waiting for retry %(retry)s of %(retries)s at %(at)s%(delay)s; last error %(error)s"
    )
    return waiting % {
        **facts,
        "retry": s.failures,
        "retries": max(s.max_attempts - 1, s.failures),
        "delay": _delay(s),
        "error": _error(s),
    }


def _delay(s: Situation) -> str:
    if s.newest is None or s.newest.ended_at is None:
        return ""
    seconds = max((s.run_after - s.newest.ended_at).total_seconds(), 0.0)
    if s.jitter and s.longest_delay:
        drawn = _(" (delay %(delay)s, drawn from up to %(longest)s)")
        return drawn % {"delay": span(seconds), "longest": span(s.longest_delay)}
    return _(" (delay %(delay)s)") % {"delay": span(seconds)}


# ---- running


def _running(s: Situation) -> Why:
    if s.open_one is None:
        return Why(
            now=_("running by its row, but without an open attempt"),
            next=_("No part of this app writes that; look at the attempts below."),
            level="bad",
        )
    if is_stuck(s):
        return _stuck(s, s.open_one)
    facts = {
        "number": s.open_one.number,
        "where": s.open_one.where,
        "since": s.ago(s.open_one.claimed_at),
        "beat": s.ago(s.open_one.beat_at),
        "left": span((s.open_one.lease_until - s.now).total_seconds()),
    }
    if is_silent(s):
        silent = _("running but silent: attempt %(number)s on %(where)s beats, but %(quiet)s")
        quiet = _("has shown no activity for %(ago)s (stall_after is %(after)s)") % {
            "ago": s.ago(s.open_one.active_at or s.open_one.claimed_at),
            "after": span(s.stall_after or 0),
        }
        said = silent % {**facts, "quiet": quiet}
        return Why(now=said + _progress(s.open_one), next=_at_its_end(s), level="warn")
    now = _(
        "running for %(since)s: attempt %(number)s on %(where)s, last beat %(beat)s ago, leased "
        "for another %(left)s"
    )
    return Why(now=now % facts + _progress(s.open_one), next=_at_its_end(s), level="good")


def _progress(open_one: Try) -> str:
    if not open_one.progress:
        return ""
    return _("; progress: %(progress)s") % {"progress": _cut(open_one.progress)}


def _stuck(s: Situation, newest: Try) -> Why:
    now = _(
        "stuck: the worker of attempt %(number)s on %(where)s has not beaten for %(beat)s, and its "
        "lease expired %(over)s ago"
    ) % {
        "number": newest.number,
        "where": newest.where,
        "beat": s.ago(newest.beat_at),
        "over": s.ago(newest.lease_until),
    }
    seconds = (newest.lease_until - newest.beat_at).total_seconds() / 3
    after = _("The coordinator takes it once it has seen no beat for %(third)s") % {
        "third": span(seconds)
    }
    rest = f"{after}; {_after_loss(s, newest)}"
    return Why(now=now + _progress(newest), next=rest, level="bad")


def _after_loss(s: Situation, newest: Try) -> str:
    if s.on_lost == "hold" and newest.began:
        return _("then it is held for a person. If it stays stuck, no coordinator runs.")
    if newest.began and s.lost_count + 1 >= s.max_lost:
        return _("then it is dead: lost too often. If it stays stuck, no coordinator runs.")
    return _("then it is due again. If it stays stuck, no coordinator runs.")


def _at_its_end(s: Situation) -> str:
    if s.cancel_requested:
        return _("A person asked to cancel it: it stops at its next check, or when it ends.")
    if s.hold_requested:
        return _("A person asked to hold it: it stops at its next check, or when it ends.")
    if s.failures + 1 >= s.max_attempts:
        return _("If this attempt fails, it is dead: the last of %(most)s.") % {
            "most": s.max_attempts
        }
    return _("If this attempt fails, retry %(retry)s of %(retries)s follows.") % {
        "retry": s.failures + 1,
        "retries": s.max_attempts - 1,
    }


# ---- at rest


def _held(s: Situation) -> Why:
    outcome = s.newest.outcome if s.newest else None
    number = s.newest.number if s.newest else 0
    if outcome in (AttemptOutcome.LOST, AttemptOutcome.INTERRUPTED) and s.on_lost == "hold":
        now = _('held: the worker was lost during attempt %(number)s, and the job says "hold"') % {
            "number": number
        }
    else:
        now = _("held for a person: %(error)s") % {"error": _error(s)}
    rest = _(
        "Nothing happens until somebody unholds or cancels it; calls with its key are refused."
    )
    return Why(now=now, next=rest, level="warn")


def _dead(s: Situation) -> Why:
    outcome = s.newest.outcome if s.newest else None
    if s.tombstone:
        now = _("dead; its arguments and attempts were pruned")
    elif outcome == AttemptOutcome.LOST:
        now = _("dead: lost with its worker %(lost)s times (max_lost is %(most)s)") % {
            "lost": s.lost_count,
            "most": s.max_lost,
        }
    elif s.failures >= s.max_attempts:
        now = _("dead: failed %(failures)s times of %(most)s; last error %(error)s") % {
            "failures": s.failures,
            "most": s.max_attempts,
            "error": _error(s),
        }
    else:
        now = _("dead: its error is not to be retried; last error %(error)s") % {"error": _error(s)}
    return Why(now=now, next=_after_death(s), level="bad")


def _after_death(s: Situation) -> str:
    if s.on_dead == "block":
        return _('It keeps its key (on_dead="block") until somebody retries it.')
    return _("The next call with its key runs it again; so does a retry here.")


def _cancelled(s: Situation) -> Why:
    now = _("cancelled%(at)s: %(error)s") % {
        "at": f" ({s.at(s.finished_at)})" if s.finished_at else "",
        "error": _error(s),
    }
    freed = _("Its key is free: the next call with it runs it again; so does a retry here.")
    return Why(now=now, next=freed, level="calm")


def _succeeded(s: Situation) -> Why:
    now = _("succeeded in attempt %(number)s at %(at)s") % {
        "number": s.newest.number if s.newest else "?",
        "at": s.at(s.finished_at) if s.finished_at else "?",
    }
    if s.tombstone:
        now = _("succeeded at %(at)s; its arguments, result and attempts were pruned") % {
            "at": s.at(s.finished_at) if s.finished_at else "?"
        }
    return Why(now=now, next=_holds_key(s), level="good")


def _holds_key(s: Situation) -> str:
    if s.unique_until is None:
        return _("It holds its key for ever: calls with it are answered with this success.")
    if s.unique_until > s.now:
        return _("It holds its key until %(at)s; the next call after that runs it again.") % {
            "at": s.at(s.unique_until)
        }
    return _("Its key is free: the next call with it runs it again.")


def _error(s: Situation) -> str:
    text = s.error or (s.newest.error_class if s.newest else "") or _("not noted")
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


_OF = {
    Status.PENDING: _pending,
    Status.RUNNING: _running,
    Status.RETRYING: _retrying,
    Status.SUCCEEDED: _succeeded,
    Status.DEAD: _dead,
    Status.CANCELLED: _cancelled,
    Status.HELD: _held,
}
