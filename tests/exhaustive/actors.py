"""
Who takes which arrow when: callers, an operator, the coordinator, two workers and their parents.

Each yields the steps that it could take next. Faults, each at most ``Config.faults`` together: a
crash, a pause past the lease, SIGTERM, all messages lost, a message doubled, a push that is lost
or killed before, a COMMIT without a reply or not done, a jump of the database's clock.

Abstracted: the version that an operator's arrow asks for means that he acts on what he sees (a
real look is taken where that guard is dropped). Two witnesses: a lease ends only under an owner
that is dead or paused. RESEND_AFTER: a dispatch id that stands in no queue and in no live hand.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.exhaustive import arrows
from tests.exhaustive.state import (
    IDLE,
    NEW,
    QUEUE,
    WAITING,
    Attempt,
    Config,
    Message,
    Step,
    Worker,
    World,
)


def steps(w: World, c: Config) -> Iterator[Step]:
    """Yield all that can happen next."""
    yield from _caller(w, c)
    if w.row is not None:
        yield from _operator(w, c)
        yield from _time(w)
        yield from _coordinator(w, c)
        yield from _parent(w, c)
        yield from _redis(w)
        for index in (0, 1) if w.workers[0] != w.workers[1] else (0,):
            yield from _worker(w, c, index)


def _fault(w: World) -> World:
    return w._replace(faults=w.faults - 1)


def _push(w: World) -> World | None:
    """Put the row's message into its queue, if there is room."""
    if len(w.queue) >= QUEUE:
        return None
    message = Message(w.row.generation, w.row.sent)
    return w._replace(queue=tuple(sorted((*w.queue, message))))


# ---- callers


def _caller(w: World, c: Config) -> Iterator[Step]:
    if w.view[0]:
        yield from _accepted(w._replace(view=("", 0)), c, *w.view)
        return
    if w.calls >= c.calls:
        return
    w = w._replace(calls=w.calls + 1)
    same = (w.row.rerun or w.row.args) if w.row else 1
    for payload in sorted({same, w.calls} if w.row else {1}):
        arrow = arrows.answer(w, c, payload)
        if c.has(f"{arrow}_guard"):
            yield from _accepted(w, c, arrow, payload)
        else:
            yield Step(
                "peek", f"(will {arrow}, payload {payload})", w._replace(view=(arrow, payload))
            )


def _accepted(w: World, c: Config, arrow: str, payload: int) -> Iterator[Step]:
    note = f"(payload {payload})"
    w = arrows.accept(w, c, arrow, payload)
    if arrow not in ("enqueue", "reopen", "replace") or w.row.sent != NEW:
        yield Step(arrow, note, w, payload)
        return
    unsent = w._replace(row=w.row._replace(sent=0))
    yield Step(arrow, note, _push(w) or unsent, payload)
    if w.faults:
        yield Step(arrow, f"{note} killed before the push", _fault(w), payload)


# ---- the operator


def _operator(w: World, c: Config) -> Iterator[Step]:
    if not w.operations:
        return
    if c.looks and not w.looked:
        yield Step("look", "(operator)", w._replace(looked=True))
        return
    done = w._replace(operations=w.operations - 1, looked=False)
    for arrow, act in arrows.OPERATIONS.items():
        after = act(done, c)
        if after is not None and after.row != w.row:
            yield Step(arrow, "(operator)", after)


# ---- time and the coordinator


def _time(w: World) -> Iterator[Step]:
    if not w.row.due:
        yield Step("due", "", w._replace(row=w.row._replace(due=True)))
    for a in w.attempts:
        if a.outcome or a.lease == "over":
            continue
        if a.number not in w.owned:
            yield Step(
                "lapse", f"(attempt {a.number}, owner dead)", w.change(a.number, lease="over")
            )
        elif w.faults:
            late = _fault(w).change(a.number, lease="over")
            yield Step("lapse", f"(attempt {a.number}, owner paused)", late)


def _coordinator(w: World, c: Config) -> Iterator[Step]:
    for a in w.attempts:
        yield from _cut("reclaim", w, c, a)
        yield from _lost("reclaim", f"(attempt {a.number})", w, arrows.reclaim(w, c, a))
        if a.number in w.owned and w.faults and not c.has("two_witnesses"):
            jumped = _fault(w)
            yield from _lost("reclaim", "(the clock jumped)", w, arrows.lose(jumped, c, a))
    row = w.row
    known = any(m.sent for m in w.queue) or any(k.sent for k in w.workers)
    lost = (not known and c.has("resend")) or not c.has("resend_known")
    if row.status in WAITING and row.due and (not row.sent or lost) and len(w.queue) < QUEUE:
        sent = arrows.mark_sent(w, c)
        yield Step("send", f"(generation {row.generation})", _push(sent))
        if w.faults and not row.sent:
            yield Step("send", "(the push is lost)", _fault(sent))


def _lost(arrow: str, words: str, before: World, after: World | None) -> Iterator[Step]:
    if after is not None and after != before:
        yield Step(arrow, words, after)


def _cut(arrow: str, w: World, c: Config, a: Attempt) -> Iterator[Step]:
    """Only where reclaim is no transaction: the coordinator dies between attempt and job."""
    ended = None if c.has("reclaim_one_tx") else arrows.reclaim(w, c, a)
    if ended is not None and w.faults:
        yield Step(arrow, "cut before the job's row", _fault(ended)._replace(row=w.row))


def _parent(w: World, c: Config) -> Iterator[Step]:
    """Bury the horse that was reaped: as lost, or as the ending for which it was killed."""
    for a in w.attempts:
        own = a.number not in w.owned or not c.has("bury_owner")
        if not (w.reaped and own) and c.has("bury_reaped"):
            continue
        buried = w._replace(reaped="")
        if w.reaped == "timeout":
            after = arrows.settle(buried, c, a, "timeout")
            if after is not None:
                yield Step(_name(w, c, "timeout", after), "(by the parent)", after)
        else:
            yield from _lost("bury", f"(attempt {a.number})", w, arrows.lose(buried, c, a))


def _redis(w: World) -> Iterator[Step]:
    if not w.faults:
        return
    known = w.queue or any(k.sent for k in w.workers)
    if known:  # RQ's registries go with the queues
        workers = tuple(k._replace(sent=0) for k in w.workers)
        yield Step(
            "flush", "(all messages are lost)", _fault(w)._replace(queue=(), workers=workers)
        )
    if len(w.queue) < QUEUE:
        for message in sorted(set(w.queue)):
            queue = tuple(sorted((*w.queue, message)))
            words = f"(a message of generation {message.generation})"
            yield Step("double", words, _fault(w)._replace(queue=queue))


# ---- workers


def _worker(w: World, c: Config, index: int) -> Iterator[Step]:
    worker = w.workers[index]
    if worker.doing == "idle":
        yield from _pop(w, c, index)
        return
    a = w.attempt(worker.number) if worker.number else None
    if w.faults:
        yield from _crash(w, c, index, a)
    yield from {"got": _got, "seek": _seek, "run": _run, "unsure": _unsure}[worker.doing](
        w, c, index
    )


def _pop(w: World, c: Config, index: int) -> Iterator[Step]:
    for i, message in enumerate(w.queue):
        early = 0 if c.has("claim_args_after") else w.row.args
        drawn = 0 if c.has("claim_fence_after") else 1
        hand = Worker("got", 0, message.generation, message.sent, "", early, drawn)
        yield Step("pop", "", w.put(index, hand)._replace(queue=w.queue[:i] + w.queue[i + 1 :]))


def _crash(w: World, c: Config, index: int, a: Attempt | None) -> Iterator[Step]:
    doing = w.workers[index].doing
    down = _fault(w).put(index, IDLE)
    if a is not None and a.begun == 1 and c.mode == "atomic" and not c.has("begin_commits"):
        yield Step(
            "crash", f"({doing}; began_at was not committed)", down.change(a.number, begun=2)
        )
        return
    yield Step("crash", f"({doing})", down)
    if a is not None and not a.outcome:
        # A parent that lives reaps its horse; without bury_owner it takes any attempt for it.
        yield Step("crash", f"({doing}, the parent lives)", down._replace(reaped="died"))
        if a.begun:
            yield Step("crash", "(killed at its time-out)", down._replace(reaped="timeout"))


def _got(w: World, c: Config, index: int) -> Iterator[Step]:
    worker = w.workers[index]
    won = arrows.claim(w, c, worker.generation, early=worker.early)
    if won is None:
        yield Step("drop", "(the delivery)", w.put(index, IDLE))
        return
    number = won.row.attempts
    made = won.attempt(number)
    note = f"(payload {made.args}, generation {made.generation})"
    note += " by a fence drawn before the last claim" * (worker.drawn == 2)
    # Whoever drew a fence before this claim holds an older one from now on.
    others = tuple(k._replace(drawn=2) if k.drawn else k for k in won.workers)
    won = won._replace(workers=others)
    yield Step("claim", note, won.put(index, Worker("run", number)))
    begun = arrows.claim(w, c, worker.generation, begins=True, early=worker.early)
    yield Step(
        "claim",
        f"{note} and begin",
        begun._replace(workers=others).put(index, Worker("run", number)),
    )
    if w.faults:
        unknown = Worker("seek", number, worker.generation)
        yield Step("claim", f"{note} COMMIT reply lost", _fault(won).put(index, unknown))
        if not c.has("claim_one_tx"):
            half = _fault(w)._replace(row=won.row).put(index, IDLE)
            yield Step("claim", f"{note} cut before the INSERT", half)


def _seek(w: World, c: Config, index: int) -> Iterator[Step]:
    """Look for the own claim by its owner; if it is not open, claim again."""
    worker = w.workers[index]
    found = not w.attempt(worker.number).outcome and c.has("claim_lookup")
    if found:
        yield Step("seek", "(own claim found)", w.put(index, Worker("run", worker.number)))
    else:
        # The owner is unique, so a second claim by the same one is refused.
        yield Step("seek", "(own claim not found)", w.put(index, IDLE))


def _run(w: World, c: Config, index: int) -> Iterator[Step]:
    a = w.attempt(w.workers[index].number)
    if a.outcome:
        yield Step("late", "(the worker sees that its lease is lost)", w.put(index, IDLE))
    yield from _lost("begin", "(user code)", w, arrows.begin(w, c, a))
    if a.lease == "over":
        yield from _lost("beat", "(lease renewed)", w, arrows.beat(w, c, a))
    if a.outcome and c.has("settle_open"):
        return
    for ending in ["stop"] * w.row.cancel + ["park"] * w.row.hold:
        yield from _settle(w, c, index, ending)
    if w.faults:
        yield from _settle(
            _fault(w), c, index, "interrupt" if a.begun else "unclaim", " on SIGTERM"
        )
    if a.begun:
        yield from _endings(w, c, index)


def _endings(w: World, c: Config, index: int) -> Iterator[Step]:
    endings = ["complete", "fail"]
    if c.extra:
        endings += ["leave"] + ["snooze"] * (not w.ghost.snoozed)
    for ending in endings:
        yield from _settle(w, c, index, ending)
        if w.faults and ending in ("complete", "fail"):
            unsure = Worker("unsure", w.workers[index].number, ending=ending)
            yield from _settle(_fault(w), c, index, ending, " COMMIT reply lost", then=unsure)
            yield Step(
                "unsure", f"({ending}: COMMIT not done, no reply)", _fault(w).put(index, unsure)
            )


def _unsure(w: World, c: Config, index: int) -> Iterator[Step]:
    """Read the own outcome after a COMMIT without a reply."""
    worker = w.workers[index]
    a = w.attempt(worker.number)
    if (a.outcome and c.has("unsure_read")) or not c.has("unsure_settles"):
        yield Step("ask", f"(own outcome: {a.outcome or 'open'})", w.put(index, IDLE))
    elif c.mode == "plain":
        yield from _settle(w, c, index, worker.ending, " again")
    elif worker.ending == "complete" and not c.has(f"{c.mode}_interrupts"):
        yield from _settle(w, c, index, "again")
    elif worker.ending == "fail":
        yield from _settle(w, c, index, "fail", " again")
    else:
        yield from _settle(w, c, index, "interrupt")


def _settle(
    w: World, c: Config, index: int, ending: str, detail: str = "", then: Worker = IDLE
) -> Iterator[Step]:
    a = w.attempt(w.workers[index].number)
    w = w.put(index, then)
    after = arrows.settle(w, c, a, ending)
    words = f"(attempt {a.number}){detail}"
    if after is None:
        if not a.outcome and not c.has("settle_rollback"):
            after = w.change(a.number, outcome=arrows.OUTCOMES[ending])
        yield Step("late", f"({ending}: 0 rows)", after or w)
        return
    if w.faults and not c.has("settle_one_tx"):
        half = _fault(after)._replace(row=w.row)
        yield Step("late", f"({ending}: cut between attempt and job)", half)
    yield Step(_name(w, c, ending, after), words, after)


def _name(w: World, c: Config, ending: str, after: World) -> str:
    """Name the arrow that an ending became by a spent budget or by a request."""
    if ending in ("fail", "timeout") and arrows.gives_up(w.row, c):
        return "give_up"
    status = after.row.status
    if status == "CANCELLED" and ending not in ("leave", "stop"):
        return "stop"
    if status == "HELD" and ending != "park" and (c.on_lost != "hold" or ending != "interrupt"):
        return "park"
    return ending
