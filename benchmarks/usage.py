"""What has been used of CPU and Redis so far, and an empty start for both servers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Self

from django.conf import settings
from django.core.management import call_command
from redis import Redis

from dedupjobs import dispatch


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU of this process and its ended children in seconds; Redis as its server counts."""

    cpu: float
    trips: int
    commands: int

    @classmethod
    def now(cls) -> Self:
        spent = [getrusage(who) for who in (RUSAGE_SELF, RUSAGE_CHILDREN)]
        info = _client().info("everything")
        return cls(
            cpu=sum(r.ru_utime + r.ru_stime for r in spent),
            trips=info["total_reads_processed"],
            commands=sum(v["calls"] for k, v in info.items() if k.startswith("cmdstat_")),
        )

    def __sub__(self, earlier: Usage) -> Usage:
        return Usage(
            cpu=self.cpu - earlier.cpu,
            trips=self.trips - earlier.trips,
            commands=self.commands - earlier.commands,
        )


def largest_process() -> int:
    """Return the most bytes that this process or an ended child of it has ever had resident."""
    return max(getrusage(who).ru_maxrss for who in (RUSAGE_SELF, RUSAGE_CHILDREN)) * 1024


def clear_servers() -> None:
    """Empty the tables and Redis."""
    call_command("flush", interactive=False, verbosity=0)
    _client().flushdb()
    # Or a coordinator would take this for a disaster and send every waiting row again.
    dispatch.set_epoch("default", ttl=3600)


@lru_cache(maxsize=1)
def _client() -> Redis:
    """One connection for all our questions, since a new one asks several of its own."""
    return Redis.from_url(settings.REDIS_URL)
