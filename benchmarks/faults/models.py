"""The effects, and the hand-made decorator's table."""

from __future__ import annotations

from django.db import models


class Effect(models.Model):
    """One row per effect. Nothing here is unique: a second effect must be visible."""

    number = models.IntegerField(db_index=True)

    class Meta:
        app_label = "benchfaults"

    def __str__(self) -> str:
        return str(self.number)


class DoneByHand(models.Model):
    key = models.CharField(max_length=200, unique=True)
    done_at = models.DateTimeField(null=True)

    class Meta:
        app_label = "benchfaults"

    def __str__(self) -> str:
        return self.key
