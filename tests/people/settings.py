"""Settings of a project with a user model of its own."""

from __future__ import annotations

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS as OTHERS

INSTALLED_APPS = [*OTHERS, "tests.people"]
AUTH_USER_MODEL = "people.Person"
MIGRATION_MODULES = {"testapp": None, "people": None}
