"""A new project follows the tutorial's text."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.tutorial import PAGE, Follower

pytestmark = pytest.mark.large


def follower(home: Path) -> Follower:
    return Follower(home=home, bin=Path(sys.executable).parent)


def test_new_project_follows_the_tutorial_to_its_first_job_admin_page_and_test(
    tmp_path: Path,
) -> None:
    one = follower(tmp_path)
    one.follow(PAGE.read_text())
    assert len(one.done) == 14


def test_page_that_promises_something_else_fails(tmp_path: Path) -> None:
    page = PAGE.read_text().replace("CREATED DUPLICATE DUPLICATE", "CREATED CREATED CREATED")
    with pytest.raises(AssertionError, match="CREATED DUPLICATE DUPLICATE"):
        follower(tmp_path).follow(page)
