"""The admin's pages under the theme django-unfold."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.skipif(not find_spec("unfold"), reason="django-unfold is not installed")
@pytest.mark.large
def test_pages_and_actions_work_under_unfold(process_env: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unfold_story"],
        env={**process_env, "DEDUPJOBS_TEST_UNFOLD": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "told under unfold: 1 operation" in done.stdout
