"""Start the suite's servers, once for all xdist workers, before any setting is read.

Loaded by `-p tests.plugin` since a conftest would come too late: pytest-django reads the settings
first. Workers inherit the addresses in the environment.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, suppress

import psutil
import pytest

from tests.servers import HOST, MariaDB, PostgreSQL, Valkey


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, None, None]:
    """Start what the environment does not already name; stop it when this pytest ends."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        # A shell script's background job ignores Ctrl-C, and so would all that the suite starts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        servers = ExitStack()
        early_config.add_cleanup(servers.close)
        _start(servers)
    return (yield)


def _start(servers: ExitStack) -> None:
    home = tempfile.mkdtemp(prefix="dedupjobs-suite-")
    servers.callback(shutil.rmtree, home, ignore_errors=True)
    if os.environ.get("DEDUPJOBS_TEST_DB") == "mariadb":
        if not MariaDB.is_installed():
            raise pytest.UsageError("no MariaDB here; on Debian: apt-get install mariadb-server")
        os.environ["DEDUPJOBS_TEST_MARIADB"] = f"{HOST}:{servers.enter_context(MariaDB()).port}"
    servers.callback(_kill_leftovers, home)
    os.environ["DEDUPJOBS_TEST_HOME"] = home
    if "DEDUPJOBS_TEST_REDIS" not in os.environ:
        os.environ["DEDUPJOBS_TEST_REDIS"] = servers.enter_context(Valkey()).url
    if os.environ.get("DEDUPJOBS_TEST_MODE") == "quorum":
        urls = [servers.enter_context(Valkey()).url for _ in range(3)]
        os.environ["DEDUPJOBS_TEST_LOCKS"] = " ".join(f"{url}/0" for url in urls)
    if os.environ.get("DEDUPJOBS_TEST_DB") == "postgresql":
        postgresql = servers.enter_context(PostgreSQL())
        os.environ["DEDUPJOBS_TEST_POSTGRESQL"] = f"{HOST}:{postgresql.port}"


def _kill_leftovers(home: str) -> None:
    """Kill what a crashed xdist worker could not stop: all that was started with our home."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("DEDUPJOBS_TEST_HOME") == home:
                print(f"left over and killed: {process.pid} {process.cmdline()}", file=sys.stderr)
                process.kill()
