"""How a run ended: one frozen value, decided first and written afterwards."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

MESSAGE_LIMIT = 2_000
CUT = " […cut]"


def clip(text: str, limit: int) -> str:
    """
    Return ``text`` as every database stores it: no NUL, no lone surrogate, at most ``limit``.

    PostgreSQL refuses both characters, and a failure must never fail to be recorded.
    """
    safe = text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")
    return safe if len(safe) <= limit else safe[: limit - len(CUT)] + CUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """What is kept of an exception: strings only, since exceptions need not survive pickling."""

    type: str
    message: str
    traceback: str

    @classmethod
    def of(cls, raised: BaseException, *, limit: int) -> Error:
        """Describe ``raised``, even if its ``__str__`` raises; ``limit`` caps the traceback."""
        kind = type(raised)
        try:
            message = str(raised)
        except Exception as broken:
            message = f"<str() raised {type(broken).__name__}>"
        try:
            lines = "".join(traceback.format_exception(raised, limit=-40))
        except Exception as broken:
            lines = f"<traceback could not be formatted: {type(broken).__name__}>"
        return cls(
            type=clip(f"{kind.__module__}.{kind.__qualname__}", 200),
            message=clip(message, MESSAGE_LIMIT),
            traceback=clip(lines, limit),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Succeeded:
    """The function returned; ``result`` is its encoded value, ``note`` why it was not kept."""

    result: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The function raised. ``after``: seconds asked for; ``final``: not to be retried."""

    error: Error
    after: float | None = None
    final: bool = False
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Snoozed:
    """The function asked to run again after ``after`` seconds."""

    after: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The job ends here; ``requested`` by an operator, else by the function itself."""

    reason: str
    requested: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """Cut off from outside through no fault of the job; ``reraise``: by KeyboardInterrupt."""

    reason: str
    reraise: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """Waits for a person: arguments that no longer fit, an unknown name, a hold request."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lapsed:
    """The lease is lost: there is nothing left that this attempt may write."""


Ending = Succeeded | Failed | Snoozed | Stopped | Interrupted | Parked | Lapsed
