"""
Run the demo: python -m project.demo

Its last line of output is one JSON object, and its exit status is 1 if anything was charged
or booked twice, or lost. On a terminal the shop then stays open until Ctrl-C; ONCE=1 prevents that.
Where there is no embedded server, REDIS_URL names an empty database of yours.
"""
# ruff: noqa: PLC0415 - what imports models can be imported only once Django is set up

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from project.demo import plan
from project.demo.stack import CannotRun, Stack

EXIT_BAD_NUMBERS = 1
EXIT_CANNOT_RUN = 2
EXIT_INTERRUPTED = 130
ADMIN = "demo"  # name and password of an account that lives as long as the demo


def main() -> int:
    # So that these, too, stop what was started.
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="dedupjobs-demo-") as folder,
            Stack(Path(folder)) as stack,
        ):
            return _demo(stack)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        print("\nInterrupted; everything that was started is stopped.")
        return EXIT_INTERRUPTED


def _demo(stack: Stack) -> int:
    started = time.monotonic()
    _start(stack)
    from project.demo import report
    from project.demo.story import Story

    story = Story(stack=stack)
    story.play()
    found = report.numbers(story.answers, story.faults, stack, time.monotonic() - started)
    print(f"\n{report.table(found, story.answers, story.faults, stack)}\n")
    print(found.line(), flush=True)
    if sys.stdout.isatty() and os.environ.get("ONCE") != "1":
        _keep_serving(stack)
    return 0 if found.good else EXIT_BAD_NUMBERS


def _start(stack: Stack) -> None:
    os.environ.update(stack.environment())
    print(
        "Starting a Redis server, the payment service, the shop, two workers, a ledger ...",
        flush=True,
    )
    stack.start_servers()
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)
    stack.start_shop()
    print(
        f"The shop is at {stack.shop_url}; two workers, lease {plan.LEASE_SECONDS} s.\n"
        "Replaying recorded webhooks; the payment service has no idempotency of its own.\n",
        flush=True,
    )


def _keep_serving(stack: Stack) -> None:
    from django.contrib.auth.models import User

    User.objects.create_superuser(ADMIN, password=ADMIN)
    print(
        f"\nThe shop stays open until Ctrl-C:\n"
        f"  shop   {stack.shop_url}/\n"
        f"  admin  {stack.shop_url}/admin/   (name {ADMIN}, password {ADMIN})",
        flush=True,
    )
    try:
        while True:
            for sentence in stack.supervise():
                print(f"  {sentence}", flush=True)
            time.sleep(plan.SUPERVISE_EVERY_SECONDS)
    except KeyboardInterrupt:
        print("\nStopping.")


def _leave(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
