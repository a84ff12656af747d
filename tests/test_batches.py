"""Messages of many rows: claimed together, each settled as if it had come alone."""

from __future__ import annotations

from typing import Any

import pytest

from dedupjobs import batches, dispatch
from dedupjobs.models import JobAttempt, ProcessedJob, Status
from tests import live
from tests.app import jobs
from tests.app.models import Ledger

pytestmark = pytest.mark.django_db(transaction=True)

KINDS = {
    "each": jobs.record,
    "group": jobs.record_in_group,
    "atomic": jobs.record_atomically,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def enqueued(kind: str, count: int, **kwargs: Any) -> list[ProcessedJob]:
    calls = [{"tag": f"{n}", **kwargs} for n in range(count)]
    return [outcome.job for outcome in KINDS[kind].enqueue_many(calls)]


def run(rows: list[ProcessedJob]) -> None:
    batches.run([[row.pk, row.generation] for row in rows])


def statuses() -> list[str]:
    return list(ProcessedJob.objects.order_by("pk").values_list("status", flat=True))


def outcomes() -> list[str | None]:
    return list(JobAttempt.objects.order_by("pk").values_list("outcome", flat=True))


def tags() -> list[str]:
    return list(Ledger.objects.order_by("pk").values_list("tag", flat=True))


@every_kind
def test_batch_runs_each_row_once_under_an_owner_and_a_fence_of_its_own(kind: str) -> None:
    rows = enqueued(kind, 5)
    run(rows)
    run(rows)
    assert statuses() == [Status.SUCCEEDED] * 5
    assert outcomes() == ["SUCCEEDED"] * 5
    assert tags() == [f"{n}" for n in range(5)]
    owners = list(JobAttempt.objects.order_by("job_id").values_list("owner", flat=True))
    first = owners[0].partition(".")[0]
    assert sorted(owners) == [f"{first}.{n}" for n in range(5)]
    assert live.locks_left() == []
    assert all(a.began_at and a.ended_at for a in JobAttempt.objects.all())


def test_calls_at_once_share_messages_of_batch_rows() -> None:
    with live.changed(DEDUPJOBS={"BATCH": 4}):
        rows = enqueued("each", 10)
    sizes = [len([r for r in rows if r.dispatch_id == i]) for i in live.queued()]
    assert sorted(sizes) == [2, 4, 4]
    assert dispatch.BATCH_ENTRY
