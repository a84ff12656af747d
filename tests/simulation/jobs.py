"""Specimen jobs of the simulation: each has one policy, and all do the same work."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

from django.db import DatabaseError, transaction

from dedupjobs import FOREVER, current_attempt, job
from dedupjobs.backoff import Exponential
from tests.simulation import stage
from tests.simulation.models import Effect

BACKOFF = Exponential(base=1, factor=2, cap=4)
SHARED = {
    "backoff": BACKOFF,
    "max_attempts": 2,
    "max_lost": 2,
    "on_mismatch": "ignore",
    "retain_for": 2,
}


def effect(kind: str) -> None:
    """Write an effect of the running attempt, in the present transaction or by itself."""
    attempt = current_attempt()
    world = stage.on_stage()
    world.reach("effect")
    Effect.objects.create(
        job_pk=attempt._claim.job_pk,
        generation=attempt._claim.generation,
        number=attempt.number,
        fence=attempt.fence,
        kind=kind,
    )
    world.observer.idempotency(
        attempt._claim.job_pk, attempt._claim.generation, attempt.idempotency_key()
    )


def work(kind: str) -> None:
    """Work for a while, have an effect, and end as the world wants."""
    world = stage.on_stage()
    world.play.labour(brief=kind == "atomic")
    if kind == "plain" and world.chance.random() < 0.5:
        with current_attempt().fenced():
            effect("fenced")
    else:
        effect(kind)
    world.play.ending()


@job(key="plain:{k}", unique_for=FOREVER, **SHARED)
def plain(*, k: int, n: int) -> int:
    work("plain")
    return n


@job(key="atomic:{k}", unique_for=FOREVER, atomic=True, **SHARED)
def atomic(*, k: int, n: int) -> int:
    work("atomic")
    return n


@job(key="completing:{k}", unique_for=FOREVER, **SHARED)
def completing(*, k: int, n: int) -> None:
    world = stage.on_stage()
    world.play.labour(brief=False)
    swallows = DatabaseError if world.chance.random() < 0.5 else ()
    with suppress(swallows), transaction.atomic():
        effect("atomic")
        world.play.ending()
        current_attempt().complete(n)
    world.reach("completing.after")


@job(key="strict:{k}", unique_for=FOREVER, backoff=BACKOFF, max_attempts=3)
def strict(*, k: int, n: int) -> int:
    work("plain")
    return n


@job(key="again:{k}", unique_for=None, **SHARED)
def again(*, k: int, n: int) -> int:
    stage.on_stage().play.labour(brief=False)
    current_attempt().step("book", effect, "step", atomic=True)
    work("plain")
    return n


@job(key="window:{k}", unique_for=timedelta(seconds=4), atomic=True, **SHARED)
def window(*, k: int, n: int) -> int:
    work("atomic")
    return n


@job(key="rerun:{k}", unique_for=None, on_conflict="rerun", **SHARED)
def rerun(*, k: int, n: int) -> int:
    work("plain")
    return n


@job(key="block:{k}", unique_for=FOREVER, on_conflict="rerun", on_dead="block", **SHARED)
def block(*, k: int, n: int) -> int:
    work("plain")
    return n


@job(key="replace:{k}", unique_for=None, on_conflict="replace", **SHARED)
def replace(*, k: int, n: int) -> int:
    work("plain")
    return n


@job(key="debounce:{k}", unique_for=None, debounce=1.5, max_wait=4, **SHARED)
def debounce(*, k: int, n: int) -> int:
    work("plain")
    return n


@job(key="careful:{k}", unique_for=FOREVER, on_lost="hold", on_conflict="rerun", **SHARED)
def careful(*, k: int, n: int) -> int:
    work("plain")
    return n


WEIGHTED = {
    plain: 1, atomic: 2, completing: 2, strict: 1, again: 1, window: 1, rerun: 1, block: 2,
    replace: 1, debounce: 1, careful: 1,
}  # fmt: skip
ALL, WEIGHTS = tuple(WEIGHTED), tuple(WEIGHTED.values())
