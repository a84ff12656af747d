"""Arguments as text and back, and the identity that is made of them."""

from __future__ import annotations

import inspect
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from itertools import combinations
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy
from hypothesis import given, settings
from hypothesis import strategies as st

from dedupjobs import keys, registry
from dedupjobs.exceptions import ArgumentError, JobDefinitionError, KeyValueError
from dedupjobs.keys import KeyMaker


class Colour(Enum):
    RED = object()
    GREEN = 2


class Level(IntEnum):
    LOW = 1


class Word(StrEnum):
    YES = "yes"


@dataclass(frozen=True)
class Point:
    x: Any
    y: Any = 0
    length: float = field(init=False, default=0.0)


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
zones = st.one_of(
    st.just(UTC),
    st.integers(-1439, 1439).map(lambda m: timezone(timedelta(minutes=m))),
    st.sampled_from(["Europe/Berlin", "Asia/Kolkata", "America/St_Johns"]).map(ZoneInfo),
)
moments = st.datetimes(
    datetime(2, 1, 1), datetime(9998, 12, 31), timezones=zones, allow_imaginary=False
)
fixed = st.integers(-1439, 1439).map(lambda m: timezone(timedelta(minutes=m)))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    texts,
    st.decimals(allow_nan=False, allow_infinity=False),
    moments,
    st.dates(),
    st.times(timezones=st.none() | fixed),
    st.timedeltas(),
    st.uuids(),
    st.binary(max_size=20),
    st.sampled_from([*Colour, *Level, *Word]),
)
names = texts | st.sampled_from(["$", "v", "t"])
kinds = st.sampled_from(["dict", "enum", "dataclass", "datetime", "decimal", "tuple", "other"])
lookalikes = st.fixed_dictionaries({"$": kinds | leaves}, optional={"v": leaves, "t": texts})
values = st.recursive(
    leaves | lookalikes,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(names, inner, max_size=3),
        st.fixed_dictionaries({"$": kinds, "v": inner}),
        st.builds(Point, inner, inner),
    ),
    max_leaves=8,
)


def show(value: Any) -> Any:
    """Return what tells two values apart, their types included."""
    match value:
        case list() | tuple():
            return type(value), [show(v) for v in value]
        case dict():
            return dict, {k: show(v) for k, v in value.items()}
        case Point():
            return Point, show(value.x), show(value.y)
        case datetime():  # zones come back as offsets
            return datetime, value.isoformat()
    return type(value), repr(value)


# ---- round trip


@given(st.dictionaries(texts, values, max_size=3))
@settings(deadline=None)
def test_arguments_come_back_equal_and_of_the_same_types(arguments: dict[str, Any]) -> None:
    text = keys.encode(arguments)
    assert show(keys.decode(text)) == show(arguments)
    assert keys.encode(keys.decode(text)) == text


@pytest.mark.parametrize(
    "value",
    [
        {"$": "decimal", "v": "1"},
        {"$": "dict", "v": {"$": "decimal", "v": "1"}},
        {"$": "enum", "t": "tests.test_keys:Level", "v": "LOW"},
        {"$": "dataclass", "t": "tests.test_keys:Point", "v": {"x": 1}},
        {"$": 1},
        {"$": "unknown"},
        {"$": None, "v": 1},
        {"$": []},
        {"$": {"$": "decimal", "v": "1"}},
    ],
    ids=str,
)
def test_dict_from_outside_that_looks_like_our_notation_stays_a_dict(value: Any) -> None:
    assert show(keys.decode(keys.encode(value))) == show(value)
    assert show(keys.decode(keys.encode({"a": value}))["a"]) == show(value)
    assert show(keys.decode(keys.encode_value([value]))) == show([value])


@pytest.mark.parametrize(
    "value",
    [Decimal("1.0"), Decimal("1.00"), Decimal("-0"), Decimal("1E+9"), -0.0, 1e300, 10**40, True],
    ids=repr,
)
def test_number_comes_back_digit_by_digit(value: Any) -> None:
    back = keys.decode(keys.encode_value(value))
    assert (type(back), repr(back)) == (type(value), repr(value))


def test_stored_type_is_looked_up_and_never_imported() -> None:
    module = "email.mime.audio"
    assert module not in sys.modules
    text = json.dumps({"$": "dataclass", "t": f"{module}:MIMEAudio", "v": {}})
    with pytest.raises(ArgumentError, match=r"email\.mime\.audio:MIMEAudio.*import its module"):
        keys.decode(text)
    assert module not in sys.modules


@pytest.mark.parametrize("path", ["os:system", "builtins:dict", "tests.test_keys:Colour", "", ":"])
def test_stored_type_that_is_no_dataclass_is_refused(path: str) -> None:
    with pytest.raises(ArgumentError):
        keys.decode(json.dumps({"$": "dataclass", "t": path, "v": {}}))


# ---- what is refused


class Local:
    """Holds types that are no argument."""

    def point(self) -> Any:
        @dataclass
        class Inner:
            x: int

        return Inner(1)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (math.nan, "NaN"),
        (-math.inf, "infinity"),
        (Decimal("NaN"), "finite"),
        (Decimal("Infinity"), "finite"),
        ("a\x00b", "NUL"),
        ("\ud800", "surrogate"),
        (datetime(2026, 1, 1), "no time zone"),
        ({1: 2}, "dict key 1 is no string"),
        ({None: 2}, "dict key None"),
        ({1, 2}, "sorted list"),
        (frozenset({1}), "sorted list"),
        (gettext_lazy("later"), "can not be stored as JSON"),
        (mark_safe("<b>"), "can not be stored as JSON"),
        (Local().point(), "local to a function"),
        (Local, "can not be stored as JSON"),
        (Point, "can not be stored as JSON"),
        (bytearray(b"a"), "can not be stored as JSON"),
        (range(3), "can not be stored as JSON"),
        (1j, "can not be stored as JSON"),
        (..., "can not be stored as JSON"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else None,
)
def test_value_that_does_not_fit_is_refused_by_name_wherever_it_stands(
    value: Any, words: str
) -> None:
    for wrapped in (value, [value], {"k": (value,)}, Point(value)):
        for act in (lambda v: keys.encode({"arg": v}), lambda v: keys.canonical(v, "arg")):
            with pytest.raises(ArgumentError, match=words) as caught:
                act(wrapped)
            assert "arg" in str(caught.value) or "local to a function" in str(caught.value)
            assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    "moment",
    [
        datetime.min.replace(tzinfo=timezone(timedelta(hours=1))),
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))),
    ],
    ids=["first", "last"],
)
def test_moment_at_the_end_of_the_calendar_is_taken_or_refused_by_name(moment: datetime) -> None:
    try:
        text = keys.canonical(moment, "arg")
    except ArgumentError as error:
        names = str(error)
    else:
        names = f"arg {text}"
    assert "arg" in names


# ---- canonical text


@given(st.dictionaries(names, values, min_size=2, max_size=4))
@settings(deadline=None)
def test_canonical_text_does_not_depend_on_the_order_of_dict_entries(value: dict[str, Any]) -> None:
    turned = dict(reversed(value.items()))
    assert keys.canonical(value, "a") == keys.canonical(turned, "a")
    assert keys.encode(value) == keys.encode(turned)
    assert keys.fingerprint(value, None) == keys.fingerprint(turned, None)


@given(moments, zones)
@settings(deadline=None)
def test_canonical_text_of_one_instant_is_equal_in_every_zone(moment: datetime, zone: Any) -> None:
    there = moment.astimezone(zone)
    assert keys.canonical(moment, "a") == keys.canonical(there, "a")


@given(values)
@settings(deadline=None)
def test_canonical_text_is_ascii_and_has_no_spaces_between_tokens(value: Any) -> None:
    text = keys.canonical(value, "a")
    assert text.isascii()
    assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) == text


UNLIKE: list[Any] = [
    None, True, False, 0, 1, 1.0, "1", "None", "", "true", Decimal(1), Decimal("1.0"), b"1",
    [1], (1,), [], (), {}, {"1": 1}, [[1]], date(2026, 1, 1), datetime(2026, 1, 1, tzinfo=UTC),
    "2026-01-01", time(0), timedelta(1), UUID(int=1), Level.LOW, Word.YES, "yes", Colour.GREEN, 2,
    Point(1), {"x": 1, "y": 0}, {"$": "decimal", "v": "1"}, [1, 2], [2, 1],
    "é", "e\u0301", "É", "\U0001f600",
]  # fmt: skip


def test_canonical_texts_of_unlike_values_differ() -> None:
    for one, other in combinations(UNLIKE, 2):
        assert keys.canonical(one, "a") != keys.canonical(other, "a"), (one, other)


# ---- fingerprints and differences


def test_fingerprint_covers_the_arguments_named_or_all() -> None:
    one, other = {"a": 1, "b": 2}, {"a": 1, "b": 3}
    assert keys.fingerprint(one, None) != keys.fingerprint(other, None)
    assert keys.fingerprint(one, ("a",)) == keys.fingerprint(other, ("a",))
    assert keys.fingerprint(one, ("a", "b")) == keys.fingerprint(one, ("b", "a"))
    assert keys.fingerprint(one, ()) == keys.fingerprint({}, None)


@pytest.mark.parametrize(
    ("stored", "given_", "names_"),
    [
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, ("b",)),
        ({"a": 1}, {"a": 1, "b": None}, ("b",)),
        ({"a": {"x": 1}, "b": 1}, {"a": {"x": 2}, "b": 2}, ("a", "b")),
        ({"a": 1}, {"a": 1}, ()),
    ],
)
def test_differing_arguments_are_named(stored: Any, given_: Any, names_: tuple[str, ...]) -> None:
    assert keys.differing(keys.encode(stored), keys.encode(given_)) == names_


# ---- keys


def some(a: Any = None, b: Any = None, opts: Any = None) -> None:
    """Lend its signature."""


def make(spec: Any, **values_: Any) -> tuple[list[Any], str]:
    return KeyMaker.of(spec, inspect.signature(some), "job").make(values_)


def identity_of(spec: Any, **values_: Any) -> keys.Identity:
    parts, text = make(spec, **values_)
    return keys.identity(scope="", owner="job", parts=parts, text=text)


def test_template_shows_its_values_in_place() -> None:
    assert identity_of("pay:{a}/{b}", a=7, b=Colour.RED).key == "pay:7/RED"
    assert identity_of("pay:{a.x}:{b[k]}", a=Point(3), b={"k": "v"}).key == "pay:3:v"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": "1", "b": "2"}, {"a": "1:", "b": "2"}),
        ({"a": 1, "b": 2}, {"a": "1", "b": 2}),
        ({"a": True, "b": 2}, {"a": 1, "b": 2}),
        ({"a": "x-y", "b": "z"}, {"a": "x", "b": "y-z"}),
        ({"a": Decimal("1.0"), "b": 1}, {"a": Decimal("1.00"), "b": 1}),
        ({"a": "é", "b": 1}, {"a": "e\u0301", "b": 1}),
        ({"a": "É", "b": 1}, {"a": "é", "b": 1}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "spec", ["{a}-{b}", ("a", "b"), lambda a, b: [a, b]], ids=["template", "names", "function"]
)
def test_keys_of_unlike_values_differ_even_if_they_look_alike(
    spec: Any, one: Any, other: Any
) -> None:
    assert identity_of(spec, **one).key_hash != identity_of(spec, **other).key_hash


def test_names_as_key_show_names_and_values() -> None:
    assert identity_of(("a", "b"), a=1, b="x").key == "a=1, b=x"


def test_function_as_key_gets_a_copy_of_the_arguments() -> None:
    opts = {"x": [1]}

    def spoil(a: Any, opts: Any) -> str:
        opts["x"].append(2)
        return f"{a}"

    assert identity_of(spoil, a=1, opts=opts).key == "1"
    assert opts == {"x": [1]}


@pytest.mark.parametrize("empty", [None, ""])
@pytest.mark.parametrize(
    "spec", ["x:{a}", ("a",), lambda a: a], ids=["template", "names", "function"]
)
def test_empty_part_is_refused(spec: Any, empty: Any) -> None:
    with pytest.raises(KeyValueError, match="calls without a value would all be the same work"):
        make(spec, a=empty)


@pytest.mark.parametrize("value", [0, False, [], {}, "0", " "], ids=repr)
def test_part_that_is_false_but_a_value_is_taken(value: Any) -> None:
    assert make(("a",), a=value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("pay", "names no argument"),
        ("", "names no argument"),
        ("{order}", "names 'order'; its arguments are: a, b, opts"),
        ("{}", "names ''"),
        ("{0}", "names '0'"),
        ("{a!r}", "no format after 'a'"),
        ("{a:>10}", "no format after 'a'"),
        ("{a", "is no template"),
        ("a}", "is no template"),
        (("a", "order"), "names 'order'"),
        ((), "is no template, tuple of argument names or function"),
        (("a", 1), "is no template"),
        (["a"], "is no template"),
        (7, "is no template"),
    ],
    ids=str,
)
def test_key_that_can_not_be_meant_is_refused_at_the_decorator(spec: Any, words: str) -> None:
    with pytest.raises(JobDefinitionError, match=words) as caught:
        KeyMaker.of(spec, inspect.signature(some), "shop.pay")
    assert "shop.pay" in str(caught.value)


def test_braces_that_are_doubled_stand_for_themselves() -> None:
    assert identity_of("{{x}}:{a}", a=1).key == "{x}:1"


@pytest.mark.parametrize(
    "changed", [{"scope": "t"}, {"owner": "other"}, {"parts": ["x", 2]}], ids=str
)
def test_identity_covers_tenant_owner_and_parts(changed: dict[str, Any]) -> None:
    base: dict[str, Any] = {"scope": "", "owner": "job", "parts": ["x", 1], "text": "x1"}
    assert keys.identity(**base).key_hash != keys.identity(**base | changed).key_hash


def test_identity_of_scheme_1_is_what_it_has_always_been() -> None:
    """Rows of an earlier release must be found: another value here needs another SCHEME."""
    identity = keys.identity(scope="t", owner="shop.pay", parts=["pay:", 7], text="pay:7")
    assert keys.SCHEME == 1
    assert identity.key_hash == keys.digest('[1,"t","shop.pay",["pay:",7]]')
    assert identity.key_hash == "554a8483393a400b7fd0beb15c01ff979b6c34ea8990940c290376dd42edc058"


def test_text_of_a_key_is_cut_while_its_hash_covers_all() -> None:
    one = identity_of("{a}", a="x" * 10_000)
    other = identity_of("{a}", a="x" * 9_999 + "y")
    assert one.key == other.key
    assert len(one.key) == 200
    assert one.key.endswith("…")
    assert one.key_hash != other.key_hash
    assert len(one.key_hash) == 64


@pytest.mark.parametrize("text", ["\u202e", "\n", "\x1b[0m", "\u200f", "\ufeff"], ids=ascii)
def test_text_of_a_key_shows_what_would_hide(text: str) -> None:
    identity = identity_of("{a}", a=f"a{text}b")
    assert identity.key.isprintable()
    assert text not in identity.key


@pytest.mark.parametrize("text", ["\U0001f600", "שלום", "é", "e\u0301", "日本"], ids=ascii)
def test_text_of_a_key_keeps_letters_of_all_scripts(text: str) -> None:
    assert identity_of("{a}", a=text).key == text


# ---- S-011: one call, one key, however it is written

CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {"opts": {"x": {"p": 1, "q": 2}, "y": 2}}),
    ((), {"a": 1, "opts": {"y": 2, "x": {"q": 2, "p": 1}}}),
    ((1, 1), {"opts": {"x": {"p": 1, "q": 2}, "y": 2}}),
    ((), {"opts": {"y": 2, "x": {"p": 1, "q": 2}}, "b": 1, "a": 1}),
]


@registry.job(key=("a", "b", "opts"), unique_for=None)
def written(a: Any, b: Any = 1, opts: Any = "none") -> None:
    """Take each argument in any way."""


def stored() -> list[tuple[str, str, str]]:
    calls = [written.call_of(written.bind(args, kwargs), unkeyed="") for args, kwargs in CALLS]
    return [(c.key_hash, c.args, c.fingerprint) for c in calls]


def test_call_has_one_key_and_one_text_however_it_is_written() -> None:
    assert len(set(stored())) == 1


@pytest.mark.large
def test_call_has_the_same_key_in_a_process_with_another_hash_seed() -> None:
    code = "import django; django.setup()\nfrom tests import test_keys\nprint(test_keys.stored())"
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "DJANGO_SETTINGS_MODULE": "tests.settings"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == str(stored())


def test_call_with_a_dict_in_the_place_of_another_argument_is_other_work() -> None:
    one = written.call_of(written.bind((1, {"b": 2}), {}), unkeyed="")
    other = written.call_of(written.bind((1,), {"b": 2}), unkeyed="")
    assert one.key_hash != other.key_hash


def test_calls_without_a_key_differ_by_what_they_are_given() -> None:
    @registry.job(key=None, name="tests.keyless")
    def keyless(*, a: int) -> None: ...

    try:
        one, other = (keyless.call_of({"a": 1}, unkeyed=text) for text in ("x", "y"))
        assert one.key_hash != other.key_hash
        assert one.key == other.key == ""
    finally:
        registry.forget("tests.keyless")


def test_calls_of_two_jobs_in_one_namespace_are_the_same_work() -> None:
    @registry.job(key="{a}", unique_for=None, name="tests.one", namespace="ours")
    def one(*, a: int) -> None: ...

    @registry.job(key="{a}", unique_for=None, name="tests.two", namespace="ours")
    def two(*, a: int) -> None: ...

    @registry.job(key="{a}", unique_for=None, name="tests.three")
    def three(*, a: int) -> None: ...

    try:
        hashes = [j.call_of({"a": 1}, unkeyed="").key_hash for j in (one, two, three)]
        assert hashes[0] == hashes[1] != hashes[2]
    finally:
        for name in ("tests.one", "tests.two", "tests.three"):
            registry.forget(name)


@pytest.mark.parametrize("scope", [None, ""])
def test_call_without_its_tenant_is_refused(scope: Any) -> None:
    with pytest.raises(KeyValueError, match="names the tenant"):
        keys.scope_of(scope, "tenant_id")


def test_tenant_may_be_a_number_and_is_text_in_the_row() -> None:
    assert keys.scope_of(7, "tenant_id") == "7"
