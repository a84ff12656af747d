"""Django settings of a stage's processes: the suite's, with the jobs of tests.faults.app."""

from __future__ import annotations

import os

from tests.settings import *  # noqa: F403
from tests.settings import DEDUPJOBS as OURS
from tests.settings import INSTALLED_APPS as SUITE

INSTALLED_APPS = [*(app for app in SUITE if app != "tests.app"), "tests.faults.app"]
MIGRATION_MODULES = {"faults": None}

# The admin's own job, too: a host that is gone holds its row as long as the longest time-out.
CONTROL = os.environ.get("FAULTS_CONTROL", "pessimistic")
DEDUPJOBS = {
    **OURS,
    "DEFAULTS": {"timeout": 6, "concurrency_control": CONTROL},
    "OUTBOX": {"TARGETS": {"stage": {"stream": "events"}}},
    "INBOX": {"CONSUMERS": {"stage": {"stream": "events", "ordered": True, "attempts": 1_000}}},
}
