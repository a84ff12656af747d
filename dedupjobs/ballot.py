"""
What a majority of lock servers says, in the words of a single one.

A script answers once per row; here each server's answer for a row is a vote (``votes``), and what
comes out is an answer for each row again, or NoQuorum where too few servers have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from dedupjobs import clock, votes
from dedupjobs.quorum import Answer, Commands, Quorum
from dedupjobs.votes import Verdict, Vote
from dedupjobs.wire import Load


class NoQuorum(RedisError):
    """Too few lock servers answer, or too late; the text says which, and why."""


def each(
    quorum: Quorum,
    commands: Commands,
    rows: int,
    *,
    ttl: float | None = None,
    carried: Load | None = None,
) -> list[Any]:
    """
    Return what a majority answers for each row; the first of the commands answers for all rows.

    ``ttl``: seconds that were asked for; what a majority grants is NoQuorum where they are over.
    ``carried`` goes to the first server. Never raises for servers that are away.
    """
    begun = clock.monotonic()

    def enough(answers: list[Answer]) -> bool:
        return all(_verdict(answers, row) is not None for row in range(rows))

    answers = quorum.ask(commands, enough=enough, extra=carried.load if carried else None)
    if carried is not None:
        _tell(carried, answers[0])
    elapsed = clock.monotonic() - begun
    late = ttl is not None and votes.validity(ttl, elapsed) <= 0
    return [_answer(answers, row, quorum, late=late) for row in range(rows)]


def _tell(carried: Load, answer: Answer) -> None:
    if isinstance(answer, Exception):
        carried.left_behind(answer)
    elif answer is not None:
        carried.arrived(answer)


def _verdict(answers: Sequence[Answer], row: int) -> Verdict | None:
    return votes.verdict(_vote(answer, row) for answer in answers)


def _vote(answer: Answer, row: int) -> Vote:
    if answer is None:
        return Vote.OPEN
    said = _said(answer, row)
    if said is None:
        return Vote.SILENT
    return Vote.GRANTED if (said[0] if isinstance(said, list) else said) else Vote.DENIED


def _said(answer: Answer, row: int) -> Any:
    """Return what a server answers for a row; None: nothing."""
    if not isinstance(answer, list) or not isinstance(answer[0], list):
        return None
    return answer[0][row]


def _answer(answers: Sequence[Answer], row: int, quorum: Quorum, *, late: bool) -> Any:
    found = _verdict(answers, row)
    if found in (None, Verdict.UNKNOWN):
        return NoQuorum(trouble(answers, quorum))
    granted = found is Verdict.GRANTED
    if granted and late:
        return NoQuorum(f"asking took as long as the lock was to live; {trouble(answers, quorum)}")
    said = [_said(answer, row) for answer in answers]
    marks = [one[1] for one in said if isinstance(one, list)]
    if not marks:
        return int(granted)
    # The oldest mark has the least time left.
    return [int(granted), min((mark for mark in marks if mark >= 0), default=-2)]


def trouble(answers: Sequence[Answer], quorum: Quorum) -> str:
    """Return which servers have no answer, and why."""
    found = []
    for server, answer in zip(quorum.servers, answers, strict=True):
        error = answer[0] if isinstance(answer, list) else answer
        if isinstance(error, Exception):
            found.append(f"{server.name}: {type(error).__name__}: {error}")
    needed = votes.majority(len(answers))
    return f"{needed} of {len(answers)} lock servers must answer; {'; '.join(found) or 'all do'}"
