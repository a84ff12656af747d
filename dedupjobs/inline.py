"""Running a call here and now: a webhook consumer or a command that must not do it twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dedupjobs import client, clock, lifecycle, runner
from dedupjobs.client import Outcome
from dedupjobs.exceptions import JobDefinitionError
from dedupjobs.registry import Variant


def run_now(variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
    """
    Run this call in this process if its key is free, by the same rows and attempts.

    The outcome's ``job`` is the row as it is afterwards. A failure waits for its retry by a
    worker, as any other would. A key that is taken is answered as ``enqueue`` answers it.
    """
    options = variant.job.options
    if options.newest_wins or variant.run_after is not None:
        raise JobDefinitionError(
            f"{variant.job.name}.run_now() runs at once; it can not go with on_conflict="
            f"{options.on_conflict!r}, debounce={options.debounce} or run_after. Use enqueue()."
        )
    outcome = client.reserve(variant, args, kwargs, sends=False)
    if outcome.error is not None:
        raise outcome.error
    if outcome.created:
        row = outcome.job
        runner.deliver(row.pk, row.generation, owner=clock.token(), lock=options.takes_lock)
        outcome = replace(outcome, job=lifecycle.jobs().filter(pk=row.pk).first() or row)
    return outcome
