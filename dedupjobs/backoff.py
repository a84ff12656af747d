"""How long a failed job waits before its next attempt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Backoff = Callable[[int, Callable[[float, float], float]], float]
"""``backoff(failures, uniform)`` → seconds; ``failures`` counts from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    """
    ``base × factor^(failures - 1)`` seconds, at most ``cap``, with full jitter.

    Full jitter draws evenly from 0 to that value, which spreads a burst of failures best
    (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
    """

    base: float = 2.0
    factor: float = 2.0
    cap: float = 600.0
    jitter: bool = True

    def __post_init__(self) -> None:
        if self.base < 0 or self.factor < 1 or self.cap < self.base:
            raise ValueError(f"{self!r}: wants base >= 0, factor >= 1, cap >= base")

    def __call__(self, failures: int, uniform: Callable[[float, float], float]) -> float:
        try:
            longest = min(self.cap, self.base * self.factor ** max(failures - 1, 0))
        except OverflowError:
            longest = self.cap
        return uniform(0.0, longest) if self.jitter else longest


@dataclass(frozen=True, slots=True)
class Constant:
    """Always ``seconds``."""

    seconds: float

    def __call__(self, failures: int, uniform: Callable[[float, float], float]) -> float:
        return self.seconds
