"""
What a person does with controls: add one, end one, list them. Each leaves who, when and why.

A control that names nothing there is, makes no sense or contradicts one in force is refused at
once, with its cure. ``controls`` is what all processes make of those in force.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db import IntegrityError, connections, transaction
from django.db.models import Q
from django.utils.translation import gettext as _

from dedupjobs import (
    controls,
    dispatch,
    invalidation,
    keys,
    lifecycle,
    registry,
    signals,
)
from dedupjobs.clock import DbNow
from dedupjobs.exceptions import ControlError, JobDefinitionError
from dedupjobs.models import ACTIVE, Aim, Control, ControlKind, Status
from dedupjobs.visible import line

MOST = 1_000_000  # attempts, and runs at a time, that a control may say
LONGEST = 366 * 86_400  # seconds that a control may last
LONGEST_TARGET = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """
    What a person wants. ``value``: seconds, attempts or runs at a time, as the kind has it; None
    as a time-out: no end. ``lasts``: seconds; None: until somebody ends it.
    """

    kind: str
    aim: str
    target: str = ""
    value: float | None = None
    holds: bool = False
    lasts: float | None = None


AIMS: dict[str, tuple[str, ...]] = {
    ControlKind.PAUSE: (Aim.JOB, Aim.QUEUE),
    ControlKind.DRAIN: (Aim.ALL, Aim.QUEUE, Aim.JOB),
    ControlKind.FILTER: (Aim.KEY, Aim.PREFIX, Aim.JOB, Aim.SCOPE),
    ControlKind.CONCURRENCY: (Aim.JOB, Aim.GROUP),
    ControlKind.LEASE: (Aim.JOB,),
    ControlKind.TIMEOUT: (Aim.JOB,),
    ControlKind.MAX_ATTEMPTS: (Aim.JOB,),
    ControlKind.BYPASS_CACHE: (Aim.ALL, Aim.JOB),
}
"""What each kind may be about."""

HOLDING = (ControlKind.DRAIN, ControlKind.FILTER)


def add(wish: Wish, *, by: str, reason: str, replaces: bool = False) -> Control:
    """
    Put a control in force, in all processes; raises ControlError.

    ``replaces``: end the one that stands in its place, if there is one, in the same transaction.
    """
    check(wish, by=by, reason=reason)
    with transaction.atomic(using=lifecycle.alias()):
        controls.close_expired()
        if replaces and (there := _in_place_of(wish)) is not None:
            _end(there, by=by, reason=_("replaced: %(reason)s") % {"reason": reason})
        _refuse_contradictions(wish)
        made = Control(
            kind=wish.kind,
            aim=wish.aim,
            target=_target(wish),
            value=wish.value,
            holds=wish.holds,
            by=by[:200],
            reason=reason,
            created_at=DbNow(),
            until=None if wish.lasts is None else DbNow(wish.lasts),
            place=_place(wish),
        )
        try:
            with transaction.atomic(using=lifecycle.alias()):
                made.save(using=lifecycle.alias(), force_insert=True)
        except IntegrityError:
            raise ControlError(
                _("Somebody else has just set a control of this kind; look at the list again.")
            ) from None
    _announce("added", made, by)
    return controls.table().get(pk=made.pk)  # type: ignore[no-any-return]


def end(pk: int, *, by: str, reason: str) -> Control:
    """End a control in all processes; raises ControlError. What it kept waiting runs at once."""
    _check_words(by, reason)
    with transaction.atomic(using=lifecycle.alias()):
        controls.close_expired()
        found = controls.table().filter(pk=pk).first()
        if found is None:
            raise ControlError(_("There is no control %(pk)s; --list shows them.") % {"pk": pk})
        if not _end(found, by=by, reason=reason):
            words = _("Control %(pk)s has ended already, at %(at)s.")
            facts = {"pk": pk, "at": f"{found.ended_at:%Y-%m-%d %H:%M:%S} UTC"}
            raise ControlError(words % facts)
    _announce("ended", found, by)
    return controls.table().get(pk=pk)  # type: ignore[no-any-return]


def check(wish: Wish, *, by: str, reason: str) -> None:
    """Raise ControlError for what makes no sense, whatever else is in force."""
    _check_words(by, reason)
    if wish.kind not in AIMS:
        raise ControlError(_near(_("kind"), wish.kind, list(AIMS)))
    if wish.aim not in AIMS[wish.kind]:
        words = _("%(kind)s can be about %(aims)s, not about %(aim)s.")
        aims = ", ".join(AIMS[wish.kind])
        raise ControlError(words % {"kind": wish.kind, "aims": aims, "aim": wish.aim or "nothing"})
    if wish.holds and wish.kind not in HOLDING:
        words = _("%(kind)s turns nothing away, so there is nothing to hold.")
        raise ControlError(words % {"kind": wish.kind})
    if wish.lasts is not None and not 1 <= wish.lasts <= LONGEST:
        words = _("%(given)s s is no time for a control: give 1 second to 366 days.")
        raise ControlError(words % {"given": f"{wish.lasts:g}"})
    _AIMED[wish.aim](wish.target)
    _VALUED.get(wish.kind, _no_value)(wish.value)
    _fits_the_database(wish)


def value_of(kind: str, text: str) -> float | None:
    """Return the value that a person has typed: "3", "90", "5m"; for a time-out also "none"."""
    if kind == ControlKind.TIMEOUT and not text:
        raise ControlError(_("Give a time such as 90s or 5m, or none: no time-out at all."))
    if not text or (kind == ControlKind.TIMEOUT and text == "none"):
        return None
    if kind not in _VALUED:
        raise ControlError(_takes_none(line(text, 50)))
    return seconds_of(text) if kind in TIMES else _count_of(text)


def _count_of(text: str) -> float:
    if not _NUMBER.fullmatch(text.strip()):
        raise ControlError(_no_count(repr(line(text, 50))))
    return float(text)


def seconds_of(text: str) -> float:
    """Return the seconds that "90", "90s", "5m", "2h" or "7d" means; raises ControlError."""
    found = _SPAN.fullmatch(text.strip())
    if found is None:
        words = _("%(given)s: give a number, or a time such as 90s, 5m, 2h.")
        raise ControlError(words % {"given": repr(line(text, 50))})
    return float(found[1]) * UNITS[found[2] or "s"]


UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400}
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,3})?")
_SPAN = re.compile(rf"({_NUMBER.pattern})([smhdw]?)")


def progress(control: Any) -> str:
    """Say how far a drain or pause is: how many rows still wait and run."""
    rows = lifecycle.jobs().filter(status__in=ACTIVE)
    if control.aim in (Aim.JOB, Aim.QUEUE):
        names = controls.names_of(control.target) if control.aim == Aim.JOB else ()
        rows = rows.filter(name__in=names) if names else rows.filter(queue=control.target)
    counted = list(rows.order_by().values_list("status", flat=True)[: COUNTED + 1])
    running = sum(status == Status.RUNNING for status in counted)
    more = "+" if len(counted) > COUNTED else ""
    facts = {"waiting": f"{len(counted) - running:,}{more}", "running": f"{running:,}"}
    return _("%(waiting)s waiting, %(running)s running") % facts


COUNTED = 10_000


# ---- how


def _end(found: Control, *, by: str, reason: str) -> int:
    mine = controls.table().filter(pk=found.pk, place__isnull=False)
    return int(mine.update(place=None, ended_at=DbNow(), ended_by=by[:200], end_reason=reason))


def _announce(what: str, control: Control, by: str) -> None:
    def tell() -> None:
        controls.ring()
        invalidation.announce_controls()
        signals.tell(signals.control_changed, "", control=control, what=what, by=by)

    transaction.on_commit(tell, using=lifecycle.alias(), robust=True)


def _place(wish: Wish) -> str:
    return keys.digest(f"{wish.kind}:{wish.aim}:{_target(wish)}")


def _target(wish: Wish) -> str:
    return controls.canonical(wish.target) if wish.aim == Aim.JOB else wish.target


def _in_place_of(wish: Wish) -> Control | None:
    return controls.table().filter(place=_place(wish)).first()  # type: ignore[no-any-return]


def _refuse_contradictions(wish: Wish) -> None:
    there = _in_place_of(wish)
    if there is not None:
        words = _(
            "Control %(pk)s is in force there already: %(what)s (by %(by)s: %(reason)s). End it, "
            "or say that this one replaces it."
        )
        facts = {"pk": there.pk, "what": controls.spoken(there), "by": there.by}
        raise ControlError(words % {**facts, "reason": line(there.reason, 200)})
    opposite = {ControlKind.PAUSE: ControlKind.DRAIN, ControlKind.DRAIN: ControlKind.PAUSE}
    other = opposite.get(ControlKind(wish.kind))
    same = Q(aim=wish.aim, target=_target(wish)) | Q(aim=Aim.ALL)
    in_reach = Q() if wish.aim == Aim.ALL else same
    others = controls.table().filter(in_reach, kind=other, place__isnull=False)
    if other and (found := others.first()):
        words = _(
            "Control %(pk)s (%(what)s) contradicts it: a drain is over once all that waits has "
            "run, and a pause lets nothing run. End that one first."
        )
        raise ControlError(words % {"pk": found.pk, "what": controls.spoken(found)})


# ---- what makes sense


def _check_words(by: str, reason: str) -> None:
    if not by.strip():
        raise ControlError(_("Say who does it: nobody is named."))
    if not reason.strip():
        raise ControlError(_("Say why: others will have to know what this control is for."))


def _near(what: str, given: str, known: list[str]) -> str:
    near = difflib.get_close_matches(given, known, 1, 0.4)
    meant = _(" Did you mean %(near)s?") % {"near": near[0]} if near else ""
    listed = ", ".join(known[:20]) or _("none")
    words = _("There is no %(what)s %(given)s.%(meant)s Known are: %(listed)s.")
    return words % {"what": what, "given": repr(line(given, 60)), "meant": meant, "listed": listed}


def _a_job(target: str) -> None:
    if not target or registry.find(target) is None:
        raise ControlError(_near(_("job"), target, registry.names()))


def _a_queue(target: str) -> None:
    if target not in dispatch.queue_names():
        raise ControlError(_near(_("queue"), target, dispatch.queue_names()))


def _a_text(target: str) -> None:
    if not target.strip() or len(target) > LONGEST_TARGET or "\x00" in target:
        words = _("%(given)s names nothing: give 1 to %(most)s characters, as a key shows them.")
        raise ControlError(words % {"given": repr(line(target, 60)), "most": LONGEST_TARGET})
    if target.endswith(("*", "%")) or target.startswith("^") or ".*" in target:
        words = _(
            "%(given)s looks like a pattern with wildcards, and none are known here: a key is "
            "compared as it stands, a prefix with the beginning of keys."
        )
        raise ControlError(words % {"given": repr(line(target, 60))})
    if "{" in target:
        words = _(
            "%(given)s is a template; give what it makes of the arguments, for example tenant:7."
        )
        raise ControlError(words % {"given": repr(line(target, 60))})


def _a_key(target: str) -> None:
    _a_text(target)
    if len(target) == LONGEST_TARGET and target.endswith("…"):
        words = _("%(given)s was cut to be shown; give the key's hash, as the job's page has it.")
        raise ControlError(words % {"given": repr(line(target, 60))})


def _a_scope(target: str) -> None:
    _a_text(target)
    if not any(job.scope for job in registry.every()):
        raise ControlError(_("No job has a scope, so there is no tenant to name."))


def _a_group(target: str) -> None:
    _a_text(target)
    if not any(job.concurrency and job.concurrency.group_of for job in registry.every()):
        raise ControlError(
            _(
                'No job has groups. Give one @job(concurrency="tenant:{tenant_id}"), or limit a '
                "job as a whole."
            )
        )


def _nothing(target: str) -> None:
    if target:
        words = _("%(given)s: a control about everything names nothing.")
        raise ControlError(words % {"given": repr(line(target, 60))})


_AIMED: dict[str, Callable[[str], None]] = {
    Aim.JOB: _a_job,
    Aim.QUEUE: _a_queue,
    Aim.KEY: _a_key,
    Aim.PREFIX: _a_key,
    Aim.SCOPE: _a_scope,
    Aim.GROUP: _a_group,
    Aim.ALL: _nothing,
}


def _fits_the_database(wish: Wish) -> None:
    """Refuse what a check refuses of a decorator: an atomic run that keeps its own beats out."""
    job = registry.find(wish.target) if wish.kind in TIMES else None
    if job is None or not job.options.atomic or connections[lifecycle.alias()].vendor != "sqlite":
        return
    now = controls.current(at_most=0.0).options_of(job.name)
    times = {"lease": now.lease, "timeout": now.timeout, wish.kind: wish.value}
    lease, timeout = times["lease"] or 0.0, times["timeout"]
    if timeout is None or timeout >= lease / 3:
        words = _(
            "%(job)s is atomic, and SQLite has one writer: its time-out must be shorter than a "
            "third of its lease, or it would keep its own heartbeat out."
        )
        raise ControlError(words % {"job": job.name})


TIMES = (ControlKind.LEASE, ControlKind.TIMEOUT)


def _no_value(value: float | None) -> None:
    if value is not None:
        raise ControlError(_takes_none(f"{value:g}"))


def _a_count(value: float | None) -> None:
    if value is None or value != int(value) or not 1 <= value <= MOST:
        raise ControlError(_no_count("None" if value is None else f"{value:g}"))


def _takes_none(given: str) -> str:
    return _("%(given)s: this kind takes no value.") % {"given": given}


def _no_count(given: str) -> str:
    words = _("%(given)s: give a whole number from 1 to %(most)s. To let nothing run, pause it.")
    return words % {"given": given, "most": f"{MOST:,}"}


def _an_option(option: str) -> Callable[[float | None], None]:
    def check_option(value: float | None) -> None:
        try:
            registry.options({option: value}, "control")
        except JobDefinitionError as error:
            if value is None:
                raise ControlError(str(error).removeprefix("control: ")) from None
            words = _("%(given)s s: give 0.1 s to 366 days, such as 90, 90s, 5m, 2h.")
            raise ControlError(words % {"given": f"{value:g}"}) from None

    return check_option


_VALUED: dict[str, Callable[[float | None], None]] = {
    ControlKind.CONCURRENCY: _a_count,
    ControlKind.MAX_ATTEMPTS: _a_count,
    ControlKind.LEASE: _an_option("lease"),
    ControlKind.TIMEOUT: _an_option("timeout"),
}
