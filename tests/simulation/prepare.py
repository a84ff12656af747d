"""What a process does once before its first run."""

from __future__ import annotations

import gc
import logging
import os
import threading

import django
from django.db import connections


def prepare() -> None:
    """Set Django up, make the tables, and do what would make a first run unlike a second."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.simulation.settings"
    # Django's own, by asgiref, asks for an event loop at each access.
    connections._connections = threading.local()
    django.setup()
    logging.disable(logging.CRITICAL)
    _make_tables()
    _warm_up()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _make_tables() -> None:
    """Make them as the models are now, so that a mutant of a model counts."""
    from django.apps import apps
    from django.db import connection

    with connection.schema_editor() as editor:
        for label in ("dedupjobs", "simulation"):
            for model in apps.get_app_config(label).get_models():
                if not model._meta.proxy:  # which has another's table
                    editor.create_model(model)


def _warm_up() -> None:
    """Let the clients load their scripts and ask for the server's version."""
    from dedupjobs import counters, dispatch, locks, stats
    from tests.simulation.lock_servers import SimulatedQuorum

    locks.Quorum = SimulatedQuorum  # type: ignore[misc,assignment]
    dispatch._producer("default").queue.get_redis_server_version()
    locks.acquire(1, "nobody", ttl=1)
    locks.extend(1, "nobody", ttl=1)
    locks.release(1, "nobody")
    stats._client().redis.exists("nothing")
    counters.pay("warm-up")
