"""How a job leaves RUNNING: the writes that several endings share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db.models import F
from django.db.models.functions import Coalesce

from dedupjobs import registry
from dedupjobs.clock import DbNow
from dedupjobs.lifecycle.rows import (
    FRESH,
    NEXT_GENERATION,
    NEXT_VERSION,
    NO_RERUN,
    UNASKED,
    UNSENT,
    Claim,
    job,
    jobs,
)
from dedupjobs.models import Status
from dedupjobs.registry import Options


@dataclass(frozen=True, slots=True)
class Leaving:
    """A move on from RUNNING, if this attempt is still the job's newest and the guards hold."""

    claim: Claim
    status: Status
    sets: dict[str, Any]
    guards: dict[str, Any]

    @property
    def where(self) -> dict[str, Any]:
        """What must hold of the job."""
        newest = {"pk": self.claim.job_pk, "attempts": self.claim.number}
        return {**newest, "status": Status.RUNNING, **self.guards}

    @property
    def to(self) -> dict[str, Any]:
        """What is written."""
        return {"status": self.status, "version": NEXT_VERSION, **self.sets}

    def by_itself(self) -> Status | None:
        """Make the move in a statement of its own; None: it is not ours to make."""
        return self.status if job(**self.where).update(**self.to) else None


def leave(claim: Claim, to: Status, *, sets: dict[str, Any], **guards: Any) -> Status | None:
    """Move the job on from RUNNING, or return None."""
    return Leaving(claim, to, sets, guards).by_itself()


def take_up(claim: Claim) -> Status | None:
    """A rerun waits: the job runs again in a new generation, with the newest arguments."""
    row = jobs().filter(pk=claim.job_pk, status=Status.RUNNING, attempts=claim.number)
    taken = row.exclude(rerun_args=None).update(**rerun_sets(registry.options_of(claim.name)))
    return Status.PENDING if taken else None


def rerun_sets(options: Options) -> dict[str, Any]:
    """Return what the take-up of a waiting rerun writes; a debounced job waits again."""
    delay = min(options.debounce or 0.0, options.max_wait or float("inf"))
    # In this order: MySQL assigns from left to right and would copy a NULL otherwise.
    return {
        "status": Status.PENDING,
        "version": NEXT_VERSION,
        "generation": NEXT_GENERATION,
        "args": F("rerun_args"),
        "fingerprint": F("rerun_fingerprint"),
        "name": Coalesce(F("rerun_name"), F("name")),
        "queue": Coalesce(F("rerun_queue"), F("queue")),
        **NO_RERUN,
        "run_after": DbNow(delay),
        "debounce_deadline": DbNow(options.max_wait) if options.max_wait else None,
        "enqueued_at": DbNow(),
        "finished_at": None,
        "error": "",
        **UNSENT,
        **FRESH,
    }


def die(claim: Claim, on_dead: str, sets: dict[str, Any]) -> Status | None:
    """DEAD; a waiting rerun is taken up, but kept for the operator's retry under "block"."""
    sets = {**sets, "finished_at": DbNow()}
    if on_dead == "block":
        return leave(claim, Status.DEAD, sets=sets)
    return leave(claim, Status.DEAD, rerun_args=None, sets=sets) or take_up(claim)


def obey(claim: Claim, counted: dict[str, Any] | None = None) -> Status | None:
    """A request waits where the job would wait for another attempt: cancel goes before hold."""
    counted = counted or {}
    return cancelled(claim, counted, cancel_requested=True) or leave(
        claim,
        Status.HELD,
        hold_requested=True,
        sets={**counted, "error": "held on request", **UNSENT, **UNASKED},
    )


def cancelled(claim: Claim, counted: dict[str, Any], **guards: Any) -> Status | None:
    """CANCELLED on request; a waiting rerun is dropped, and named."""
    for waits, words in ((False, "cancelled on request"), (True, "a waiting rerun was dropped")):
        sets = {
            **counted,
            "error": words if not waits else f"cancelled on request; {words}",
            **NO_RERUN,
            "finished_at": DbNow(),
            **UNASKED,
        }
        moved = leave(claim, Status.CANCELLED, rerun_args__isnull=not waits, sets=sets, **guards)
        if moved:
            return moved
    return None
