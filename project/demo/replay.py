"""
The payment provider and the shoppers: what comes to the shop over HTTP, and what it answers.
"""

from __future__ import annotations

import html
import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode, urlsplit

from project.demo import plan
from project.record_deliveries import FIXTURE, Delivery
from project.shop.webhooks import sign

EXPECTED_STATUS = {
    "payment": HTTPStatus.ACCEPTED,
    "mismatch": HTTPStatus.CONFLICT,
    "malformed": HTTPStatus.BAD_REQUEST,
    "forged": HTTPStatus.UNAUTHORIZED,
}
ANSWER_WITHIN_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the shop said to one delivery or click. Status 0: nothing, after all tries."""

    origin: str
    payment_id: str
    expected: int
    status: int
    created: bool = False

    @property
    def verdict(self) -> str:
        match self.status:
            case HTTPStatus.ACCEPTED | HTTPStatus.FOUND:
                return "accepted" if self.created else "duplicates"
            case HTTPStatus.CONFLICT:
                return "mismatches"
            case HTTPStatus.BAD_REQUEST | HTTPStatus.UNAUTHORIZED:
                return "rejected"
        return "failed"

    @property
    def placed(self) -> bool:
        return self.verdict in ("accepted", "duplicates")


def recorded_deliveries() -> list[Delivery]:
    lines = FIXTURE.read_text(encoding="utf-8").splitlines()
    return [Delivery(**json.loads(line)) for line in lines]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """Replays the recorded stream, each delivery at its time."""

    shop_url: str
    secret: str
    answers: list[Answer]
    stop: threading.Event

    def replay(self, deliveries: list[Delivery]) -> None:
        started = time.monotonic()
        with ThreadPoolExecutor(plan.CLIENTS) as clients:
            sent = []
            for delivery in deliveries:
                due = started + delivery.at_ms / 1000
                if self.stop.wait(max(0.0, due - time.monotonic())):
                    break
                sent.append(clients.submit(self._send, delivery))
        for one in sent:
            one.result()

    def _send(self, delivery: Delivery) -> None:
        body = delivery.body.encode()
        headers = {"Content-Type": "application/json", **self._signature(delivery, body)}
        status, _, content = insist(self.shop_url, "POST", "/webhooks/payments/", body, headers)
        placed = status == HTTPStatus.ACCEPTED
        self.answers.append(
            Answer(
                origin="webhook",
                payment_id=_payment_id(delivery) if delivery.expect == "payment" else "",
                expected=EXPECTED_STATUS[delivery.expect],
                status=status,
                created=placed and json.loads(content)["created"],
            )
        )

    def _signature(self, delivery: Delivery, body: bytes) -> dict[str, str]:
        match delivery.signature:
            case "valid":
                return {"X-Signature": sign(body, self.secret)}
            case "wrong_key":
                return {"X-Signature": sign(body, "guessed")}
            case "other_body":
                return {"X-Signature": sign(body + b" ", self.secret)}
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shoppers:
    """Double-click the Buy button, each on a page of their own."""

    shop_url: str
    answers: list[Answer]
    stop: threading.Event

    def shop(self, within_seconds: float) -> None:
        """Spread the shoppers over the time of the stream."""
        with ThreadPoolExecutor(max_workers=2) as hands:
            for number in range(plan.SHOPPERS):
                if self.stop.wait(within_seconds / plan.SHOPPERS):
                    break
                page = self._open_page()
                for click in [hands.submit(self._click, page, quantity=1) for _ in range(2)]:
                    click.result()
                if number == 0:  # goes back, orders another quantity from the same page
                    self._click(page, quantity=2, expected=HTTPStatus.CONFLICT)

    def _open_page(self) -> dict[str, str]:
        _, headers, content = insist(self.shop_url, "GET", "/")
        fields = dict(_hidden_fields(content.decode()))
        return {**fields, "cookie": headers["Set-Cookie"].partition(";")[0]}

    def _click(
        self, page: dict[str, str], *, quantity: int, expected: int = HTTPStatus.FOUND
    ) -> None:
        fields = {
            "csrfmiddlewaretoken": page["csrfmiddlewaretoken"],
            "token": page["token"],
            "quantity": str(quantity),
            "email": "shopper@example.com",
        }
        headers = {
            "Content-Type": "application/x-www-form-urlencoded",
            "Cookie": page["cookie"],
        }
        body = urlencode(fields).encode()
        status, answered, _ = insist(self.shop_url, "POST", "/buy/", body, headers)
        self.answers.append(
            Answer(
                origin="button",
                payment_id=page["token"].partition(":")[0],
                expected=expected,
                status=status,
                created="again" not in answered.get("Location", ""),
            )
        )


Reply = tuple[int, dict[str, str], bytes]
"""Status, headers, content."""


def insist(
    server: str, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> Reply:
    """Send a request again until it is answered, and not by a 5xx."""
    for _ in range(plan.SEND_TRIES):
        reply = exchange(server, method, path, body, headers)
        if 0 < reply[0] < HTTPStatus.INTERNAL_SERVER_ERROR:
            break
        time.sleep(plan.SEND_AGAIN_AFTER_SECONDS)
    return reply


def exchange(
    server: str, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> Reply:
    """Send one request; status 0 if the server did not answer. Redirects are not followed."""
    connection = http.client.HTTPConnection(urlsplit(server).netloc, timeout=ANSWER_WITHIN_SECONDS)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        headers_in = dict(answer.getheaders())
        if "Content-Length" not in headers_in:
            # The server was killed while it wrote the headers, which http.client takes as their
            # end; all of ours send a length.
            return 0, {}, b""
        return answer.status, headers_in, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, {}, b""
    finally:
        connection.close()


def _payment_id(delivery: Delivery) -> str:
    event: dict[str, Any] = json.loads(delivery.body)
    return str(event["payment_id"])


def _hidden_fields(page: str) -> Iterator[tuple[str, str]]:
    for name, value in re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', page):
        yield name, html.unescape(value)
