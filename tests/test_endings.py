"""What is kept of an exception: strings that every database stores."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedupjobs import endings
from dedupjobs.endings import CUT, Error, Failed, Snoozed, Succeeded, clip

anything = st.text(st.characters(codec=None), max_size=50)


@given(anything, st.integers(len(CUT), 60))
@settings(deadline=None)
def test_clipped_text_fits_and_can_be_stored(text: str, limit: int) -> None:
    clipped = clip(text, limit)
    assert len(clipped) <= limit
    assert "\x00" not in clipped
    clipped.encode()  # no lone surrogate


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00")))
@settings(deadline=None)
def test_clipped_text_that_fits_is_unchanged(text: str) -> None:
    assert clip(text, max(len(text), 1)) == text


def test_clipped_text_shows_what_was_there_and_that_it_was_cut() -> None:
    assert clip("a\x00b \ud800", 100) == "a\\x00b \\ud800"
    assert clip("x" * 30, 20) == "x" * (20 - len(CUT)) + CUT


def test_error_names_its_type_and_keeps_message_and_traceback() -> None:
    error = Error.of(ValueError("no luck"), limit=1_000)
    assert (error.type, error.message) == ("builtins.ValueError", "no luck")
    assert error.traceback.endswith("ValueError: no luck\n")


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no str")

    __repr__ = __str__


class HostileError(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class LongNamedError(Exception):
    pass


LongNamedError.__qualname__ = "x" * 500


def test_error_whose_str_raises_says_so() -> None:
    error = Error.of(MuteError(), limit=1_000)
    assert error.message == "<str() raised RuntimeError>"
    assert error.traceback


def test_error_in_a_group_with_mute_ones_is_kept() -> None:
    error = Error.of(ExceptionGroup("many", [MuteError(), ValueError("one")]), limit=10_000)
    assert error.message == "many (2 sub-exceptions)"
    assert "one" in error.traceback


def test_error_with_a_long_chain_is_cut() -> None:
    raised: Exception = ValueError("first")
    for number in range(2_000):
        nested = KeyError(number)
        nested.__cause__ = raised
        raised = nested
    error = Error.of(raised, limit=5_000)
    assert error.message == "1999"
    assert 0 < len(error.traceback) <= 5_000


def test_error_that_is_its_own_cause_is_kept() -> None:
    raised = ValueError("round")
    raised.__cause__ = raised
    assert "round" in Error.of(raised, limit=5_000).traceback


def test_error_of_any_size_is_cut() -> None:
    error = Error.of(LongNamedError("x" * 5_000_000), limit=3_000)
    assert (len(error.type), len(error.message), len(error.traceback)) == (200, 2_000, 3_000)
    assert error.message.endswith(CUT)


def test_error_in_deep_recursion_keeps_the_innermost_calls() -> None:
    def dive() -> None:
        dive()

    with pytest.raises(RecursionError) as caught:
        dive()
    error = Error.of(caught.value, limit=100_000)
    assert error.type == "builtins.RecursionError"
    assert error.traceback.count("in dive") <= 41


@pytest.mark.parametrize(
    "ending",
    [Succeeded(result="1"), Snoozed(after=1.0), Failed(error=Error.of(ValueError(), limit=99))],
    ids=lambda e: type(e).__name__,
)
def test_ending_is_frozen_and_equal_to_its_twin(ending: endings.Ending) -> None:
    assert ending == dataclasses.replace(ending)
    name = dataclasses.fields(ending)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(ending, name, None)
