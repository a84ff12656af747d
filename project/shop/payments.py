"""
The payment service, as the shop calls it.

The service remembers each charge it gets and has no idea of idempotency: asked twice to
charge, it charges twice. What it can do is tell what it has charged for a reference.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, TypedDict
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from django.conf import settings

ANSWER_WITHIN_SECONDS = 10


class Charge(TypedDict):
    id: str
    reference: str
    order: str
    amount: str


class PaymentServiceDown(Exception):
    """No usable answer; whether a charge was made is unknown, so ask before charging again."""


def find_charge(reference: str) -> Charge | None:
    """Return the first charge the service has recorded for this reference."""
    found = _call(f"/charges?{urlencode({'reference': reference})}")
    charges: list[Charge] = found["charges"]
    return charges[0] if charges else None


def make_charge(*, reference: str, order: str, amount: str) -> Charge:
    """Charge the card. Calling this twice charges twice."""
    body = {"reference": reference, "order": order, "amount": amount}
    made: Charge = _call("/charges", json.dumps(body).encode())
    return made


def _call(path: str, body: bytes | None = None) -> Any:
    request = Request(
        settings.PAYMENT_SERVICE_URL + path,
        data=body,
        headers={"Content-Type": "application/json"},
    )
    try:
        with urlopen(request, timeout=ANSWER_WITHIN_SECONDS) as answer:
            return json.load(answer)
    except HTTPError as error:
        status = HTTPStatus(error.code)
        error.close()
        raise PaymentServiceDown(f"{path} answered {status}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise PaymentServiceDown(f"{path}: {error}") from error
