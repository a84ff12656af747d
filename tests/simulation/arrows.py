"""
What may become of a job's row in one commit: the arrows of DESIGN §3.

Judged by the row before and after, by the attempt that ended with it, and by who did it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dedupjobs import registry
from dedupjobs.models import FINAL, WAITING
from tests.simulation import stage
from tests.simulation.tables import LEAVING, MOVES, OPERATED, Books, Row, Try

if TYPE_CHECKING:
    from tests.simulation.world import World


class Arrows:
    """Keeps the books of each row, and checks each change against them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rows: dict[int, Row] = {}
        self.tries: dict[int, Try] = {}
        self.books: dict[int, Books] = {}
        self.accepted = 0
        self.owed: Counter[tuple[str, int]] = Counter()  # (process, job) → calls accepted

    def check(self, holds: object, otherwise: str) -> None:
        if not holds:
            self.world.fail(otherwise)

    def seen(self, job_pk: int) -> None:
        """The operator looks at a row."""
        if job_pk in self.books:
            self.books[job_pk].seen = self.rows[job_pk].version

    def _row(self, was: Row | None, row: Row, old_tries: dict[int, Try], now: int) -> None:
        if was is None:
            same = [other for other in self.rows.values() if other.key_hash == row.key_hash]
            self.check(len(same) == 1, "I1 one key has two rows")
            self.check(
                (row.status, row.generation, row.attempts) == ("PENDING", 1, 0),
                f"I9 a row was born {row.status}",
            )
            self.books[row.id] = Books()
            self._accept(row, row.args)
            return
        moved = [name for name in MOVES if getattr(was, name) != getattr(row, name)]
        if not moved:
            return
        self.check(row.version > was.version, f"I9 {moved} changed, but not the version")
        books = self.books[row.id]
        if was.status == "RUNNING" and row.status != "RUNNING":
            self._left(was, row, books, old_tries)
        elif row.status == "RUNNING" and was.status != "RUNNING":
            self._took(was, row, books, now)
        elif was.status in FINAL or was.status == "HELD":
            self._opened(was, row, books, now)
        elif was.status != row.status:
            self._operated(was, row, books)
        else:
            self._changed(was, row, books, moved)
        self._rests(was, row, books)

    def _took(self, was: Row, row: Row, books: Books, now: int) -> None:
        """claim"""
        policy = registry.get(row.name).options
        mine = [
            attempt
            for attempt in self.tries.values()
            if attempt.job_id == row.id and attempt.number == row.attempts
        ]
        self.check(was.status in WAITING, f"I9 claim from {was.status}")
        self.check(row.attempts == was.attempts + 1, "I9 claim: attempts + 1")
        self.check(
            len(mine) == 1 and mine[0].generation == row.generation == was.generation,
            "I9 claim without its attempt",
        )
        self.check(stage.moment_of(was.run_after) <= now, "I9 claimed before run_after")
        asked = was.cancel_requested or was.hold_requested
        self.check(not asked, "I9 claimed although a cancel or hold is requested")
        self.check(
            books.failures < policy.max_attempts and books.lost < policy.max_lost,
            "I6 claimed although a budget is used up",
        )
        self.check(not books.doubt, "I9 user code was cut off and begins again without a person")
        if row.args == books.newest:
            books.waits = False
        known = books.tried.setdefault(row.generation, row.args)
        self.check(known == row.args, f"I12 generation {row.generation} runs two payloads")

    def _left(self, was: Row, row: Row, books: Books, old_tries: dict[int, Try]) -> None:
        """RUNNING → anything: with the ending of the newest attempt, and only so."""
        ended = [
            attempt
            for attempt in self.tries.values()
            if attempt.job_id == row.id
            and attempt.outcome is not None
            and (old := old_tries.get(attempt.id)) is not None
            and old.outcome is None
        ]
        if len(ended) == 1 and ended[0].number == was.attempts:
            self._left_by(str(ended[0].outcome), was, row, books)
        else:
            self.check(False, f"I9 RUNNING → {row.status} without the newest attempt's ending")

    def _left_by(self, outcome: str, was: Row, row: Row, books: Books) -> None:
        policy = registry.get(row.name).options
        to = row.status
        self.check(to in LEAVING[outcome], f"I9 {outcome}: RUNNING → {to}")
        taken_up = was.rerun_args is not None and row.generation == was.generation + 1
        if taken_up:
            self._took_up(was, row, books)
        else:
            self.check(row.generation == was.generation, "I12 the generation grew by itself")
            wanted = was.cancel_requested or was.hold_requested
            ignored = to in WAITING and wanted
            self.check(not ignored, f"I9 {outcome}: RUNNING → {to} although a request waits")
        dropped = to == "CANCELLED" and was.cancel_requested
        if to in FINAL and was.rerun_args is not None:
            kept = to == "DEAD" and policy.on_dead == "block"
            self.check(kept or dropped, f"I2 {to} although a rerun waits")
        if dropped:
            self._dropped(row, books)
        used = books.failures >= policy.max_attempts or books.lost >= policy.max_lost
        counted = outcome in ("FAILED", "TIMED_OUT", "LOST")
        self.check(
            not (to == "RETRYING" and counted and used), "I6 RETRYING although a budget is used up"
        )

    def _took_up(self, was: Row, row: Row, books: Books) -> None:
        self.check(
            row.status == "PENDING" and row.args == was.rerun_args and row.rerun_args is None,
            "I9 a rerun was not taken up as it is",
        )
        self._fresh(books)

    def _opened(self, was: Row, row: Row, books: Books, now: int) -> None:
        """reopen, retry, unhold"""
        if was.status == row.status:
            hollowed = not row.args and self._by() == "coordinator"
            self.check(hollowed, f"I9 a {row.status} row was changed")
            self.check(was.rerun_args is None, "I2 prune dropped a waiting rerun")
            return
        by = self._by()
        job = registry.get(row.name)
        if by == "operator":
            self._operated(was, row, books)
            return
        self.check(row.status == "PENDING", f"I9 {was.status} → {row.status} by {by}")
        self.check(was.status != "HELD", "I9 a HELD job was opened by a call")
        if was.status == "SUCCEEDED":
            over = was.unique_until is not None and stage.moment_of(was.unique_until) <= (
                now + self.world.jumps
            )
            self.check(job.unique_for is None or over, "I1 reopened while its success holds")
        if was.status == "DEAD":
            self.check(job.options.on_dead == "reopen", "I9 a dead key under block was reopened")
        same = was.fingerprint == row.fingerprint and was.status != "SUCCEEDED"
        if same:
            self.check(
                row.generation == was.generation,
                "I12 the same call continues under another generation",
            )
        elif was.attempts or was.status == "SUCCEEDED":
            self.check(row.generation == was.generation + 1, "I12 other work in one generation")
        self._fresh(books)
        self._accept(row, row.args)
        self.check(row.rerun_args is None, "I9 reopened with an old rerun")

    def _operated(self, was: Row, row: Row, books: Books) -> None:
        by = self._by()
        self.check(by == "operator", f"I9 {was.status} → {row.status} by {by}")
        self.check((was.status, row.status) in OPERATED, f"I9 {was.status} → {row.status}")
        self._looked_at(was, books)
        self.check(was.args or row.status != "PENDING", "I9 a tombstone has nothing to run with")
        books.doubt = False
        if row.status == "CANCELLED":
            self._dropped(row, books)
        elif row.status == "PENDING":
            self._fresh(books)
            if was.rerun_args is not None:
                self.check(
                    row.args == was.rerun_args and row.generation == was.generation + 1,
                    "I9 a waiting rerun was not taken up",
                )
            else:
                self.check(
                    row.generation == was.generation,
                    "I12 an operator's retry runs under another generation",
                )

    def _looked_at(self, was: Row, books: Books) -> None:
        self.check(was.version == books.seen, "I9 the operator acts on what he has not seen")

    def _changed(self, was: Row, row: Row, books: Books, moved: list[str]) -> None:
        """replace, rerun, debounce, and requests: the status stays"""
        if "args" in moved or (
            row.status == "PENDING" and "run_after" in moved and self._by() != "operator"
        ):
            tried = was.generation in books.tried
            self.check(row.status == "PENDING" and not tried, "I11 replaced after an attempt")
            self._accept(row, row.args)
        if "rerun_args" in moved:
            self.check(row.rerun_args is not None, "I2 a waiting rerun vanished")
            self.check(not was.cancel_requested, "I2 accepted what the stop will drop")
            if row.rerun_args is not None:
                self._accept(row, row.rerun_args)
        if "cancel_requested" in moved or "hold_requested" in moved:
            self._looked_at(was, books)
        if "generation" in moved:
            self.check(False, "I12 the generation grew by itself")

    def _rests(self, was: Row, row: Row, books: Books) -> None:
        self.check(
            (row.failures, row.lost_count) == (books.failures, books.lost),
            f"I6 budgets {row.failures}, {row.lost_count}; outcomes say {books.failures}, "
            f"{books.lost}",
        )
        blocked = (
            row.status == "DEAD" and registry.get(row.name).options.on_dead == "block"
        ) or row.status == "HELD"
        self.check(
            books.newest in (row.args, row.rerun_args) or not books.waits,
            "I2 the newest accepted payload is gone from the row",
        )
        if row.status in FINAL and not blocked:
            self.check(
                not (books.waits or row.rerun_args),
                f"I2 {row.status}, but an accepted call never ran",
            )
        if row.status == "SUCCEEDED":
            self.check(books.ran == books.newest, "I11 SUCCEEDED with an older payload")

    # ---- books

    def _accept(self, row: Row, args: str) -> None:
        books = self.books[row.id]
        self.accepted += 1
        if self.world.current is not None:
            self.owed[self.world.current.process.name, row.id] += 1
        books.accepted[args] = self.accepted
        books.newest = args
        books.waits = True

    def _fresh(self, books: Books) -> None:
        books.failures = books.lost = 0

    def _dropped(self, row: Row, books: Books) -> None:
        """A cancel names what it drops."""
        books.newest, books.waits = row.args, False

    def _by(self) -> str:
        return self.world.current.process.kind if self.world.current else ""
