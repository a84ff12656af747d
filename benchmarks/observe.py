"""
What it costs to be observed: ``python -m benchmarks.observe scrape [ROWS]`` or ``overhead [JOBS]``.

Each on servers of our own, by a fresh process; prints JSON.
"""

from __future__ import annotations

import sys

from benchmarks import rounds

DEFAULTS = {"scrape": ("postgresql", "1000000"), "overhead": ("sqlite", "100")}


def main(kind: str, *arguments: str) -> None:
    database, default = DEFAULTS[kind]
    rounds.by_itself(kind, database, *(arguments or (default,)))


if __name__ == "__main__":
    main(*sys.argv[1:])
