"""
Arguments as JSON text, and the identity that is built from them.

Values that JSON lacks travel as ``{"$": kind, "v": value}`` and come back as the same type:
Decimal, aware datetime, date, time, timedelta, UUID, Enum, dataclass, bytes, tuple. Canonical
text (sorted keys, no spaces, instants in UTC) is what gets hashed, so that neither the order of
keywords or dict entries nor PYTHONHASHSEED matters.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from string import Formatter
from typing import Any
from uuid import UUID

from dedupjobs.exceptions import ArgumentError, JobDefinitionError, KeyValueError

SCHEME = 1  # enters every key's hash; a new way to build keys gets a new number
TAG = "$"
LONGEST_INTEGER = 4_096  # bits; Python prints no more than some 14,000
SHOWN = 200  # characters of a key that are displayed; the hash covers all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The hash that is unique in the table, and its readable form."""

    key_hash: str
    key: str


@dataclass(frozen=True, slots=True)
class NotKept:
    """Stands where a result could not be stored; ``reason`` is a sentence's end."""

    reason: str


# ---- arguments


def encode(values: Mapping[str, Any]) -> str:
    """Return the arguments as JSON text; ArgumentError names the first that does not fit."""
    plain = {name: _flat(value, name, exact=True) for name, value in values.items()}
    return _dump(_marked(plain))


def encode_value(value: Any) -> str:
    """Return one value as JSON text."""
    return _dump(_flat(value, "result", exact=True))


def encode_result(value: Any, *, limit: int) -> tuple[str, str]:
    """
    Return a result as JSON text, and a note if it can not be kept.

    A result that does not fit never turns finished work into a failure: its text then decodes
    to ``NotKept``. ``limit``: bytes.
    """
    try:
        text = encode_value(value)
        if len(text) <= limit:
            return text, ""
        reason = f"result was not stored: {len(text):,} bytes, MAX_RESULT is {limit:,}"
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        reason = f"result was not stored: a {kind} is not serialisable: {error}"
    return _dump({TAG: "not kept", "v": reason}), reason


def decode(text: str) -> Any:
    """Return what ``encode`` or ``encode_value`` was given."""
    return _revive(json.loads(text))


def canonical(value: Any, name: str) -> str:
    """Return the text that stands for ``value`` in keys and fingerprints."""
    return _dump(_flat(value, name, exact=False))


def digest(text: str) -> str:
    """Return the sha256 of ``text`` as 64 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(values: Mapping[str, Any], names: tuple[str, ...] | None) -> str:
    """Return the digest of the arguments in ``names``, or of all."""
    chosen = values if names is None else {name: values[name] for name in names}
    return digest(canonical(dict(chosen), "arguments"))


def differing(stored: str, given: str) -> tuple[str, ...]:
    """
    Return the names of arguments whose values differ between two encoded payloads.

    None of them where the stored one was pruned.
    """
    if not stored:
        return ()
    a, b = json.loads(stored), json.loads(given)
    return tuple(sorted(n for n in a.keys() | b.keys() if a.get(n, TAG) != b.get(n, TAG)))


_dump = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def _flat(value: Any, name: str, *, exact: bool) -> Any:
    """As ``_plain``, but a value without end is an ArgumentError."""
    try:
        return _plain(value, name, exact=exact)
    except RecursionError:
        raise ArgumentError(f"{name}: nested too deep, or it contains itself; flatten it") from None


def _plain(value: Any, name: str, *, exact: bool) -> Any:
    """Return ``value`` in JSON's own types; ``name`` is where it stands, for the error."""
    if value is None or isinstance(value, bool):
        return value
    if type(value) is str:
        return _text(value, name)
    if type(value) in (int, float):
        return _number(value, name)
    if type(value) is list:
        return [_plain(v, f"{name}[{i}]", exact=exact) for i, v in enumerate(value)]
    if type(value) is dict:
        return _plain_dict(value, name, exact=exact)
    return _tagged(value, name, exact=exact)


def _number(value: int | float, name: str) -> int | float:
    if isinstance(value, int) and value.bit_length() > LONGEST_INTEGER:
        bits = value.bit_length()
        raise ArgumentError(
            f"{name}: an integer of {bits:,} bits, {LONGEST_INTEGER:,} fit; pass bytes"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ArgumentError(f"{name}={value!r}: JSON has no NaN or infinity; pass None")
    return value


def _text(value: str, name: str) -> str:
    if "\x00" in value:
        raise ArgumentError(f"{name}: a NUL character can not be stored; remove it")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise ArgumentError(f"{name}: a lone surrogate is no text; pass bytes")
    return value


def _plain_dict(value: dict[Any, Any], name: str, *, exact: bool) -> Any:
    for key in value:
        if type(key) is not str:
            raise ArgumentError(
                f"{name}: dict key {key!r} is no string; JSON would change its type"
            )
        _text(key, name)
    return _marked({k: _plain(v, f"{name}[{k!r}]", exact=exact) for k, v in value.items()})


def _marked(plain: dict[str, Any]) -> dict[str, Any]:
    """Return ``plain``, in a "dict" wrapper if it looks like our notation."""
    return {TAG: "dict", "v": plain} if TAG in plain else plain


def _tagged(value: Any, name: str, *, exact: bool) -> Any:  # noqa: C901, PLR0911 - a table
    match value:
        case Enum():
            return {TAG: "enum", "t": _path(type(value)), "v": value.name}
        case datetime():
            if value.tzinfo is None:
                raise ArgumentError(f"{name}={value!r} has no time zone; pass an aware datetime")
            return {TAG: "datetime", "v": (value if exact else _in_utc(value, name)).isoformat()}
        case date():
            return {TAG: "date", "v": value.isoformat()}
        case time():
            return {TAG: "time", "v": value.replace(fold=0).isoformat(), "fold": value.fold}
        case timedelta():
            return {TAG: "timedelta", "v": [value.days, value.seconds, value.microseconds]}
        case Decimal():
            if not value.is_finite():
                raise ArgumentError(f"{name}={value!r}: only finite decimals can be stored")
            return {TAG: "decimal", "v": str(value)}
        case UUID():
            return {TAG: "uuid", "v": value.hex}
        case bytes():
            return {TAG: "bytes", "v": base64.b64encode(value).decode()}
        case tuple() if type(value) is tuple:
            items = [_plain(v, f"{name}[{i}]", exact=exact) for i, v in enumerate(value)]
            return {TAG: "tuple", "v": items}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        plain = {k: _plain(v, f"{name}.{k}", exact=exact) for k, v in fields.items()}
        return {TAG: "dataclass", "t": _path(type(value)), "v": plain}
    raise ArgumentError(f"{name}: {_refusal(value)}")


def _in_utc(value: datetime, name: str) -> datetime:
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ArgumentError(f"{name}={value!r} lies outside the calendar in UTC") from None


def _refusal(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if hasattr(value, "_meta") and hasattr(value, "pk"):
        return f"a model instance ({kind}) would be stale when the job runs; pass its pk"
    if isinstance(value, (set, frozenset)):
        return f"a {kind} has no order; pass a sorted list"
    if hasattr(value, "model") and hasattr(value, "query"):
        return f"a queryset ({kind}) can not be stored; pass a list of pks"
    return f"a {kind} can not be stored as JSON; pass plain values and look the rest up in the job"


def _path(kind: type) -> str:
    if "<locals>" in kind.__qualname__:
        raise ArgumentError(f"{kind.__qualname__} is local to a function; define it in a module")
    return f"{kind.__module__}:{kind.__qualname__}"


def _revive(plain: Any) -> Any:
    """
    Return the value that ``_plain`` was given, from the outside in.

    A dict that only looks like our notation stands in a "dict" wrapper, whose inside is not
    looked at as a tag: data from outside never becomes an object.
    """
    if isinstance(plain, list):
        return [_revive(v) for v in plain]
    if not isinstance(plain, dict):
        return plain
    kind = plain.get(TAG)
    if kind == "dict":
        return {k: _revive(v) for k, v in plain["v"].items()}
    if kind in _REVIVERS:
        return _REVIVERS[kind](plain)
    return {k: _revive(v) for k, v in plain.items()}


def _named_type(path: str, wanted: Callable[[type], bool]) -> type:
    # Only modules that are loaded already: stored text must never import code.
    module, _, qualname = path.partition(":")
    target: Any = sys.modules.get(module)
    for part in qualname.split("."):
        target = getattr(target, part, None)
    if not isinstance(target, type) or not wanted(target):
        raise ArgumentError(f"stored type {path!r} is not known in this process; import its module")
    return target


def _revive_enum(found: dict[str, Any]) -> Any:
    kind: Any = _named_type(found["t"], lambda t: issubclass(t, Enum))
    return kind[found["v"]]


def _revive_dataclass(found: dict[str, Any]) -> Any:
    fields = {name: _revive(value) for name, value in found["v"].items()}
    return _named_type(found["t"], dataclasses.is_dataclass)(**fields)


_REVIVERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "not kept": lambda f: NotKept(f["v"]),
    "enum": _revive_enum,
    "dataclass": _revive_dataclass,
    "datetime": lambda f: datetime.fromisoformat(f["v"]),
    "date": lambda f: date.fromisoformat(f["v"]),
    "time": lambda f: time.fromisoformat(f["v"]).replace(fold=f["fold"]),
    "timedelta": lambda f: timedelta(*f["v"]),
    "decimal": lambda f: Decimal(f["v"]),
    "uuid": lambda f: UUID(hex=f["v"]),
    "bytes": lambda f: base64.b64decode(f["v"]),
    "tuple": lambda f: tuple(_revive(v) for v in f["v"]),
}


# ---- keys


class Hidden(inspect.Parameter):
    """A parameter that callers do not give themselves: no key is made of it, no error shows it."""

    __slots__ = ()


def visible(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature without what is hidden."""
    shown = [p for p in signature.parameters.values() if not isinstance(p, Hidden)]
    return signature.replace(parameters=shown)


def scope_of(value: Any, name: str) -> str:
    """Return the tenant as text; ``name`` is the argument that names it, for the error."""
    if value is None or value == "":
        raise KeyValueError(f"{name}={value!r} names the tenant; without one, keys would mix")
    text = str(value)
    _text(text, name)
    if len(text) > SHOWN:
        raise ArgumentError(f"{name} names the tenant in {len(text)} characters; {SHOWN} fit")
    return text


def identity(*, scope: str, owner: str, parts: list[Any], text: str) -> Identity:
    """
    Return the identity of ``parts`` under a tenant (``scope``) and a job name or namespace.

    The hash covers sha256(JSON [scheme, scope, owner, parts]); ``text`` is only displayed.
    """
    shown = text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
    shown = shown if len(shown) <= SHOWN else shown[: SHOWN - 1] + "…"
    return Identity(key_hash=digest(_dump([SCHEME, scope, owner, parts])), key=shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMaker:
    """Turns bound arguments into the parts of a key and its readable text."""

    make: Callable[[Mapping[str, Any]], tuple[list[Any], str]]

    @classmethod
    def of(cls, spec: Any, signature: inspect.Signature, job: str) -> KeyMaker:
        """Return the maker for a template, a tuple of argument names, or a callable."""
        if isinstance(spec, str):
            return cls(make=_template(spec, signature, job))
        if isinstance(spec, tuple) and spec and all(isinstance(n, str) for n in spec):
            return cls(make=_names(spec, signature, job))
        if callable(spec):
            return cls(make=_function(spec))
        raise JobDefinitionError(
            f"{job}: key={spec!r} is no template, tuple of argument names or function. "
            "For a job without deduplication write key=None."
        )


def _template(
    template: str, signature: inspect.Signature, job: str
) -> Callable[[Mapping[str, Any]], tuple[list[Any], str]]:
    pieces = _pieces(template, signature, job)

    def make(values: Mapping[str, Any]) -> tuple[list[Any], str]:
        parts: list[Any] = []
        text = ""
        for literal, name in pieces:
            parts.append(literal)
            text += literal
            if name is not None:
                value, _ = Formatter().get_field(name, (), values)
                parts.append(_part(value, name))
                text += _shown(value)
        return parts, text

    return make


def text_template(
    template: str, signature: inspect.Signature, job: str, where: str
) -> Callable[[Mapping[str, Any]], str]:
    """Return the function that fills a template with bound arguments; it may name none."""
    pieces = _parsed(template, signature, job, where)

    def make(values: Mapping[str, Any]) -> str:
        return "".join(
            literal + ("" if name is None else _shown(Formatter().get_field(name, (), values)[0]))
            for literal, name in pieces
        )

    return make


def _pieces(template: str, signature: inspect.Signature, job: str) -> list[tuple[str, str | None]]:
    where = f"key={template!r}"
    pieces = _parsed(template, signature, job, where)
    if not any(name is not None for _, name in pieces):
        raise JobDefinitionError(
            f"{job}: {where} names no argument, so all calls would be the same work. Write an "
            "argument in braces, for example {order_id}."
        )
    return pieces


def _parsed(
    template: str, signature: inspect.Signature, job: str, where: str
) -> list[tuple[str, str | None]]:
    """Return the template as literals, each with the field behind it; refuse what can not be."""
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise JobDefinitionError(f"{job}: {where} is no template: {error}") from error
    for _, name, spec, conversion in pieces:
        if spec or conversion:
            raise JobDefinitionError(f"{job}: {where}: no format after {name!r} allowed")
        if name is not None:
            _known(name.split(".")[0].split("[")[0], signature, job, where)
    return [(literal, name) for literal, name, _, _ in pieces]


def _names(
    names: tuple[str, ...], signature: inspect.Signature, job: str
) -> Callable[[Mapping[str, Any]], tuple[list[Any], str]]:
    for name in names:
        _known(name, signature, job, f"key={names!r}")

    def make(values: Mapping[str, Any]) -> tuple[list[Any], str]:
        parts = [[name, _part(values[name], name)] for name in names]
        return parts, ", ".join(f"{name}={_shown(values[name])}" for name in names)

    return make


def _function(
    function: Callable[..., Any],
) -> Callable[[Mapping[str, Any]], tuple[list[Any], str]]:
    def make(values: Mapping[str, Any]) -> tuple[list[Any], str]:
        # A copy: a key function that changes its arguments must not change the job's.
        value = function(**decode(encode(values)))
        return [_part(value, "key()")], _shown(value)

    return make


def _known(name: str, signature: inspect.Signature, job: str, where: str) -> None:
    parameters = visible(signature).parameters
    if name not in parameters:
        known = ", ".join(parameters) or "none"
        raise JobDefinitionError(f"{job}: {where} names {name!r}; its arguments are: {known}")


def _part(value: Any, name: str) -> Any:
    if value is None or value == "":
        raise KeyValueError(
            f"{name}={value!r} stands in the key: calls without a value would all be the same "
            "work. Give it a value, or take it out of the key."
        )
    return _flat(value, name, exact=False)


def _shown(value: Any) -> str:
    return (
        value if isinstance(value, str) else str(value.name if isinstance(value, Enum) else value)
    )
