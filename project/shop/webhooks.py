"""
What the payment provider sends: signed JSON, at least once, in any order.

The header X-Signature carries the HMAC-SHA256 of the body in hex. Message ids are not
looked at: a redelivery has a new one. What identifies the work is the payment.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import validate_email

MAX_BODY_BYTES = 16 * 1024
PAYMENT_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
AMOUNT = re.compile(r"[0-9]{1,7}(\.[0-9]{1,2})?")


class Malformed(Exception):
    """Signed by the provider, but not an event we understand; the message says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaymentAuthorized:
    payment_id: str
    amount: Decimal
    email: str


def sign(body: bytes, secret: str) -> str:
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


def is_genuine(body: bytes, signature: str, secret: str) -> bool:
    # Compared as bytes: compare_digest refuses text that is not ASCII.
    return hmac.compare_digest(sign(body, secret).encode(), signature.encode())


def parse(body: bytes) -> PaymentAuthorized:
    """Read one event or raise Malformed."""
    if len(body) > MAX_BODY_BYTES:
        raise Malformed(f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        event = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Malformed("the body is not JSON") from error
    if not isinstance(event, dict) or event.get("type") != "payment.authorized":
        raise Malformed("the body is not a payment.authorized event")
    return PaymentAuthorized(
        payment_id=_text(event, "payment_id", PAYMENT_ID),
        amount=_amount(event),
        email=_email(event),
    )


def _text(event: dict[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = event.get(name)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise Malformed(f"{name} must be text like {pattern.pattern}")
    return value


def _amount(event: dict[str, Any]) -> Decimal:
    try:
        amount = Decimal(_text(event, "amount", AMOUNT))
    except InvalidOperation as error:
        raise Malformed("amount is not a number") from error
    if not amount:
        raise Malformed("amount must be more than 0")
    return amount


def _email(event: dict[str, Any]) -> str:
    email = event.get("email")
    try:
        validate_email(email)
    except ValidationError as error:
        raise Malformed("email is not an address") from error
    return str(email)
