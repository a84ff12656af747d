"""Bugs that the simulation has found and that are not mended yet: a run that shows one passes."""

from __future__ import annotations

KNOWN = {
    # F1: a call with other arguments on a key of which only the tombstone is left
    "JSONDecodeError('Expecting value: line 1 column 1 (char 0)')",
    # F7: run_now whose row was pruned while its worker stood still
    "DoesNotExist('ProcessedJob matching query does not exist.')",
}


def is_known(violation: str) -> bool:
    return any(text in violation for text in KNOWN)
