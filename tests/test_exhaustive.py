"""
The exhaustive mode with bounds small enough for every run; `make exhaustive` goes further.

The comparison with the code reaches all its states and draws the arrows that lead to no new one by
chance, others in each run; a difference names the way to it.
"""

from __future__ import annotations

import time

import pytest

from tests.exhaustive import explorer, mutants, twin
from tests.exhaustive.state import Config

pytestmark = pytest.mark.large

KINDS = [
    Config(policy="return", unique_for="forever", on_dead="block", on_lost="retry"),
    Config(policy="replace", unique_for="none", on_dead="reopen", on_lost="hold"),
    Config(policy="rerun", unique_for="forever", on_dead="block", on_lost="hold"),
    Config(policy="debounce", unique_for="none", on_dead="reopen", on_lost="retry"),
]


@pytest.mark.parametrize("policy", explorer.POLICIES)
def test_workers_coordinator_and_operator_in_every_order_violate_nothing(policy: str) -> None:
    for bounds in ({"operations": 1, "faults": 0}, {"operations": 0, "faults": 1, "extra": True}):
        report = explorer.explore(Config(policy=policy, calls=2, **bounds))
        assert report.completed
        assert report.violations == {}
        assert report.states > 200


@pytest.mark.django_db
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.policy)
def test_lifecycle_answers_and_leaves_what_the_model_does_in_every_state(kind: Config) -> None:
    found = twin.compare(kind, attempts=1, share=0.05)
    assert found.differences == []
    assert found.completed
    assert found.states > 100
    assert 0 < found.refused < found.pairs


@pytest.mark.django_db
@pytest.mark.usefixtures("step_by_step")
@pytest.mark.parametrize("kind", KINDS[1:3], ids=lambda kind: kind.policy)
def test_call_with_an_arrow_between_its_read_and_its_write_does_as_if_it_came_after(
    kind: Config,
) -> None:
    found = twin.compare(kind, attempts=1, share=0.01, gaps=True)
    assert found.differences == []
    assert found.completed


@pytest.mark.timeout(600)
def test_model_without_any_of_its_guards_is_caught() -> None:
    for mutant in mutants.MUTANTS:
        config = next(mutant.configurations())
        report = explorer.without(mutant.guards, [config], time.monotonic() + 100)
        assert report.violations, f"no check misses {mutant} in {config}"


@pytest.mark.django_db
def test_code_that_differs_from_the_model_is_told() -> None:
    """The comparison itself: a model that lacks a guard is not what the code does."""
    wrong = Config(policy="return", dropped=frozenset({"claim_due"}))
    found = twin.compare(wrong, attempts=1, share=1.0)
    assert any("claim 1: answers None" in text for text in found.differences), found
