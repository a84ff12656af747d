"""Django settings of the suite, for pytest and for the processes that tests start.

All that varies comes from the environment, so that a subprocess reaches the same servers and the
same test database: `tests/plugin.py` and the fixture `process_env` set the variables.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec

import django

ENV = os.environ.get

SECRET_KEY = "not a secret"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "tests.urls"
ALLOWED_HOSTS = ["*"]
STATIC_URL = "static/"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.admin",
    "django.contrib.staticfiles",
    "django_rq",
    "dedupjobs",
    "tests.app",
]
if ENV("DEDUPJOBS_TEST_UNFOLD"):
    INSTALLED_APPS.insert(0, "unfold")
MIGRATION_MODULES = {"testapp": None}
MIDDLEWARE = [
    "tests.csp.middleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
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

# A subprocess gets the name of the test database itself; pytest makes that from TEST.
DATABASE_NAME = ENV("DEDUPJOBS_TEST_DB_NAME")

if ENV("DEDUPJOBS_TEST_DB", "sqlite") == "postgresql":
    HOST, _, PORT = ENV("DEDUPJOBS_TEST_POSTGRESQL", "127.0.0.1:5432").partition(":")
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": DATABASE_NAME or "dedupjobs",
            "HOST": HOST,
            "PORT": PORT,
            "USER": "postgres",
        }
    }
elif ENV("DEDUPJOBS_TEST_DB") == "mariadb":
    if find_spec("MySQLdb") is None:  # mysqlclient, where it is installed
        import pymysql

        pymysql.version_info = (2, 2, 7, "final", 0)  # what Django asks of the driver it knows
        pymysql.install_as_MySQLdb()
    HOST, _, PORT = ENV("DEDUPJOBS_TEST_MARIADB", "127.0.0.1:3306").partition(":")
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.mysql",
            "NAME": DATABASE_NAME or "dedupjobs",
            "HOST": HOST,
            "PORT": PORT,
            "USER": "root",
            "TEST": {"CHARSET": "utf8mb4"},
        }
    }
else:
    # A file, since threads and processes share it; without a home (mypy, makemigrations) none.
    HOME = ENV("DEDUPJOBS_TEST_HOME")
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": DATABASE_NAME or ":memory:",
            "TEST": {"NAME": f"{HOME}/test.sqlite3" if HOME else ":memory:"},
            "OPTIONS": {
                "timeout": 20,
                "transaction_mode": "IMMEDIATE",
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
            },
        }
    }

# Each xdist worker, and what it starts, has two of Valkey's databases: RQ's and the cache's.
WORKER_NUMBER = int(ENV("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
REDIS = ENV("DEDUPJOBS_TEST_REDIS", "redis://127.0.0.1:6379")
RQ_URL = f"{REDIS}/{2 * WORKER_NUMBER}"
CACHE_URL = f"{REDIS}/{2 * WORKER_NUMBER + 1}"

RQ_QUEUES = {name: {"URL": RQ_URL} for name in ("default", "high", "low")}
# Django 6.1 wants it named; those before it do not know the setting.
MAILERS = {"default": {"BACKEND": "django.core.mail.backends.smtp.EmailBackend"}}
RQ = {"WORKER_CLASS": ENV("DEDUPJOBS_TEST_WORKER", "dedupjobs.worker.DedupWorker")}
RQ_EXCEPTION_HANDLERS = json.loads(ENV("DEDUPJOBS_TEST_HANDLERS", "[]"))
CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": CACHE_URL}}
for number, url in enumerate(ENV("DEDUPJOBS_TEST_LOCKS", "").split()):
    CACHES[f"locks{number}"] = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url}

TASKS = {
    "default": {
        "BACKEND": "dedupjobs.backends.DedupBackend",
        "QUEUES": ["default", "high", "low"],
        "OPTIONS": {"priorities": {10: "high", -100: "low", 0: "default"}},
    },
    "all arguments": {
        "BACKEND": "dedupjobs.backends.DedupBackend",
        "OPTIONS": {"key": "arguments", "unique_for": 3_600, "job": {"timeout": 60}},
    },
}
if django.VERSION < (6, 0) and find_spec("django_tasks"):
    INSTALLED_APPS.append("django_tasks")

# Where locks are in a whole run of the suite: on three servers ("quorum"), nowhere ("optimistic").
MODES = {
    "quorum": {"LOCK_CACHE": ["locks0", "locks1", "locks2"]},
    "optimistic": {"DEFAULTS": {"concurrency_control": "optimistic"}},
}
MODE = MODES.get(ENV("DEDUPJOBS_TEST_MODE", ""), {})

# On a busy machine a healthy Redis may take longer than the defaults; tests of the bounds set them.
DEDUPJOBS = {
    "PUSH_TIMEOUT": 5.0,
    "LOCK_TIMEOUT": 5.0,
    **MODE,
    **json.loads(ENV("DEDUPJOBS_TEST_SETTINGS", "{}")),
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(process)d %(name)s %(message)s"}},
    "handlers": {
        "quiet": {"class": "logging.NullHandler"},
        "console": {"class": "logging.StreamHandler", "formatter": "line"},
    },
    "root": {
        "handlers": ["console" if ENV("DEDUPJOBS_TEST_LOG") else "quiet"],
        "level": ENV("DEDUPJOBS_TEST_LOG", "WARNING"),
    },
}
