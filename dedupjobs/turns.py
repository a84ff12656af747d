"""
Whose turn it is: one process at a time sends to a target, or takes in where an order is kept.

A lease in the database, so it holds where Redis does not. What a process writes in its turn it
writes in a transaction that first renews the lease: one that was frozen meanwhile writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Q

from dedupjobs import lifecycle
from dedupjobs.clock import DbNow
from dedupjobs.models import Turn

LEASE = 15.0  # seconds


class TurnLost(Exception):
    """Another process has the turn now, so nothing was written."""


def of(name: str) -> Any:
    """Return the row."""
    return Turn._base_manager.using(lifecycle.alias()).filter(name=name)


def sending(target: str) -> str:
    """Return the name of the turn to send to a target."""
    return f"out:{target}"


def taking(consumer: str) -> str:
    """Return the name of the turn to take in for a consumer."""
    return f"in:{consumer}"


def take(name: str, owner: str, *, lease: float = LEASE) -> Turn | None:
    """Take the turn, or go on with it; None: another process has it."""
    mine = of(name).filter(Q(owner=owner) | Q(until__lt=DbNow()))
    if not mine.update(owner=owner, until=DbNow(lease)):
        if of(name).exists():
            return None
        make(name)
        return take(name, owner, lease=lease)
    found: Turn | None = of(name).filter(owner=owner).first()
    return found


def make(name: str) -> None:
    """Let there be a row."""
    with suppress(IntegrityError), transaction.atomic(using=lifecycle.alias()):
        Turn(name=name, until=DbNow(-1)).save(using=lifecycle.alias(), force_insert=True)


def give(name: str, owner: str) -> None:
    """Let another process have it at once."""
    of(name).filter(owner=owner).update(owner="", until=DbNow(-1))


@contextmanager
def mine(name: str, owner: str, *, lease: float = LEASE) -> Iterator[None]:
    """Run the block in a transaction, if it is still the owner's turn; else TurnLost."""
    with transaction.atomic(using=lifecycle.alias()):
        if not of(name).filter(owner=owner).update(until=DbNow(lease)):
            raise TurnLost(name)
        yield


@contextmanager
def anybodys(name: str) -> Iterator[None]:
    """Run the block in a transaction that whoever has the turn waits for."""
    make(name)
    with transaction.atomic(using=lifecycle.alias()):
        list(of(name).select_for_update().values_list("pk"))
        yield
