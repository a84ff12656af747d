"""How long a failed job waits."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedupjobs import clock
from dedupjobs.backoff import Constant, Exponential
from dedupjobs.exceptions import Retry, Snooze


def most(low: float, high: float) -> float:
    """Draw the largest wait."""
    return high


def least(low: float, high: float) -> float:
    """Draw the smallest wait."""
    return low


def test_default_waits_double_from_two_seconds_up_to_ten_minutes() -> None:
    waits = [Exponential()(failures, most) for failures in range(1, 12)]
    assert waits == [2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]


def test_full_jitter_draws_from_nothing_to_the_whole_wait() -> None:
    drawn: list[tuple[float, float]] = []

    def note(low: float, high: float) -> float:
        drawn.append((low, high))
        return high

    Exponential()(3, note)
    assert drawn == [(0.0, 8.0)]
    assert Exponential()(3, least) == 0.0


def test_without_jitter_nothing_is_drawn() -> None:
    assert Exponential(jitter=False)(3, least) == 8.0


@given(st.integers(-3, 10**9), st.floats(0, 1e6), st.floats(1, 1e6), st.floats(0, 1e6))
@settings(deadline=None)
def test_wait_is_never_negative_nor_above_the_cap(
    failures: int, base: float, factor: float, more: float
) -> None:
    wait = Exponential(base=base, factor=factor, cap=base + more)(failures, clock.uniform)
    assert 0 <= wait <= base + more


@pytest.mark.parametrize("failures", [65, 1_000, 10**9])
@pytest.mark.parametrize("factor", [1.0, 2.0, 1e300])
def test_wait_after_any_number_of_failures_is_finite(failures: int, factor: float) -> None:
    assert Exponential(base=2, factor=factor, cap=600)(failures, most) <= 600


@pytest.mark.parametrize("wrong", [{"base": -1}, {"factor": 0.5}, {"base": 10, "cap": 5}], ids=str)
def test_backoff_that_can_not_be_meant_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="wants base >= 0, factor >= 1, cap >= base"):
        Exponential(**wrong)


def test_constant_wait_is_what_it_says() -> None:
    assert [Constant(1.5)(failures, most) for failures in (1, 99)] == [1.5, 1.5]


@pytest.mark.parametrize(
    ("given_", "seconds"),
    [(0, 0.0), (1.5, 1.5), (timedelta(minutes=1), 60.0), (366 * 86400, 31622400)],
)
def test_wish_takes_seconds_or_a_timedelta(given_: float | timedelta, seconds: float) -> None:
    assert Retry(after=given_).after == Snooze(given_).after == seconds


def test_retry_without_a_time_leaves_it_to_the_backoff() -> None:
    assert Retry("later").after is None
    assert Retry("later").reason == "later"


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), 367 * 86400, timedelta(-1)])
def test_wish_for_a_time_that_can_not_be_is_refused(wrong: float | timedelta) -> None:
    for wish in (lambda: Retry(after=wrong), lambda: Snooze(wrong)):
        with pytest.raises(ValueError, match="give 0 to 366 days"):
            wish()
