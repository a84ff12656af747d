"""
What the answers of several lock servers amount to. Pure: votes in, one verdict out.

The rules are those of Redlock (https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/):
a lock is held where a majority of all servers has granted it, for as long as its TTL lasts less
the time that asking took and an allowance for the drift of their clocks. A server that is away,
or refuses, has no vote, and is still counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum

DRIFT = 0.01  # of a TTL, by which servers' clocks may run apart meanwhile
LEAST_DRIFT = 0.002  # seconds, since Redis ends keys to the millisecond only


class Vote(Enum):
    """What one server has said."""

    GRANTED = "granted"
    DENIED = "denied"  # it answers: somebody else has it, or it is gone
    SILENT = "silent"  # it does not answer, or refuses to write
    OPEN = "open"  # not yet


class Verdict(Enum):
    """What all of them have said."""

    GRANTED = "granted"
    DENIED = "denied"
    UNKNOWN = "unknown"  # too few answer to know


def majority(servers: int) -> int:
    """Return how many of so many servers must agree."""
    return servers // 2 + 1


def verdict(votes: Iterable[Vote]) -> Verdict | None:
    """
    Return what the votes of all servers amount to; None: those that are open may decide.

    Once it is not None, no vote that is still open can change it.
    """
    cast = list(votes)
    needed = majority(len(cast))
    granted, denied = cast.count(Vote.GRANTED), cast.count(Vote.DENIED)
    left = cast.count(Vote.OPEN)
    if granted >= needed:
        return Verdict.GRANTED
    if granted + left >= needed:
        return None
    if granted + denied >= needed:
        return Verdict.DENIED
    return None if granted + denied + left >= needed else Verdict.UNKNOWN


def drift(ttl: float) -> float:
    """Return the seconds of a TTL that clocks of different speed may take away."""
    return ttl * DRIFT + LEAST_DRIFT


def validity(ttl: float, elapsed: float) -> float:
    """
    Return for how many seconds a lock is surely held that was asked for ``elapsed`` seconds ago.

    Counted from now; 0 or less: asking took so long that it may be over already.
    """
    return ttl - elapsed - drift(ttl)


def agreed(
    held: Iterable[tuple[str, float | None]], servers: int
) -> tuple[str, float | None] | None:
    """
    Return the owner whom a majority of ``servers`` names, and for how many seconds it will yet.

    ``held``: what each server says that has the lock at all.
    """
    by_owner: dict[str, list[float]] = {}
    for owner, ttl in held:
        by_owner.setdefault(owner, []).append(math.inf if ttl is None else ttl)
    for owner, ttls in by_owner.items():
        if len(ttls) >= majority(servers):
            left = sorted(ttls, reverse=True)[majority(servers) - 1]
            return owner, None if left == math.inf else left
    return None
