"""Running many seeds, in this process or in several."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.simulation.known import is_known
from tests.simulation.prepare import prepare

TAIL = 60  # lines of a trace that are printed
CHUNK = 25  # seeds that a process gets at a time

Seen = tuple[int, int, str, float]
"""Seed, steps (negative if it failed), digest, seconds of CPU; failures have been printed."""


def run_all(seeds: range, jobs: int, stop: bool) -> Iterator[Seen]:
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    if jobs == 1:
        prepare()
        yield from [] if stop else _corpus()
        for chunk in chunks:
            yield from _some(chunk, stop)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=prepare) as pool:
        replayed = pool.submit(_corpus)
        for seen in pool.map(_some, chunks, [stop] * len(chunks)):
            yield from seen
        yield from replayed.result()


def _corpus() -> list[Seen]:
    from tests.simulation.shrink import corpus

    return [_one(plan, stop=True) for plan in corpus()]


def _some(seeds: range, stop: bool) -> list[Seen]:
    from tests.simulation.run import Plan

    return [_one(Plan.of(seed), stop) for seed in seeds]


def _one(plan: object, stop: bool) -> Seen:
    """Run a plan; steps are negative if it failed."""
    from tests.simulation.run import run
    from tests.simulation.shrink import remember, shrink

    begun = time.process_time()
    result = run(plan)
    seconds = time.process_time() - begun
    seed = result.plan.seed
    if not result.violations or is_known(result.violations[0]):
        return seed, result.steps, result.digest, seconds
    print(f"seed {seed}: {result.violations[0]}  {list(result.happened)}", flush=True)
    if not stop:
        small = shrink(result)
        print(small.text(TAIL), flush=True)
        remember(small)
    return seed, -result.steps, result.digest, seconds


def keep(seed: int, file: str) -> None:
    """Make a failing run smaller, and add it to a corpus."""
    from tests.simulation.run import Plan, run
    from tests.simulation.shrink import remember, shrink

    remember(shrink(run(Plan.of(seed))), Path(file))
