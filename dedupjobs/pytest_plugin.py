"""
Fixtures for pytest-django: ``dedupjobs_inline``, ``dedupjobs_captured``, ``dedupjobs_clock``.

Loaded with the package; does nothing for tests that ask for none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dedupjobs.testing import Calls, FrozenClock

# Imported when asked for: models can not load before pytest-django has read the settings.


@pytest.fixture
def dedupjobs_inline(db: None) -> Iterator[Calls]:
    """Run jobs as soon as they are committed; gives the Calls that were made."""
    from dedupjobs.testing import inline  # noqa: PLC0415

    with inline() as calls:
        yield calls


@pytest.fixture
def dedupjobs_captured(db: None) -> Iterator[Calls]:
    """Note calls and run none; gives the Calls that were made."""
    from dedupjobs.testing import captured_jobs  # noqa: PLC0415

    with captured_jobs() as calls:
        yield calls


@pytest.fixture
def dedupjobs_clock(db: None) -> Iterator[FrozenClock]:
    """Stop the clock that jobs are judged by; gives the FrozenClock."""
    from dedupjobs.testing import frozen_clock  # noqa: PLC0415

    with frozen_clock() as clock:
        yield clock
