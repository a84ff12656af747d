"""Addresses that a project may include: ``path("", include("dedupjobs.urls"))``."""

from __future__ import annotations

from django.urls import path

from dedupjobs import prometheus

app_name = "dedupjobs"
urlpatterns = [path("metrics", prometheus.metrics, name="metrics")]
