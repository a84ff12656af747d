"""
How hard the system is pressed, as a score from 0 to 1, and how intervals stretch by it.

    score    of the average queue delay, the growth of the backlog and the memory of Redis
    factor   1 + score, times PENALTY while Redis is above its limit
    retry    a failed run's delay × factor
    tick     the coordinator's pause between two rounds × factor
    rest     what a DedupWorker adds between two fetches, PAUSE × (factor - 1), and only after a run
             that failed: a success resets it, so a long backlog of healthy jobs is not slowed down

Each interval has an upper bound, and one that is longer already is left alone. Nothing here asks
a clock, a table or Redis.
"""

from __future__ import annotations

from dataclasses import dataclass

from dedupjobs.thresholds import flag, number, seconds, share

HALF_LIFE = 120.0  # seconds in which a score falls by half
FEWEST = 100  # rows below which a backlog's growth is judged as if it had so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``DEDUPJOBS["PRESSURE"]``. Below the first of a pair nothing happens, at the second all."""

    ON: bool = flag(True)
    DELAY_FROM: float = seconds(5.0)  # average queue delay
    DELAY_TO: float = seconds(60.0)
    GROWTH_FROM: float = number(0.5, low=0.0)  # of the backlog within a minute; 1: it has doubled
    GROWTH_TO: float = number(3.0, low=0.001)
    MEMORY_FROM: float = share(0.7)  # of what Redis may use
    MEMORY_TO: float = share(0.9)
    PENALTY: float = number(2.0, low=1.0, high=100.0)  # factor while memory is above MEMORY_TO
    PAUSE: float = seconds(0.2)  # base of a DedupWorker's rest between two fetches
    LONGEST_RETRY: float = seconds(3600.0)  # bounds of what stretching may reach
    LONGEST_TICK: float = seconds(5.0)
    LONGEST_REST: float = seconds(1.0)


PAIRS = (
    ("DELAY_FROM", "DELAY_TO"),
    ("GROWTH_FROM", "GROWTH_TO"),
    ("MEMORY_FROM", "MEMORY_TO"),
)
"""Of each, the first must be the smaller one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """
    What was measured. ``delay``: seconds, on average; ``growth``: of the backlog within a minute,
    as a share of it; ``memory``: the largest share of its limit that a Redis uses.
    """

    delay: float = 0.0
    growth: float = 0.0
    memory: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """``score``: 0 to 1. ``penalised``: whether Redis is above its memory limit."""

    score: float = 0.0
    penalised: bool = False

    def factor(self, limits: Limits) -> float:
        """Return by how much an interval stretches, at least 1."""
        return (1.0 + self.score) * (limits.PENALTY if self.penalised else 1.0)


CALM = Level()


def level(load: Load, limits: Limits) -> Level:
    """
    Return the score of a load: each part alone can bring it to 1.

    ``1 - (1 - delay) (1 - growth) (1 - memory)``, each part from 0 at its first threshold to 1 at
    its second.
    """
    if not limits.ON:
        return CALM
    calm = 1.0
    for value, low, high in (
        (load.delay, limits.DELAY_FROM, limits.DELAY_TO),
        (load.growth, limits.GROWTH_FROM, limits.GROWTH_TO),
        (load.memory, limits.MEMORY_FROM, limits.MEMORY_TO),
    ):
        calm *= 1.0 - _part(value, low, high)
    return Level(score=1.0 - calm, penalised=load.memory > limits.MEMORY_TO)


def _part(value: float, low: float, high: float) -> float:
    if value >= high:
        return 1.0
    return (value - low) / (high - low) if value > low else 0.0


def eased(before: Level, now: Level, apart: float) -> Level:
    """
    Return a level that rises at once and falls by half in HALF_LIFE; ``apart``: seconds.

    Else what was held back while it was high would all come when it falls.
    """
    fallen = before.score * 0.5 ** (apart / HALF_LIFE)
    return Level(score=max(now.score, fallen), penalised=now.penalised)


def growth(before: int, now: int, apart: float) -> float:
    """Return how much of itself a backlog has gained per minute; ``apart``: seconds."""
    return (now - before) / max(before, FEWEST) * 60.0 / apart if apart > 0 else 0.0


def retry(delay: float, level: Level, limits: Limits) -> float:
    """Return the seconds that a failed run waits."""
    return _stretched(delay, level, limits, limits.LONGEST_RETRY)


def tick(pause: float, level: Level, limits: Limits, *, most: float) -> float:
    """Return the seconds between two rounds; ``most``: those that the leader lease allows."""
    return _stretched(pause, level, limits, min(limits.LONGEST_TICK, most))


def rest(level: Level, limits: Limits) -> float:
    """Return the seconds that a worker rests after a run that failed."""
    return min(limits.PAUSE * (level.factor(limits) - 1.0), limits.LONGEST_REST)


def _stretched(base: float, level: Level, limits: Limits, longest: float) -> float:
    return min(base * level.factor(limits), max(base, longest))
