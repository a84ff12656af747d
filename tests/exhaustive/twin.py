"""
The model's arrows and the real ``dedupjobs.lifecycle``, side by side.

Breadth first over the rows of one key: in every state that is reached each arrow is taken by the
model and by the real function, also where the guard must refuse, and both must answer the same and
leave the same rows. States are put back by writing the columns that were read. Endings go through
``runner.settle``, so that its table is held to the model, too; a call is also made with another
arrow in the gap between its read and its write.

The model's rest (messages, workers, faults) decides only *which* arrow comes next, and here any
may: what ``explorer`` reaches is a part of this.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connections

from dedupjobs import FOREVER, clock, lifecycle, probes, registry, runner
from dedupjobs.clock import DbNow
from dedupjobs.endings import Error, Failed, Interrupted, Parked, Snoozed, Stopped, Succeeded
from dedupjobs.lifecycle import Claim, Note, Place
from dedupjobs.models import FINAL as FINAL_STATUSES
from dedupjobs.models import JobAttempt, Kind, ProcessedJob
from dedupjobs.registry import Call, Variant
from tests.exhaustive import arrows
from tests.exhaustive.state import (
    MAX_FAILURES,
    MAX_LOST,
    NEW,
    Attempt,
    Config,
    Row,
    World,
)

DAY = 86_400.0  # lease, backoff, snooze and debounce: nothing becomes due by itself meanwhile
LONG_AGO = datetime(2001, 1, 1, tzinfo=UTC)
STALE_ID = "dedupjobs_of_another_hand_over"

_ERROR = Error(type="builtins.ValueError", message="no luck", traceback="")
_ENDINGS: dict[str, Any] = {
    "complete": Succeeded(result="null"),
    "fail": Failed(error=_ERROR),
    "timeout": Failed(error=_ERROR, timed_out=True),
    "snooze": Snoozed(after=DAY),
    "interrupt": Interrupted(reason="SIGTERM"),
    "stop": Stopped(reason="asked to", requested=True),
    "leave": Stopped(reason="by itself", requested=False),
    "park": Parked(reason="held"),
}
_KINDS = {"enqueue": Kind.CREATED, "reopen": Kind.CREATED, "join": Kind.DUPLICATE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The columns of the key's rows, and the claims that workers hold, by attempt number."""

    job: tuple[Any, ...] | None = None
    attempts: tuple[tuple[Any, ...], ...] = ()
    claims: dict[int, Claim] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """
    One arrow in one state: what the model makes of it, and how to do it for real.

    ``model`` returns the world after it, or None where the guard refuses, and ``real`` what
    ``answer`` says of that. ``bumps``: whether an accepted one must raise the row's version; None
    if that is not to be judged.
    """

    name: str
    model: Callable[[World], World | None]
    real: Callable[[], Any]
    answer: Callable[[World, World | None], Any]
    bumps: Callable[[World, World], bool | None] = lambda before, after: True


@dataclass(slots=True)
class Comparison:
    """How many states were reached, pairs of state and arrow compared, and where they differ."""

    states: int = 0
    pairs: int = 0
    refused: int = 0
    completed: bool = True
    differences: list[str] = field(default_factory=list)

    def add(self, other: Comparison) -> None:
        self.states += other.states
        self.pairs += other.pairs
        self.refused += other.refused
        self.completed = self.completed and other.completed
        self.differences += other.differences


def compare(
    config: Config,
    *,
    attempts: int,
    deadline: float = float("inf"),
    gaps: bool = False,
    share: float = 1.0,
) -> Comparison:
    """
    Compare in all states with at most so many attempts, or until the deadline.

    ``gaps``: also with every arrow in the gap of every call. ``share``: of the pairs that lead to
    no new state, compare only so many, drawn by chance.
    """
    with _registered(config) as job:
        return _Walk(Twin(config, job), attempts, gaps, share).run(deadline)


@contextmanager
def _registered(config: Config) -> Iterator[Any]:
    """Register a job with the configuration's options for the block."""
    conflicts = {"replace": "replace", "rerun": "rerun"}
    name = f"twin.{config.policy}_{config.unique_for}_{config.on_dead}_{config.on_lost}"
    make = registry.job(
        name=name,
        key="twin:{key}",
        unique_for=FOREVER if config.unique_for == "forever" else None,
        on_conflict=conflicts.get(config.policy, "return"),
        on_mismatch="ignore",
        debounce=DAY if config.policy == "debounce" else None,
        on_dead=config.on_dead,
        on_lost=config.on_lost,
        max_attempts=MAX_FAILURES,
        max_lost=MAX_LOST,
        backoff=DAY,
        lease=DAY,
    )
    try:
        yield make(_specimen)
    finally:
        registry.forget(name)


def _specimen(*, key: str, payload: int) -> None:
    """Never run."""


class Twin:
    """The real rows of one key."""

    def __init__(self, config: Config, job: Any) -> None:
        self.config = config
        self.job = job
        self.connection = connections[lifecycle.alias()]
        self.claims: dict[int, Claim] = {}
        self.calls = [self._call(payload) for payload in (0, 1, 2)]
        self.payloads = {call.args: payload for payload, call in enumerate(self.calls)}
        self._columns: dict[Any, list[str]] = {}
        self._selects: dict[Any, str] = {}
        self._inserts: dict[Any, str] = {}
        self._row: dict[str, Any] = {}
        for model in (ProcessedJob, JobAttempt):
            self._prepare(model)

    def _prepare(self, model: Any) -> None:
        self._columns[model] = [f.column for f in model._meta.concrete_fields]
        columns = ", ".join(map(self.connection.ops.quote_name, self._columns[model]))
        marks = ", ".join(["%s"] * len(self._columns[model]))
        table = model._meta.db_table
        self._selects[model] = f"SELECT {columns} FROM {table} ORDER BY id"
        self._inserts[model] = f"INSERT INTO {table} ({columns}) VALUES ({marks})"

    def _call(self, payload: int) -> Call:
        values = self.job.bind((), {"key": "k", "payload": payload})
        return self.job.call_of(values, Variant(job=self.job), unkeyed="")

    # ---- putting a state back, and reading it

    def restore(self, snapshot: Snapshot) -> None:
        """Let the tables hold exactly these rows."""
        with self.connection.cursor() as cursor:
            for model in (JobAttempt, ProcessedJob):
                cursor.execute(f"DELETE FROM {model._meta.db_table}")
            if snapshot.job is not None:
                cursor.execute(self._inserts[ProcessedJob], snapshot.job)
                self._row = self.named(ProcessedJob, snapshot.job)
            if snapshot.attempts:
                cursor.executemany(self._inserts[JobAttempt], snapshot.attempts)
        self.claims = dict(snapshot.claims)

    def capture(self) -> Snapshot:
        """Read all columns."""
        with self.connection.cursor() as cursor:
            job = self._select(cursor, ProcessedJob)
            attempts = self._select(cursor, JobAttempt)
        return Snapshot(job=job[0] if job else None, attempts=attempts, claims=dict(self.claims))

    def _select(self, cursor: Any, model: Any) -> tuple[tuple[Any, ...], ...]:
        cursor.execute(self._selects[model])
        return tuple(tuple(_storable(v, self.connection) for v in row) for row in cursor.fetchall())

    def named(self, model: Any, values: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self._columns[model], values, strict=True))

    def abstract(self, snapshot: Snapshot) -> World:
        """Return the model's view of rows."""
        if snapshot.job is None:
            return World()
        job = self.named(ProcessedJob, snapshot.job)
        row = Row(
            status=job["status"],
            generation=job["generation"],
            attempts=job["attempts"],
            failures=job["failures"],
            lost=job["lost_count"],
            args=self.payloads[job["args"]],
            rerun=self.payloads[job["rerun_args"]] if job["rerun_args"] is not None else 0,
            due=not _is_ahead(job["run_after"]),
            sent=int(job["dispatched_at"] is not None),
            cancel=bool(job["cancel_requested"]),
            hold=bool(job["hold_requested"]),
        )
        attempts = (self._attempt(values, snapshot.claims) for values in snapshot.attempts)
        return World(row=row, attempts=tuple(attempts))

    def _attempt(self, values: tuple[Any, ...], claims: dict[int, Claim]) -> Attempt:
        stored = self.named(JobAttempt, values)
        return Attempt(
            number=stored["number"],
            generation=stored["generation"],
            args=self.payloads[claims[stored["number"]].args],
            outcome=stored["outcome"] or "",
            lease="live" if _is_ahead(stored["lease_until"]) else "over",
            begun=int(stored["began_at"] is not None),
        )

    def misshapen(self, snapshot: Snapshot) -> list[str]:
        """Name what no row may look like, in columns that the model leaves out."""
        if snapshot.job is None:
            return []
        job = self.named(ProcessedJob, snapshot.job)
        final = job["status"] in FINAL_STATUSES
        rules = {
            "finished_at without an end": (job["finished_at"] is not None) == final,
            "a result without a success": job["result"] is None or job["status"] == "SUCCEEDED",
            "a rerun's fingerprint by itself": (job["rerun_args"] is None)
            == (job["rerun_fingerprint"] is None),
            "handed over without an id": job["dispatched_at"] is None or job["dispatch_id"],
            "dead or cancelled without a reason": job["error"]
            or job["status"] not in ("DEAD", "CANCELLED", "HELD"),
        }
        attempts = [self.named(JobAttempt, a) for a in snapshot.attempts]
        rules["an attempt's end without a moment"] = all(
            (a["ended_at"] is None) == (a["outcome"] is None) for a in attempts
        )
        return [text for text, holds in rules.items() if not holds]

    # ---- what is done for real

    def call(self, payload: int, gap: Callable[[], Any] | None = None) -> Any:
        """Enqueue; do ``gap`` between the first read and the write that it leads to."""
        if gap is not None:
            probes.hook = _Once("enqueue.read", gap)
        try:
            answer = lifecycle.enqueue(
                self.calls[payload],
                options=self.job.options,
                holds=self.job.unique_for is not None,
            )
        finally:
            probes.hook = None
        return answer.kind, answer.sends

    def claim(self, generation: int, begins: bool) -> Any:
        made = lifecycle.claim(
            self._row["id"], generation, owner=clock.token(), place=Place(), begins=begins
        )
        if made is None:
            return None
        self.claims[made.number] = made
        return self.payloads[made.args], made.generation, made.began

    def begin(self, number: int) -> bool:
        begun = lifecycle.begin(self.claims[number])
        if begun:
            self.claims[number] = replace(self.claims[number], began=True)
        return begun

    def beat(self, number: int) -> Any:
        pulse = lifecycle.beat(self.claims[number].fence, lease=DAY)
        return pulse.over, pulse.lost, pulse.cancel, pulse.hold

    def settle(self, number: int, ending: str) -> str | None:
        if ending == "unclaim":
            return lifecycle.unclaim(self.claims[number])
        note = Note(error=_ERROR) if ending in ("fail", "timeout") else Note(reason=ending)
        return runner.settle(self.claims[number], _ENDINGS[ending], note, self.job)

    def reclaim(self, number: int, *, seen: str = "as it is", ahead: bool = False) -> Any:
        """Reclaim; ``seen``: the beat that the coordinator saw; ``ahead``: the clock went back."""
        fence = self.claims[number].fence
        mine = lifecycle.attempts().filter(pk=fence)
        if ahead:
            mine.update(lease_until=DbNow(10 * DAY))
        beat_at = mine.get().beat_at if seen == "as it is" else LONG_AGO - timedelta(days=1)
        lost = lifecycle.reclaim(
            fence, beat_at=beat_at, ahead_of=DAY if ahead else None, reason="lost"
        )
        return lost and (lost.outcome, lost.status)

    def bury(self, number: int) -> Any:
        lost = lifecycle.bury(self.claims[number].fence, "lost: its process died")
        return lost and (lost.outcome, lost.status)

    def operate(self, arrow: str, *, stale: bool = False) -> str | None:
        return getattr(lifecycle, arrow)(self._row["id"], self._row["version"] - stale)

    def send(self, *, stale: str = "") -> bool:
        version = self._row["version"] - (stale == "version")
        known = STALE_ID if stale == "id" else self._row["dispatch_id"]
        return lifecycle.mark_sent(self._row["id"], version, known) is not None

    def unsend(self, *, other: bool = False) -> bool:
        known = self._row["dispatch_id"] if self._row["dispatched_at"] else None
        return bool(lifecycle.mark_unsent([STALE_ID if other or known is None else known]))

    def come_due(self) -> None:
        lifecycle.jobs().update(run_after=LONG_AGO)

    def lapse(self, number: int) -> None:
        mine = lifecycle.attempts().filter(pk=self.claims[number].fence)
        mine.update(lease_until=LONG_AGO, beat_at=LONG_AGO)


class _Once:
    """A probe hook that acts the first time that a point is reached."""

    def __init__(self, point: str, act: Callable[[], Any]) -> None:
        self.point = point
        self.act: Callable[[], Any] | None = act

    def __call__(self, point: str) -> None:
        if point == self.point and self.act is not None:
            act, self.act = self.act, None
            act()


def _storable(value: Any, connection: Any) -> Any:
    if isinstance(value, datetime) and connection.vendor == "sqlite":
        return value.replace(tzinfo=None).isoformat(" ", "milliseconds")
    return value


def _is_ahead(moment: Any) -> bool:
    found = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return found.replace(tzinfo=found.tzinfo or UTC) > clock.utcnow() + timedelta(hours=1)


# ---- every act of a state


def _acts(twin: Twin, world: World, gaps: bool) -> Iterator[Act]:
    calls = [_call_act(twin, payload) for payload in (1, 2)]
    yield from calls
    if world.row is not None:
        others = list(_acts_on_a_row(twin, world))
        yield from others
        if gaps:
            moving = [act for act in others if not act.name.startswith(("beat", "stale"))]
            for call in (1, 2):
                yield from (_call_with_gap(twin, call, act) for act in moving)
    elif gaps:
        yield from (_call_with_gap(twin, 1, act) for act in calls)


def _call_act(twin: Twin, payload: int) -> Act:
    c = twin.config

    def model(w: World) -> World:
        return arrows.accept(w, c, arrows.answer(w, c, payload), payload)

    return Act(
        name=f"call {payload}",
        model=model,
        real=lambda: twin.call(payload),
        answer=lambda before, after: _answer(before, c, payload),
        bumps=lambda before, after: before.row is not None and _writes(before, c, payload),
    )


def _call_with_gap(twin: Twin, payload: int, gap: Act) -> Act:
    """
    Act in the gap between a call's read and its write.

    A call that only reads answers by what it has read. One that writes finds that the row has
    moved, and does as if it came afterwards.
    """
    c = twin.config

    def between(w: World) -> World:
        return _settled(gap.model(w) or w)

    def model(w: World) -> World:
        later = between(w)
        if not _writes(w, c, payload):
            return later
        return arrows.accept(later, c, arrows.answer(later, c, payload), payload)

    def answer(before: World, after: World | None) -> Any:
        return _answer(between(before) if _writes(before, c, payload) else before, c, payload)

    return Act(
        name=f"call {payload} with {gap.name} in its gap",
        model=model,
        real=lambda: twin.call(payload, gap.real),
        answer=answer,
        bumps=lambda before, after: None,
    )


def _writes(w: World, c: Config, payload: int) -> bool:
    arrow = arrows.answer(w, c, payload)
    if arrow == "rerun":
        return w.row.rerun != payload or connections[lifecycle.alias()].in_atomic_block
    if arrow == "join" and connections[lifecycle.alias()].in_atomic_block:
        # The very call that waits: in a caller's transaction it holds the row until the commit.
        return (
            c.policy in ("replace", "rerun") and arrows.is_untried(w, c) and w.row.args == payload
        )
    return arrow in ("enqueue", "replace", "reopen")


def _answer(w: World, c: Config, payload: int) -> tuple[Kind, bool]:
    """Return what ``enqueue`` says: its kind, and whether the caller is to push a message."""
    arrow = arrows.answer(w, c, payload)
    return _kind(w, c, arrow), c.policy != "debounce" and arrow in ("enqueue", "reopen", "replace")


def _kind(w: World, c: Config, arrow: str) -> Kind:
    if arrow == "turned-away":
        return Kind.REPLAYED if w.row.status == "SUCCEEDED" else Kind.BLOCKED
    if arrow in ("replace", "rerun"):
        plain = Kind.REPLACED if arrow == "replace" else Kind.RERUN
        return Kind.DEBOUNCED if c.policy == "debounce" else plain
    return _KINDS[arrow]


def _acts_on_a_row(twin: Twin, world: World) -> Iterator[Act]:
    c = twin.config
    for generation in {world.row.generation, world.row.generation + 1, 1}:
        for begins in (False, True):
            yield Act(
                name=f"claim {generation}{' and begin' * begins}",
                model=lambda w, g=generation, b=begins: arrows.claim(w, c, g, begins=b),
                real=lambda g=generation, b=begins: twin.claim(g, b),
                answer=lambda _, after: after and _claimed(after.attempts[-1]),
            )
    for attempt in world.attempts:
        yield from _acts_on_an_attempt(twin, attempt)
    for arrow, act in arrows.OPERATIONS.items():
        yield Act(
            name=arrow,
            model=lambda w, act=act: act(w, c),
            real=lambda arrow=arrow: twin.operate(arrow),
            answer=_status_after,
        )
        yield _refused(f"stale {arrow}", lambda arrow=arrow: twin.operate(arrow, stale=True), None)
    yield from _messages(twin)
    if not world.row.due:
        yield _made("due", lambda w: w._replace(row=w.row._replace(due=True)), twin.come_due)


def _claimed(a: Attempt) -> tuple[int, int, bool]:
    return a.args, a.generation, bool(a.begun)


def _acts_on_an_attempt(twin: Twin, a: Attempt) -> Iterator[Act]:
    c, n = twin.config, a.number
    yield Act(
        name=f"begin {n}",
        model=lambda w: arrows.begin(w, c, a),
        real=lambda: twin.begin(n),
        answer=lambda _, after: after is not None,
        bumps=lambda before, after: False,
    )
    yield Act(
        name=f"beat {n}",
        model=lambda w: arrows.beat(w, c, a),
        real=lambda: twin.beat(n),
        answer=lambda w, after: _pulse(w, a),
        bumps=lambda before, after: False,
    )
    for ending in (*_ENDINGS, "unclaim"):
        yield Act(
            name=f"{ending} {n}",
            model=lambda w, e=ending: arrows.settle(w, c, a, e),
            real=lambda e=ending: twin.settle(n, e),
            answer=_status_after,
        )
    yield from _losses(twin, a)
    if not a.outcome and a.lease == "live":
        yield _made(f"lapse {n}", lambda w: w.change(n, lease="over"), lambda: twin.lapse(n))


def _losses(twin: Twin, a: Attempt) -> Iterator[Act]:
    c, n = twin.config, a.number

    def answer(before: World, after: World | None) -> Any:
        return after and (after.attempt(n).outcome, after.row.status)

    def reclaim(w: World) -> World | None:
        return arrows.reclaim(w, c, a)

    yield Act(name=f"reclaim {n}", model=reclaim, real=lambda: twin.reclaim(n), answer=answer)
    yield _refused(f"stale reclaim {n}", lambda: twin.reclaim(n, seen="another beat"), None)
    if a.lease == "over" and not a.outcome:
        yield Act(
            name=f"reclaim {n} of a lease far ahead",
            model=lambda w: _far_ahead(reclaim(w), n),
            real=lambda: twin.reclaim(n, ahead=True),
            answer=answer,
        )
    yield Act(
        name=f"bury {n}",
        model=lambda w: arrows.lose(w, c, a),
        real=lambda: twin.bury(n),
        answer=answer,
    )


def _far_ahead(w: World | None, number: int) -> World | None:
    """The ended attempt keeps the lease that the wrong clock wrote."""
    return w and w.change(number, lease="live")


def _pulse(w: World, a: Attempt) -> tuple[bool, bool, bool, bool]:
    lost = a.outcome in ("LOST", "RETURNED")
    return bool(a.outcome), lost, w.row.cancel, w.row.hold


def _messages(twin: Twin) -> Iterator[Act]:
    c = twin.config

    def never(before: World, after: World) -> bool:
        return False

    def done(before: World, after: World | None) -> bool:
        return after is not None

    def send(w: World) -> World | None:
        return arrows.mark_sent(w, c)

    def unsend(w: World) -> World | None:
        return arrows.mark_unsent(w, c)

    yield Act(name="send", model=send, real=twin.send, answer=done, bumps=never)
    yield _refused("stale send", lambda: twin.send(stale="version"), False)
    yield _refused("stale send by id", lambda: twin.send(stale="id"), False)
    yield Act(name="unsend", model=unsend, real=twin.unsend, answer=done, bumps=never)
    yield _refused("stale unsend", lambda: twin.unsend(other=True), False)


def _refused(name: str, real: Callable[[], Any], says: Any) -> Act:
    return Act(name=name, model=lambda w: None, real=real, answer=lambda before, after: says)


def _made(name: str, model: Callable[[World], World], real: Callable[[], None]) -> Act:
    """Time passes: no arrow, so nothing to answer and no version to raise."""
    return Act(
        name=name,
        model=model,
        real=real,
        answer=lambda before, after: None,
        bumps=lambda before, after: False,
    )


def _status_after(before: World, after: World | None) -> str | None:
    return after and after.row.status


# ---- the walk


def _settled(w: World) -> World:
    """A dispatch id that was NEW is an id like any other afterwards."""
    if w.row is None:
        return w
    return w._replace(row=w.row._replace(sent=int(bool(w.row.sent))))


def _key(w: World) -> Any:
    """Ended attempts count only by their generation, so equal keys have equal futures."""
    return w.row, tuple(a._replace(args=0, outcome="ended", lease="", begun=0) if a.outcome else a
                        for a in w.attempts)  # fmt: skip


class _Walk:
    """Breadth first over rows."""

    def __init__(self, twin: Twin, attempts: int, gaps: bool, share: float) -> None:
        self.twin = twin
        self.attempts = attempts
        self.gaps = gaps
        self.share = share
        self.found = Comparison()
        self.states: list[tuple[Snapshot, str]] = [(Snapshot(), "")]
        self.keys = {_key(World())}

    def run(self, deadline: float) -> Comparison:
        for snapshot, trace in self.states:  # grows while it is read
            world = self.twin.abstract(snapshot)
            self.twin.restore(snapshot)
            for act in _acts(self.twin, world, self.gaps):
                if time.monotonic() > deadline:
                    self.found.completed = False
                    return self._ended()
                expected = act.model(world)
                if self._leads_on(expected) or random.random() < self.share:
                    self._compare(snapshot, world, act, expected, trace)
        return self._ended()

    def _leads_on(self, expected: World | None) -> bool:
        """Tell whether the model expects a state that was not reached yet."""
        if expected is None or expected.row is None:
            return False
        return self._is_small(expected) and _key(_settled(expected)) not in self.keys

    def _is_small(self, w: World) -> bool:
        return w.row.attempts <= self.attempts and w.row.generation <= self.attempts + 1

    def _ended(self) -> Comparison:
        self.twin.restore(Snapshot())
        self.found.states = len(self.states)
        return self.found

    def _compare(
        self, snapshot: Snapshot, world: World, act: Act, expected: World | None, trace: str
    ) -> None:
        said = act.real()
        after = self.twin.capture()
        self.found.pairs += 1
        self.found.refused += expected is None
        problems = self._judge(world, act, expected, said, after)
        if snapshot.job is not None and after.job is not None:
            problems += self._misnumbered(snapshot, world, act, expected, after)
        path = f"{trace}; {act.name}" if trace else act.name
        self.found.differences += [f"{path}: {problem}" for problem in problems]
        if (after.job, after.attempts) != (snapshot.job, snapshot.attempts):
            self._remember(after, path)
            self.twin.restore(snapshot)

    def _judge(
        self, world: World, act: Act, expected: World | None, said: Any, after: Snapshot
    ) -> list[str]:
        """Judge what was said, and what rows were left."""
        problems = self.twin.misshapen(after)
        wanted = act.answer(world, expected)
        if said != wanted:
            problems.append(f"answers {said!r}, the model {wanted!r}")
        got = self.twin.abstract(after)
        model = world if expected is None else _settled(expected)
        if (got.row, got.attempts) != (model.row, model.attempts):
            problems.append(
                f"leaves {got.row} {got.attempts}, the model {model.row} {model.attempts}"
            )
        return problems

    def _misnumbered(
        self, snapshot: Snapshot, world: World, act: Act, expected: World | None, after: Snapshot
    ) -> list[str]:
        """Judge what only grows or changes: the version, the fence, the dispatch id."""
        old = self.twin.named(ProcessedJob, snapshot.job or ())
        new = self.twin.named(ProcessedJob, after.job or ())
        bumps = False if expected is None else act.bumps(world, expected)
        problems = []
        if bumps is not None and new["version"] - old["version"] != int(bumps):
            problems.append(f"version {old['version']} became {new['version']}")
        fresh = expected is not None and expected.row.sent == NEW
        if fresh and new["dispatch_id"] == old["dispatch_id"]:
            problems.append("sent again under the same id")
        fences = [self.twin.named(JobAttempt, a)["id"] for a in after.attempts]
        numbers = [self.twin.named(JobAttempt, a)["number"] for a in after.attempts]
        if numbers != sorted(numbers) or fences != sorted(fences):
            problems.append("the fence does not grow")
        return problems

    def _remember(self, after: Snapshot, trace: str) -> None:
        world = self.twin.abstract(after)
        key = _key(world)
        if self._is_small(world) and key not in self.keys:
            self.keys.add(key)
            self.states.append((after, trace))
