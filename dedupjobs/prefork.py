"""
What a worker does once, before its first fork, so that no horse has to, each in its first job.

What a fresh process does first costs more than a short job: it imports the runner and the
drivers, makes clients, compiles statements. What the parent has done is there in each horse, and
what is frozen is not copied by a horse's garbage collector.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from importlib import import_module

from django.core.cache import caches
from django.db import connections

from dedupjobs import conf, controls, dispatch, hardening, lifecycle, locks

STOCK_WORKERS = ("django_rq.management.commands.rqworker", "rq.cli")
"""What is imported where this process is an RQ worker; whether it forks is not known."""

_is_ready = False


def connect() -> None:
    """Get ready before the first fork of an RQ worker; in other processes do nothing."""
    os.register_at_fork(before=_before_fork)


def _before_fork() -> None:
    if not _is_ready and any(name in sys.modules for name in STOCK_WORKERS):
        get_ready()


def get_ready() -> None:
    """Import, make and compile what runs need; asks no server anything, and never raises."""
    global _is_ready  # noqa: PLW0603 - once per process
    _is_ready = True
    with suppress(Exception):  # wrong settings are a check's business, and the job's
        for entry in dispatch.ENTRIES:
            import_module(entry.rpartition(".")[0])
        hardening.harden_connections()
        for alias in conf.get().lock_caches:
            caches[alias]
        locks.get_ready()
        vendors = {connection.vendor for connection in connections.all()}  # imports the drivers
        if "mysql" not in vendors:  # which has to be asked for its version first
            lifecycle.get_ready()
            controls.get_ready()
    gc.collect()
    gc.freeze()
