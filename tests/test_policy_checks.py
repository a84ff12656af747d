"""Policies that contradict each other are named by a check with an id, and by nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.core.checks import CheckMessage, run_checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError

from dedupjobs import FOREVER, job, registry
from dedupjobs.exceptions import JobDefinitionError
from tests.app import jobs

POLICIES = {f"dedupjobs.E0{number}" for number in range(11, 19)}


def plain(*, tag: str = "") -> None: ...


def by_slot(*, slot: datetime) -> None: ...


def by_slot_and_more(*, slot: datetime, more: str) -> None: ...


def by_slot_with_default(*, slot: datetime, more: str = "") -> None: ...


def by_slot_with_text(*, slot: datetime, more: str = "x") -> None: ...


@contextmanager
def defined(function: Callable[..., None], **options: Any) -> Iterator[str]:
    """Let the registry have the function as a job for the block."""
    name = "checked.specimen"
    job(name=name, **options)(function)
    try:
        yield name
    finally:
        registry.forget(name)


def complaints(function: Callable[..., None], **options: Any) -> list[CheckMessage]:
    """Return what the checks say of a job with these options."""
    with defined(function, **options) as name:
        found = [message for message in run_checks() if message.id in POLICIES]
    assert all(name in message.msg for message in found)
    return found


def ids(found: list[CheckMessage]) -> list[str]:
    return sorted(str(message.id).removeprefix("dedupjobs.") for message in found)


HOUR = timedelta(hours=1)
KEYED = {"key": "k:{tag}", "unique_for": FOREVER}
SLOTTED = {"key": "k:{slot}", "unique_for": FOREVER}

CONTRADICTIONS = {
    "debounce that raises": ("E011", plain, {**KEYED, "debounce": 5, "on_conflict": "raise"}),
    "wait below debounce": ("E012", plain, {**KEYED, "debounce": 5, "max_wait": 4}),
    "wait without debounce": ("E012", plain, {**KEYED, "max_wait": 4}),
    "no key but raise": ("E013", plain, {"key": None, "on_conflict": "raise"}),
    "no key but replace": ("E013", plain, {"key": None, "on_conflict": "replace"}),
    "no key but rerun": ("E013", plain, {"key": None, "on_conflict": "rerun"}),
    "no key but debounce": ("E013", plain, {"key": None, "debounce": 5}),
    "window below time-out": ("E014", plain, {**KEYED, "unique_for": 59, "timeout": 60}),
    "window below no time-out": ("E014", plain, {**KEYED, "unique_for": HOUR, "timeout": None}),
    "every and cron": ("E015", by_slot, {**SLOTTED, "every": 60, "cron": "* * * * *"}),
    "no slot": ("E016", plain, {**KEYED, "every": 60}),
    "more than a slot": ("E016", by_slot_and_more, {**SLOTTED, "every": 60}),
    "key without slot": ("E017", by_slot_with_text, {**KEYED, "key": "k:{more}", "every": 60}),
    "key with a part": ("E017", by_slot, {**KEYED, "key": "k:{slot.year}", "every": 60}),
    "only while active": ("E018", by_slot, {"key": "k:{slot}", "unique_for": None, "every": 60}),
    "window below two slots": (
        "E018",
        by_slot,
        {"key": "k:{slot}", "unique_for": 7_199, "every": 3_600},
    ),
    "window below two days": (
        "E018",
        by_slot,
        {"key": "k:{slot}", "unique_for": 47 * HOUR, "cron": "0 3 * * *"},
    ),
    # Between Friday and Monday lie three days.
    "window below two weekends": (
        "E018",
        by_slot,
        {"key": "k:{slot}", "unique_for": 60 * HOUR, "cron": "0 9 * * 1-5"},
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradiction_is_named_by_its_check_alone(case: str) -> None:
    expected, function, options = CONTRADICTIONS[case]
    found = complaints(function, **options)
    assert ids(found) == [expected]
    assert found[0].hint
    assert found[0].is_serious()


CONSISTENT = {
    "debounce": (plain, {**KEYED, "debounce": 5, "max_wait": 5}),
    "debounce with rerun": (plain, {**KEYED, "debounce": 5, "on_conflict": "rerun"}),
    "raise": (plain, {**KEYED, "on_conflict": "raise"}),
    "no key": (plain, {"key": None}),
    "window as long as the time-out": (plain, {**KEYED, "unique_for": 60, "timeout": 60}),
    "only while active": (plain, {**KEYED, "unique_for": None, "timeout": None}),
    "for ever without a time-out": (plain, {**KEYED, "timeout": None}),
    "every": (by_slot, {**SLOTTED, "every": 60}),
    "cron": (by_slot, {**SLOTTED, "cron": "30 2 * * *"}),
    "a default beside the slot": (by_slot_with_default, {**SLOTTED, "every": 60}),
    "slot in a tuple": (by_slot, {"key": ("slot",), "unique_for": FOREVER, "every": 60}),
    "window of two slots": (by_slot, {**SLOTTED, "unique_for": 7_200, "every": 3_600}),
    "window of two days": (by_slot, {**SLOTTED, "unique_for": 48 * HOUR, "cron": "0 3 * * *"}),
}


@pytest.mark.parametrize("case", CONSISTENT)
def test_consistent_policy_is_left_in_peace(case: str) -> None:
    function, options = CONSISTENT[case]
    assert complaints(function, **options) == []


@pytest.mark.parametrize("key", ["k:{slot.nonsense}", "k:{slot[3]}"])
def test_key_that_can_not_be_made_of_a_slot_is_a_message_and_no_crash(key: str) -> None:
    assert ids(complaints(by_slot, key=key, unique_for=FOREVER, every=60)) == ["E016"]


def key_that_fails(slot: datetime) -> str:
    raise ValueError("no key today")


def test_key_function_that_fails_is_a_message_and_no_crash() -> None:
    found = complaints(by_slot, key=key_that_fails, unique_for=FOREVER, every=60)
    assert ids(found) == ["E016"]
    assert "no key today" in found[0].msg


def test_several_contradictions_are_all_named() -> None:
    found = complaints(by_slot_with_text, key=None, on_conflict="raise", debounce=5, every=60)
    assert ids(found) == ["E011", "E013", "E017", "E018"]


def test_messages_name_the_two_numbers_and_the_cure() -> None:
    short = {**KEYED, "unique_for": 59, "timeout": 60}
    with defined(plain, **short) as name, pytest.raises(SystemCheckError) as caught:
        call_command("check")
    text = str(caught.value)
    assert f"(dedupjobs.E014) Job {name}: unique_for=59 s is shorter than timeout=60.0 s" in text
    assert "Lengthen unique_for or shorten timeout." in text


def test_shipped_specimens_and_options_pass() -> None:
    assert jobs.record.name in registry.names()
    assert [message for message in run_checks() if message.id in POLICIES] == []


@pytest.mark.parametrize("job_", [jobs.rerun, jobs.replace, jobs.debounced])
def test_run_now_of_a_job_whose_newest_call_wins_is_refused(job_: Any) -> None:
    with pytest.raises(JobDefinitionError, match=r"run_now\(\) runs at once"):
        job_.run_now(tag="a")
