"""``attempt.step()``: what one attempt has done, the next one does not do again."""

from __future__ import annotations

import io
import logging
import string
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext

from dedupjobs import (
    FOREVER,
    Done,
    NotDone,
    batches,
    clock,
    current_attempt,
    job,
    lifecycle,
    operations,
)
from dedupjobs.batches import course
from dedupjobs.clock import DbNow
from dedupjobs.context import Attempt, entered
from dedupjobs.exceptions import (
    LeaseLost,
    Snooze,
    StepError,
    StepInDoubt,
    StepResultError,
    TimeoutReached,
)
from dedupjobs.heartbeat import Heart
from dedupjobs.lifecycle import Place
from dedupjobs.models import JobStep, Operation, ProcessedJob, Status, StepState
from dedupjobs.testing import captured_jobs, inline, run_pending
from tests import live
from tests.app.jobs import note
from tests.app.models import Ledger
from tests.live import deliver
from tests.rows import (
    PATIENCE,
    Pause,
    Side,
    alter,
    expire,
    has_row_locks,
    job_row,
    together,
    until_blocked,
)
from tests.sessions import needs_server
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

STARTED, SUCCEEDED, FAILED = StepState.STARTED, StepState.SUCCEEDED, StepState.FAILED


@dataclass(frozen=True)
class Receipt:
    """A result that JSON has no word for."""

    number: int
    amount: Decimal
    at: datetime


RECEIPT = (Receipt(7, Decimal("9.90"), datetime(2026, 1, 2, tzinfo=UTC)), ["a", None])


@job(key="stepped:{tag}", unique_for=FOREVER, max_attempts=9, backoff=0.1)
def stepped(*, tag: str) -> Any:
    """Do what the test says, by the tag."""
    return PLAYS[tag](current_attempt())


PLAYS: dict[str, Callable[[Attempt], Any]] = {}


def plays(play: Callable[[Attempt], Any], tag: str = "a") -> ProcessedJob:
    """Return the row of a job that will do this."""
    PLAYS[tag] = play
    return stepped.enqueue(tag=tag).job


def ran() -> list[str]:
    return list(Ledger.objects.order_by("pk").values_list("note", flat=True))


def states() -> dict[str, str]:
    return dict(JobStep.objects.order_by("pk").values_list("name", "state"))


def deliver_again(row: ProcessedJob) -> Status | None:
    """Run it once its backoff is over."""
    alter(row, run_after=DbNow())
    return deliver(row)


def claimed(row: ProcessedJob) -> Attempt:
    """Return a new attempt of the row, as its running function would see it."""
    claim = lifecycle.claim(row.pk, job_row(row).generation, owner=clock.token(), place=Place())
    assert claim is not None
    heart = Heart(
        job_pk=claim.job_pk, fence=claim.fence, owner=claim.owner, name=claim.name, lease=60
    )
    return Attempt(claim, heart)


def lose(attempt: Attempt) -> None:
    """Let the attempt be given up for lost."""
    beat_at = expire(attempt._claim)
    assert lifecycle.reclaim(attempt.fence, beat_at=beat_at, ahead_of=None, reason="lost")


def charge(text: str = "charged") -> str:
    note("a", text)
    return text


class Killed(BaseException):
    """Ends a run as a kill does: nothing of what comes after it is done."""


def killed() -> None:
    note("a", "begun")
    raise Killed


@pytest.fixture
def doubtful() -> ProcessedJob:
    """A job whose first attempt was lost in the middle of its step "charge"."""
    row = stepped.enqueue(tag="a").job
    first = claimed(row)
    with suppress(Killed):
        first.step("charge", killed)
    lose(first)
    return row


# ---- the result


def test_retry_gets_the_stored_result_back_and_runs_nothing_again() -> None:
    def play(attempt: Attempt) -> Any:
        first = attempt.step("charge", charge)
        second = attempt.step("receipt", lambda: RECEIPT)
        assert type(second[0].amount) is Decimal
        if attempt.number == 1:
            raise ValueError("later")
        return [first, second]

    row = plays(play)
    assert deliver(row) == Status.RETRYING
    assert states() == {"charge": SUCCEEDED, "receipt": SUCCEEDED}
    assert deliver_again(row) == Status.SUCCEEDED
    assert ran() == ["charged"]
    assert stepped.enqueue(tag="a").result() == ["charged", RECEIPT]
    assert set(JobStep.objects.values_list("attempt", flat=True)) == {1}


def test_first_run_returns_what_later_ones_will_get() -> None:
    mine = [1, (2, 3)]
    row = stepped.enqueue(tag="a").job
    first = claimed(row)
    given = first.step("list", lambda: mine)
    assert given == mine
    assert given is not mine
    lose(first)
    assert claimed(row).step("list", charge) == mine


def test_step_that_returns_nothing_is_done_as_well() -> None:
    row = stepped.enqueue(tag="a").job
    first = claimed(row)
    assert first.step("note", note, "a", text="once") is None
    lose(first)
    assert claimed(row).step("note", note, "a", text="twice") is None
    assert ran() == ["once"]


def test_steps_of_another_key_and_of_the_next_generation_are_their_own() -> None:
    for tag in "ab":
        assert claimed(stepped.enqueue(tag=tag).job).step("charge", charge, tag) == tag
    row = stepped.enqueue(tag="c").job
    first = claimed(row)
    first.step("charge", charge, "c")
    assert lifecycle.complete(first._claim, "null", unique_for=None)
    alter(row, status=Status.PENDING, generation=2)
    assert claimed(row).step("charge", charge, "c again") == "c again"
    assert ran() == ["a", "b", "c", "c again"]


def test_operators_retry_of_a_dead_job_goes_on_with_the_same_steps() -> None:
    def play(attempt: Attempt) -> str:
        charged: str = attempt.step("charge", charge)
        if attempt.number == 1:
            raise MemoryError
        return charged

    row = plays(play)
    alter(row, max_attempts=1)
    assert deliver(row) == Status.DEAD
    operations.retry(job_row(row), by="ops")
    assert deliver(row) == Status.SUCCEEDED
    assert ran() == ["charged"]


def test_stored_result_whose_type_is_gone_is_an_error_that_names_step_and_cure() -> None:
    row = stepped.enqueue(tag="a").job
    claimed_once = claimed(row)
    claimed_once.step("receipt", lambda: RECEIPT)
    JobStep.objects.update(result='{"$":"dataclass","t":"gone:Receipt","v":{}}')
    lose(claimed_once)
    with pytest.raises(StepResultError, match=r"step 'receipt': attempt 1 .* Deploy code"):
        claimed(row).step("receipt", lambda: RECEIPT)


# ---- how it may end


def test_step_that_raises_has_ended_and_is_run_again() -> None:
    def play(attempt: Attempt) -> str:
        def fail() -> str:
            note("a", f"try {attempt.number}")
            if attempt.number == 1:
                raise ValueError("no")
            return "done"

        return attempt.step("charge", fail)

    row = plays(play)
    assert deliver(row) == Status.RETRYING
    step = JobStep.objects.get()
    assert (step.state, step.error, step.attempt) == (FAILED, "builtins.ValueError: no", 1)
    assert step.ended_at >= step.started_at
    assert deliver_again(row) == Status.SUCCEEDED
    assert ran() == ["try 1", "try 2"]
    step = JobStep.objects.get()
    assert (step.state, step.error, step.attempt) == (SUCCEEDED, "", 2)


@pytest.mark.parametrize("atomic", [False, True])
def test_step_that_fails_may_be_tried_again_in_the_same_run(atomic: bool) -> None:
    def play(attempt: Attempt) -> str:
        with suppress(ValueError):
            attempt.step("charge", int, "no number", atomic=atomic)
        assert states() == {"charge": FAILED}
        return attempt.step("charge", charge, atomic=atomic)

    assert deliver(plays(play)) == Status.SUCCEEDED
    assert states() == {"charge": SUCCEEDED}


def test_wish_in_a_step_is_granted() -> None:
    def play(attempt: Attempt) -> str:
        def ask() -> str:
            if attempt.number == 1:
                raise Snooze(0, "not yet")
            return "now"

        return attempt.step("ask", ask)

    row = plays(play)
    assert deliver(row) == Status.RETRYING
    assert job_row(row).failures == 0
    assert deliver_again(row) == Status.SUCCEEDED


# ---- in doubt


def test_step_in_doubt_holds_the_job_and_says_which_and_how_to_go_on(
    doubtful: ProcessedJob,
) -> None:
    PLAYS["a"] = lambda attempt: attempt.step("charge", charge)
    assert deliver(doubtful) == Status.HELD
    row = job_row(doubtful)
    assert "step 'charge' is in doubt: attempt 1 began it" in row.error
    assert claim_key(doubtful) in row.error
    assert row.failures == 0
    assert ran() == ["begun"]
    assert states() == {"charge": STARTED}


def claim_key(row: ProcessedJob) -> str:
    key = ""

    def play(attempt: Attempt) -> None:
        nonlocal key
        key = attempt.idempotency_key("charge")
        raise Snooze(0)

    kept, PLAYS["a"] = PLAYS.get("a"), play
    alter(row, status=Status.PENDING)
    assert deliver(row) == Status.RETRYING
    PLAYS["a"] = kept or play
    return key


def test_step_in_doubt_that_may_be_repeated_is_run_again(doubtful: ProcessedJob) -> None:
    assert claimed(doubtful).step("charge", charge, repeat=True) == "charged"
    assert ran() == ["begun", "charged"]
    assert states() == {"charge": SUCCEEDED}


def test_step_in_doubt_that_was_done_is_looked_up_and_not_run(doubtful: ProcessedJob) -> None:
    second = claimed(doubtful)
    asked: list[str] = []

    def check(key: str) -> Done:
        asked.append(key)
        return Done({"id": "ch_1"})

    assert second.step("charge", charge, check=check) == {"id": "ch_1"}
    assert asked == [second.idempotency_key("charge")]
    lose(second)
    assert claimed(doubtful).step("charge", charge, check=check) == {"id": "ch_1"}
    assert len(asked) == 1
    assert ran() == ["begun"]


def test_step_in_doubt_that_was_not_done_is_run(doubtful: ProcessedJob) -> None:
    assert claimed(doubtful).step("charge", charge, check=lambda key: NotDone()) == "charged"
    assert ran() == ["begun", "charged"]


def test_check_is_asked_after_a_failure_too_and_never_before_a_first_run() -> None:
    row = stepped.enqueue(tag="a").job
    asked: list[str] = []

    def check(key: str) -> Done:
        asked.append(key)
        return Done("looked up")

    first = claimed(row)
    with pytest.raises(ValueError, match="no"):
        first.step("charge", lambda: int("no"), check=check)
    assert asked == []
    assert first.step("charge", charge, check=check) == "looked up"
    assert ran() == []


def test_check_that_can_not_know_leaves_the_step_in_doubt(doubtful: ProcessedJob) -> None:
    def down(key: str) -> Done:
        raise OSError("down")

    second = claimed(doubtful)
    with pytest.raises(OSError, match="down"):
        second.step("charge", charge, check=down)
    with pytest.raises(StepError, match=r"its check returned NoneType. Return Done\(result\)"):
        second.step("charge", charge, check=lambda key: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(StepInDoubt):
        second.step("charge", charge)
    assert ran() == ["begun"]


@pytest.mark.parametrize("cut", [TimeoutReached, KeyboardInterrupt, SystemExit])
def test_step_that_is_cut_off_is_in_doubt(cut: type[BaseException]) -> None:
    def play(attempt: Attempt) -> None:
        def cut_off() -> None:
            raise cut("in the middle")

        attempt.step("charge", cut_off)

    row = plays(play)
    with suppress(KeyboardInterrupt):
        deliver(row)
    assert states() == {"charge": STARTED}
    assert deliver_again(row) == Status.HELD


def test_function_that_can_not_know_says_so_and_the_step_is_in_doubt() -> None:
    def send() -> None:
        raise StepInDoubt("the request was sent, and no answer came")

    row = plays(lambda attempt: attempt.step("charge", send))
    assert deliver(row) == Status.HELD
    assert "no answer came" in JobStep.objects.get().error
    error = job_row(row).error
    second = claimed(alter(row, status=Status.PENDING))
    key = second.idempotency_key("charge")
    place = f"(step 'charge', attempt 1, key {key})"
    assert error == f"the request was sent, and no answer came {place}"
    with pytest.raises(StepInDoubt, match="no answer came"):
        second.step("charge", charge)
    assert second.step("charge", charge, check=lambda key: Done("there")) == "there"


# ---- atomic


def test_effects_of_an_atomic_step_and_its_record_are_committed_together() -> None:
    row = stepped.enqueue(tag="a").job
    attempt = claimed(row)
    with Pause("step.uncommitted") as pause:
        running = Side(attempt.step, "book", charge, atomic=True)
        pause.wait()
        if has_row_locks:
            assert (ran(), states()) == ([], {})
        pause.go_on()
        assert running.result() == "charged"
    assert (ran(), states()) == (["charged"], {"book": SUCCEEDED})
    lose(attempt)
    assert claimed(row).step("book", charge, atomic=True) == "charged"
    assert ran() == ["charged"]


def test_atomic_step_that_raises_leaves_nothing_but_its_failure() -> None:
    attempt = claimed(stepped.enqueue(tag="a").job)

    def fail() -> None:
        charge()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        attempt.step("book", fail, atomic=True)
    assert (ran(), states()) == ([], {"book": FAILED})


def test_atomic_step_that_is_cut_off_is_not_in_doubt() -> None:
    row = stepped.enqueue(tag="a").job
    first = claimed(row)
    with suppress(Killed):
        first.step("book", killed, atomic=True)
    lose(first)
    assert states() == {}
    assert claimed(row).step("book", charge, atomic=True) == "charged"
    assert ran() == ["charged"]


def test_atomic_step_in_an_atomic_job_is_committed_with_the_job() -> None:
    row = stepped_atomically.enqueue(tag="a", first="raises").job
    assert deliver(row) == Status.RETRYING
    assert (ran(), states()) == ([], {})
    assert deliver_again(row) == Status.SUCCEEDED
    assert ran() == ["inner", "outer"]
    assert states() == {"inner": SUCCEEDED, "outer": SUCCEEDED}


@job(key="both:{tag}", unique_for=FOREVER, atomic=True, timeout=15, backoff=0.1)
def stepped_atomically(*, tag: str, first: str = "") -> None:
    attempt = current_attempt()

    def outer() -> str:
        attempt.step("inner", charge, "inner", atomic=True)
        return charge("outer")

    attempt.step("outer", outer, atomic=True)
    if attempt.number == 1 and first == "raises":
        raise ValueError("after both")
    if first == "not atomic":
        attempt.step("charge", charge)


# ---- a stale attempt


@pytest.mark.parametrize("atomic", [False, True])
def test_stale_attempt_begins_no_step(atomic: bool) -> None:
    stale = claimed(stepped.enqueue(tag="a").job)
    lose(stale)
    with pytest.raises(LeaseLost, match="given up for lost"):
        stale.step("charge", charge, atomic=atomic)
    assert (ran(), states()) == ([], {})


def test_stale_attempt_records_no_result_and_the_step_stays_in_doubt() -> None:
    row = stepped.enqueue(tag="a").job
    stale = claimed(row)

    def lose_and_charge() -> str:
        lose(stale)
        return charge()

    with pytest.raises(LeaseLost, match="nothing more is recorded"):
        stale.step("charge", lose_and_charge)
    assert states() == {"charge": STARTED}
    with pytest.raises(StepInDoubt):
        claimed(row).step("charge", charge)


def test_stale_attempt_overwrites_nothing_of_a_newer_one() -> None:
    row = stepped.enqueue(tag="a").job
    stale = claimed(row)

    def overtaken() -> str:
        lose(stale)
        claimed(row).step("charge", charge, "newer", repeat=True)
        return charge("stale")

    with pytest.raises(LeaseLost):
        stale.step("charge", overtaken)
    step = JobStep.objects.get()
    assert (step.state, step.result, step.attempt) == (SUCCEEDED, '"newer"', 2)


def test_success_of_a_step_stands_whatever_is_written_after_it() -> None:
    attempt = claimed(stepped.enqueue(tag="a").job)
    attempt.step("charge", charge)
    failure = lifecycle.Entry(name="charge", state=FAILED, error="late")
    assert not lifecycle.enter_step(attempt._claim, failure, known=True)
    assert not lifecycle.end_step(attempt._claim, failure)
    assert states() == {"charge": SUCCEEDED}


def test_failure_of_a_stale_attempt_is_not_recorded_and_comes_through() -> None:
    stale = claimed(stepped.enqueue(tag="a").job)

    def lose_and_fail() -> None:
        lose(stale)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        stale.step("charge", lose_and_fail)
    assert states() == {"charge": STARTED}


def test_attempt_that_has_ended_begins_no_step() -> None:
    attempt = claimed(stepped.enqueue(tag="a").job)
    assert lifecycle.complete(attempt._claim, "null", unique_for=FOREVER)
    with pytest.raises(LeaseLost):
        attempt.step("charge", charge)
    assert (ran(), states()) == ([], {})


@pytest.mark.parametrize("point", ["reclaim.between", "reclaim.uncommitted"])
@pytest.mark.parametrize("atomic", [False, True])
def test_record_that_meets_a_reclaim_waits_for_it_and_is_not_written(
    point: str, atomic: bool
) -> None:
    row = stepped.enqueue(tag="a").job
    stale = claimed(row)
    beat_at = expire(stale._claim)
    with Pause(point) as pause:
        taking = Side(lifecycle.reclaim, stale.fence, beat_at=beat_at, ahead_of=None, reason="lost")
        pause.wait()
        stepping = Side(stale.step, "charge", charge, atomic=atomic)
        if has_row_locks:
            stepping.join(0.3)
            assert stepping.is_alive(), "it waits"
        pause.go_on()
        assert taking.result().status == Status.RETRYING
        with pytest.raises(LeaseLost):
            stepping.result()
    assert (ran(), states()) == ([], {})


@pytest.mark.parametrize("doubtful_before", [False, True], ids=["new", "taken over"])
def test_end_that_meets_a_reclaim_waits_for_it_and_is_not_written(doubtful_before: bool) -> None:
    row = stepped.enqueue(tag="a").job
    if doubtful_before:
        first = claimed(row)
        with suppress(Killed):
            first.step("charge", killed)
        lose(first)
    stale = claimed(row)
    beat_at = expire(stale._claim)
    go = threading.Event()

    def wait() -> None:
        assert go.wait(PATIENCE)

    with Pause("reclaim.uncommitted") as pause:
        stepping = Side(stale.step, "charge", wait, repeat=True)
        until(lambda: JobStep.objects.filter(attempt=stale.number).exists(), PATIENCE)
        taking = Side(lifecycle.reclaim, stale.fence, beat_at=beat_at, ahead_of=None, reason="lost")
        pause.wait()
        go.set()
        until_blocked(stepping)
        pause.go_on()
        assert taking.result() is not None
        with pytest.raises(LeaseLost):
            stepping.result()
    assert states() == {"charge": STARTED}


@needs_server
def test_taking_over_that_meets_a_reclaim_waits_for_it_and_is_not_written(
    doubtful: ProcessedJob,
) -> None:
    stale = claimed(doubtful)
    beat_at = expire(stale._claim)
    with Pause("reclaim.uncommitted") as pause:
        taking = Side(lifecycle.reclaim, stale.fence, beat_at=beat_at, ahead_of=None, reason="lost")
        pause.wait()
        stepping = Side(stale.step, "charge", charge, repeat=True)
        until_blocked(stepping)
        pause.go_on()
        assert taking.result() is not None
        with pytest.raises(LeaseLost):
            stepping.result()
    assert ran() == ["begun"]
    assert JobStep.objects.get().attempt == 1


def test_reclaim_that_meets_a_record_takes_nothing_before_its_commit() -> None:
    row = stepped.enqueue(tag="a").job
    attempt = claimed(row)
    beat_at = expire(attempt._claim)
    with Pause("step.uncommitted") as pause:
        stepping = Side(attempt.step, "book", charge, atomic=True)
        pause.wait()
        taking = Side(
            lifecycle.reclaim, attempt.fence, beat_at=beat_at, ahead_of=None, reason="lost"
        )
        if has_row_locks:
            assert taking.result() is None, "a row in use is passed over"
        pause.go_on()
        assert stepping.result() == "charged"
        taking.join(PATIENCE)
    assert (ran(), states()) == (["charged"], {"book": SUCCEEDED})


def test_steps_and_reclaims_at_once_leave_one_writer_each_time() -> None:
    row = stepped.enqueue(tag="a").job
    for number in range(1, 7):
        attempt = claimed(row)
        beat_at = expire(attempt._claim)
        name = f"charge {number}"

        def step(attempt: Attempt = attempt, name: str = name) -> bool:
            try:
                attempt.step(name, charge, name, atomic=True)
            except LeaseLost:
                return False
            return True

        def reclaim(attempt: Attempt = attempt, beat_at: Any = beat_at) -> bool:
            taken = lifecycle.reclaim(attempt.fence, beat_at=beat_at, ahead_of=None, reason="lost")
            return taken is not None

        stepped_in_time, _ = together(step, reclaim)
        assert (name in ran()) == stepped_in_time == (name in states())
        if job_row(row).status == Status.RUNNING:
            lose(attempt)
        alter(row, lost_count=0)


# ---- bad input


@pytest.mark.parametrize("name", ["", " ", " charge", "charge\n", "a\x00b", 7, None, "\ud800"])
def test_name_that_is_none_is_refused(name: Any) -> None:
    with pytest.raises(StepError, match=r"names no step. Give a text that people can read"):
        claimed(stepped.enqueue(tag="a").job).step(name, charge)
    assert ran() == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"name": "n" * 101}, r"its name has 101 characters, 100 fit. Pass data as arguments"),
        ({"function": None}, r"None can not be called. Pass the function and its arguments"),
        ({"function": "charge"}, r"'charge' can not be called"),
        ({"atomic": True, "repeat": True}, r"an atomic step is never in doubt"),
        ({"atomic": True, "check": Done}, r"an atomic step is never in doubt"),
        ({"check": Done, "repeat": True}, r"check= says whether to repeat it"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_call_that_makes_no_sense_is_refused_and_says_the_cure(
    call: dict[str, Any], words: str
) -> None:
    attempt = claimed(stepped.enqueue(tag="a").job)
    name, function = call.pop("name", "charge"), call.pop("function", charge)
    with pytest.raises(StepError, match=words):
        attempt.step(name, function, **call)
    assert (ran(), states()) == ([], {})


async def fetch() -> None:
    """Nothing that a step could wait for."""


def pages() -> Iterator[int]:
    yield 1


def test_async_function_is_refused_and_says_the_cure() -> None:
    with pytest.raises(StepError, match=r"fetch is async.* async_to_sync"):
        claimed(stepped.enqueue(tag="a").job).step("fetch", fetch)


def test_generator_is_refused_before_it_counts_as_begun() -> None:
    with pytest.raises(StepError, match=r"pages is a generator: a call of it runs nothing"):
        claimed(stepped.enqueue(tag="a").job).step("read", pages)
    assert states() == {}


@pytest.mark.parametrize(
    ("check", "words"),
    [("look_up", r"its check 'look_up' can not be called"), (fetch, r"its check fetch is async")],
)
def test_check_that_can_not_answer_is_refused_at_once(check: Any, words: str) -> None:
    with pytest.raises(StepError, match=words):
        claimed(stepped.enqueue(tag="a").job).step("charge", charge, check=check)
    assert (ran(), states()) == ([], {})


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ("charge", r"'charge' is used twice in one run: the second would get the first's"),
        ("Charge", r"'charge' and 'Charge' differ in case only"),
    ],
)
def test_name_used_twice_in_one_run_is_refused_and_names_the_cure(second: str, words: str) -> None:
    attempt = claimed(stepped.enqueue(tag="a").job)
    attempt.step("charge", charge)
    with pytest.raises(StepError, match=rf"{words}.* Give each its own name, such as f'{second}"):
        attempt.step(second, charge)
    assert ran() == ["charged"]


def test_name_used_twice_is_refused_on_a_retry_too_where_both_are_stored_results() -> None:
    row = stepped.enqueue(tag="a").job
    first = claimed(row)
    first.step("charge", charge)
    lose(first)
    second = claimed(row)
    second.step("charge", charge)
    with pytest.raises(StepError, match="used twice"):
        second.step("charge", charge)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (object(), r"step 'charge': its result can not be kept: .*object can not be stored"),
        ({1: 2}, r"can not be kept: .* dict key 1 is no string"),
        (float("nan"), r"can not be kept: .*no NaN"),
        ("x" * 2_000, r"has 2,002 bytes as JSON, and DEDUPJOBS\[\"MAX_STEP_RESULT\"\] is 1,000"),
    ],
    ids=["object", "keys", "nan", "large"],
)
@pytest.mark.parametrize("atomic", [False, True])
def test_result_that_can_not_be_kept_is_an_error_and_no_effect_is_repeated(
    result: Any, words: str, atomic: bool
) -> None:
    def done() -> Any:
        charge()
        return result

    row = stepped.enqueue(tag="a").job
    first = claimed(row)
    tight = live.changed(DEDUPJOBS={"MAX_STEP_RESULT": 1_000})
    with tight, pytest.raises(StepResultError, match=words):
        first.step("charge", done, atomic=atomic)
    if atomic:
        assert (ran(), states()) == ([], {"charge": FAILED})
        return
    assert states() == {"charge": STARTED}
    lose(first)
    second = claimed(row)
    with pytest.raises(StepInDoubt, match="StepResultError"):
        second.step("charge", done)
    assert second.step("charge", done, check=lambda key: Done(1)) == 1
    assert ran() == ["charged"]


def test_one_step_more_than_the_most_is_refused_and_known_ones_are_not() -> None:
    row = stepped.enqueue(tag="a").job
    with live.changed(DEDUPJOBS={"MAX_STEPS": 2}):
        first = claimed(row)
        first.step("one", charge)
        first.step("two", charge)
        with pytest.raises(StepError, match=r"step 'three': this job has 2 steps, .* is 2. Do"):
            first.step("three", charge)
        lose(first)
        second = claimed(row)
        assert second.step("two", charge) == "charged"
        with pytest.raises(StepError, match="this job has 2 steps"):
            second.step("three", charge)
    assert len(ran()) == 2


# ---- where it stands


def test_step_in_the_functions_own_transaction_must_be_atomic() -> None:
    def play(attempt: Attempt) -> None:
        with transaction.atomic():
            attempt.step("book", charge, atomic=True)
            with pytest.raises(StepError, match=r"'charge' stands inside transaction.atomic\(\)"):
                attempt.step("charge", charge)
            with pytest.raises(StepError, match="Give it atomic=True"):
                attempt.step("nested", lambda: attempt.step("charge", charge), atomic=True)

    assert deliver(plays(play)) == Status.SUCCEEDED
    assert ran() == ["charged"]


def test_step_that_is_not_atomic_is_refused_in_an_atomic_job() -> None:
    row = stepped_atomically.enqueue(tag="a", first="not atomic").job
    assert deliver(row) == Status.RETRYING
    assert "stands inside transaction.atomic(), as all of an atomic job" in job_row(row).error
    assert ran() == []


def test_step_in_run_now_is_a_step_but_not_inside_a_callers_transaction() -> None:
    PLAYS["a"] = PLAYS["b"] = lambda attempt: attempt.step("charge", charge)
    assert stepped.run_now(tag="a").job.status == Status.SUCCEEDED
    assert states() == {"charge": SUCCEEDED}
    with transaction.atomic():
        row = stepped.run_now(tag="b").job
    assert row.status == Status.RETRYING
    assert "run_now() inside a transaction" in row.error
    assert ran() == ["charged"]


@pytest.mark.django_db(transaction=False)
def test_steps_work_inside_the_transaction_of_a_test() -> None:
    def play(attempt: Attempt) -> str:
        charged: str = attempt.step("charge", charge)
        attempt.step("book", charge, "booked", atomic=True)
        with transaction.atomic(), pytest.raises(StepError):
            attempt.step("in the job's own", charge)
        if attempt.number == 1:
            raise ValueError("later")
        return charged

    PLAYS["a"] = play
    with captured_jobs():
        stepped.enqueue(tag="a")
        assert run_pending(retries=True) == 2
    assert ran() == ["charged", "booked"]
    with inline():
        stepped.enqueue(tag="b")
    PLAYS["b"] = play
    assert stepped.run_now(tag="c").job.status != Status.SUCCEEDED


@job(key="each:{tag}", unique_for=FOREVER)
def in_turn(*, tag: str) -> str:
    return current_attempt().step("charge", charge, tag)


@job(key="group:{tag}", unique_for=FOREVER, batch="group")
def in_group(*, tag: str) -> str:
    return current_attempt().step("charge", charge, tag)


@job(key="together:{tag}", unique_for=FOREVER, atomic=True, timeout=15)
def in_one_transaction(*, tag: str) -> str:
    return current_attempt().step("book", charge, tag, atomic=True)


@pytest.mark.parametrize("specimen", [in_turn, in_group, in_one_transaction], ids=lambda j: j.name)
@pytest.mark.parametrize("threads", [1, 3])
def test_steps_work_in_every_kind_of_batch(
    specimen: Any, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "PATIENT", PATIENCE)  # on a busy machine some would go back
    outcomes = specimen.enqueue_many([{"tag": str(n)} for n in range(5)])
    with live.changed(DEDUPJOBS={"THREADS": threads}):
        batches.run([[o.job.pk, o.job.generation] for o in outcomes])
    assert [job_row(o.job).status for o in outcomes] == [Status.SUCCEEDED] * 5
    assert sorted(ran()) == list("01234")
    assert list(JobStep.objects.values_list("state", flat=True)) == [SUCCEEDED] * 5


def test_steps_may_be_run_from_threads_of_the_job() -> None:
    attempt = claimed(stepped.enqueue(tag="a").job)

    def step(number: int) -> Any:
        try:
            return attempt.step(f"charge {number}", charge, str(number))
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(step, range(8))) == list("01234567")
    assert list(states().values()) == [SUCCEEDED] * 8


@job(key="async:{tag}", unique_for=FOREVER)
async def stepped_asynchronously(*, tag: str) -> Any:
    attempt = current_attempt()

    def step() -> Any:
        try:
            return attempt.step("charge", charge, tag)
        finally:
            connection.close()

    return await sync_to_async(step)()


def test_step_of_an_async_job_runs_in_a_thread_of_its_own() -> None:
    row = stepped_asynchronously.enqueue(tag="a").job
    assert deliver(row) == Status.SUCCEEDED
    assert (ran(), states()) == (["a"], {"charge": SUCCEEDED})


def test_one_name_in_two_threads_is_used_once() -> None:
    attempt = claimed(stepped.enqueue(tag="a").job)
    with Pause("step.after_started") as pause:
        first = Side(attempt.step, "charge", charge)
        pause.wait()
        with pytest.raises(StepError, match="used twice"):
            attempt.step("charge", charge)
        pause.go_on()
        assert first.result() == "charged"
    assert ran() == ["charged"]


# ---- what it costs, and what is left


def sql(action: Callable[[], Any]) -> list[str]:
    with CaptureQueriesContext(connection) as captured:
        action()
    return [query["sql"].split()[0] for query in captured.captured_queries]


def test_step_costs_two_statements_and_an_atomic_one_a_single_one_with_its_transaction() -> None:
    attempt = claimed(stepped.enqueue(tag="a").job)
    assert sql(lambda: attempt.step("one", int)) == ["SELECT", "INSERT", "UPDATE"]
    assert sql(lambda: attempt.step("two", int)) == ["INSERT", "UPDATE"]
    extra = {"mysql": {"SAVEPOINT", "RELEASE"}}.get(connection.vendor, set())
    found = sql(lambda: attempt.step("three", int, atomic=True))
    assert [verb for verb in found if verb not in extra] == ["BEGIN", "INSERT", "COMMIT"]
    lose(attempt)
    second = claimed(attempt.job)
    assert sql(lambda: [second.step(name, int) for name in ("one", "two")]) == ["SELECT"]


def test_job_without_steps_asks_their_table_nothing() -> None:
    row = plays(lambda attempt: None)
    with CaptureQueriesContext(connection) as captured:
        assert deliver(row) == Status.SUCCEEDED
    assert not [q for q in captured.captured_queries if "jobstep" in q["sql"]]


@pytest.mark.parametrize("held", [True, False], ids=["tombstone", "gone"])
def test_steps_go_with_their_job(held: bool) -> None:
    row = plays(lambda attempt: attempt.step("charge", charge))
    other = plays(lambda attempt: attempt.step("charge", charge), "b")
    assert (deliver(row), deliver(other)) == (Status.SUCCEEDED, Status.SUCCEEDED)
    if not held:
        alter(row, unique_until=DbNow(-60))
    alter(row, finished_at=DbNow(-3_600))
    pruned = lifecycle.prune(row.name, older_than=60, limit=10)
    assert (pruned.tombstones, pruned.deleted) == ((1, 0) if held else (0, 1))
    assert list(JobStep.objects.values_list("job_id", flat=True)) == [other.pk]


# ---- replies that are lost


@needs_server
def test_record_whose_commit_has_no_reply_is_written_once_and_the_job_goes_on() -> None:
    row = plays(lambda attempt: attempt.step("charge", charge))
    with live.through_proxy() as proxy:

        def swallow(attempt: Attempt) -> Any:
            def do() -> str:
                text = charge()
                proxy.swallow_reply_to(b"UPDATE dedupjobs_jobstep")
                return text

            return attempt.step("charge", do)

        PLAYS["a"] = swallow
        assert deliver(row) == Status.SUCCEEDED
        assert proxy.swallowed.is_set()
    assert (ran(), states()) == (["charged"], {"charge": SUCCEEDED})


@needs_server
@pytest.mark.parametrize("trouble", ["swallow_reply_to", "cut_before"])
def test_atomic_step_whose_commit_has_no_reply_is_done_once(trouble: str) -> None:
    row = stepped.enqueue(tag="a").job
    with live.through_proxy() as proxy:

        def play(attempt: Attempt) -> Any:
            def do() -> str:
                if attempt.number == 1:
                    getattr(proxy, trouble)(b"COMMIT")
                return charge()

            return attempt.step("book", do, atomic=True)

        PLAYS["a"] = play
        first = deliver(row)
    if trouble == "swallow_reply_to":
        assert first == Status.SUCCEEDED
    else:
        assert first == Status.RETRYING
        assert deliver_again(row) == Status.SUCCEEDED
    assert (ran(), states()) == (["charged"], {"book": SUCCEEDED})


# ---- what is said of it


def test_each_call_is_told_in_the_log_with_the_step_and_never_its_result(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "dedupjobs")
    row = stepped.enqueue(tag="a").job
    first = claimed(row)
    first.step("charge", charge, "secret")
    lose(first)
    claimed(row).step("charge", charge)
    lines = [r for r in caplog.records if getattr(r, "dedupjobs", {}).get("step") == "charge"]
    assert [r.dedupjobs["event"] for r in lines] == ["done", "stored"]  # type: ignore[attr-defined]
    assert "secret" not in caplog.text


def test_step_in_doubt_is_a_warning(
    caplog: pytest.LogCaptureFixture, doubtful: ProcessedJob
) -> None:
    with pytest.raises(StepInDoubt):
        claimed(doubtful).step("charge", charge)
    (line,) = [r for r in caplog.records if getattr(r, "dedupjobs", {}).get("step")]
    assert line.levelno == logging.WARNING


# ---- the key


def test_idempotency_key_is_short_opaque_and_differs_by_effect() -> None:
    row = stepped.enqueue(tag="a").job
    attempt = claimed(row)
    keys = [attempt.idempotency_key(effect) for effect in ("", "card", "Card", "card ", "ü" * 500)]
    assert len(set(keys)) == len(keys)
    for key in keys:
        assert len(key) == 40
        assert set(key) <= set(string.hexdigits.lower())
        assert str(row.key_hash)[:8] not in key
    lose(attempt)
    assert claimed(row).idempotency_key("card") == keys[1]
    other = claimed(stepped.enqueue(tag="b").job)
    assert other.idempotency_key("card") not in keys


def test_step_sees_the_attempt_that_runs_it() -> None:
    attempt = claimed(stepped.enqueue(tag="a").job)
    with entered(attempt):
        assert attempt.step("look", lambda: current_attempt().number) == 1


# ---- what people see


def page(client: Client, row: ProcessedJob) -> str:
    response = client.get(f"/admin/dedupjobs/processedjob/{row.pk}/change/")
    assert response.status_code == 200
    return response.content.decode()


@pytest.fixture
def seen(doubtful: ProcessedJob) -> ProcessedJob:
    """A job with a step in doubt, one that failed, and one that succeeded with a secret."""
    attempt = claimed(doubtful)
    attempt.step("receipt", lambda: {"number": "no. 4711", "token": "s3cr3t"})
    with suppress(ValueError):
        attempt.step("mail <b>", int, "no number")
    lose(attempt)
    return doubtful


def test_page_of_a_job_shows_its_steps_and_results_to_those_who_may_see_arguments(
    seen: ProcessedJob, client: Client
) -> None:
    user = User.objects.create_user("ops", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_processedjob"))
    client.force_login(user)
    text = page(client, seen)
    assert "step charge of attempt 1: in doubt" in text
    assert "step receipt of attempt 2: succeeded after" in text
    assert "mail &lt;b&gt;" in text
    assert "invalid literal" in text
    assert "no. 4711" not in text
    user.user_permissions.add(Permission.objects.get(codename="arguments_processedjob"))
    client.force_login(User.objects.get(pk=user.pk))
    text = page(client, seen)
    assert "no. 4711" in text
    assert "s3cr3t" not in text


def test_step_of_an_attempt_at_work_is_started_and_not_in_doubt(
    admin_client: Client,
) -> None:
    row = stepped.enqueue(tag="a").job
    attempt = claimed(row)
    with suppress(Killed):
        attempt.step("charge", killed)
    assert "step charge of attempt 1: has run for" in page(admin_client, row)
    lose(attempt)
    assert "step charge of attempt 1: in doubt" in page(admin_client, row)


def test_page_of_a_job_without_steps_has_no_lane_for_them(admin_client: Client) -> None:
    row = stepped.enqueue(tag="a").job
    text = page(admin_client, row)
    assert ">steps<" not in text
    assert "dj-steps" not in text


def test_explanation_tells_the_steps_and_no_result(
    seen: ProcessedJob, capsys: pytest.CaptureFixture[str]
) -> None:
    call_command("dedupjobs_explain", str(seen.pk))
    text = capsys.readouterr().out
    assert "step charge of attempt 1: in doubt" in text
    assert "step receipt of attempt 2: succeeded after" in text
    assert "no. 4711" not in text


# ---- what a person says of one


def decide(row: ProcessedJob, *words: str) -> str:
    out = io.StringIO()
    call_command("dedupjobs_step", str(row.pk), "charge", *words, "--by", "siti", stdout=out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("words", "result", "effects"),
    [
        (["--done", '{"id": "ch_1"}'], {"id": "ch_1"}, ["begun"]),
        (["--done", "null"], None, ["begun"]),
        (["--not-done", "--reason", "asked the bank"], "charged", ["begun", "charged"]),
    ],
)
def test_person_who_has_looked_a_step_up_says_so_and_the_job_goes_on(
    doubtful: ProcessedJob, words: list[str], result: Any, effects: list[str]
) -> None:
    PLAYS["a"] = lambda attempt: attempt.step("charge", charge)
    assert deliver(doubtful) == Status.HELD
    said = decide(doubtful, *words)
    assert f"dedupjobs_operate unhold {doubtful.pk}" in said
    operations.unhold(job_row(doubtful), by="siti")
    assert deliver(doubtful) == Status.SUCCEEDED
    assert stepped.enqueue(tag="a").result() == result
    assert ran() == effects
    told = Operation.objects.get(action="step")
    assert (told.by, told.before, told.after) == ("siti", Status.HELD, Status.HELD)
    assert told.reason.startswith("charge: ")


def test_nobody_decides_a_step_while_an_attempt_is_at_work(doubtful: ProcessedJob) -> None:
    attempt = claimed(doubtful)
    with pytest.raises(CommandError, match="no step 'charge' in doubt that could be decided now"):
        decide(doubtful, "--done", "null")
    lose(attempt)
    decide(doubtful, "--done", "null")
    with pytest.raises(CommandError, match="no step 'charge' in doubt"):
        decide(doubtful, "--not-done")
    assert Operation.objects.count() == 1


@pytest.mark.parametrize("text", ["", "ch_1", "{", "NaN"])
def test_result_that_is_no_json_is_refused(doubtful: ProcessedJob, text: str) -> None:
    with pytest.raises(CommandError, match="give JSON, such as null") as refused:
        decide(doubtful, "--done", text)
    assert refused.value.returncode == 2
    assert states() == {"charge": STARTED}
