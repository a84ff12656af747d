"""Settings of a stage on several hosts: the campaign's, and what docs/hosts.md advises."""

from __future__ import annotations

from tests.faults.settings import *  # noqa: F403
from tests.faults.settings import DATABASES

DATABASES["default"]["OPTIONS"] = {"connect_timeout": 3}
