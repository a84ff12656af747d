"""The judge's own tests need the stages' tables: pytest --ds tests.faults.settings tests/faults."""

from __future__ import annotations

from django.conf import settings

collect_ignore = [] if "tests.faults.app" in settings.INSTALLED_APPS else ["test_judge.py"]
