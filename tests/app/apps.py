"""The suite's own app: specimen jobs in `jobs.py`, and a ledger of what they did."""

from __future__ import annotations

from django.apps import AppConfig


class TestAppConfig(AppConfig):
    """Labelled so that no other app named "app" can clash with it."""

    name = "tests.app"
    label = "testapp"
    default_auto_field = "django.db.models.BigAutoField"
