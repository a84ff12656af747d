"""
What people have set for all processes until further notice: the controls that are in force.

A process keeps them in memory, and reads the table again when it hears that they have changed,
when HEARING seconds have passed, or DEAF seconds where nobody would tell it. So a lever works
within a second where messages arrive and within five where they do not, and costs a job nothing:
a process that is at work makes one small query every few seconds, whatever the number of jobs.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from django.db import DatabaseError, InterfaceError, connections
from django.db.models import F, Q

from dedupjobs import clock, keys, lifecycle, registry
from dedupjobs.clock import DbNow
from dedupjobs.exceptions import GroupUnknown
from dedupjobs.lifecycle import OPEN, Gate, Grant, Refusal, Refused
from dedupjobs.lifecycle.statements import Select
from dedupjobs.models import Aim, ConcurrencyGroup, Control, ControlKind, ProcessedJob
from dedupjobs.registry import Options

HEARING, DEAF = 4.0, 1.0  # seconds that a process may believe what it has read
AGAIN = 1.0  # seconds until the next try where the database could not be asked
OWN = "dedupjobs."  # our own jobs, with which people clean up, obey only what names them

Place = tuple[str, str, str]  # kind, aim, target


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A control as memory keeps it. ``ends``: by this process's monotonic clock."""

    pk: int
    kind: str
    aim: str
    target: str
    value: float | None
    holds: bool
    by: str
    reason: str
    ends: float = field(default=math.inf, compare=False)

    def __str__(self) -> str:
        return f"control {self.pk} ({self.words}), set by {self.by}: {self.reason}"

    @property
    def words(self) -> str:
        """What it does, in a few words."""
        return spoken(self)


def spoken(control: Any) -> str:
    """Return what a control does, as a person would type it."""
    what = control.kind.replace("_", "-")
    value = "" if control.kind not in _VALUED else f" {_number(control.value)}"
    hold = " --hold" if control.holds else ""
    target = f" {control.target}" if control.target else ""
    return f"{what}{value} --{control.aim}{target}{hold}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


_VALUED = (
    ControlKind.CONCURRENCY,
    ControlKind.LEASE,
    ControlKind.TIMEOUT,
    ControlKind.MAX_ATTEMPTS,
)


@dataclass(frozen=True, slots=True)
class InForce:
    """The controls in force, as of one reading of the table."""

    rules: tuple[Rule, ...] = ()
    ends: float = math.inf
    _places: Mapping[Place, Rule] = field(default_factory=dict)
    _options: dict[str, Options] = field(default_factory=dict)

    @classmethod
    def of(cls, rules: Iterable[Rule]) -> InForce:
        kept = tuple(sorted(rules, key=lambda rule: rule.pk))
        places = {(rule.kind, rule.aim, rule.target): rule for rule in kept}
        return cls(kept, min((rule.ends for rule in kept), default=math.inf), places)

    def at(self, kind: str, aim: str, target: str = "") -> Rule | None:
        """Return the control of a kind that is about exactly this."""
        return self._places.get((kind, aim, target))

    def pause(self, name: str, queue: str) -> Rule | None:
        """Return what keeps a job of this queue from starting."""
        if not self.rules:
            return None
        found = self.at(ControlKind.PAUSE, Aim.JOB, canonical(name))
        if found is None and not name.startswith(OWN):
            found = self.at(ControlKind.PAUSE, Aim.QUEUE, queue)
        return found

    def ingress(self, call: registry.Call) -> Rule | None:
        """Return what turns a call away, or else has it held."""
        if not self.rules:
            return None
        found = list(self._met_by(call))
        return next((rule for rule in found if not rule.holds), found[0] if found else None)

    def _met_by(self, call: registry.Call) -> Iterator[Rule]:
        own = call.name.startswith(OWN)
        wide = {(Aim.ALL, ""), (Aim.QUEUE, call.queue), (Aim.SCOPE, call.scope)}
        exact = {(Aim.JOB, canonical(call.name)), (Aim.KEY, call.key), (Aim.KEY, call.key_hash)}
        for rule in self.rules:
            if rule.kind not in (ControlKind.FILTER, ControlKind.DRAIN):
                continue
            place = (rule.aim, rule.target)
            prefixed = rule.aim == Aim.PREFIX and call.key.startswith(rule.target)
            if place in exact or prefixed or (place in wide and not own):
                yield rule

    def bypasses_cache(self, name: str) -> bool:
        """Whether calls of a job are to ask the database, whatever the status cache says."""
        if not self.rules:
            return False
        kind = ControlKind.BYPASS_CACHE
        return bool(self.at(kind, Aim.ALL) or self.at(kind, Aim.JOB, canonical(name)))

    def options_of(self, name: str) -> Options:
        """Return a job's options with what is set for it now."""
        if not self.rules:
            return registry.options_of(name)
        found = self._options.get(name)
        if found is None:
            found = self._options[name] = replace(registry.options_of(name), **self._set_for(name))
        return found

    def _set_for(self, name: str) -> dict[str, Any]:
        known = canonical(name)
        rules = {option: self.at(option, Aim.JOB, known) for option in _OPTION}
        return {o: _OPTION[o](rule.value) for o, rule in rules.items() if rule is not None}

    def gate(self, *, locks: bool = True) -> Gate:
        """
        Return who is asked about before a claim; most jobs start without a question.

        ``locks``: False, none can be had, and some jobs do not run without.
        """
        needy = () if locks else registry.in_need_of_locks()
        limited = registry.limited()
        if not self.rules and not limited and not needy:
            return OPEN
        asked = {r.target for r in self.rules if r.kind in _ASKED and r.aim == Aim.JOB}
        names = {name for target in asked for name in names_of(target)}
        queues = {r.target for r in self.rules if (r.kind, r.aim) == PAUSED_QUEUE}
        admits = admit_without_locks if needy else admit
        return Gate(admits, tuple(sorted({*limited, *names, *needy})), tuple(sorted(queues)))

    def limits(self, name: str, args: str) -> list[Limit]:
        """Return the limits that a run counts against, in the order in which they are locked."""
        job = registry.find(name)
        concurrency = job.concurrency if job else None
        if concurrency is None and not self.rules:
            return []
        known = job.name if job else name
        found = [self._limit(Aim.JOB, known, _declared(concurrency, grouped=False))]
        if group := _group_text(job, args):
            found.append(self._limit(Aim.GROUP, group, _declared(concurrency, grouped=True)))
        return sorted((f for f in found if f.most is not None), key=lambda f: f.group_hash)

    def _limit(self, aim: str, target: str, declared: int | None) -> Limit:
        rule = self.at(ControlKind.CONCURRENCY, aim, target)
        most = declared if rule is None or rule.value is None else int(rule.value)
        return Limit(aim=aim, target=target, most=most, rule=rule)

    def about(self, row: ProcessedJob) -> list[Rule]:
        """Return all that is in force on a row, for people to see."""
        group = _group_text(registry.find(row.name), row.args)
        places = {
            (Aim.ALL, ""),
            (Aim.JOB, canonical(row.name)),
            (Aim.QUEUE, row.queue),
            (Aim.SCOPE, row.scope),
            (Aim.KEY, row.key),
            (Aim.KEY, row.key_hash),
            (Aim.GROUP, group),
        }
        return [
            rule
            for rule in self.rules
            if (rule.aim, rule.target) in places
            or (rule.aim == Aim.PREFIX and row.key.startswith(rule.target))
        ]


_OPTION: dict[str, Any] = {
    ControlKind.LEASE: lambda value: value,
    ControlKind.TIMEOUT: lambda value: value,
    ControlKind.MAX_ATTEMPTS: int,
}


_ASKED = (ControlKind.PAUSE, ControlKind.LEASE, ControlKind.CONCURRENCY)
PAUSED_QUEUE = (ControlKind.PAUSE, Aim.QUEUE)


def names_of(name: str) -> tuple[str, ...]:
    """Return the names, present and former, that rows of a job may have."""
    job = registry.find(name)
    return (job.name, *job.aliases) if job else (name,)


def canonical(name: str) -> str:
    """Return the present name of a job that a row may call by a former one."""
    job = registry.find(name)
    return job.name if job else name


# ---- limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How many attempts may be open at a time, of a job or of a group; ``most``: None: any."""

    aim: str
    target: str
    most: int | None
    rule: Rule | None = None

    @property
    def group_hash(self) -> str:
        """Names the group in the tables."""
        return group_hash(self.aim, self.target)

    @property
    def mark(self) -> str:
        """What rows that wait for room are set aside under."""
        return f"{lifecycle.ROOM_MARKS}{self.group_hash[:40]}"

    @property
    def words(self) -> str:
        """Why a row waits."""
        by = f"; {self.rule}" if self.rule else ""
        return f"no room: {self.most} of {self.aim} {self.target} at a time{by}"

    def room(self) -> int:
        """
        Return how many more may start. The slots of a limit are the open attempts themselves.

        So none can leak: whatever ends an attempt frees its slot in the same transaction.
        """
        return (self.most or 0) - int(self._open().count())

    def _open(self) -> Any:
        still = lifecycle.attempts().filter(outcome=None)
        if self.aim == Aim.GROUP:
            return still.filter(group_hash=self.group_hash)
        return still.filter(job__name__in=names_of(self.target))


def group_hash(aim: str, target: str) -> str:
    """Return the name of a group in the tables."""
    return keys.digest(f"{aim}:{target}")


def _declared(concurrency: registry.Concurrency | None, *, grouped: bool) -> int | None:
    if concurrency is None or (concurrency.group_of is not None) is not grouped:
        return None
    return concurrency.limit


def _group_text(job: registry.Job[..., Any] | None, args: str) -> str:
    """Return the group that a run belongs to, or "": it has none, or its arguments do not fit."""
    if job is None or job.concurrency is None or job.concurrency.group_of is None or not args:
        return ""
    with suppress(Exception):  # the run itself will say what is wrong with them
        return job.concurrency.group_of(keys.decode(args))
    return ""


def admit(row: Any) -> Grant:
    """
    Let a due row start, inside the transaction that has just taken it, or raise Refused.

    While it counts it holds a lock on each group, to the end of that transaction: of two claims
    the second counts the first one's attempt.
    """
    if (refusal := refusal_of(row)) is not None:  # those who find no room need no lock
        raise Refused(refusal)
    force = known()
    for limit in force.limits(row.name, row.args):
        _lock(limit.group_hash)
        if limit.room() < 1:
            raise Refused(_refusal(limit, row))
    group = _group_text(registry.find(row.name), row.args)
    return Grant(
        lease=force.options_of(row.name).lease,
        group_hash=group_hash(Aim.GROUP, group) if group else "",
    )


def admit_without_locks(row: Any) -> Grant:
    """As ``admit``, while no lock can be had."""
    if registry.options_of(row.name).needs_lock:
        words = "no lock can be had, and on_redis_error says not to run without"
        facts = {"name": row.name, "sent_as": row.dispatch_id}
        raise Refused(Refusal(mark=lifecycle.NO_LOCKS, words=words, **facts))
    return admit(row)


def refusal_of(row: Any) -> Refusal | None:
    """Return why a waiting row may not start right now, or None; locks nothing."""
    force = known()
    if (rule := force.pause(row.name, row.queue)) is not None:
        facts = {"name": row.name, "sent_as": row.dispatch_id}
        return Refusal(mark=pause_mark(str(rule.pk)), words=f"paused by {rule}", **facts)
    limits = force.limits(row.name, row.args)
    full = next((limit for limit in limits if limit.room() < 1), None)
    return _refusal(full, row) if full else None


def _refusal(limit: Limit, row: Any) -> Refusal:
    facts = {"name": row.name, "sent_as": row.dispatch_id}
    return Refusal(mark=limit.mark, words=limit.words, **facts)


def pause_mark(number: str) -> str:
    """Return what rows are set aside under while the pause of this number is in force."""
    return f"{lifecycle.PAUSE_MARKS}{number}"


def _lock(name: str) -> None:
    connection = connections[lifecycle.alias()]
    if not connection.features.has_select_for_update:
        return  # SQLite has one writer, which we are
    groups = ConcurrencyGroup._base_manager.using(lifecycle.alias())
    if not list(groups.select_for_update().filter(group_hash=name).values_list("pk")):
        raise GroupUnknown(name)


def make_group(name: str) -> None:
    """Make the row that claims of a group lock; outside of their transactions."""
    groups = ConcurrencyGroup._base_manager.using(lifecycle.alias())
    groups.bulk_create([ConcurrencyGroup(group_hash=name, made_at=DbNow())], ignore_conflicts=True)


# ---- what this process believes


class _Bell:
    """Rung when controls have changed; a worker's processes share one, which costs no look."""

    _COUNT = struct.Struct("=Q")

    def __init__(self) -> None:
        self.shared = False
        self._memory: Any = bytearray(self._COUNT.size)

    def share(self) -> None:
        self._memory = mmap.mmap(-1, self._COUNT.size)
        self.shared = True

    def ring(self) -> None:
        self._COUNT.pack_into(self._memory, 0, self.count() + 1)

    def count(self) -> int:
        return int(self._COUNT.unpack_from(self._memory)[0])


@dataclass(slots=True)
class _Belief:
    """What was read, and until when it is believed if the bell does not ring."""

    force: InForce = field(default_factory=InForce)
    until: float = -math.inf
    bell: int = -1


_bell = _Bell()
_belief = _Belief()
_reading = threading.Lock()
_hears = False


def known() -> InForce:
    """Return what this process believes, without asking the database."""
    force = _belief.force
    if force.ends <= clock.monotonic():
        left = (rule for rule in force.rules if rule.ends > clock.monotonic())
        force = _belief.force = InForce.of(left)
    return force


def current(*, at_most: float | None = None) -> InForce:
    """
    Return what is in force, read again if it has changed or is too old.

    ``at_most``: seconds that it may be old, where less than usual.
    """
    now = clock.monotonic()
    until = _belief.until
    if at_most is not None:
        until -= _patience() - at_most
    if (now >= until or _belief.bell != _bell.count()) and _reading.acquire(blocking=False):
        try:
            _read()
        finally:
            _reading.release()
    return known()


def ring() -> None:
    """Controls have changed: let this process, or all of this worker, read them again."""
    _bell.ring()


def share_bell() -> None:
    """Let the processes that this one forks hear what one of them has heard."""
    _bell.share()


def hear(hears: bool) -> None:
    """Note whether this process is told of changes now."""
    global _hears  # noqa: PLW0603 - of the process
    _hears = hears


def forget() -> None:
    """Believe nothing that was read before."""
    global _belief  # noqa: PLW0603 - of the process
    _belief = _Belief()


def _patience() -> float:
    return HEARING if _hears or _bell.shared else DEAF


def _read() -> None:
    bell, begun = _bell.count(), clock.monotonic()
    try:
        force = InForce.of(_rules(begun))
    except (DatabaseError, InterfaceError):
        if connections[lifecycle.alias()].in_atomic_block:
            raise
        _belief.bell, _belief.until = bell, begun + AGAIN  # what was in force stays so meanwhile
        return
    _belief.force, _belief.bell, _belief.until = force, bell, begun + _patience()


def _rules(begun: float) -> Iterator[Rule]:
    for row in _IN_FORCE.rows(lifecycle.alias()):
        until = row["until"]
        left = math.inf if until is None else (until - row["db_now"]).total_seconds()
        yield Rule(
            pk=row["id"],
            kind=row["kind"],
            aim=row["aim"],
            target=row["target"],
            value=row["value"],
            holds=row["holds"],
            by=row["by"],
            reason=row["reason"],
            ends=begun + left,
        )


def table() -> Any:
    """Return all controls, from the database that decides."""
    return Control._base_manager.using(lifecycle.alias())


def in_force() -> Any:
    """Return the controls in force, as the database has them."""
    return table().filter(Q(until=None) | Q(until__gt=DbNow()), place__isnull=False)


_IN_FORCE = Select(Control, "in force", lambda: in_force().annotate(db_now=DbNow()))


def get_ready() -> None:
    """Compile how controls are read, which each forked horse does; asks the database nothing."""
    _IN_FORCE.compiled(lifecycle.alias())


def close_expired() -> int:
    """Write down that controls have ended whose time was up."""
    over = table().filter(place__isnull=False, until__lte=DbNow())
    return int(over.update(place=None, ended_at=F("until"), ended_by="", end_reason="expired"))


def _after_fork() -> None:
    global _reading  # noqa: PLW0603 - a thread that a fork leaves behind may have held it
    _reading = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
