"""
A process that calls a job over and over, as a web server does, and prints what became of it.

    python -m tests.caller <"listen" or "deaf">

Prints a line per call: the wall clock in seconds, and the outcome's kind. Ends when told to.
"""

from __future__ import annotations

import itertools
import os
import sys
import time

import django

django.setup()

from dedupjobs import invalidation  # noqa: E402 - models load after the set-up
from tests.app import jobs  # noqa: E402

if __name__ == "__main__":
    if sys.argv[1] == "listen":
        invalidation.ensure_listening()
    for number in itertools.count():
        outcome = jobs.record_always.enqueue(tag=f"{os.getpid()} {number}")
        print(f"call {time.time()} {outcome.kind}", flush=True)
        time.sleep(0.05)
