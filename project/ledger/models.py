"""What the ledger knows: a line for each order that was paid."""

from __future__ import annotations

from django.db import models


class Entry(models.Model):
    """Nothing here is unique on purpose: an event that takes effect twice must be visible."""

    payment_id = models.CharField(max_length=64)
    amount = models.DecimalField(max_digits=9, decimal_places=2)
    event_id = models.CharField(max_length=100)
    booked_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-pk",)
        verbose_name_plural = "entries"

    def __str__(self) -> str:
        return f"{self.payment_id} {self.amount}"
