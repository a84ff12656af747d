"""What the answers of several lock servers amount to: all combinations, against the plain rule."""

from __future__ import annotations

from itertools import product

import pytest

from dedupjobs import votes
from dedupjobs.votes import Verdict, Vote

GRANTED, DENIED, SILENT, OPEN = Vote.GRANTED, Vote.DENIED, Vote.SILENT, Vote.OPEN
SAID = (GRANTED, DENIED, SILENT)


def by_the_rule(cast: tuple[Vote, ...]) -> Verdict:
    """Redlock's rule once nothing is open, in its own words."""
    more_than_half = len(cast) / 2
    if cast.count(GRANTED) > more_than_half:
        return Verdict.GRANTED
    if len(cast) - cast.count(SILENT) > more_than_half:
        return Verdict.DENIED
    return Verdict.UNKNOWN


@pytest.mark.parametrize("servers", [1, 3, 5, 7])
def test_verdict_of_all_servers_is_that_of_the_rule(servers: int) -> None:
    for cast in product(SAID, repeat=servers):
        assert votes.verdict(cast) is by_the_rule(cast), cast


@pytest.mark.parametrize("servers", [1, 3, 5])
def test_verdict_comes_as_soon_as_no_open_vote_can_change_it_and_no_sooner(servers: int) -> None:
    for cast in product((*SAID, OPEN), repeat=servers):
        choices = [SAID if vote is OPEN else (vote,) for vote in cast]
        possible = {by_the_rule(ended) for ended in product(*choices)}
        early = votes.verdict(cast)
        assert early is (possible.pop() if len(possible) == 1 else None), cast


@pytest.mark.parametrize("servers", [3, 5, 7])
def test_two_majorities_share_a_server_and_a_minority_is_none(servers: int) -> None:
    assert 2 * votes.majority(servers) > servers
    assert servers - votes.majority(servers) < votes.majority(servers)


@pytest.mark.parametrize(
    ("ttl", "elapsed", "left"),
    [(10, 0, 9.898), (10, 0.1, 9.798), (1, 0.988, 0), (0.002, 0, -0.00002), (60, 100, -40.602)],
)
def test_validity_is_the_ttl_without_the_time_it_took_and_the_drift(
    ttl: float, elapsed: float, left: float
) -> None:
    assert votes.validity(ttl, elapsed) == pytest.approx(left)


def test_owner_is_whom_a_majority_of_all_servers_names_until_the_majority_ends() -> None:
    assert votes.agreed([("me", 3.0), ("me", 5.0), ("me", None)], 3) == ("me", 5.0)
    assert votes.agreed([("me", 3.0), ("you", 5.0), ("me", 4.0)], 3) == ("me", 3.0)
    assert votes.agreed([("me", None), ("me", None)], 3) == ("me", None)
    assert votes.agreed([("me", 3.0), ("you", 5.0)], 3) is None
    assert votes.agreed([("me", 3.0)], 3) is None
    assert votes.agreed([("me", 3.0), ("me", 3.0)], 5) is None
    assert votes.agreed([], 3) is None
