"""Messages of another project, whose workers share a queue with ours: handed on, never run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from django.conf import settings
from rq.job import Job as RqJob
from rq.serializers import JSONSerializer

from dedupjobs import dispatch, levers, lifecycle, signals
from dedupjobs.levers import Wish
from dedupjobs.models import ControlKind, Status
from tests import live
from tests.app import jobs
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

STRANGE = {"PREFIX": "south (of the river)"}


@contextmanager
def heard() -> Iterator[list[bool]]:
    """Yield whether each message of another project was handed on."""
    told: list[bool] = []

    def hear(handed_on: bool, **_: Any) -> None:
        told.append(handed_on)

    signals.stranger_met.connect(hear)
    try:
        yield told
    finally:
        signals.stranger_met.disconnect(hear)


def work_one_off() -> None:
    """Run the message at the head of the queue."""
    with redis.Redis.from_url(settings.RQ_URL) as client:
        popped = client.lpop("rq:queue:default").decode()
        RqJob.fetch(popped, connection=client, serializer=JSONSerializer).perform()


def stored() -> list[str]:
    """The ids in the queue."""
    with live.rq_client() as client:
        return [str(i) for i in client.lrange("rq:queue:default", 0, -1)]


def test_message_says_whose_it_is_where_the_prefix_is_not_the_usual_one() -> None:
    assert dispatch.described("shop.charge") == "shop.charge (1 row)"
    assert dispatch.described("shop.charge", again=True) == "shop.charge (1 row, again)"
    with live.changed(DEDUPJOBS={"PREFIX": "north"}):
        assert dispatch.described("shop.charge", 20) == "shop.charge (20 rows, of north)"
        assert dispatch.is_of_others("shop.charge (20 rows)")
        assert not dispatch.is_of_others("shop.charge (1 row, again, of north)")
    assert dispatch.is_of_others("shop.charge (1 row, of north)")
    with live.changed(DEDUPJOBS=STRANGE):
        description = dispatch.described("shop.charge")
        assert not dispatch.is_of_others(description)
    assert dispatch.is_of_others(description)
    assert dispatch.name_in(description) == "shop.charge"


@pytest.mark.parametrize("count", [1, 3])
def test_message_of_another_project_is_handed_on_a_few_times_and_touches_no_row(
    count: int,
) -> None:
    made = jobs.record_freely.enqueue_many([{"tag": str(n)} for n in range(count)])
    with live.changed(DEDUPJOBS=STRANGE), heard() as told:
        assert live.work_off() == dispatch.HANDS + 1
    assert told == [True] * dispatch.HANDS + [False]
    for outcome in made:
        row = live.row_of(outcome)
        assert (row.status, row.attempts) == (Status.PENDING, 0)


def test_message_that_was_handed_on_stands_at_the_head_and_runs_as_it_was_sent() -> None:
    first, second = (jobs.record.enqueue(tag=tag) for tag in "ab")
    sent = stored()
    with live.changed(DEDUPJOBS=STRANGE):
        work_one_off()
        work_one_off()
    assert stored() == [f"{sent[0]}-2", sent[1]]
    assert live.work_off() == 2
    for outcome in (first, second):
        row = live.row_of(outcome)
        assert row.status == Status.SUCCEEDED
        assert live.attempt(outcome).rq_id == row.dispatch_id in sent


def test_row_whose_message_was_handed_on_is_set_aside_by_a_pause() -> None:
    outcome = jobs.record.enqueue(tag="a")
    pause = Wish(kind=ControlKind.PAUSE, aim="queue", target="default", value=None)
    levers.add(pause, by="tester", reason="test")
    with live.changed(DEDUPJOBS=STRANGE):
        work_one_off()
    assert live.work_off() == 1
    assert lifecycle.is_aside(live.row_of(outcome))


def test_messages_that_were_handed_on_expire() -> None:
    jobs.record.enqueue(tag="a")
    with live.changed(DEDUPJOBS=STRANGE):
        live.work_off()
    assert live.eternal_keys() == []


@pytest.mark.parametrize("worker", [live.DEDUP, live.STOCK, live.SIMPLE])
def test_workers_of_two_projects_on_one_queue_hand_each_other_what_is_theirs(
    worker: str, spawn: live.Spawn
) -> None:
    strange = live.start_worker(spawn, worker=worker, PREFIX="south")
    live.start_worker(spawn, worker=worker)
    with live.changed(RQ={"WORKER_CLASS": worker}):
        for number in range(3):
            live.wait_for(jobs.record.enqueue(tag=str(number)))
    until(lambda: "was handed on to the next worker" in strange.output, 10)
