"""
The arrows of docs/design.md §3 on the rows of one key: pure functions, in life order.

Each returns the world with changed rows, or None where the arrow's guard refuses; ``twin``
holds every one of them against the function of ``dedupjobs.lifecycle`` that bears its name.
Each guard can be dropped by name.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.exhaustive.state import (
    ACTIVE,
    MAX_FAILURES,
    MAX_LOST,
    NEW,
    WAITING,
    Attempt,
    Config,
    Row,
    World,
)

OUTCOMES = {
    "complete": "SUCCEEDED",
    "again": "SUCCEEDED",  # settled again, without its effect
    "fail": "FAILED",
    "timeout": "TIMED_OUT",
    "snooze": "SNOOZED",
    "interrupt": "INTERRUPTED",
    "unclaim": "RETURNED",
    "stop": "CANCELLED",  # an operator's request
    "leave": "CANCELLED",  # the job's own Cancel
    "park": "HELD",
}

# ---- a call


def answer(w: World, c: Config, payload: int) -> str:
    """Name what a call with this payload does to the row as it is."""
    if w.row is None:
        return "enqueue"
    if w.row.status not in ACTIVE:
        return "reopen" if _is_free(w.row, c, payload) else "turned-away"
    return "join" if c.policy == "return" else _renewal(w, w.row, c, payload)


def is_untried(w: World, c: Config) -> bool:
    """Tell whether what waits has not been tried in this generation."""
    tried = w.ghost.tried or any(a.generation == w.row.generation for a in w.attempts)
    return w.row.status == "PENDING" and not (
        tried and c.has("rerun_tried" if c.policy == "rerun" else "replace_untried")
    )


def _renewal(w: World, row: Row, c: Config, payload: int) -> str:
    """Name what a call does whose newest payload wins."""
    untried = is_untried(w, c)
    if untried and c.policy != "debounce" and row.args == payload:
        return "join"  # what waits is this very call
    if untried:
        return "replace"  # rerun and debounce on such a row are this arrow, too
    if c.policy == "replace" or (row.status != "RUNNING" and not c.has("rerun_waiting")):
        return "join"
    if row.cancel:
        return "turned-away"  # the stop would drop what nobody has seen
    return "rerun"


def _is_free(row: Row, c: Config, payload: int) -> bool:
    return {
        "SUCCEEDED": c.unique_for == "none" or not c.has("reopen_window"),
        "DEAD": c.on_dead == "reopen" or not c.has("reopen_block"),
        "CANCELLED": True,
        "HELD": not c.has("held_blocks") and payload == row.args,
    }[row.status]


def accept(w: World, c: Config, arrow: str, payload: int) -> World:
    """Do what ``answer`` has named; a row that waits for a message gets a NEW dispatch id."""
    row, later = w.row, c.policy == "debounce"
    sent = 0 if later else NEW
    if arrow == "enqueue":
        row = Row("PENDING", 1, 0, 0, 0, payload, 0, not later, sent, False, False)
    elif arrow == "rerun":
        row = row._replace(rerun=payload)
    elif arrow == "replace":
        kept = not later and not c.has("replace_new_id")
        row = row._replace(args=payload, due=not later, sent=row.sent if kept else sent)
    elif arrow == "reopen":
        row = _opened(row, c, "reopen")._replace(
            status="PENDING",
            generation=row.generation + _grows(row, c, payload),
            args=payload,
            rerun=0 if c.has("reopen_rerun") else row.rerun,
            due=not later,
            sent=sent,
        )
    return w._replace(row=row)


def _grows(row: Row, c: Config, payload: int) -> bool:
    """Tell whether a reopened row is another intended execution."""
    if row.status == "SUCCEEDED":
        return c.has("reopen_succeeded_generation")
    if payload == row.args:
        return not c.has("reopen_same_generation")
    return c.has("reopen_other_generation") and (row.attempts > 0 or not c.has("reopen_attempted"))


# ---- messages


def mark_sent(w: World, c: Config) -> World | None:
    """Give a waiting row a new dispatch id."""
    return w._replace(row=w.row._replace(sent=NEW)) if w.row.status in WAITING else None


def mark_unsent(w: World, c: Config) -> World | None:
    """Forget a hand-over that failed."""
    free = w.row.status in WAITING and w.row.sent
    return w._replace(row=w.row._replace(sent=0)) if free else None


# ---- an attempt


def claim(
    w: World, c: Config, generation: int, *, begins: bool = False, early: int = 0
) -> World | None:
    """PENDING, RETRYING → RUNNING. ``early``: a payload that was read before."""
    row = w.row
    waits = row.status in WAITING or not c.has("claim_waiting")
    due = row.due or not c.has("claim_due")
    meant = row.generation == generation or not c.has("claim_generation")
    asked = (row.cancel or row.hold) and c.has("claim_unasked")
    if not (waits and due and meant) or asked:
        return None
    number = row.attempts + 1
    made = Attempt(number, generation, early or row.args, "", "live", int(begins))
    row = row._replace(status="RUNNING", attempts=number)
    return w._replace(row=row, attempts=(*w.attempts, made))


def begin(w: World, c: Config, a: Attempt) -> World | None:
    """Write that user code starts."""
    return w.change(a.number, begun=1) if not a.begun and _open(a, c, "begin_open") else None


def beat(w: World, c: Config, a: Attempt) -> World | None:
    """Renew the lease, also an expired one that nobody has reclaimed."""
    renewed = "live" if c.has("reclaim_lease") or a.lease == "live" else "renewed"
    return w.change(a.number, lease=renewed) if _open(a, c, "beat_open") else None


def _open(a: Attempt, c: Config, guard: str) -> bool:
    return not a.outcome or not c.has(guard)


# ---- endings: the attempt first, then the job


def settle(w: World, c: Config, a: Attempt, ending: str) -> World | None:
    """End an attempt, and move its job; None: somebody else had decided, nothing is written."""
    row = w.row
    running = row.status == "RUNNING" or not c.has("settle_running")
    newest = row.attempts == a.number or not c.has("settle_mine")
    begun = ending == "unclaim" and a.begun == 1
    if not _open(a, c, "settle_open") or not (running and newest) or begun:
        return None
    return w.change(a.number, outcome=OUTCOMES[ending])._replace(row=_moved(row, c, a, ending))


def gives_up(row: Row, c: Config) -> bool:
    """Tell whether one more failure uses up the budget."""
    counted = row.failures + c.has("fail_counts")
    return counted >= MAX_FAILURES and c.has("give_up_max")


def _moved(row: Row, c: Config, a: Attempt, ending: str) -> Row:
    match ending:
        case "complete" | "again":
            return _finished(row, c, "SUCCEEDED", "complete")
        case "fail" | "timeout" if gives_up(row, c):
            return _finished(_failed(row, c), c, "DEAD", "give_up")
        case "leave":
            return _finished(row, c, "CANCELLED", "stop")
        case "stop":
            return _stopped(row, c)
        case "park":
            return _waits(_cleared(row, c, "park"), c, "HELD")
    return _put_off(row, c, a, ending)


def _put_off(row: Row, c: Config, a: Attempt, ending: str) -> Row:
    """The job waits for another attempt, unless a person is asked or has asked."""
    begun = {
        "interrupt": a.begun == 1 and c.has("interrupt_on_lost"),
        "unclaim": not c.has("interrupt_begun"),
    }
    if c.on_lost == "hold" and begun.get(ending):
        return _waits(row, c, "HELD")
    later = ending in ("fail", "timeout", "snooze")
    if ending in ("fail", "timeout"):
        row = _failed(row, c)
    elif not c.has(f"{ending}_uncounted"):
        row = row._replace(failures=row.failures + 1)
    status = "RETRYING" if later else "PENDING"
    return _obeyed(row, c) or _waits(row, c, status, due=not later)


def _failed(row: Row, c: Config) -> Row:
    return row._replace(failures=row.failures + c.has("fail_counts"))


def _finished(row: Row, c: Config, status: str, arrow: str) -> Row:
    """Final, or a waiting rerun is taken up; only DEAD under "block" keeps one."""
    blocked = status == "DEAD" and c.on_dead == "block" and c.has("block_rests")
    if row.rerun and not blocked and c.has(f"{arrow}_rerun"):
        return _taken_up(row, c)
    lost = blocked and not c.has("block_keeps")
    return _cleared(row, c, arrow)._replace(status=status, rerun=0 if lost else row.rerun)


def _stopped(row: Row, c: Config) -> Row:
    """CANCELLED on request: a waiting rerun is dropped, and named."""
    kept = 0 if c.has("stop_drops") else row.rerun
    return _cleared(row, c, "stop")._replace(status="CANCELLED", rerun=kept)


def _obeyed(row: Row, c: Config) -> Row | None:
    """A request waits where the job would wait for another attempt: cancel goes before hold."""
    if row.cancel and c.has("requests_bind"):
        return _stopped(row, c)
    if row.hold and c.has("requests_bind"):
        return _waits(_cleared(row, c, "park"), c, "HELD")
    return None


def _taken_up(row: Row, c: Config) -> Row:
    """The newest payload runs next, in a generation of its own; a debounced job waits again."""
    row = _waits(_opened(row, c, "takeup"), c, "PENDING", due=c.policy != "debounce")
    grows = c.has("takeup_generation")
    return row._replace(generation=row.generation + grows, args=row.rerun, rerun=0)


def _waits(row: Row, c: Config, status: str, due: bool | None = None) -> Row:
    sent = 0 if c.has("dispatch_cleared") else row.sent
    return row._replace(status=status, sent=sent, due=row.due if due is None else due)


def _cleared(row: Row, c: Config, arrow: str) -> Row:
    return row._replace(cancel=False, hold=False) if c.has(f"{arrow}_clears") else row


def _opened(row: Row, c: Config, arrow: str) -> Row:
    """Requests and budgets start afresh."""
    row = row._replace(failures=0, lost=0) if c.has(f"{arrow}_budgets") else row
    return _cleared(row, c, arrow)


# ---- an attempt whose worker is gone


def reclaim(w: World, c: Config, a: Attempt) -> World | None:
    """RUNNING → RETRYING, HELD, DEAD or CANCELLED, once the lease is over."""
    over = a.lease == "over" or (a.lease == "renewed" and not c.has("reclaim_lease"))
    return lose(w, c, a) if over else None


def lose(w: World, c: Config, a: Attempt) -> World | None:
    """Do so whatever the lease says: ``bury``, by the parent that has reaped its horse."""
    if not _open(a, c, "reclaim_open"):
        return None
    begun = a.begun == 1 or not c.has("reclaim_returned")
    w = w.change(a.number, outcome="LOST" if begun else "RETURNED")
    if (w.row.status, w.row.attempts) != ("RUNNING", a.number) and c.has("reclaim_job"):
        return w
    return w._replace(row=_after_loss(w.row, c, begun))


def _after_loss(row: Row, c: Config, begun: bool) -> Row:
    counts = c.has("reclaim_counts") if begun else not c.has("reclaim_uncounted")
    row = row._replace(lost=row.lost + counts)
    held = begun and c.on_lost == "hold" and c.has("reclaim_on_lost")
    if held and c.has("hold_first"):
        return _waits(row, c, "HELD")
    if row.cancel and c.has("reclaim_stop"):
        return _stopped(row, c)
    if held:
        return _waits(row, c, "HELD")
    if counts and row.lost >= MAX_LOST and c.has("reclaim_max"):
        return _finished(row, c, "DEAD", "reclaim")
    if row.hold and c.has("requests_bind"):
        return _waits(_cleared(row, c, "park"), c, "HELD")
    return _waits(row, c, "RETRYING", due=True)


# ---- an operator's


def cancel(w: World, c: Config) -> World | None:
    """Waiting, HELD → CANCELLED; a RUNNING job is asked to stop."""
    row = w.row
    if row.status in (*WAITING, "HELD") or (
        row.status == "RUNNING" and not c.has("cancel_waiting")
    ):
        rerun = 0 if c.has("cancel_rerun") else row.rerun
        return w._replace(row=_waits(row, c, "CANCELLED")._replace(rerun=rerun))
    return w._replace(row=row._replace(cancel=True)) if row.status == "RUNNING" else None


def hold(w: World, c: Config) -> World | None:
    """Waiting → HELD; a RUNNING job is asked to."""
    row = w.row
    if row.status in WAITING or (row.status == "RUNNING" and not c.has("hold_waiting")):
        return w._replace(row=_waits(row, c, "HELD"))
    return w._replace(row=row._replace(hold=True)) if row.status == "RUNNING" else None


def retry(w: World, c: Config) -> World | None:
    """DEAD, HELD, CANCELLED, RETRYING → PENDING now; takes up a waiting rerun."""
    fits = w.row.status in ("DEAD", "HELD", "CANCELLED", "RETRYING")
    if fits or (w.row.status == "RUNNING" and not c.has("retry_final")):
        return _put_back(w, c, "retry")
    return None


def unhold(w: World, c: Config) -> World | None:
    """HELD → PENDING now; takes up a waiting rerun."""
    return _put_back(w, c, "unhold") if w.row.status == "HELD" else None


def _put_back(w: World, c: Config, arrow: str) -> World:
    row = _opened(w.row, c, arrow)
    if row.rerun and c.has("retry_takes"):
        return w._replace(row=_taken_up(row, c))
    return w._replace(row=_waits(row, c, "PENDING", due=True))


OPERATIONS: dict[str, Callable[[World, Config], World | None]] = {
    "cancel": cancel,
    "hold": hold,
    "retry": retry,
    "unhold": unhold,
}
