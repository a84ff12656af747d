"""Which calls were made: ``captured_jobs()`` and what can be asserted of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from dedupjobs import client, dispatch, keys, lifecycle
from dedupjobs.client import Outcome
from dedupjobs.exceptions import OutsideTests
from dedupjobs.models import Kind
from dedupjobs.registry import Job, Variant
from dedupjobs.testing.stage import only_in_tests, variant_of, without_redis

TURNED_AWAY = (Kind.DUPLICATE, Kind.REPLAYED, Kind.BLOCKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued:
    """One call, by whatever way it was made, and what became of it."""

    job: Job[..., Any]
    arguments: Mapping[str, Any]
    outcome: Outcome

    @property
    def key(self) -> str:
        return self.outcome.job.key

    @property
    def kind(self) -> Kind:
        return self.outcome.kind

    @property
    def undone(self) -> bool:
        """Whether the call's transaction was rolled back."""
        row = self.outcome.job
        there = lifecycle.jobs().filter(pk=row.pk, key_hash=row.key_hash, version__gte=row.version)
        return not there.exists()

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        key = f" key {self.key!r}" if self.key else ""
        undone = ", rolled back" if self.undone else ""
        return f"{self.job.name}({arguments}){key}: {self.kind}{undone}"


@dataclass(slots=True)
class Calls:
    """The calls of a block, in their order: a sequence of Enqueued."""

    made: list[Enqueued] = field(default_factory=list)

    def __iter__(self) -> Iterator[Enqueued]:
        return iter(self.made)

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, index: int) -> Enqueued:
        return self.made[index]

    def assert_enqueued(
        self,
        job: Any,
        *,
        key: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        times: int | None = None,
    ) -> None:
        """
        Fail unless calls of ``job`` made a run follow: ``times`` of them, or at least one.

        ``job``: a job, or a task of ours. ``arguments``: those that matter. What was rolled back
        does not count.
        """
        name = variant_of(job, "assert_enqueued()").job.name
        chosen = self._of(name, key, arguments)
        runs = [c for c in chosen if c.kind not in TURNED_AWAY and not c.undone]
        self._expect(runs, times, f"{_named(name, key, arguments)} to be enqueued")

    def assert_deduplicated(
        self, job: Any, *, key: str | None = None, times: int | None = None
    ) -> None:
        """Fail unless calls of ``job`` were turned away, because their key was taken."""
        name = variant_of(job, "assert_deduplicated()").job.name
        away = [c for c in self._of(name, key, None) if c.kind in TURNED_AWAY]
        self._expect(away, times, f"calls of {_named(name, key, None)} to be turned away")

    def _of(
        self, name: str, key: str | None, arguments: Mapping[str, Any] | None
    ) -> list[Enqueued]:
        wanted = (arguments or {}).items()
        return [
            call
            for call in self.made
            if call.job.name == name
            and key in (None, call.key)
            and all(given in call.arguments and call.arguments[given] == v for given, v in wanted)
        ]

    def _expect(self, found: list[Enqueued], times: int | None, what: str) -> None:
        if found if times is None else len(found) == times:
            return
        often = "at least once" if times is None else f"{times} times"
        made = "".join(f"\n  {call}" for call in self.made) or " none"
        raise AssertionError(f"expected {what} {often}, found {len(found)}; calls made:{made}")


def _named(job: str, key: str | None, arguments: Mapping[str, Any] | None) -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in (arguments or {}).items())
    call = f"{job}({given})" if given else job
    return call if key is None else f"{call} with key {key!r}"


_open: list[Calls] = []


@contextmanager
def captured_jobs() -> Iterator[Calls]:
    """
    Note the calls of the block, and hand none over: rows are written, nothing runs.

    ``run_pending()`` runs them, also in the block. As a decorator, for a whole test.
    """
    only_in_tests("captured_jobs()")
    with without_redis(), recorded() as calls, handing_over_to(_nobody):
        yield calls


def assert_enqueued(
    job: Any,
    *,
    key: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    times: int | None = None,
) -> None:
    """As ``Calls.assert_enqueued``, of the innermost open captured_jobs() or inline() block."""
    _innermost("assert_enqueued()").assert_enqueued(job, key=key, arguments=arguments, times=times)


def assert_deduplicated(job: Any, *, key: str | None = None, times: int | None = None) -> None:
    """As ``Calls.assert_deduplicated``, of the innermost open block."""
    _innermost("assert_deduplicated()").assert_deduplicated(job, key=key, times=times)


def _innermost(helper: str) -> Calls:
    only_in_tests(helper)
    if not _open:
        raise OutsideTests(
            f"{helper} looks at the calls that captured_jobs() or inline() note, and no such "
            "block is open. Call it inside, or on what the block gives: calls.assert_enqueued(…)"
        )
    return _open[-1]


@contextmanager
def recorded() -> Iterator[Calls]:
    """Note all calls of the block."""
    calls = Calls()
    _open.append(calls)
    with (
        mock.patch.object(client, "reserve", _noting_one(client.reserve, calls)),
        mock.patch.object(client, "enqueue_many", _noting_many(client.enqueue_many, calls)),
    ):
        try:
            yield calls
        finally:
            _open.remove(calls)


@contextmanager
def handing_over_to(take: Callable[[Any], None]) -> Iterator[None]:
    """Let ``take`` have what would be pushed to Redis after the commit."""
    with mock.patch.object(dispatch, "push_on_commit", take):
        yield


def _nobody(deliveries: Any) -> None: ...


def _noting_one(reserve: Callable[..., Outcome], calls: Calls) -> Callable[..., Outcome]:
    @functools.wraps(reserve)
    def noting(variant: Variant, args: Any, kwargs: Any, **options: Any) -> Outcome:
        outcome = reserve(variant, args, kwargs, **options)
        _note(calls, variant, args, kwargs, outcome)
        return outcome

    return noting


def _noting_many(
    enqueue_many: Callable[..., list[Outcome]], calls: Calls
) -> Callable[..., list[Outcome]]:
    @functools.wraps(enqueue_many)
    def noting(variant: Variant, given: Any) -> list[Outcome]:
        given = list(given)
        outcomes = enqueue_many(variant, given)
        for kwargs, outcome in zip(given, outcomes, strict=True):
            _note(calls, variant, (), kwargs, outcome)
        return outcomes

    return noting


def _note(calls: Calls, variant: Variant, args: Any, kwargs: Any, outcome: Outcome) -> None:
    job = variant.job
    bound, shown = job.bind(args, dict(kwargs)), keys.visible(job.signature).parameters
    arguments = {name: value for name, value in bound.items() if name in shown}
    calls.made.append(Enqueued(job=job, arguments=arguments, outcome=outcome))
