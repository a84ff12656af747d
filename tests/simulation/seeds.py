"""Running many seeds, in this process or in several."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from tests.simulation.prepare import prepare

TAIL = 60  # lines of a trace that are printed
CHUNK = 25  # seeds that a process gets at a time


class Seen(NamedTuple):
    """A run, whose failure was printed; ``happened``: the kinds of its faults."""

    seed: int
    failed: bool
    steps: int
    digest: str
    seconds: float  # of CPU
    happened: tuple[str, ...]


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
    """Run a plan; print why it failed, and keep it unless ``stop``."""
    from tests.simulation.run import run
    from tests.simulation.shrink import remember, shrink

    begun = time.process_time()
    result = run(plan)
    seconds = time.process_time() - begun
    if result.violations:
        happened = "; ".join(map(str, result.happened))
        print(f"seed {result.plan.seed}: {result.violations[0]}  [{happened}]", flush=True)
        if not stop:
            small = shrink(result)
            print(small.text(TAIL), flush=True)
            remember(small)
    return Seen(
        seed=result.plan.seed,
        failed=bool(result.violations),
        steps=result.steps,
        digest=result.digest,
        seconds=seconds,
        happened=tuple(fault.kind for fault in result.happened),
    )


def keep(seed: int, file: str) -> None:
    """Make a failing run smaller, and add it to a corpus."""
    from tests.simulation.run import Plan, run
    from tests.simulation.shrink import remember, shrink

    remember(shrink(run(Plan.of(seed))), Path(file))
