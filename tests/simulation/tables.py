"""The rows as the observer reads them, the arrows that are allowed, and what it remembers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Row(NamedTuple):
    """A job's row."""

    id: int
    key_hash: str
    name: str
    status: str
    version: int
    generation: int
    attempts: int
    failures: int
    lost_count: int
    args: str
    fingerprint: str
    rerun_args: str | None
    run_after: str
    cancel_requested: int
    hold_requested: int
    unique_until: str | None
    dispatch_id: str | None
    dispatched_at: str | None


class Try(NamedTuple):
    """An attempt's row."""

    id: int
    job_id: int
    number: int
    generation: int
    owner: str
    lease_until: str
    beat_at: str
    began_at: str | None
    outcome: str | None
    late_ending: str


class Effect(NamedTuple):
    """An effect's row."""

    id: int
    job_pk: int
    generation: int
    number: int
    fence: int
    kind: str


def _select(table: str, row: type[NamedTuple]) -> str:
    # The plus signs keep sqlite3 from turning texts into datetimes.
    columns = ", ".join(f"+{name}" for name in row._fields)
    return f"SELECT {columns} FROM {table}"


ROWS = _select("dedupjobs_processedjob", Row)
TRIES = _select("dedupjobs_jobattempt", Try)
EFFECTS = _select("simulation_effect", Effect)

# The arrows of DESIGN §3 out of RUNNING, by the outcome that the attempt gets in the same commit.
LEAVING = {
    "SUCCEEDED": {"SUCCEEDED", "PENDING"},
    "FAILED": {"RETRYING", "DEAD", "PENDING", "CANCELLED", "HELD"},
    "TIMED_OUT": {"RETRYING", "DEAD", "PENDING", "CANCELLED", "HELD"},
    "SNOOZED": {"RETRYING", "CANCELLED", "HELD"},
    "INTERRUPTED": {"PENDING", "CANCELLED", "HELD"},
    "RETURNED": {"PENDING", "RETRYING", "CANCELLED", "HELD"},
    "CANCELLED": {"CANCELLED", "PENDING"},
    "HELD": {"HELD"},
    "LOST": {"RETRYING", "HELD", "DEAD", "CANCELLED", "PENDING"},
}
# The arrows by which a person moves a job.
OPERATED = {
    *(("PENDING", to) for to in ("CANCELLED", "HELD")),
    *(("RETRYING", to) for to in ("CANCELLED", "HELD", "PENDING")),
    *(("HELD", to) for to in ("CANCELLED", "PENDING")),
    ("DEAD", "PENDING"),
    ("CANCELLED", "PENDING"),
}
MOVES = (
    *("status", "generation", "attempts", "failures", "lost_count", "args", "rerun_args"),
    *("run_after", "cancel_requested", "hold_requested"),
)
SLACK = 100  # milliseconds that a lease / 3 may seem shorter, since beats and looks take time


@dataclass(slots=True)
class Books:
    """What the observer remembers of one key's row."""

    tried: dict[int, str] = field(default_factory=dict)  # generation → arguments of its attempts
    accepted: dict[str, int] = field(default_factory=dict)  # arguments → when accepted last
    newest: str = ""
    waits: bool = True  # whether the newest arguments still wait for an attempt
    seen: int = -1  # version at the operator's last look
    highest: int = 0  # of the accepted that were claimed
    ran: str = ""  # arguments of the newest success
    failures: int = 0
    lost: int = 0
    successes: set[int] = field(default_factory=set)
    doubt: bool = False  # user code was cut off under on_lost="hold", and nobody has looked
    beats: dict[int, tuple[str, int]] = field(default_factory=dict)  # attempt → beat_at, when
