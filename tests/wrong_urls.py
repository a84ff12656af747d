"""Addresses with a webhook for a consumer whose name is mistyped, wrapped and included."""

from __future__ import annotations

from django.urls import include, path
from django.views.decorators.cache import never_cache

from dedupjobs import inbox

urlpatterns = [
    path("hooks/", include([path("events/", never_cache(inbox.webhook_view("legder")))]))
]
