"""Placing an order and seeing what became of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal

from django.db import transaction

from dedupjobs.client import Outcome
from dedupjobs.models import ProcessedJob
from project.shop import jobs
from project.shop.models import Order

STEPS = {"payment": "Charge", "receipt": "Receipt", "invoice": "Invoice"}


def place(*, payment_id: str, amount: Decimal, email: str, source: Order.Source) -> Outcome:
    """
    Write the order and ask for its charge: both or neither, and once for a payment.

    Raises PayloadMismatch where the payment is known with another amount.
    """
    with transaction.atomic():
        outcome = jobs.charge.enqueue(payment_id=payment_id, amount=f"{amount:.2f}")
        if outcome.created:
            Order.objects.update_or_create(  # there already, if a dead charge is asked for again
                payment_id=payment_id,
                defaults={"amount": amount, "email": email, "source": source},
            )
    return outcome


@dataclass(slots=True, kw_only=True)
class Step:
    """One job of an order; no row means that it is not asked for yet."""

    label: str
    row: ProcessedJob | None = None

    @property
    def status(self) -> str:
        return self.row.status if self.row else "WAITING"


@dataclass(slots=True, kw_only=True)
class Progress:
    order: Order
    steps: dict[str, Step] = field(
        default_factory=lambda: {part: Step(label=label) for part, label in STEPS.items()}
    )

    @property
    def done(self) -> bool:
        """Nothing moves any more, for better or worse."""
        return all(step.status not in MOVING for step in self.steps.values())


MOVING = ("WAITING", "PENDING", "RUNNING", "RETRYING")


def progress_of(orders: Iterable[Order]) -> list[Progress]:
    """Join orders with their jobs' rows in one query."""
    found = {order.payment_id: Progress(order=order) for order in orders}
    keys = [f"{part}:{payment_id}" for payment_id in found for part in STEPS]
    for row in ProcessedJob.objects.filter(scope="", key__in=keys, name__startswith="shop."):
        part, _, payment_id = row.key.partition(":")
        found[payment_id].steps[part].row = row
    return list(found.values())
