"""Django settings of ``benchmarks.admin``: those of the others, and what Django's admin needs."""

from __future__ import annotations

from benchmarks.settings import *  # noqa: F403
from benchmarks.settings import INSTALLED_APPS as APPS
from benchmarks.settings import REDIS_URL

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.admin",
    *APPS,
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
ROOT_URLCONF = "benchmarks.admin_urls"
STATIC_URL = "static/"
ALLOWED_HOSTS = ["*"]
SESSION_ENGINE = "django.contrib.sessions.backends.cache"
RQ_QUEUES = {name: {"URL": REDIS_URL} for name in ("default", "high", "low")}
