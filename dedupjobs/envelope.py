"""
An event as it travels: in a Redis stream, or in the body of a webhook.

    stream    entry of FIELDS; data: the payload as JSON
    webhook   POST {"type": name, "timestamp": ISO 8601, "key": key, "data": payload}, signed as the
              Standard Webhooks specification 1.0 has it: webhook-id, webhook-timestamp (Unix
              seconds), webhook-signature ("v1," and the base64 of HMAC-SHA256 over
              "id.timestamp.body", one for each secret, parted by spaces)
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dedupjobs import routes
from dedupjobs.exceptions import EventError, SignatureError

FIELDS = ("id", "name", "key", "ordered", "at", "traceparent", "data")
LONGEST_ID = 100
LONGEST_KEY = 200

_ID = re.compile(r"[\x21-\x7e]{1,100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """
    Something that happened. ``id`` is the same however often it is delivered; ``body``: the
    payload as JSON text; ``at``: when it was published, in UTC.
    """

    id: str
    name: str
    body: str
    key: str = ""
    ordered: bool = False
    at: datetime | None = None
    traceparent: str = ""

    @property
    def payload(self) -> Any:
        """What was published."""
        return json.loads(self.body)

    def words(self) -> tuple[str, ...]:
        """Return the values of FIELDS."""
        at = self.at.isoformat() if self.at else ""
        flag = "1" if self.ordered else ""
        return (self.id, self.name, self.key, flag, at, self.traceparent, self.body)

    def text(self) -> str:
        """Return the body of a webhook."""
        at = json.dumps(self.at.isoformat() if self.at else "")
        key, name = json.dumps(self.key), json.dumps(self.name)
        return f'{{"type":{name},"timestamp":{at},"key":{key},"data":{self.body}}}'


def of_fields(fields: Mapping[str, str]) -> Event:
    """Return the event of a stream's entry; EventError says what is wrong with it."""
    return _made(
        id=fields.get("id", ""),
        name=fields.get("name", ""),
        body=fields.get("data", ""),
        key=fields.get("key", ""),
        at=fields.get("at", ""),
        ordered=bool(fields.get("ordered")),
        traceparent=fields.get("traceparent", ""),
    )


def of_text(event_id: str, text: str) -> Event:
    """Return the event of a webhook's body; EventError says what is wrong with it."""
    found = _loaded(text)
    if not isinstance(found, dict) or "data" not in found:
        raise EventError('The body is no event: it must be a JSON object with "type" and "data".')
    return _made(
        id=event_id,
        name=found.get("type", ""),
        body=json.dumps(found["data"], ensure_ascii=False, separators=(",", ":")),
        key=found.get("key", ""),
        at=found.get("timestamp", ""),
    )


def _made(*, id: str, name: Any, body: str, key: Any, at: Any, **more: Any) -> Event:
    if not _ID.fullmatch(id):
        raise EventError(f"The event's id is {id[:100]!r}; it must be 1 to 100 visible characters.")
    if not routes.is_event_name(name):
        raise EventError(f"The event's name is {str(name)[:100]!r}; {GRAMMAR}")
    if not isinstance(key, str) or len(key) > LONGEST_KEY:
        raise EventError(f"The event's key is longer than {LONGEST_KEY} characters, or no text.")
    _loaded(body)
    return Event(id=id, name=name, body=body, key=key, at=_moment(at), **more)


GRAMMAR = (
    "it must be words of lower case letters, digits, _ and -, with dots between them, such as "
    "'order.paid', 100 characters at most."
)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EventError(f"The payload is no JSON: {type(error).__name__}.") from error


def _moment(text: Any) -> datetime | None:
    try:
        at = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)


# ---- signatures


def headers(event_id: str, text: str, *, now: float, secrets: Iterable[str]) -> dict[str, str]:
    """Return the headers that say who sends ``text``, and when; ``now``: Unix seconds."""
    stamp = str(int(now))
    signed = [_signature(secret, event_id, stamp, text.encode()) for secret in secrets]
    return {
        "webhook-id": event_id,
        "webhook-timestamp": stamp,
        "webhook-signature": " ".join(signed),
    }


def verify(
    given: Mapping[str, str], text: bytes, *, now: float, secrets: Iterable[str], tolerance: float
) -> str:
    """
    Return the event's id, if one of the secrets signed these bytes within ``tolerance`` seconds.

    SignatureError says what is wrong, and nothing that would help to forge one.
    """
    event_id, stamp = given.get("webhook-id", ""), given.get("webhook-timestamp", "")
    signatures = given.get("webhook-signature", "")
    if not (event_id and stamp and signatures):
        names = "webhook-id, webhook-timestamp and webhook-signature"
        raise SignatureError(f"The headers {names} are needed (standardwebhooks.com).")
    if not (stamp.isascii() and stamp.isdigit() and abs(now - int(stamp[:12])) <= tolerance):
        raise SignatureError(
            f"webhook-timestamp is not within {tolerance:g} s of now: an old message that somebody "
            "sends again, or one of the two clocks is wrong."
        )
    wanted = [_signature(secret, event_id, stamp, text).encode() for secret in secrets]
    offered = signatures.encode(errors="replace").split(b" ")[:10]
    # All are compared, whatever comes out: the time that it takes tells nothing.
    same = [hmac.compare_digest(one, other) for one in wanted for other in offered]
    if not any(same):
        raise SignatureError("No secret of this consumer made webhook-signature of these bytes.")
    return event_id


def _signature(secret: str, event_id: str, stamp: str, text: bytes) -> str:
    message = f"{event_id}.{stamp}.".encode(errors="replace") + text
    digest = hmac.new(routes.secret_bytes(secret), message, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"
