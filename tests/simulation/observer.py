"""
What must hold after each commit (DESIGN §7), judged by what the commit changed.

The observer knows nothing of how the code works: it compares the tables before and after, and
keeps its own books of what was accepted, run, counted and asked for.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dedupjobs import registry
from dedupjobs.models import ACTIVE, FINAL, WAITING, Kind, ProcessedJob
from dedupjobs.registry import FOREVER
from tests.simulation import stage
from tests.simulation.arrows import Arrows
from tests.simulation.tables import EFFECTS, ROWS, SLACK, TRIES, Books, Effect, Row, Try

if TYPE_CHECKING:
    from tests.simulation.database.base import Line
    from tests.simulation.world import World


class Observer(Arrows):
    """Looks at the tables after each commit that wrote them."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.effects: dict[int, Effect] = {}
        self.keys: dict[tuple[int, int], str] = {}  # (job, generation) → idempotency key
        self.span: dict[Line, tuple[int, int]] = {}  # database's times of a transaction
        self.earliest = 0  # of these, in the transaction that is looked at
        self.last_fence = 0
        self.sent: set[str] = set()  # RQ ids that committed rows have had
        self.pruned: set[str] = set()  # keys whose rows are out of retention
        self.answers: list[tuple[str, int, str]] = []
        world.redis.deleted = self.deleted

    # ---- called by the world

    def begin(self, line: Line) -> None:
        """Note the first moment at which a transaction may have read the database's clock."""
        now = self.world.db_now()
        self.span[line] = (now, now)

    def jumped(self) -> None:
        """The database's clock has jumped, perhaps within open transactions."""
        now = self.world.db_now()
        for line, (first, last) in self.span.items():
            self.span[line] = (min(first, now), max(last, now))

    def look(self, line: Line) -> None:
        """Compare the tables with how they were; called after the commit that wrote them."""
        old_rows, old_tries = self.rows, self.tries
        rows, tries = self._read(line)
        now = self.world.db_now()
        first, last = self.span.pop(line, (now, now))
        self.earliest, now = min(now, first), max(now, last)
        if "simulation_effect" in line.dirty:
            self._effects(line, old_tries)
        for pk, attempt in tries.items():
            before = old_tries.get(pk)
            if before != attempt:
                self._attempt(before, attempt, now)
        for pk in old_rows.keys() - rows.keys():
            self._pruned(old_rows[pk], now)
        for pk, row in rows.items():
            was = old_rows.get(pk)
            if row.dispatch_id is not None:
                self.sent.add(row.dispatch_id)
            if was != row:
                self._row(was, row, old_tries, now)

    def _read(self, line: Line) -> tuple[dict[int, Row], dict[int, Try]]:
        """Read the tables that were written."""
        if "dedupjobs_processedjob" in line.dirty:
            self.rows = {row[0]: Row._make(row) for row in line.read(ROWS)}
        if "dedupjobs_jobattempt" in line.dirty:
            self.tries = {row[0]: Try._make(row) for row in line.read(TRIES)}
        return self.rows, self.tries

    def idempotency(self, job_pk: int, generation: int, key: str) -> None:
        """Note the key that user code hands to others."""
        known = self.keys.setdefault((job_pk, generation), key)
        self.check(known == key, f"I12 two idempotency keys in generation {generation}")
        same = [of for of, k in self.keys.items() if k == key]
        self.check(len(same) == 1, f"I12 one idempotency key for {same}")

    def pushed(self, message: str) -> None:
        """Note a message that goes into the queue."""
        known = message in self.sent
        self.check(known, f"I2 {message} was published before its row was committed")

    def deleted(self, db: int, key: bytes, value: object, command: str) -> None:
        """Check who deletes a lock: its owner, whoever has ended its attempt, or a cancel."""
        if b":lock:" not in key or not isinstance(value, bytes) or self.world.current is None:
            return
        owner = value.decode().partition(":")[2]
        mine = self.world.process_of(owner) is self.world.current.process
        if self._by() == "operator":
            return  # a cancel takes the lock from whoever has it
        ended = all(a.outcome for a in self.tries.values() if a.owner == owner)
        self.check(mine or ended, f"I8 {self._by()} deleted the lock of {owner} by {command}")

    def answered(self, kind: Kind, row: ProcessedJob, asked_at: int) -> None:
        """
        Note what a caller was told: a run that follows because of the call was accepted.

        ``asked_at``: the database's moment when the call began.
        """
        process = self.world.current.process.name if self.world.current else ""
        self.answers.append((kind.name, row.pk, row.key_hash))
        if kind in (Kind.CREATED, Kind.REPLACED):
            self.check(
                self.owed[process, row.pk] > 0,
                f"I2 {kind.name} was answered, but nothing accepted",
            )
        self.owed[process, row.pk] = 0
        if kind is Kind.REPLAYED:
            until = row.unique_until
            over = until and stage.milliseconds_of(until) + self.world.jumps <= asked_at
            self.check(not over, "I1 a success was replayed after its window")

    def ran_with(self, fence: int, args: str) -> None:
        """User code of a live attempt runs with these arguments: what I11 and I12 are about."""
        attempt = self.tries.get(fence)
        if attempt is None or attempt.outcome is not None:
            return  # it has not noticed yet that it was given up
        books, generation = self.books[attempt.job_id], attempt.generation
        known = books.tried.setdefault(generation, args)
        self.check(known == args, f"I12 generation {generation} runs two payloads")
        order = books.accepted.get(args, 0)
        self.check(order >= books.highest, "I11 an older payload runs after a newer one")
        books.highest = max(books.highest, order)

    @property
    def at_rest(self) -> bool:
        """Whether no job is active and no attempt open."""
        return not any(row.status in ACTIVE for row in self.rows.values()) and all(
            attempt.outcome for attempt in self.tries.values()
        )

    def longest_wait(self) -> int:
        """Return the milliseconds until the last waiting row is due, by the database's clock."""
        now = self.world.db_now()
        waiting = [row for row in self.rows.values() if row.status in WAITING]
        return max([0, *(stage.moment_of(row.run_after) - now for row in waiting)])

    def _pruned(self, was: Row, now: int) -> None:
        self.check(was.status in FINAL, f"I9 a {was.status} row was deleted")
        job = registry.get(was.name)
        until = was.unique_until
        success = was.status == "SUCCEEDED" and job.unique_for is not None
        holds = success and (until is None or stage.moment_of(until) > now)
        blocks = was.status == "DEAD" and job.options.on_dead == "block"
        self.check(not (holds or blocks), "I1 a row that holds its key was deleted")
        self.pruned.add(was.key_hash)
        del self.books[was.id]

    # ---- attempts

    def _attempt(self, was: Try | None, attempt: Try, now: int) -> None:
        books = self.books[attempt.job_id]
        if was is None:
            self._claimed(attempt, books)
        elif was.outcome != attempt.outcome:
            self.check(
                was.outcome is None,
                f"I6 outcome {was.outcome} of attempt {attempt.number} was overwritten by "
                f"{attempt.outcome}",
            )
            self._ended(was, attempt, books, now)
        if was is None or was.beat_at != attempt.beat_at:
            books.beats[attempt.id] = (attempt.beat_at, self.world.now)
            lease = round(1000 * registry.get(self.rows[attempt.job_id].name).options.lease)
            granted = stage.moment_of(attempt.lease_until) - lease
            self.check(
                self.earliest - 1 <= granted <= now + 1,
                f"I3 the lease of attempt {attempt.number} is not of the database's clock",
            )
        if was and was.outcome:
            noted = was._replace(late_ending=attempt.late_ending, outcome=attempt.outcome)
            self.check(attempt == noted, f"I6 the ended attempt {attempt.number} was changed")
        if attempt.late_ending:
            self.check(
                attempt.late_ending != attempt.outcome,
                f"I6 {attempt.outcome} was noted as late though it was written",
            )

    def _claimed(self, attempt: Try, books: Books) -> None:
        others = [
            other
            for other in self.tries.values()
            if other.job_id == attempt.job_id and other.id != attempt.id
        ]
        open_ones = [other.number for other in others if other.outcome is None]
        self.check(not open_ones, f"I3 attempt {attempt.number} claimed while {open_ones} are open")
        self.check(attempt.id > self.last_fence, "I4 the fence does not grow")
        self.check(
            all(other.number < attempt.number for other in others),
            f"I4 attempt {attempt.number} is not the newest",
        )
        self.last_fence = max(self.last_fence, attempt.id)
        self.check(attempt.outcome is None, "I6 an attempt was born ended")

    def _ended(self, was: Try, attempt: Try, books: Books, now: int) -> None:
        outcome = attempt.outcome
        job = self.rows.get(attempt.job_id)
        policy = registry.get(job.name).options if job else None
        books.failures += outcome in ("FAILED", "TIMED_OUT")
        books.lost += outcome == "LOST"
        begun = attempt.began_at is not None
        if outcome == "LOST":
            self.check(begun, "I6 LOST, but user code had not begun")
        if outcome == "RETURNED":
            self.check(not begun, "I6 RETURNED, but user code had begun")
        if outcome in ("LOST", "RETURNED"):
            self._taken(was, books, now)
        if policy and policy.on_lost == "hold" and begun and outcome in ("LOST", "INTERRUPTED"):
            books.doubt = job is not None and job.status != "CANCELLED"
        if outcome == "SUCCEEDED":
            self._succeeded(attempt, books)

    def _taken(self, was: Try, books: Books, now: int) -> None:
        """An attempt was given up by somebody else: by its parent, or by a coordinator."""
        if self._by() == "coordinator":
            self._reclaimed(was, books, now)
            return
        owner = self.world.process_of(was.owner)
        self.check(self._by() == "parent", f"I3 a {self._by()} took attempt {was.number}")
        self.check(owner is not None and owner.dead, "I3 a parent buried what lives")

    def _reclaimed(self, was: Try, books: Books, now: int) -> None:
        """Two witnesses: the lease by the database's clock, the standstill by true time."""
        lease = 1000 * registry.get(self.rows[was.job_id].name).options.lease
        left = stage.moment_of(was.lease_until) - now
        over, ahead = left < 0, left > lease
        self.check(over or ahead, f"I3 attempt {was.number} reclaimed {left} ms before its lease")
        owner = self.world.process_of(was.owner)
        self.check(
            owner is None or owner.dead or owner.troubled or self.world.troubled,
            f"I3 attempt {was.number} was taken from a worker that is alive and well",
        )
        still = self.world.now - books.beats[was.id][1]
        needed = lease if ahead else lease / 3
        jumped = any(fault.kind == "process clock jumps" for fault in self.world.happened)
        if not jumped:
            self.check(
                still >= needed - SLACK,
                f"I3 attempt {was.number} reclaimed {still} ms after its last beat",
            )

    def _succeeded(self, attempt: Try, books: Books) -> None:
        row = self.rows[attempt.job_id]
        job = registry.get(row.name)
        self.check(
            attempt.generation not in books.successes,
            f"I1 generation {attempt.generation} succeeded twice",
        )
        if job.unique_for is FOREVER and not job.options.newest_wins:
            self.check(not books.successes, "I1 a key that is unique for ever succeeded twice")
        books.successes.add(attempt.generation)
        books.ran = books.tried.get(attempt.generation, "")

    # ---- effects

    def _effects(self, line: Line, old_tries: dict[int, Try]) -> None:
        for effect in map(
            Effect._make, line.read(f"{EFFECTS} WHERE id > ?", max(self.effects, default=0))
        ):
            self.effects[effect.id] = effect
            attempt = self.tries.get(effect.fence)
            before = old_tries.get(effect.fence)
            live = before is None or before.outcome is None
            if effect.kind in ("fenced", "step"):
                self.check(live, f"a stale attempt {effect.number} wrote behind its fence")
            if effect.kind == "atomic":
                self.check(
                    attempt is not None and attempt.outcome == "SUCCEEDED" and live,
                    "I1 an atomic effect without its completion",
                )

    def final(self) -> None:
        """What must hold once all is quiet."""
        effects = self.effects.values()
        counts = Counter((e.job_pk, e.generation) for e in effects)
        steps = Counter((e.job_pk, e.generation) for e in effects if e.kind == "step")
        for pk, books in self.books.items():
            kind = registry.get(self.rows[pk].name)
            for generation in books.successes:
                number = counts[pk, generation]
                self.check(number >= 1, f"I1 no effect in generation {generation}")
                if kind.options.atomic or kind.name.endswith("completing"):
                    self.check(number == 1, f"I1 {number} effects in generation {generation}")
                if kind.name.endswith("again"):
                    self.check(steps[pk, generation] == 1, "I1 a generation without its step")
        self.check(max(steps.values(), default=1) == 1, "I1 a step was done twice")
        for attempt in self.tries.values():
            self.check(attempt.outcome is not None, "I6 an attempt has no ending")
