"""Rows of your own that refuse a stale attempt, wherever they are: ``FencedModel``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import models, router

from dedupjobs.exceptions import StaleFence


class FencedModel(models.Model):
    """
    A row that has seen a token refuses every older one.

        class Shelf(FencedModel):
            sku = models.CharField(max_length=20, unique=True)
            level = models.IntegerField(default=0)

        Shelf.write(current_attempt().fence, {"sku": "A-1"}, level=3)

    For rows in another database than the jobs'; there, ``attempt.fenced()`` needs no column.
    Tokens grow per job key, so a row must be written by attempts of one key only.
    """

    fence = models.PositiveBigIntegerField(default=0, editable=False)

    class Meta:
        abstract = True

    @classmethod
    def write(
        cls, token: int, key: Mapping[str, Any], /, *, using: str | None = None, **values: Any
    ) -> None:
        """
        Set ``values`` of the row that ``key`` names, as in ``filter()``, in one guarded UPDATE.

        StaleFence: the row has seen a newer token, nothing was written. DoesNotExist: no row.
        """
        _check(token)
        rows = cls._base_manager.using(using or router.db_for_write(cls)).filter(**key)
        if not rows.filter(fence__lte=token).update(**values, fence=token):
            seen = rows.values_list("fence", flat=True).first()
            named = ", ".join(f"{name}={value!r}" for name, value in key.items())
            if seen is None:
                raise cls.DoesNotExist(f"no {cls._meta.label} with {named} to write to")
            raise StaleFence(
                f"{cls._meta.label} with {named} has seen token {seen}, and {token} is older: "
                "another attempt owns the job. Write nothing more, and return."
            )

    def save_fenced(self, token: int) -> None:
        """As ``save()`` of a row that is there, but by ``write``: signals are not sent."""
        columns = (f for f in self._meta.concrete_fields if not (f.primary_key or f.generated))
        values = {f.attname: f.pre_save(self, False) for f in columns if f.name != "fence"}
        type(self).write(token, {"pk": self.pk}, using=self._state.db, **values)
        self.fence = token


def _check(token: Any) -> None:
    if type(token) is not int or token < 1:
        raise TypeError(f"{token!r} is no token: pass attempt.fence, a number that grows")
