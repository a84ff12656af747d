"""Why a job is where it is: a sentence for every situation, and another one for each."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from dedupjobs.models import Status
from dedupjobs.story import progress
from dedupjobs.story.spoken import span
from dedupjobs.story.why import Situation, Try, explain


@pytest.fixture(autouse=True)
def _in_utc() -> Iterator[None]:
    with timezone.override("UTC"):
        yield


NOW = datetime(2026, 5, 4, 14, 1, 30, tzinfo=UTC)


def s(seconds: float) -> datetime:
    """Return the moment that many seconds from now."""
    return NOW + timedelta(seconds=seconds)


def tried(outcome: str | None = None, **facts: Any) -> Try:
    return Try(
        **{
            "number": 2,
            "outcome": outcome,
            "where": "worker-1:4711",
            "claimed_at": s(-60),
            "beat_at": s(-5),
            "lease_until": s(55),
            "ended_at": None if outcome is None else s(-9),
            **facts,
        }
    )


SILENT = tried(active_at=s(-50), progress="5")
STUCK = tried(beat_at=s(-90), lease_until=s(-30), progress="6")

TABLE: list[tuple[str, dict[str, Any], str, str, str]] = [
    # name, facts, what it says now, what it says next, level
    ("pending handed over", {"status": "PENDING", "dispatched_at": s(-4)},
     "handed over to queue default 4 s ago, waiting for a worker",
     "it is sent again after 30 s", "wait"),
    ("pending just due", {"status": "PENDING", "run_after": s(-1)},
     "due for 1 s and not handed over to queue default yet", "in its next round", "wait"),
    ("pending long due", {"status": "PENDING", "run_after": s(-100)},
     "due for 100 s and not handed over", "no coordinator runs", "warn"),
    ("pending later", {"status": "PENDING", "run_after": s(3_600)},
     "waiting until 15:01:30, as it was asked to", "hands it over then", "wait"),
    ("pending tomorrow", {"status": "PENDING", "run_after": s(86_400)},
     "waiting until 2026-05-05 14:01:30", "hands it over then", "wait"),
    ("pending debounced",
     {"status": "PENDING", "run_after": s(10), "debounced_until": s(60)},
     "waiting for calls to stop: due at 14:01:40, at the latest at 14:02:30",
     "hands it over then", "wait"),
    ("pending interrupted",
     {"status": "PENDING", "dispatched_at": s(-4), "newest": tried("INTERRUPTED")},
     "interrupted in attempt 2; handed over to queue default", "A worker", "wait"),
    ("pending returned",
     {"status": "PENDING", "dispatched_at": s(-4), "newest": tried("RETURNED")},
     "given back before attempt 2 began; handed over", "A worker", "wait"),
    ("retrying with jitter",
     {"status": "RETRYING", "run_after": s(31), "failures": 3, "newest": tried("TIMED_OUT"),
      "error": "TimeoutError: too slow", "longest_delay": 64, "jitter": True},
     "waiting for retry 3 of 4 at 14:02:01 (delay 40 s, drawn from up to 64 s); last error "
     "TimeoutError: too slow", "hands it over then", "wait"),
    ("retrying without jitter",
     {"status": "RETRYING", "run_after": s(31), "failures": 1, "newest": tried("FAILED"),
      "error": "ValueError: no"},
     "waiting for retry 1 of 4 at 14:02:01 (delay 40 s); last error ValueError: no",
     "hands it over then", "wait"),
    ("retrying snoozed",
     {"status": "RETRYING", "run_after": s(31), "newest": tried("SNOOZED")},
     "snoozed by itself in attempt 2 until 14:02:01", "hands it over then", "wait"),
    ("retrying after a loss",
     {"status": "RETRYING", "run_after": s(-1), "lost_count": 1, "newest": tried("LOST")},
     "the worker was lost during attempt 2 (1 of 3); due again", "next round", "wait"),
    ("running", {"status": "RUNNING", "newest": tried()},
     "running for 60 s: attempt 2 on worker-1:4711, last beat 5 s ago, leased for another 55 s",
     "retry 1 of 4 follows", "good"),
    ("running with progress", {"status": "RUNNING", "newest": tried(progress="5 of 14 · going")},
     "leased for another 55 s; progress: 5 of 14 · going", "retry 1 of 4 follows", "good"),
    ("running the last time", {"status": "RUNNING", "newest": tried(), "failures": 4},
     "running for 60 s", "it is dead: the last of 5", "good"),
    ("running to be cancelled",
     {"status": "RUNNING", "newest": tried(), "cancel_requested": True},
     "running for 60 s", "asked to cancel it", "good"),
    ("running to be held", {"status": "RUNNING", "newest": tried(), "hold_requested": True},
     "running for 60 s", "asked to hold it", "good"),
    ("running silent", {"status": "RUNNING", "newest": SILENT, "stall_after": 30},
     "running but silent: attempt 2 on worker-1:4711 beats, but has shown no activity for 50 s "
     "(stall_after is 30 s); progress: 5", "If this attempt fails", "warn"),
    ("running not silent yet", {"status": "RUNNING", "newest": SILENT, "stall_after": 51},
     "running for 60 s", "If this attempt fails", "good"),
    ("running without attempt", {"status": "RUNNING"},
     "running by its row, but without an open attempt", "No part of this app", "bad"),
    ("stuck", {"status": "RUNNING", "newest": STUCK},
     "stuck: the worker of attempt 2 on worker-1:4711 has not beaten for 90 s, and its lease "
     "expired 30 s ago; progress: 6", "seen no beat for 20 s; then it is due again", "bad"),
    ("stuck to be held", {"status": "RUNNING", "newest": STUCK, "on_lost": "hold"},
     "stuck:", "then it is held for a person", "bad"),
    ("stuck too often", {"status": "RUNNING", "newest": STUCK, "lost_count": 2},
     "stuck:", "then it is dead: lost too often", "bad"),
    ("held after a loss",
     {"status": "HELD", "newest": tried("LOST"), "on_lost": "hold", "error": "lost: no heartbeat"},
     'held: the worker was lost during attempt 2, and the job says "hold"',
     "until somebody unholds", "warn"),
    ("held by somebody", {"status": "HELD", "error": "held by ada: fraud check"},
     "held for a person: held by ada: fraud check", "until somebody unholds", "warn"),
    ("dead by failures",
     {"status": "DEAD", "failures": 5, "newest": tried("FAILED"), "error": "ValueError: no"},
     "dead: failed 5 times of 5; last error ValueError: no", "The next call", "bad"),
    ("dead at once",
     {"status": "DEAD", "failures": 1, "newest": tried("FAILED"), "error": "KeyError: a"},
     "dead: its error is not to be retried; last error KeyError: a", "The next call", "bad"),
    ("dead by losses", {"status": "DEAD", "lost_count": 3, "newest": tried("LOST")},
     "dead: lost with its worker 3 times (max_lost is 3)", "The next call", "bad"),
    ("dead and blocking",
     {"status": "DEAD", "failures": 5, "error": "x", "on_dead": "block"},
     "dead: failed 5 times", "It keeps its key", "bad"),
    ("dead tombstone", {"status": "DEAD", "tombstone": True},
     "dead; its arguments and attempts were pruned", "The next call", "bad"),
    ("cancelled",
     {"status": "CANCELLED", "error": "cancelled by ada", "finished_at": s(-30)},
     "cancelled (14:01:00): cancelled by ada", "Its key is free", "calm"),
    ("succeeded for ever",
     {"status": "SUCCEEDED", "newest": tried("SUCCEEDED"), "finished_at": s(-9)},
     "succeeded in attempt 2 at 14:01:21", "for ever", "good"),
    ("succeeded for a while",
     {"status": "SUCCEEDED", "newest": tried("SUCCEEDED"), "finished_at": s(-9),
      "unique_until": s(600)},
     "succeeded in attempt 2", "until 14:11:30", "good"),
    ("succeeded and free",
     {"status": "SUCCEEDED", "newest": tried("SUCCEEDED"), "finished_at": s(-9),
      "unique_until": s(-1)},
     "succeeded in attempt 2", "Its key is free", "good"),
    ("succeeded tombstone",
     {"status": "SUCCEEDED", "finished_at": s(-9), "tombstone": True},
     "succeeded at 14:01:21; its arguments, result and attempts were pruned", "for ever", "good"),
]  # fmt: skip


def situation(facts: dict[str, Any]) -> Situation:
    return Situation(**{"now": NOW, "run_after": s(-5), **facts})


@pytest.mark.parametrize(
    ("facts", "now", "following", "level"),
    [row[1:] for row in TABLE],
    ids=[row[0].replace(" ", "-") for row in TABLE],
)
def test_sentence_says_why_and_what_follows(
    facts: dict[str, Any], now: str, following: str, level: str
) -> None:
    why = explain(situation(facts))
    assert now in why.now
    assert following in why.next
    assert why.level == level
    assert "%(" not in why.now + why.next


def test_every_status_has_sentences() -> None:
    assert {row[1]["status"] for row in TABLE} == set(Status.values)


def test_waiting_rerun_and_unknown_name_are_told_in_every_state() -> None:
    for _, facts, *_rest in TABLE:
        why = explain(situation({**facts, "rerun_waits": True, "known": False}))
        assert "Another run with newer arguments waits" in why.next
        assert "No job of this name is known here" in why.next


def test_known_name_that_is_near_an_unknown_one_is_told() -> None:
    facts = {"status": "HELD", "known": False, "name": "shop.jobs.charge", "near": "shop.charge"}
    why = explain(situation(facts))
    assert "Known is shop.charge: if that is it" in why.next
    assert 'aliases=("shop.jobs.charge",)' in why.next


def test_long_error_is_cut_in_the_sentence() -> None:
    why = explain(situation({"status": "HELD", "error": "x" * 10_000}))
    assert len(why.now) < 400
    assert why.now.endswith("…")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (0.44, "0.4 s"), (9, "9 s"), (40, "40 s"), (119, "119 s"), (121, "2 min"),
     (7_199, "120 min"), (7_201, "2 h"), (200_000, "2 d"), (-40, "40 s")],
)  # fmt: skip
def test_duration_is_spoken(seconds: float, words: str) -> None:
    assert span(seconds) == words


def test_moments_are_the_readers_own() -> None:
    with timezone.override("Asia/Jakarta"):
        why = explain(situation({"status": "PENDING", "run_after": s(3_600)}))
    assert "22:01:30" in why.now


@pytest.mark.parametrize(
    ("stored", "words", "percent"),
    [("[5, 14, \"going\"]", "5 of 14 · going", 5 / 14 * 100), ("[0.25, 1, \"\"]", "0.25 of 1", 25),
     ("[3, null, \"rows\"]", "3 · rows", None), ("[9, 4, \"\"]", "9 of 4", 100),
     ("[0, 0, \"\"]", "0 of 0", None), ("[1e400, 2, \"\"]", "inf of 2", None)],
)  # fmt: skip
def test_progress_is_read_as_it_was_said(stored: str, words: str, percent: float | None) -> None:
    said = progress.read(stored)
    assert said is not None
    assert (said.words, said.percent) == (words, percent)
