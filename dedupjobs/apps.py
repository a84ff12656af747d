from __future__ import annotations

import sys
from contextlib import suppress

from django.apps import AppConfig, apps
from django.conf import settings
from django.utils.module_loading import autodiscover_modules, import_string
from django.utils.translation import gettext_lazy as _


class DedupjobsConfig(AppConfig):
    name = "dedupjobs"
    verbose_name = _("Deduplicated jobs")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        # Models are loaded by now.
        from dedupjobs import (  # noqa: PLC0415
            checks,
            conf,
            herald,
            ledger,
            logs,
            metrics,
            prefork,
            tracing,
        )

        if apps.is_installed("django.contrib.admin"):
            from dedupjobs import bulk  # noqa: F401, PLC0415 - it has a job of its own

        checks.register_all()
        logs.connect()
        ledger.connect()
        metrics.connect()
        tracing.connect()
        herald.connect()
        prefork.connect()
        # A wrong setting is a check with an id; it must not keep `manage.py check` from running.
        modules = conf.Settings().AUTODISCOVER if any(conf.problems()) else conf.get().AUTODISCOVER
        autodiscover_modules(*modules)
        _find_tasks()


def _find_tasks() -> None:
    """Let a process that has our backend for django.tasks find tasks by their rows."""
    with suppress(Exception):  # the framework tells what is wrong, once it is used
        for params in getattr(settings, "TASKS", {}).values():
            import_string(params["BACKEND"])
    if backends := sys.modules.get("dedupjobs.backends"):
        backends.load_modules()
