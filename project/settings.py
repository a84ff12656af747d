"""
Settings of the sample shop; everything that differs between machines comes from the environment.

The five lines that dedupjobs needs are INSTALLED_APPS, CACHES, RQ_QUEUES, RQ and, if you
want other defaults, DEDUPJOBS.
"""

from __future__ import annotations

import os
from pathlib import Path

BASE_DIR = Path(__file__).resolve().parent.parent

# For a shop on your own machine. A real one sets all three.
SECRET_KEY = os.environ.get("SECRET_KEY", "not-secret-only-for-the-sample-shop")
DEBUG = os.environ.get("DEBUG", "1") == "1"
ALLOWED_HOSTS = os.environ.get("ALLOWED_HOSTS", "127.0.0.1,localhost,[::1]").split(",")

REDIS_URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")
PAYMENT_SERVICE_URL = os.environ.get("PAYMENT_SERVICE_URL", "http://127.0.0.1:8001")
WEBHOOK_SECRET = os.environ.get("WEBHOOK_SECRET", "not-secret-either")

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_rq",
    "dedupjobs",
    "project.shop",
]

CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": REDIS_URL}}
RQ_QUEUES = {"default": {"URL": REDIS_URL}}
RQ = {"WORKER_CLASS": "dedupjobs.worker.DedupWorker"}
DEDUPJOBS = {
    "DEFAULTS": {"lease": int(os.environ.get("JOB_LEASE_SECONDS", "60"))},
    "OUTBOX": {"TARGETS": {"orders": {"stream": "orders"}}},
}

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("SHOP_DB", str(BASE_DIR / "shop.sqlite3")),
        "OPTIONS": {
            # A transaction that first reads and then writes would otherwise fail at once
            # ("database is locked") when another one writes in between, whatever the time-out.
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

EMAIL_BACKEND = "django.core.mail.backends.filebased.EmailBackend"
EMAIL_FILE_PATH = os.environ.get("EMAIL_DIR", str(BASE_DIR / "sent-mail"))
DEFAULT_FROM_EMAIL = "shop@example.com"

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
ROOT_URLCONF = "project.urls"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    }
]
STATIC_URL = "static/"
LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True
