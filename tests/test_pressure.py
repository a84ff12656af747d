"""The adaptive backoff: a score of what was measured, and what stretches by it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dedupjobs import pressure
from dedupjobs.pressure import CALM, Level, Limits, Load
from tests.outage import CALM_DAY, LIGHT, OUTAGE, SLOWLY, Result, Scene, play

LIMITS = Limits()
FULL = Level(score=1.0)
amounts = st.floats(0, 1e6)
loads = st.builds(Load, delay=amounts, growth=amounts, memory=st.floats(0, 2))
levels = st.builds(Level, score=st.floats(0, 1), penalised=st.booleans())


@given(loads)
def test_score_lies_between_0_and_1(load: Load) -> None:
    assert 0 <= pressure.level(load, LIMITS).score <= 1


@given(loads, st.sampled_from(["delay", "growth", "memory"]), amounts)
def test_more_of_anything_never_lowers_the_score(load: Load, part: str, more: float) -> None:
    worse = replace(load, **{part: getattr(load, part) + more})
    assert pressure.level(worse, LIMITS).score >= pressure.level(load, LIMITS).score


@pytest.mark.parametrize(
    ("load", "score"),
    [
        (Load(), 0.0),
        (Load(delay=5.0, growth=0.5, memory=0.7), 0.0),
        (Load(delay=32.5), 0.5),
        (Load(growth=1.75), 0.5),
        (Load(memory=0.8), 0.5),
        (Load(delay=32.5, growth=1.75), 0.75),
        (Load(delay=60.0), 1.0),
        (Load(growth=3.0), 1.0),
        (Load(memory=0.9), 1.0),
    ],
)
def test_each_part_counts_from_its_first_threshold_to_its_second(load: Load, score: float) -> None:
    assert pressure.level(load, LIMITS).score == pytest.approx(score)


def test_memory_above_its_limit_is_penalised() -> None:
    assert not pressure.level(Load(memory=0.9), LIMITS).penalised
    assert pressure.level(Load(memory=0.91), LIMITS).penalised
    assert Level(score=1.0, penalised=True).factor(LIMITS) == 4.0
    assert Level(score=0.5).factor(LIMITS) == 1.5
    assert CALM.factor(LIMITS) == 1.0


def test_nothing_is_stretched_where_it_is_off() -> None:
    assert pressure.level(Load(delay=1e6, memory=1.0), Limits(ON=False)) == CALM


def test_equal_thresholds_are_a_step() -> None:
    step = Limits(DELAY_FROM=5.0, DELAY_TO=5.0)
    assert pressure.level(Load(delay=4.9), step).score == 0
    assert pressure.level(Load(delay=5.0), step).score == 1


@given(levels, st.floats(0, 1e5))
def test_interval_is_stretched_up_to_its_bound_and_never_shortened(
    level: Level, base: float
) -> None:
    for stretched, bound in (
        (pressure.retry(base, level, LIMITS), LIMITS.LONGEST_RETRY),
        (pressure.tick(base, level, LIMITS, most=2.5), 2.5),
    ):
        assert base <= stretched <= max(base, bound)
        assert stretched <= base * level.factor(LIMITS) + 1e-9


@given(levels)
def test_rest_is_bounded_and_nothing_without_pressure(level: Level) -> None:
    assert 0 <= pressure.rest(level, LIMITS) <= LIMITS.LONGEST_REST
    assert pressure.rest(CALM, LIMITS) == 0


def test_growth_is_the_share_gained_per_minute() -> None:
    assert pressure.growth(1_000, 2_000, 60.0) == 1.0
    assert pressure.growth(1_000, 1_500, 30.0) == 1.0
    assert pressure.growth(0, 10, 60.0) == 0.1, "a few rows are no growth"
    assert pressure.growth(1_000, 500, 60.0) == -0.5
    assert pressure.growth(1, 2, 0.0) == 0.0


@given(levels, levels, st.floats(0, 1e4))
def test_score_rises_at_once_and_falls_by_half_in_its_time(
    before: Level, now: Level, apart: float
) -> None:
    eased = pressure.eased(before, now, apart)
    assert now.score <= eased.score <= max(now.score, before.score)
    half = pressure.eased(Level(score=0.8), CALM, pressure.HALF_LIFE)
    assert half.score == pytest.approx(0.4)


# ---- an outage, simulated


@pytest.fixture(scope="module", params=[1, 2, 3])
def outage(request: pytest.FixtureRequest) -> tuple[Result, Result]:
    """The same outage with and without the adaptive backoff."""
    on = play(OUTAGE, Limits(), seed=request.param)
    return on, play(OUTAGE, Limits(ON=False), seed=request.param)


def test_peak_of_retries_in_an_outage_is_halved(outage: tuple[Result, Result]) -> None:
    on, off = outage
    assert off.peak > 0
    assert on.peak <= off.peak / 2, (on, off)


def test_outage_loses_no_job_and_all_end_soon_after_it(outage: tuple[Result, Result]) -> None:
    on, off = outage
    assert on.succeeded + on.dead == on.enqueued
    assert on.dead <= off.dead
    assert on.ended_at <= off.ended_at * 1.5, (on, off)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_calm_day_is_not_slowed_by_more_than_2_percent(seed: int) -> None:
    on = play(CALM_DAY, Limits(), seed=seed)
    off = play(CALM_DAY, Limits(ON=False), seed=seed)
    assert on.succeeded == off.succeeded == on.enqueued
    assert on.retries > 100, "some fail on a calm day, too"
    assert on.mean <= off.mean * 1.02, (on, off)
    assert on.ended_at <= off.ended_at * 1.02


@pytest.mark.parametrize("scene", [LIGHT, SLOWLY], ids=["capacity left", "refused slowly"])
def test_peak_is_no_higher_where_retries_do_not_fill_the_workers(scene: Scene) -> None:
    on, off = play(scene, Limits(), seed=1), play(scene, Limits(ON=False), seed=1)
    assert on.peak <= off.peak
    assert on.retries < off.retries


@pytest.mark.parametrize("seed", [1, 2])
def test_long_backlog_of_healthy_jobs_is_not_slowed_down(seed: int) -> None:
    burst = replace(CALM_DAY, seconds=300.0, at_once=10_000)
    on, off = play(burst, Limits(), seed=seed), play(burst, Limits(ON=False), seed=seed)
    assert on.most_score > 0.9, "it does press"
    assert on.ended_at <= off.ended_at * 1.02
    assert not math.isnan(on.mean)
