"""The suite's pages: the admin, where the app registers its models, and the metrics."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

urlpatterns = [path("admin/", admin.site.urls), path("", include("dedupjobs.urls"))]
