"""When jobs ran, in memory that a worker shares with the horses it forks."""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass

_RECORD = struct.Struct("ddq")
_memory = mmap.mmap(-1, _RECORD.size)


@dataclass(frozen=True, slots=True)
class Stamps:
    """Starts of the first and the last function by the monotonic clock, and how many there were."""

    first: float = 0.0
    last: float = 0.0
    count: int = 0

    @property
    def per_second(self) -> float:
        """From start to start, so that it holds whole jobs with all that lies between them."""
        return (self.count - 1) / (self.last - self.first)


def mark() -> None:
    """Note that a job's function starts; costs about a microsecond."""
    seen, now = read(), time.monotonic()
    _RECORD.pack_into(_memory, 0, seen.first or now, now, seen.count + 1)


def read() -> Stamps:
    return Stamps(*_RECORD.unpack_from(_memory))


def reset() -> None:
    _RECORD.pack_into(_memory, 0, 0.0, 0.0, 0)
