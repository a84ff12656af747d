"""
What others have written into RQ's part of Redis, as a DedupWorker reads it.

RQ follows what it finds there: it unpickles, imports and calls any function that a message names,
as its call or as a callback, and asks any address for a web hook. Whoever can write to Redis could
run what he likes. So nothing is read but JSON, nothing is called but our own entry, and the rest
needs ``FOREIGN_PICKLE``.
"""

from __future__ import annotations

import pickle  # only reached with FOREIGN_PICKLE=True
import zlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from rq.exceptions import NoSuchJobError
from rq.job import Job as RqJob
from rq.job import parse_job_id, validate_job_id
from rq.serializers import JSONSerializer

from dedupjobs import conf, dispatch
from dedupjobs.exceptions import ForeignPickle
from dedupjobs.visible import line

PICKLE_MARK = b"\x80"  # how every pickle of protocol 2 and up begins
HOOKS = frozenset(
    b"success_callback_name failure_callback_name stopped_callback_name webhooks".split()
)
"""Fields of a message that make RQ call, or ask, what they name."""

PACKED = frozenset((b"data", b"exc_info"))  # fields that RQ unpacks, whatever comes out of them
LONGEST = 1024 * 1024  # bytes of such a field


class Serializer:
    """JSON whose only call is our own entry; anything else only where the project allows it."""

    dumps = staticmethod(JSONSerializer.dumps)

    @staticmethod
    def loads(data: bytes, *args: Any, **kwargs: Any) -> Any:
        trusts = conf.get().FOREIGN_PICKLE
        if data.startswith(PICKLE_MARK):
            if trusts:
                return pickle.loads(data)  # noqa: S301 - asked for by the setting
            raise _refusal("was queued as a pickle, which runs any code its writer likes")
        value = _json(data, *args, **kwargs)
        if _may_be_call(value) and not trusts and not _is_ours(value):
            raise _refusal(f"names {str(value[0])[:200]!r}, and RQ would run any function so named")
        return value


def _json(data: bytes, *args: Any, **kwargs: Any) -> Any:
    try:
        return JSONSerializer.loads(data, *args, **kwargs)  # type: ignore[no-untyped-call]
    except RecursionError:
        raise ValueError("nested too deep") from None


def _may_be_call(value: Any) -> bool:
    """Return whether RQ could take it for function, instance, arguments and keywords."""
    return isinstance(value, list) and len(value) == 4  # noqa: PLR2004


def _is_ours(value: list[Any]) -> bool:
    function, instance, args, kwargs = value
    # RQ unpacks whatever stands for the arguments: of a dict, its keys.
    ours = isinstance(function, str) and function in dispatch.ENTRIES
    return ours and (instance, kwargs) == (None, {}) and isinstance(args, list)


def _refusal(what: str) -> ForeignPickle:
    return ForeignPickle(
        f"This job is not one of dedupjobs: it {what}. If only trusted code writes to this Redis, "
        'set DEDUPJOBS["FOREIGN_PICKLE"] = True and requeue it; otherwise give it a queue and a '
        "stock worker of its own."
    )


class Guarded:
    """
    Mixed into RQ's job class: a message may hold anything.

    ``rubbish``: why it could not be read; such a job is not to be run.
    """

    rubbish = ""

    @classmethod
    def fetch(cls: Any, id: str, *args: Any, **kwargs: Any) -> Any:
        if not _is_id(id):
            raise NoSuchJobError(f"{id!r} is no id of RQ's")
        return super().fetch(id, *args, **kwargs)  # type: ignore[misc]

    @classmethod
    def fetch_many(cls: Any, job_ids: Iterable[str], *args: Any, **kwargs: Any) -> list[Any]:
        ids = list(job_ids)
        found = super().fetch_many(filter(_is_id, ids), *args, **kwargs)  # type: ignore[misc]
        jobs = iter(found)
        return [next(jobs) if _is_id(one) else None for one in ids]

    def restore(self: Any, raw_data: dict[bytes, bytes]) -> None:
        trusts = conf.get().FOREIGN_PICKLE
        kept = raw_data if trusts else {k: v for k, v in raw_data.items() if k not in HOOKS}
        try:
            if not trusts:
                _check_sizes(kept)
            super().restore(kept)  # type: ignore[misc]
        except NoSuchJobError:
            raise
        except Exception as error:  # whatever RQ makes of what somebody has put there
            self.rubbish = f"{type(error).__name__}: {error}"
        if self.description is not None:  # RQ logs it as it is
            self.description = line(self.description)


def _check_sizes(raw: dict[bytes, bytes]) -> None:
    """Raise ValueError if a field that RQ unpacks is larger than any of ours."""
    for name in PACKED & raw.keys():
        reader = zlib.decompressobj()
        with suppress(zlib.error):  # RQ then takes it as it is
            reader.decompress(raw[name], LONGEST)
            if reader.unconsumed_tail:
                raise ValueError(f"{name.decode()} has more than {LONGEST:,} bytes once unpacked")


def _is_id(text: str) -> bool:
    try:
        validate_job_id(parse_job_id(text))
    except ValueError:
        return False
    return True


def guarded(kind: type[RqJob]) -> type[RqJob]:
    """Return RQ's job class, or a project's, with the guard."""
    return kind if issubclass(kind, Guarded) else type(kind.__name__, (Guarded, kind), {})
