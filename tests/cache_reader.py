"""
A process that reads keys from the status cache as fast as it can, for the stress test.

    python -m tests.cache_reader <file that ends it> <seed> <key hash>…

Some of its reads are slow, between the database's answer and their use. Prints one JSON object:
how often a state was older than one that was seen before the read began, and, after a pause longer
than L1_TTL, what it believes of each key.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from pathlib import Path

import django

django.setup()

from django.db import connections  # noqa: E402 - models load after the set-up

from dedupjobs import cache, conf, controls, invalidation, probes  # noqa: E402
from tests.waiting import until  # noqa: E402

THREADS = 3


class Reader:
    """Reads in THREADS threads until ``end`` exists, and counts steps back in time."""

    def __init__(self, end: Path, seed: int, keys: list[str]) -> None:
        self.end, self.keys, self.chance = end, keys, random.Random(seed)
        self.seen: dict[str, tuple[int, int]] = {}
        self.guard = threading.Lock()
        self.reads = self.older = 0

    def run(self) -> None:
        probes.hook = self._slow
        threads = [threading.Thread(target=self._read) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        probes.hook = None

    def _slow(self, point: str) -> None:
        if point == "cache.loaded" and self.chance.random() < 0.1:
            time.sleep(self.chance.uniform(0, 0.3))

    def _read(self) -> None:
        while not self.end.exists():
            key = self.chance.choice(self.keys)
            before = self.seen.get(key)
            known = cache.read(key, holds=True)
            with self.guard:
                self.reads += 1
                if known is not None:
                    self.older += before is not None and known.stamp < before
                    self.seen[key] = max(self.seen.get(key, known.stamp), known.stamp)
        connections.close_all()


def main(end: Path, seed: int, keys: list[str]) -> None:
    invalidation.ensure_listening()
    until(lambda: controls._hears, 60, what="the listener is connected")
    Path(f"{end}.{seed}").touch()
    reader = Reader(end, seed, keys)
    reader.run()
    time.sleep(conf.get().L1_TTL * 2)
    believed = {key: cache.read(key, holds=True) for key in keys}
    report = {
        "reads": reader.reads,
        "older": reader.older,
        "heard": invalidation.counts["heard"],
        "cut": invalidation.counts["connections lost"],
        "believed": {k: known and [*known.stamp, known.status] for k, known in believed.items()},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
