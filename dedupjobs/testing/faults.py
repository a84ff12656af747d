"""What can go wrong, in a test: a crash, a lost lease, a Redis that is gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

from dedupjobs import client, clock, lifecycle, probes, registry
from dedupjobs.context import Attempt, entered
from dedupjobs.heartbeat import Heart
from dedupjobs.lifecycle import Claim, Place
from dedupjobs.testing.stage import only_in_tests, variant_of, without_redis

PACKAGE = Path(probes.__file__).parent


class Crashed(BaseException):
    """The process has died here, as far as the test is concerned; nothing should catch it."""


@contextmanager
def crash_at(point: str) -> Iterator[None]:
    """
    Let the block die when it reaches ``point``, as by ``kill -9``, and go on behind the block.

    Nothing that the dead process had not committed is there; its attempts are counted as lost, so
    that the next one is due: ``run_pending()``. Points: ``user_code.before``, ``user_code.after``,
    ``settle.uncommitted``, ``settle.committed``, ``claim.committed`` and all others of
    ``probes.reach()``. AssertionError: the block did not come by.
    """
    only_in_tests("crash_at()")
    if point not in points():
        near = get_close_matches(point, points(), 1, 0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(points())}"
        raise ValueError(f"crash_at({point!r}): there is no such point; {hint}")
    hook = _Death(point)
    before = lifecycle.attempts().order_by("-pk").values_list("pk", flat=True).first() or 0
    try:
        with mock.patch.object(probes, "hook", hook):
            yield
    except Crashed:
        pass
    if not hook.dead:
        raise AssertionError(f"crash_at({point!r}): the block did not reach this point")
    for fence in lifecycle.attempts().filter(outcome=None, pk__gt=before).values_list("pk"):
        lifecycle.bury(*fence, "lost: the test let its process die")


class _Death:
    """Raises at the point, and ever after: a dead process does nothing more."""

    def __init__(self, point: str) -> None:
        self.point = point
        self.dead = False

    def __call__(self, reached: str) -> None:
        if reached == self.point:
            self.dead = True
        if self.dead:
            raise Crashed(self.point)


@lru_cache(maxsize=1)
def points() -> list[str]:
    """Return the names of all points, as they stand in the package."""
    texts = (path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    return sorted({found for text in texts for found in re.findall(r'\breach\("([\w.]+)"\)', text)})


class Zombie:
    """An attempt that runs your code although the coordinator may have given it up."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self._heart = Heart(
            job_pk=claim.job_pk,
            fence=claim.fence,
            owner=claim.owner,
            name=claim.name,
            lease=registry.options_of(claim.name).lease,
        )
        self.attempt = Attempt(claim, self._heart)

    def take_over(self) -> None:
        """Give the attempt up for lost, as the coordinator does; the next one is due."""
        lifecycle.bury(self._claim.fence, "lost: the test has taken it over")
        self._heart.see(lifecycle.look(self._claim.fence))


@contextmanager
def zombie(job: Any, *args: Any, taken_over: bool = True, **kwargs: Any) -> Iterator[Zombie]:
    """
    Run the block as an attempt of this call that has lost its lease: does your code notice?

        with zombie(charge, order_id=7), pytest.raises(LeaseLost):
            charge(order_id=7)      # calls attempt.check(), or writes in attempt.fenced()

    ``job``: a job, what its ``using()`` returns, or a task of ours. With ``taken_over=False`` the
    attempt is the right one until ``take_over()`` is called, for example by what stands in for a
    slow payment service.
    """
    only_in_tests("zombie()")
    variant = variant_of(job, "zombie()")
    with without_redis():
        outcome = client.reserve(variant, args, kwargs, sends=False)
        if not outcome.created:
            raise AssertionError(f"zombie() needs a key that is free: {outcome.reason}")
        row = outcome.job
        owner = clock.token()
        claim = lifecycle.claim(row.pk, row.generation, owner=owner, place=Place(host="zombie"))
        if claim is None:
            raise AssertionError(f"zombie() needs a call that is due: run_after={row.run_after}")
        undead = Zombie(claim)
        if taken_over:
            undead.take_over()
        with entered(undead.attempt):
            yield undead


@contextmanager
def simulate_redis_loss() -> Iterator[None]:
    """
    Let Redis be gone for all that dedupjobs does in the block; messages are lost.

    Locks are missed, so that ``on_redis_error`` is obeyed, also by ``run_pending()`` and in
    ``inline()`` and ``captured_jobs()``. Behind the block nothing is believed that was read from
    Redis before. The rows are still there: ``run_pending()`` runs them, as workers do once the
    coordinator has sent them again.
    """
    only_in_tests("simulate_redis_loss()")
    with without_redis(missed=True):
        yield
