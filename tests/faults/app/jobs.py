"""
What the stages run. Each job writes its effect where its promise says: in the transaction of its
completion, behind its fence, or outside, where at least once is all that can be promised.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from django.db import transaction

from dedupjobs import FOREVER, Done, NotDone, current_attempt, inbox, job, outbox
from tests.faults import ledger

LEASE = float(os.environ.get("FAULTS_LEASE", "5"))
TIMEOUT = 6
# SQLite has one writer: an atomic job there must end within a third of its lease (a check).
ATOMIC_TIMEOUT = LEASE / 3 - 0.2
OPTIONS: dict[str, Any] = {
    "lease": LEASE,
    "timeout": TIMEOUT,
    "backoff": 0.2,
    # A campaign kills the same job often; whether budgets are kept is asked elsewhere.
    "max_attempts": 1_000,
    "max_lost": 1_000,
}
OLD_CODE = os.environ.get("FAULTS_CODE") == "old"


def identity() -> tuple[int, int]:
    """Return primary key and generation of the present job."""
    claim = current_attempt()._claim
    return claim.job_pk, claim.generation


def outside(tag: str, number: int = 0) -> None:
    """Have an effect on the world outside of the database."""
    attempt = current_attempt()
    pk, generation = identity()
    ledger.write(
        "effect",
        tag=tag,
        job=pk,
        generation=generation,
        fence=attempt.fence,
        attempt=attempt.number,
        key=attempt.idempotency_key(),
        number=number,
    )


def tell(tag: str, *, key: str) -> None:
    """Tell others of it, in the present transaction."""
    outbox.publish("effect.made", {"tag": tag}, key=key)


@inbox.handler("effect.made", consumer="stage")
def apply(event: inbox.Event) -> None:
    """Have the effect of an event where it is consumed."""
    from tests.faults.app.models import Applied

    Applied.objects.create(event_id=event.id, tag=event.payload["tag"])


def inside(tag: str, number: int = 0) -> None:
    """Have an effect in the present transaction."""
    from tests.faults.app.models import Effect

    pk, generation = identity()
    Effect.objects.create(
        tag=tag, job_pk=pk, generation=generation, fence=current_attempt().fence, number=number
    )


@job(key="{tag}", unique_for=FOREVER, **OPTIONS)
def plain(*, tag: str, work: float = 0) -> str:
    time.sleep(work)
    outside(tag)
    return tag


@job(key="{tag}", unique_for=FOREVER, atomic=True, **{**OPTIONS, "timeout": ATOMIC_TIMEOUT})
def atomic(*, tag: str) -> None:
    inside(tag)
    tell(tag, key=tag)


@job(key="{tag}", unique_for=FOREVER, **OPTIONS)
def completing(*, tag: str) -> None:
    outside(tag)
    with transaction.atomic():
        inside(tag)
        tell(tag, key="completing")  # all of them in the order of their commits
        current_attempt().complete(tag)


@job(key="{tag}", unique_for=FOREVER, **OPTIONS)
def fenced(*, tag: str, work: float = 0) -> None:
    with current_attempt().fenced():
        inside(tag)
    time.sleep(work)


@job(key="{tag}", unique_for=FOREVER, **OPTIONS)
def stepping(*, tag: str) -> None:
    """Write inside, charge what can be looked up, and tell what may be told twice."""
    attempt = current_attempt()
    attempt.step("book", inside, tag, atomic=True)
    attempt.step("charge", charge, tag, attempt.idempotency_key("charge"), check=look_up)
    attempt.step("tell", outside, tag, repeat=True)


def charge(tag: str, key: str) -> str:
    """Have an effect outside that can be found again by its key."""
    attempt, (pk, generation) = current_attempt(), identity()
    number = attempt.number
    ledger.write("charge", tag=tag, job=pk, generation=generation, attempt=number, key=key)
    return key


def look_up(key: str) -> Done | NotDone:
    """Ask the world whether it was charged."""
    found = any(line["what"] == "charge" and line["key"] == key for line in ledger.read())
    return Done(key) if found else NotDone()


@job(key="{tag}", unique_for=FOREVER, **OPTIONS)
def flaky(*, tag: str) -> None:
    """Fail at first."""
    if current_attempt().number == 1:
        raise ValueError(tag)
    outside(tag)


@job(key="{tag}", unique_for=None, on_conflict="rerun", **OPTIONS)
def latest(*, tag: str, number: int) -> None:
    """Take long enough to be called again meanwhile."""
    time.sleep(0.2)
    outside(tag, number)


@job(key="{tag}", unique_for=None, on_conflict="replace", **OPTIONS)
def newest(*, tag: str, number: int) -> None:
    outside(tag, number)


@job(key="{tag}", unique_for=FOREVER, **OPTIONS)
def forking(*, tag: str) -> None:
    """Have children of all sorts, which leave in their own ways."""
    for leave in (_exit, _raise):
        if (child := os.fork()) == 0:
            leave()
        os.waitpid(child, 0)
    subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    outside(tag)


def _exit() -> None:
    sys.exit(0)


def _raise() -> None:
    raise ValueError("in the child")


@job(key="{tag}", unique_for=FOREVER, concurrency_control="optimistic", **OPTIONS)
def free(*, tag: str) -> None:
    """Take no lock."""
    outside(tag)


@job(key="{tag}", unique_for=FOREVER, on_redis_error="wait", **OPTIONS)
def patient(*, tag: str) -> None:
    """Not run while no lock can be had."""
    outside(tag)


@job(key="{tag}", unique_for=FOREVER, **OPTIONS)
def silent(*, tag: str) -> None:
    """Do nothing."""


if OLD_CODE:

    @job(key="{tag}", unique_for=FOREVER, **OPTIONS)
    def grown(*, tag: str) -> None:
        """The job before it took another argument."""
        outside(tag)

else:

    @job(key="{tag}", unique_for=FOREVER, **OPTIONS)
    def grown(*, tag: str, since: str = "") -> None:
        outside(tag)

    @job(key="{tag}", unique_for=FOREVER, **OPTIONS)
    def newcomer(*, tag: str) -> None:
        """A job that the old code does not have."""
        outside(tag)
