"""
The inbox: an event takes effect once for each consumer, however often it is delivered.

    from dedupjobs import inbox

    @inbox.handler("order.paid", consumer="ledger")
    def book(event):
        Entry.objects.create(order=event.payload["order"], amount=event.payload["amount"])

The handler runs in a transaction with the mark that says so (``marks``). Events come from a Redis
stream by ``manage.py dedupjobs_consume`` (``reading``), or from a webhook (``web``).
"""

from __future__ import annotations

from dedupjobs.envelope import Event
from dedupjobs.exceptions import EventError, SignatureError
from dedupjobs.inbox.handlers import handler
from dedupjobs.inbox.marks import Fate, take
from dedupjobs.inbox.web import receive, webhook_view

__all__ = [
    "Event",
    "EventError",
    "Fate",
    "SignatureError",
    "handler",
    "receive",
    "take",
    "webhook_view",
]
