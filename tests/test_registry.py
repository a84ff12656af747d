"""What @job takes, what it refuses, and who is found by name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from dedupjobs import FOREVER, Exponential, keys, registry
from dedupjobs.backoff import Constant
from dedupjobs.exceptions import ArgumentError, JobDefinitionError, UnknownJob
from dedupjobs.registry import Job, Options, job
from tests.app import jobs

NAME = "tests.specimen"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    registry.forget(NAME)


def pay(*, order_id: int, amount: str = "1") -> str:
    """Be decorated by the tests."""
    return f"{order_id} {amount}"


def define(func: Any = pay, **given: Any) -> Job[..., Any]:
    given = {"key": "pay:{order_id}", "unique_for": FOREVER, "name": NAME} | given
    return job(**{k: v for k, v in given.items() if v is not ...})(func)


def test_job_is_registered_under_its_apps_label_and_found_by_name() -> None:
    assert jobs.record.name == "testapp.record"
    assert registry.get("testapp.record") is registry.find("testapp.record") is jobs.record
    assert jobs.record in registry.every()
    names = [j.name for j in registry.every()]
    assert names == sorted(names)


def test_job_keeps_the_function_and_its_signature() -> None:
    made = define()
    assert made.func is pay
    assert made(order_id=7) == "7 1"
    assert made.signature == inspect.signature(pay)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.name = "other"  # type: ignore[misc]


def test_options_have_the_designs_defaults() -> None:
    options = define().options
    assert options == Options()
    assert dataclasses.asdict(options) == {
        "queue": "default",
        "max_attempts": 5,
        "backoff": dataclasses.asdict(Exponential(base=2, factor=2, cap=600, jitter=True)),
        "retry_on": (Exception,),
        "give_up_on": (),
        "timeout": 180.0,
        "lease": 60.0,
        "stall_after": None,
        "on_conflict": "return",
        "on_mismatch": "raise",
        "on_dead": "reopen",
        "on_lost": "retry",
        "max_lost": 3,
        "on_redis_error": "database",
        "concurrency_control": "pessimistic",
        "atomic": False,
        "batch": True,
        "debounce": None,
        "max_wait": None,
        "retain_for": 30 * 86_400.0,
        "every": None,
        "cron": None,
        "catch_up": "latest",
    }
    assert options.beat_every == 10.0


@pytest.mark.parametrize("misplaced", [abs, "default"])
def test_decorator_without_keywords_says_what_to_write(misplaced: Any) -> None:
    with pytest.raises(JobDefinitionError, match=r'Write @job\(key="payment:') as error:
        job(misplaced)
    assert repr(misplaced) in str(error.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"key": ...}, "key= is missing"),
        ({"unique_for": ...}, "unique_for= is missing"),
        ({"key": None}, "no meaning with key=None"),
        ({"key": "pay:{order}"}, "names 'order'; its arguments are: order_id, amount"),
        ({"key": "pay"}, "names no argument"),
        ({"unique_for": 0}, "unique_for=0"),
        ({"unique_for": -1}, "unique_for=-1"),
        ({"unique_for": timedelta(0)}, "unique_for=datetime.timedelta"),
        ({"unique_for": timedelta(-1)}, "unique_for="),
        ({"unique_for": timedelta(days=4_000_000)}, "unique_for="),
        ({"unique_for": float("nan")}, "unique_for=nan"),
        ({"unique_for": float("inf")}, "unique_for=inf"),
        ({"unique_for": "1h"}, "unique_for='1h'"),
        ({"unique_for": True}, "unique_for=True"),
        ({"scope": "tenant"}, "scope='tenant' is no argument; there are: order_id, amount"),
        ({"fingerprint": ("price",)}, "fingerprint names 'price'"),
        ({"fingerprint": "amount"}, "fingerprint"),
        ({"retries": 3}, "unknown option retries; known: atomic, "),
        ({"queue": ""}, "queue=''"),
        ({"queue": 1}, "queue=1"),
        ({"max_attempts": 0}, "max_attempts=0"),
        ({"max_attempts": 1.5}, "max_attempts=1.5"),
        ({"max_attempts": True}, "max_attempts=True"),
        ({"max_lost": 0}, "max_lost=0"),
        ({"backoff": -1}, "backoff=-1"),
        ({"backoff": "fast"}, "backoff='fast'"),
        ({"backoff": None}, "backoff=None"),
        ({"retry_on": ValueError()}, "retry_on="),
        ({"retry_on": (BaseException,)}, "tuple of Exception classes"),
        ({"give_up_on": ("ValueError",)}, "give_up_on="),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"lease": None}, "lease=None; a lease must end"),
        ({"lease": 0}, "lease=0"),
        ({"lease": 0.0004}, "lease=0.0004"),
        ({"lease": timedelta(0)}, "lease="),
        ({"stall_after": 0}, "stall_after=0"),
        ({"on_conflict": "ignore"}, r"on_conflict='ignore' is not one of"),
        ({"on_mismatch": "return"}, "on_mismatch='return'"),
        ({"on_dead": None}, "on_dead=None"),
        ({"on_lost": "fail"}, "on_lost='fail'"),
        ({"on_redis_error": "ignore"}, "on_redis_error='ignore'"),
        ({"atomic": 1}, "atomic=1"),
        ({"concurrency": 0}, "concurrency=0; give a whole number of at least 1"),
        ({"concurrency": True}, "concurrency=True"),
        ({"concurrency": ""}, "concurrency=''"),
        ({"concurrency": ("order:{order_id}", 0)}, r"concurrency=\('order:{order_id}', 0\); give"),
        ({"concurrency": ("order:{order_id}",)}, "To stop a job, pause it"),
        ({"concurrency": "tenant:{tenant}"}, "names 'tenant'; its arguments are: order_id, amount"),
    ],
    ids=str,
)
def test_option_that_can_not_be_meant_is_refused_with_job_and_value(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(JobDefinitionError, match=words) as caught:
        define(**given)
    assert NAME in str(caught.value)
    assert registry.find(NAME) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"timeout": timedelta(minutes=1)}, {"timeout": 60.0}),
        ({"timeout": None}, {"timeout": None}),
        ({"lease": 5}, {"lease": 5.0}),
        ({"retry_on": OSError}, {"retry_on": (OSError,)}),
        ({"give_up_on": (KeyError, ValueError)}, {"give_up_on": (KeyError, ValueError)}),
        ({"backoff": timedelta(seconds=3)}, {"backoff": Constant(3.0)}),
    ],
    ids=str,
)
def test_option_is_taken_in_every_form_that_makes_sense(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    options = define(**given).options
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (FOREVER, timedelta.max),
        (None, None),
        (timedelta(days=400), timedelta(days=400)),
        (90, timedelta(seconds=90)),
    ],
    ids=str,
)
def test_window_of_a_success_is_taken_in_every_form(given: Any, expected: Any) -> None:
    assert define(unique_for=given).unique_for == expected


def test_job_without_a_key_needs_no_window() -> None:
    made = define(key=None, unique_for=...)
    assert (made.key_maker, made.unique_for) == (None, None)


def test_function_in_a_function_needs_a_name_that_a_worker_can_know() -> None:
    def local(*, order_id: int) -> None: ...

    with pytest.raises(JobDefinitionError, match="local to a function"):
        define(local, name=None)
    with pytest.raises(JobDefinitionError, match="local to a function"):
        define(lambda order_id: None, name=None)


def test_async_job_can_not_be_atomic() -> None:
    async def pay_async(*, order_id: int) -> None: ...

    with pytest.raises(JobDefinitionError, match="another connection, so atomic=True"):
        define(pay_async, atomic=True)
    assert registry.find(NAME) is None
    assert define(pay_async).options.atomic is False


def test_name_longer_than_its_column_is_refused() -> None:
    with pytest.raises(JobDefinitionError, match="200"):
        define(name="x" * 201)


def test_name_that_two_functions_want_is_refused_and_stays_with_the_first() -> None:
    made = define()
    with pytest.raises(JobDefinitionError, match=f"{NAME} is registered twice"):
        define(jobs.record.func, key=None, unique_for=...)
    assert registry.get(NAME) is made


def test_module_that_is_imported_again_replaces_its_jobs() -> None:
    define()
    again = define(max_attempts=2)
    assert registry.get(NAME) is again


def test_name_that_is_unknown_is_an_error_that_lists_what_is_known() -> None:
    with pytest.raises(UnknownJob, match=r"'shop\.gone'.*testapp\.record.*jobs\.py"):
        registry.get("shop.gone")
    assert registry.find("shop.gone") is None
    assert registry.options_of("shop.gone") == Options()


# ---- binding, and stored arguments


def test_bound_call_has_all_arguments_by_name_with_defaults() -> None:
    made = define()
    assert made.bind((), {"order_id": 7}) == {"order_id": 7, "amount": "1"}


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((7,), {}), ((), {"order_id": 7, "x": 1})],
    ids=["missing", "positional", "unknown"],
)
def test_call_that_misfits_is_a_type_error_with_name_and_signature(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=r"tests\.specimen\(\*, order_id: ") as caught:
        define().bind(args, kwargs)
    assert not isinstance(caught.value, ArgumentError)


def collect(first: int, /, second: int = 2, *rest: int, key: str, **more: int) -> tuple[Any, ...]:
    """Take arguments of every kind."""
    return first, second, rest, key, more


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1,), {"key": "k"}),
        ((1, 2, 3, 4), {"key": "k"}),
        ((1,), {"second": 5, "key": "k", "b": 2, "a": 1}),
        ((1, 2, 3), {"key": "k", "x": 1}),
    ],
    ids=str,
)
def test_arguments_of_every_kind_reach_the_function_as_they_were_given(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    made = define(collect, key="{key}")
    bound = made.bound(made.call_of(made.bind(args, kwargs), unkeyed="").args)
    assert collect(*bound.args, **bound.kwargs) == collect(*args, **kwargs)


def test_stored_arguments_get_defaults_that_were_added_since() -> None:
    bound = define().bound(keys.encode({"order_id": 7}))
    assert dict(bound.arguments) == {"order_id": 7, "amount": "1"}


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"order_id": 7, "gone": 1, "also": 2}, "no longer takes also, gone"),
        ({"amount": "1"}, "missing a required.*'order_id'"),
    ],
    ids=["too many", "too few"],
)
def test_stored_arguments_that_no_longer_fit_are_named(stored: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        define().bound(keys.encode(stored))


@pytest.mark.parametrize("word", ["delay", "apply_async", "send", "nonsense"])
def test_attribute_that_does_not_exist_is_an_error(word: str) -> None:
    with pytest.raises(AttributeError, match=word):
        getattr(define(), word)
