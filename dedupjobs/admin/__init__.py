"""
The admin: see why a job is where it is, and put it right.

Registered on the default site; on another one, call ``register(site)``. Lists read
``criteria``, sentences come from ``why``, differences from ``truth``, changes go through ``deeds``;
the dashboard is ``board``, drawn by ``charts``.
"""

from __future__ import annotations

from django.contrib import admin

from dedupjobs.admin.controls import ControlAdmin
from dedupjobs.admin.dashboard import DashboardAdmin
from dedupjobs.admin.events import InboxMessageAdmin, OutboxEventAdmin
from dedupjobs.admin.jobs import ProcessedJobAdmin
from dedupjobs.admin.plain import PLAIN
from dedupjobs.models import Control, Dashboard, InboxMessage, OutboxEvent, ProcessedJob

__all__ = ["ProcessedJobAdmin", "register"]


def register(site: admin.AdminSite) -> None:
    """Show dedupjobs' pages on an admin site."""
    site.register(ProcessedJob, ProcessedJobAdmin)
    site.register(Dashboard, DashboardAdmin)
    site.register(Control, ControlAdmin)
    site.register(OutboxEvent, OutboxEventAdmin)
    site.register(InboxMessage, InboxMessageAdmin)
    for model, kind in PLAIN.items():
        site.register(model, kind)


register(admin.site)
