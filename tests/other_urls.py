"""The admin on a site of the project's own, and no default one."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from dedupjobs.admin import register

site = admin.AdminSite(name="backstage")
register(site)

urlpatterns = [path("backstage/", site.urls)]
