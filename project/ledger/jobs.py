"""What the ledger does with events; found by autodiscovery, as jobs are."""

from __future__ import annotations

from decimal import Decimal

from dedupjobs import inbox
from project.ledger.models import Entry


@inbox.handler("order.paid", consumer="ledger")
def book(event: inbox.Event) -> None:
    """
    Write a line, once for each event: the line and the mark of the event commit together.

    No constraint, no look-up, no "have I seen this?": an event that comes again, since Redis was
    wiped or a process was killed, finds its mark.
    """
    paid = event.payload
    Entry.objects.create(
        payment_id=paid["payment"], amount=Decimal(paid["amount"]), event_id=event.id
    )
