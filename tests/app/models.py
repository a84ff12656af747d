"""What specimen jobs write."""

from __future__ import annotations

from django.db import models

from dedupjobs import FencedModel


class Ledger(models.Model):
    """One row per effect. Nothing here is unique on purpose: a second effect must be visible."""

    tag = models.CharField(max_length=200, db_index=True)
    note = models.CharField(max_length=200, blank=True)
    at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.tag} {self.note}"


class Shelf(FencedModel):
    """What a robot may only move by the newest order."""

    sku = models.CharField(max_length=20, unique=True)
    level = models.IntegerField(default=0)

    def __str__(self) -> str:
        return self.sku
