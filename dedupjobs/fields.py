"""
What log lines say of the job that runs: fields on our own lines, and on those of the job's code.

    LOGGING = {
        "filters": {"job": {"()": "dedupjobs.fields.CurrentJob"}},
        "handlers": {"console": {"class": "logging.StreamHandler", "filters": ["job"], …}},
    }

Every record then has ``record.dedupjobs``, a dict, and ``record.dedupjobs_prefix``, a text for
plain formats; both are empty outside a job. Imports no model, since logging is set up before any.
"""

from __future__ import annotations

import contextvars
import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dedupjobs import conf
from dedupjobs.visible import line

if TYPE_CHECKING:
    from dedupjobs.lifecycle import Claim

NOTHING: Mapping[str, Any] = MappingProxyType({})
ATTRIBUTE = "dedupjobs"

worker = ""
"""The name of the RQ worker that this process is, or works for; set when it is known."""

_current: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar(
    "dedupjobs_fields", default=NOTHING
)


def of_claim(claim: Claim) -> dict[str, Any]:
    """Return the fields of an attempt: who, what and where; never an argument."""
    return {
        **of_job(claim.name, claim.job_pk, claim.key_hash, claim.key),
        "queue": line(claim.queue),
        "attempt": claim.number,
        "fence": claim.fence,
        "rq_id": line(claim.rq_id),
        "worker": worker,
        "host": claim.host,
    }


def of_job(name: str, pk: int, key_hash: str = "", key: str = "") -> dict[str, Any]:
    """Return the fields of a job; the key itself only where LOG_KEYS allows it."""
    found: dict[str, Any] = {"job": line(name), "row": pk}
    if key_hash:
        found["key_hash"] = key_hash
    if key and conf.get().LOG_KEYS:
        found["key"] = line(key)
    return found


def of_process() -> dict[str, Any]:
    """Return where this process runs."""
    return {"worker": worker, "host": socket.gethostname()}


@contextmanager
def given(claim: Claim) -> Iterator[None]:
    """Let the log lines of the block, in this thread or task, have the fields of an attempt."""
    token = _current.set(of_claim(claim))
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Mapping[str, Any]:
    """Return the fields of the attempt that runs this code, or none: for structlog and others."""
    return _current.get()


class CurrentJob(logging.Filter):
    """Gives each record the fields of the attempt that runs it; lets every record through."""

    def filter(self, record: logging.LogRecord) -> bool:
        found = getattr(record, ATTRIBUTE, None)
        if found is None:
            found = dict(_current.get())
            setattr(record, ATTRIBUTE, found)
        record.dedupjobs_prefix = prefix(found)
        return True


def prefix(fields: Mapping[str, Any]) -> str:
    """Return the fields in short: ``"[shop.charge row 7 attempt 1] "``, or an empty text."""
    if "job" not in fields:
        return ""
    attempt = f" attempt {fields['attempt']}" if "attempt" in fields else ""
    return f"[{fields['job']} row {fields.get('row')}{attempt}] "
