"""The table of the hand-made decorator."""

from __future__ import annotations

from django.db import models


class DoneByHand(models.Model):
    key = models.CharField(max_length=200, unique=True)
    done_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return self.key
