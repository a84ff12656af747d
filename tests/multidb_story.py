"""
A job's life in a project with two databases; prints what happened as JSON.

Run by test_multidb in a process of its own, since Django's databases can not change in one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from io import StringIO
from typing import Any

import django

django.setup()

from django.conf import settings  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.db import connections, router, transaction  # noqa: E402
from django.test import Client  # noqa: E402
from redis import Redis  # noqa: E402

from dedupjobs import clock, dispatch, lifecycle, operations, runner, stats  # noqa: E402
from dedupjobs.clock import DbNow  # noqa: E402
from dedupjobs.coordinator import Coordinator  # noqa: E402
from dedupjobs.heartbeat import Heart  # noqa: E402
from dedupjobs.lifecycle import Place  # noqa: E402
from dedupjobs.models import (  # noqa: E402
    DuplicateCount,
    DuplicateSample,
    JobAttempt,
    Operation,
    ProcessedJob,
)
from tests import multidb_settings  # noqa: E402
from tests.app import jobs  # noqa: E402
from tests.app.models import Ledger  # noqa: E402

OURS = router.db_for_write(ProcessedJob)
NOT_OURS = next(alias for alias in settings.DATABASES if alias != OURS)
facts: dict[str, Any] = {"alias": lifecycle.alias()}
strays: dict[str, list[str]] = {}


@contextmanager
def watched(step: str) -> Iterator[None]:
    """Note each statement about our tables that goes to the database that does not decide."""

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "dedupjobs_" in sql:
            strays.setdefault(step, []).append(sql[:120])
        return execute(sql, params, many, context)

    with connections[NOT_OURS].execute_wrapper(wrapper):
        yield


def step(name: str, act: Callable[[], Any]) -> Any:
    """Do one thing, and keep its answer, or the error that ended it."""
    try:
        with watched(name):
            answer = act()
    except Exception as error:
        facts[name] = f"{type(error).__name__}: {error}"
        return None
    facts[name] = answer if isinstance(answer, (int, str, list, bool)) else str(answer)
    return answer


def row(tag: str) -> ProcessedJob:
    return ProcessedJob.objects.using(OURS).get(key=f"record:{tag}")


def queued() -> int:
    with Redis.from_url(settings.RQ_URL) as client:
        return int(client.llen("rq:queue:default"))


def deliver(tag: str) -> str:
    now = row(tag)
    return str(runner.deliver(now.pk, now.generation, owner=clock.token()))


def life() -> None:
    step("enqueue", lambda: jobs.record.enqueue(tag="a").kind)
    step("enqueue again", lambda: jobs.record.enqueue(tag="a").kind)
    step(
        "enqueue many",
        lambda: [str(o.kind) for o in jobs.record.enqueue_many([{"tag": "a"}, {"tag": "b"}])],
    )
    step("run", lambda: deliver("a"))
    step("result", lambda: jobs.record.enqueue(tag="a").result(timeout=2))
    step("run now", lambda: jobs.record.run_now(tag="now", text="t").result())
    step("effects", Ledger.objects.count)
    step("fold", lambda: stats.fold().duplicates)
    step("tick", lambda: Coordinator().tick().leads)


def death() -> None:
    claim = lifecycle.claim(row("b").pk, 1, owner="dead", place=Place())
    assert claim is not None
    heart = Heart(job_pk=claim.job_pk, fence=claim.fence, owner="dead", name=claim.name, lease=60)
    step("beat", lambda: [heart.tick().over, heart.tick().lost])
    attempt = JobAttempt.objects.using(OURS).filter(pk=claim.fence)
    attempt.update(lease_until=DbNow(-9), beat_at=DbNow(-10))
    coordinator = Coordinator()
    coordinator._beats[claim.fence] = (attempt.get().beat_at, -1_000.0)
    step("reclaim", lambda: [str(lost.status) for lost in coordinator.reclaim()])
    step("hand over", lambda: coordinator.hand_over(dispatch.queue_names()))


def operators() -> None:
    step("hold", lambda: operations.hold(row("b"), by="ada"))
    step("unhold", lambda: operations.unhold(row("b"), by="ada"))
    step("cancel", lambda: operations.cancel(row("b"), by="ada"))
    step("operations", lambda: Operation.objects.using(OURS).count())
    step("counts", lambda: DuplicateCount.objects.using(OURS).count())
    step("samples", lambda: DuplicateSample.objects.using(OURS).count() > 0)
    for command in ("dedupjobs_duplicates", "dedupjobs_schedule"):
        step(command, lambda command=command: call_command(command, stdout=StringIO()) or "done")


def pages() -> None:
    from django.contrib.auth.models import User

    client = Client()
    client.force_login(User.objects.create_superuser("ada"))
    for model in ("processedjob", "jobattempt", "duplicatecount", "duplicatesample", "operation"):
        url = f"/admin/dedupjobs/{model}/"
        step(f"list of {model}", lambda url=url: client.get(url).status_code)
    page = client.get("/admin/dedupjobs/processedjob/").content.decode()
    facts["list shows the newest"] = "record:a" in page and "record:now" in page
    url = f"/admin/dedupjobs/processedjob/{row('a').pk}/change/"
    step("page of a job", lambda: client.get(url).status_code)


def prune() -> None:
    old = lifecycle.database_now() - timedelta(days=40)
    ProcessedJob.objects.using(OURS).update(finished_at=old)
    pruned = step("prune", lambda: lifecycle.prune("testapp.record", older_than=1, limit=10))
    if pruned is not None:
        facts["prune"] = [pruned.deleted, pruned.tombstones]
    step("attempts left", lambda: JobAttempt.objects.using(OURS).count())


def commits() -> None:
    """Messages wait for the commit of the rows' own database, and for no other."""
    _freeze(False)  # or not even an empty transaction could be opened there
    before = queued()
    with transaction.atomic(using=OURS):
        jobs.record.enqueue(tag="commit")
        facts["inside its own"] = queued() - before
    facts["after its own"] = queued() - before
    before = queued()
    with transaction.atomic(using=NOT_OURS):
        jobs.record.enqueue(tag="other")
        facts["inside the other"] = queued() - before
    before = queued()
    try:
        with transaction.atomic(using=OURS):
            jobs.record.enqueue(tag="undone")
            raise RuntimeError
    except RuntimeError:
        facts["rolled back"] = [
            queued() - before,
            ProcessedJob.objects.using(OURS).filter(key="record:undone").count(),
        ]
    before = queued()
    with transaction.atomic(using=NOT_OURS), transaction.atomic(using=OURS):
        jobs.record.enqueue(tag="both")
        facts["inside both"] = queued() - before
    facts["after both"] = queued() - before


def _freeze(frozen: bool) -> None:
    """Refuse all writes to the replica: it stays as empty as it is."""
    if multidb_settings.SETUP == "replica":
        with connections[NOT_OURS].cursor() as cursor:
            cursor.execute(f"PRAGMA query_only = {'ON' if frozen else 'OFF'}")


def main() -> None:
    for alias in settings.DATABASES:
        call_command("migrate", database=alias, run_syncdb=True, verbosity=0)
    for url in (settings.RQ_URL, settings.CACHE_URL):
        with Redis.from_url(url) as client:
            client.flushdb()
    _freeze(True)
    for chapter in (life, death, operators, pages, prune, commits):
        chapter()
    facts["strays"] = strays
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
