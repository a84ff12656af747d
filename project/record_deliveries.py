"""
Write project/fixtures/deliveries.jsonl: the recorded webhook stream that the demo replays.

    python -m project.record_deliveries

One line a delivery, in the order of arrival:
    at_ms      when it arrives, counted from the start of the stream
    body       what is sent, as text
    signature  "valid", "wrong_key", "missing", or "other_body" (genuine, but of another body)
    expect     "payment" (202), "mismatch" (409), "malformed" (400) or "forged" (401)

The same seed gives the same file. A payment provider delivers at least once, in any order,
with a new message id each time; and not everything that arrives comes from the provider.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

FIXTURE = Path(__file__).parent / "fixtures" / "deliveries.jsonl"
SEED = 20250401
STREAM_MS = 20_000

PAYMENTS = 120
REDELIVERED = 50  # payments of which one or two copies follow seconds later
BURSTS = 14  # payments of which several copies arrive at the same instant
OVERTAKEN = 16  # payments whose second message arrives before the first
OTHER_AMOUNT = 20
MALFORMED = 20
FORGED = 20

# A delivery with another amount must lose against the first one, also on a slow machine.
OTHER_AMOUNT_AFTER_MS = 3_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    at_ms: int
    body: str
    signature: str
    expect: str


@dataclass(slots=True)
class Recorder:
    chance: random.Random
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    deliveries: list[Delivery] = field(default_factory=list)

    def record(
        self, at_ms: float, body: str, expect: str = "payment", signature: str = "valid"
    ) -> None:
        delivery = Delivery(at_ms=int(at_ms), body=body, signature=signature, expect=expect)
        self.deliveries.append(delivery)

    def message(self, payment: dict[str, Any], **changes: Any) -> str:
        """A new message about a payment: same content, new message id."""
        return json.dumps({"message_id": f"msg_{next(self.numbers):05d}", **payment, **changes})


def recorded(seed: int = SEED) -> list[Delivery]:
    recorder = Recorder(random.Random(seed))
    payments = [_payment(recorder.chance, number) for number in range(1, PAYMENTS + 1)]
    starts = sorted(recorder.chance.uniform(0, STREAM_MS * 0.8) for _ in payments)
    timed = list(zip(payments, starts, strict=True))
    _payments_and_their_copies(recorder, timed)
    _other_amounts(recorder, timed)
    _malformed(recorder)
    _forged(recorder, payments)
    return sorted(recorder.deliveries, key=lambda delivery: delivery.at_ms)


def _payment(chance: random.Random, number: int) -> dict[str, Any]:
    return {
        "type": "payment.authorized",
        "payment_id": f"pay_{number:04d}",
        "amount": f"{chance.randint(500, 20_000) / 100:.2f}",
        "email": f"customer{number}@example.com",
    }


def _payments_and_their_copies(
    recorder: Recorder, timed: list[tuple[dict[str, Any], float]]
) -> None:
    shuffled = recorder.chance.sample(timed, len(timed))
    redelivered = shuffled[:REDELIVERED]
    bursts = shuffled[REDELIVERED : REDELIVERED + BURSTS]
    overtaken = shuffled[REDELIVERED + BURSTS :][:OVERTAKEN]
    for payment, start in timed:
        first = recorder.message(payment)
        if (payment, start) in overtaken:
            recorder.record(start, recorder.message(payment))
            recorder.record(start + recorder.chance.uniform(5, 400), first)
        else:
            recorder.record(start, first)
        if (payment, start) in redelivered:
            for copy in range(1, recorder.chance.randint(1, 2) + 1):
                later = start + copy * recorder.chance.uniform(200, 2_500)
                recorder.record(later, recorder.message(payment))
        if (payment, start) in bursts:
            for _ in range(recorder.chance.randint(3, 5)):
                recorder.record(start, recorder.message(payment))


def _other_amounts(recorder: Recorder, timed: list[tuple[dict[str, Any], float]]) -> None:
    for payment, start in recorder.chance.sample(timed, OTHER_AMOUNT):
        other = recorder.message(payment, amount=f"{float(payment['amount']) + 1:.2f}")
        later = start + OTHER_AMOUNT_AFTER_MS + recorder.chance.uniform(0, 1_000)
        recorder.record(later, other, expect="mismatch")


def _malformed(recorder: Recorder) -> None:
    for number in range(MALFORMED):
        payment = _payment(recorder.chance, 9_000 + number)
        broken = [
            "",
            "not JSON at all",
            recorder.message(payment)[:-9],
            json.dumps([recorder.message(payment)]),
            recorder.message(payment, type="payment.imagined"),
            recorder.message(payment, amount="-5.00"),
            recorder.message(payment, amount="0.00"),
            recorder.message(payment, amount=float("nan")),
            recorder.message(payment, amount=12.5),
            recorder.message(payment, payment_id=None),
            recorder.message(payment, payment_id="pay_\x00"),
            recorder.message(payment, payment_id="p" * 65),
            recorder.message(payment, email="nobody"),
        ]
        at_ms = recorder.chance.uniform(0, STREAM_MS)
        recorder.record(at_ms, broken[number % len(broken)], expect="malformed")


def _forged(recorder: Recorder, payments: list[dict[str, Any]]) -> None:
    ways = ("wrong_key", "missing", "other_body")
    for number in range(FORGED):
        # Half of them invent a payment, half try to change one.
        known = dict(recorder.chance.choice(payments), amount="0.01")
        payment = known if number % 2 else _payment(recorder.chance, 8_000 + number)
        recorder.record(
            recorder.chance.uniform(0, STREAM_MS),
            recorder.message(payment),
            expect="forged",
            signature=ways[number % len(ways)],
        )


def main() -> None:
    lines = [json.dumps(asdict(delivery)) + "\n" for delivery in recorded()]
    FIXTURE.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} deliveries in {FIXTURE}")


if __name__ == "__main__":
    main()
