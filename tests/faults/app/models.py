"""Effects inside the database."""

from __future__ import annotations

from django.db import models


class Effect(models.Model):
    """One row per effect. Nothing here is unique on purpose: a second effect must be visible."""

    tag = models.CharField(max_length=100, db_index=True)
    job_pk = models.BigIntegerField()
    generation = models.IntegerField()
    fence = models.BigIntegerField()
    number = models.IntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.tag} by {self.fence}"


class Applied(models.Model):
    """What an event has done where it was consumed; not unique either."""

    event_id = models.CharField(max_length=100, db_index=True)
    tag = models.CharField(max_length=100)

    def __str__(self) -> str:
        return f"{self.tag} by {self.event_id}"
