"""
Where events go to and come from: ``DEDUPJOBS["OUTBOX"]`` and ``DEDUPJOBS["INBOX"]``.

    "OUTBOX": {
        "TARGETS": {
            "orders": {"stream": "orders"},
            "partner": {"webhook": "https://partner.example/events", "secrets": ["whsec_…"]},
            "audit": {"call": "shop.audit.note"},
            "here": {"signal": True},
        },
        "ROUTES": {"order.*": ["orders", "partner"], "*": "audit"},
    }
    "INBOX": {"CONSUMERS": {"ledger": {"stream": "orders"}}}
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from dedupjobs.thresholds import checked, count, flag, hint, is_address, plain, problems, seconds

LOOPBACK = ("localhost", "127.0.0.1", "::1")
LONGEST_NAME = 100
REDIS = ("redis", "rediss", "unix")  # schemes
SECRET_PREFIX = "whsec_"  # noqa: S105 - as Standard Webhooks writes a secret: its base64 follows
SHORTEST_SECRET = 24  # bytes
KINDS = ("stream", "webhook", "call", "signal")

_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_PATTERN = re.compile(r"([a-z0-9_-]+\.)*(\*|[a-z0-9_-]+)")
_LABEL = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def is_event_name(name: Any) -> bool:
    """Whether this names an event: words of lower case letters, digits, _ and -, with dots."""
    return isinstance(name, str) and len(name) <= LONGEST_NAME and bool(_NAME.fullmatch(name))


def is_pattern(pattern: Any) -> bool:
    """Whether this names one event, or with * as its last word all below it."""
    return isinstance(pattern, str) and bool(_PATTERN.fullmatch(pattern))


def matches(pattern: str, name: str) -> bool:
    """Whether an event of this name is meant."""
    if pattern.endswith("*"):
        return name.startswith(pattern[:-1])
    return pattern == name


def secret_bytes(secret: str) -> bytes:
    """Return what is signed with; ``whsec_`` stands before base64. ValueError: not base64."""
    if not secret.startswith(SECRET_PREFIX):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError(f"{error}: no base64") from error


def _is_secret(value: Any) -> bool:
    try:
        return isinstance(value, str) and len(secret_bytes(value)) >= SHORTEST_SECRET
    except ValueError:
        return False


def _are_secrets(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_secret, value))


def _is_text(value: Any) -> bool:
    return value is None or (isinstance(value, str) and 0 < len(value) <= 500)  # noqa: PLR2004


def _is_redis(value: Any) -> bool:
    if value is None:
        return True
    try:
        parts = urlsplit(value)
        return parts.scheme in REDIS and parts.port != 0
    except (ValueError, AttributeError, TypeError):
        return False


def _redis() -> Any:
    return checked(None, _is_redis, "give the address of a Redis, redis://host:port/db.")


def _text(words: str) -> Any:
    return checked(None, _is_text, words)


def _secrets() -> Any:
    """Return a field whose mistakes are told without its value."""
    return checked((), lambda _: True, "")


def _choice(*words: str) -> Any:
    return checked(words[0], lambda v: v in words, f"give one of {', '.join(words)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Who gets events: a stream, a webhook, a function or the receivers of a signal."""

    stream: str | None = _text("name the Redis stream.")
    cache: str | None = _text("name an alias of CACHES that is a django-redis one.")
    url: str | None = _redis()
    maxlen: int = count(1_000_000)  # entries that a stream keeps, about
    webhook: str | None = checked(None, is_address, "give an https address.")
    secrets: tuple[str, ...] = _secrets()  # all sign: the new one and, for a while, the old one
    allow_http: bool = flag(False)  # to other machines, too: who listens reads the payload
    timeout: float = seconds(10.0)  # for one request, as a whole
    call: str | None = _text("give the dotted path of a function that takes an event.")
    signal: bool = flag(False)  # dedupjobs.signals.event_published
    attempts: int = count(20)  # failures after which a person is asked
    on_dead: str = _choice("wait", "go_on")  # what later events of its key do

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return next((kind for kind in KINDS if getattr(self, kind)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """Who takes events in: from a stream, or from a webhook."""

    stream: str | None = _text("name the Redis stream.")
    cache: str | None = _text("name an alias of CACHES that is a django-redis one.")
    url: str | None = _redis()
    secrets: tuple[str, ...] = _secrets()  # any of them may have signed
    tolerance: float = seconds(300.0)  # by which a signed moment may differ from now
    ordered: bool = flag(False)  # later events of a key wait for those that failed
    attempts: int = count(8)  # failures after which a person is asked
    claim_after: float = seconds(60.0)  # that a process may keep a message before others take it


@dataclass(frozen=True, slots=True, kw_only=True)
class Outbox:
    """The targets by name, and which of them get an event."""

    targets: Mapping[str, Target] = field(default_factory=dict)
    routes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    retain: float = 3 * 86_400.0  # seconds that a delivered event is kept, to be sent again

    def targets_of(self, name: str) -> tuple[str, ...]:
        """Return the targets that an event goes to: those of all patterns that mean it."""
        if not self.routes:
            return tuple(self.targets)
        found = (t for p, targets in self.routes.items() if matches(p, name) for t in targets)
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inbox:
    """The consumers by name."""

    consumers: Mapping[str, Consumer] = field(default_factory=dict)
    retain: float = 30 * 86_400.0  # seconds that a mark keeps an event from being applied again


def outbox(given: Mapping[str, Any]) -> Outbox:
    """Return what ``DEDUPJOBS["OUTBOX"]`` means."""
    routes = {p: _listed(names) for p, names in given.get("ROUTES", {}).items()}
    return Outbox(
        targets={name: _made(Target, one) for name, one in given.get("TARGETS", {}).items()},
        routes=routes,
        retain=plain(given.get("RETAIN", Outbox().retain)),
    )


def inbox(given: Mapping[str, Any]) -> Inbox:
    """Return what ``DEDUPJOBS["INBOX"]`` means."""
    return Inbox(
        consumers={n: _made(Consumer, one) for n, one in given.get("CONSUMERS", {}).items()},
        retain=plain(given.get("RETAIN", Inbox().retain)),
    )


def _listed(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _made(kind: Any, given: Mapping[str, Any]) -> Any:
    lists = {n: tuple(v) if isinstance(v, list) else plain(v) for n, v in given.items()}
    return kind(**lists)


# ---- mistakes


def outbox_problems(given: Any, name: str) -> Iterator[str]:
    """Yield a sentence per mistake in a setting called ``name``, each with its cure."""
    yield from _outer_problems(given, name, ("TARGETS", "ROUTES", "RETAIN"))
    targets = _inner(given, "TARGETS")
    for label, one in targets.items():
        where = f"{name}['TARGETS'][{label!r}]"
        mistakes = list(_label_problems(label, where)) or list(
            problems(Target, one, where, one="option")
        )
        yield from mistakes or _target_problems(_made(Target, one), where)
    for pattern, names in _inner(given, "ROUTES").items():
        yield from _route_problems(pattern, names, targets, f"{name}['ROUTES'][{pattern!r}]")


def inbox_problems(given: Any, name: str) -> Iterator[str]:
    """Yield a sentence per mistake in a setting called ``name``, each with its cure."""
    yield from _outer_problems(given, name, ("CONSUMERS", "RETAIN"))
    for label, one in _inner(given, "CONSUMERS").items():
        where = f"{name}['CONSUMERS'][{label!r}]"
        mistakes = list(_label_problems(label, where)) or list(
            problems(Consumer, one, where, one="option")
        )
        yield from mistakes or _consumer_problems(_made(Consumer, one), where)


def _inner(given: Any, part: str) -> Mapping[str, Any]:
    found = given.get(part) if isinstance(given, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _outer_problems(given: Any, name: str, known: tuple[str, ...]) -> Iterator[str]:
    if not isinstance(given, Mapping):
        yield f"{name} is {given!r}; it must be a dict."
        return
    for part, value in given.items():
        if part not in known:
            yield f"{name}[{part!r}] is not a setting. {hint(part, known)}"
        elif part == "RETAIN":
            if not _is_span(value):
                yield f"{name}['RETAIN'] = {value!r}: give seconds from 1 to a year."
        elif not isinstance(value, Mapping):
            yield f"{name}[{part!r}] is {value!r}; it must be a dict."


def _is_span(value: Any) -> bool:
    number = plain(value)
    return type(number) in (int, float) and 1 <= number <= 366 * 86_400


def _label_problems(label: Any, where: str) -> Iterator[str]:
    if not (isinstance(label, str) and _LABEL.fullmatch(label)):
        yield f"{where}: the name {label!r} must be 1 to 100 letters, digits, _, - and dots."


def _target_problems(target: Target, where: str) -> Iterator[str]:
    kinds = [kind for kind in KINDS if getattr(target, kind)]
    if len(kinds) != 1:
        yield f"{where} says {', '.join(kinds) or 'none'} of {', '.join(KINDS)}; give exactly one."
        return
    if target.webhook:
        parts = urlsplit(target.webhook)
        if parts.scheme == "http" and parts.hostname not in LOOPBACK and not target.allow_http:
            yield (
                f"{where}: {target.webhook!r} is not encrypted, and whoever is on the way reads "
                "the payload. Use https, or set allow_http=True."
            )
        if not target.secrets:
            yield f"{where} has no secrets, so nobody can tell who sent an event. Give 'secrets'."
    elif target.secrets:
        yield f"{where} has secrets, which only a webhook uses. Remove them."
    yield from _common_problems(target, where)


def _consumer_problems(consumer: Consumer, where: str) -> Iterator[str]:
    if not consumer.stream and not consumer.secrets:
        yield f"{where} says neither whose 'stream' it reads nor by which 'secrets' it is called."
    yield from _common_problems(consumer, where)


def _common_problems(one: Target | Consumer, where: str) -> Iterator[str]:
    if not _are_secrets(one.secrets):
        yield (
            f"{where}: 'secrets' is no list of secrets; give each as \"{SECRET_PREFIX}\" and the "
            "base64 of 24 to 64 random bytes."
        )
    if one.cache and one.url:
        yield f"{where} has both 'cache' and 'url'; a stream is on one Redis. Remove one of them."


def _route_problems(
    pattern: Any, names: Any, targets: Mapping[str, Any], where: str
) -> Iterator[str]:
    if not is_pattern(pattern):
        yield f"{where}: give a name such as 'order.paid', or 'order.*', or '*'."
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, (list, tuple)):
        yield f"{where} is {names!r}; give the name of a target, or a list of names."
        return
    for name in listed:
        if name not in targets:
            yield f"{where} names {name!r}, which TARGETS lacks. {hint(name, targets)}"
