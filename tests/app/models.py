"""What specimen jobs write."""

from __future__ import annotations

from django.db import models


class Ledger(models.Model):
    """One row per effect. Nothing here is unique on purpose: a second effect must be visible."""

    tag = models.CharField(max_length=200, db_index=True)
    note = models.CharField(max_length=200, blank=True)
    at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.tag} {self.note}"
