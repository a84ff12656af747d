"""
The event outbox: what happened is told to others if, and only if, it was committed.

    from dedupjobs import outbox

    with transaction.atomic():
        order.pay()
        outbox.publish("order.paid", {"order": order.pk, "amount": "9.90"}, key=f"order:{order.pk}")

A row per event and target is written in the caller's transaction (``publishing``); coordinators
relay the rows (``relay``), at least once and in order per key, to the targets that
``DEDUPJOBS["OUTBOX"]`` names (``targets``). ``shelf`` alone moves rows.
"""

from __future__ import annotations

from dedupjobs.envelope import Event
from dedupjobs.exceptions import EventError, Unavailable
from dedupjobs.outbox.publishing import publish, publish_many

__all__ = ["Event", "EventError", "Unavailable", "publish", "publish_many"]
