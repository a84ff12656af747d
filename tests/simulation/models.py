"""What simulated jobs write."""

from __future__ import annotations

from django.db import models


class Effect(models.Model):
    """One row per effect. Nothing here is unique on purpose: a second effect must be visible."""

    job_pk = models.BigIntegerField()
    generation = models.IntegerField()
    number = models.IntegerField()
    fence = models.BigIntegerField()
    kind = models.CharField(max_length=20)

    class Meta:
        app_label = "simulation"

    def __str__(self) -> str:
        return f"{self.kind} of job {self.job_pk}, attempt {self.number}"
