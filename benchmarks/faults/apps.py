from __future__ import annotations

from django.apps import AppConfig


class FaultsConfig(AppConfig):
    name = "benchmarks.faults"
    label = "benchfaults"
    default_auto_field = "django.db.models.BigAutoField"
