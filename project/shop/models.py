"""
What the shop itself knows. Whether a payment's jobs have run is the jobs' rows' business.
"""

from __future__ import annotations

from django.db import models
from django.urls import reverse


class Order(models.Model):
    """One payment to be charged, from the Buy button or from the webhook."""

    class Source(models.TextChoices):
        BUTTON = "button", "Buy button"
        WEBHOOK = "webhook", "webhook"

    payment_id = models.CharField(max_length=64, unique=True)
    amount = models.DecimalField(max_digits=9, decimal_places=2)
    email = models.EmailField()
    source = models.CharField(max_length=7, choices=Source.choices)
    created_at = models.DateTimeField(auto_now_add=True)
    charge_id = models.CharField(max_length=64, blank=True)
    charged_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("-pk",)

    def __str__(self) -> str:
        return self.payment_id

    def get_absolute_url(self) -> str:
        return reverse("shop:order", args=[self.payment_id])


class Invoice(models.Model):
    """
    At most one for an order, by the table's own constraint.

    The constraint is no part of deduplication: people book invoices in the admin too.
    """

    order = models.ForeignKey(Order, on_delete=models.PROTECT, related_name="invoices")
    amount = models.DecimalField(max_digits=9, decimal_places=2)
    booked_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-pk",)
        constraints = (models.UniqueConstraint(fields=["order"], name="one_invoice_per_order"),)

    def __str__(self) -> str:
        return self.number

    @property
    def number(self) -> str:
        return f"INV-{self.pk:06d}"
