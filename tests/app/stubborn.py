"""Specimen jobs that hang out of the alarm's reach on their first attempt."""

from __future__ import annotations

import signal
import time

from dedupjobs import FOREVER, current_attempt, job
from tests.app.jobs import note


def _hang_at_first(tag: str) -> None:
    number = current_attempt().number
    note(tag, str(number))
    if number == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGTERM})
        time.sleep(600)


@job(key="stuck:{tag}", unique_for=FOREVER, timeout=0.5, max_attempts=2, backoff=0.1)
def hang_at_first(*, tag: str) -> None:
    _hang_at_first(tag)


@job(key="final:{tag}", unique_for=FOREVER, timeout=0.5, max_attempts=5, give_up_on=(TimeoutError,))
def hang_and_give_up(*, tag: str) -> None:
    _hang_at_first(tag)
