"""What the admin's buttons do to rows: guarded by what was seen, and logged."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.contrib.admin.models import DELETION, LogEntry
from django.test import Client

from dedupjobs import cache, clock, dispatch, lifecycle, locks
from dedupjobs.admin import deeds
from dedupjobs.admin.deeds import DEEDS, AsSeen
from dedupjobs.clock import DbNow
from dedupjobs.models import JobAttempt, Operation, ProcessedJob, Status
from dedupjobs.testing import run_pending
from tests.admin_rows import address, everything, expired, fresh, make, try_of
from tests.app import jobs

pytestmark = pytest.mark.django_db
committing = pytest.mark.django_db(transaction=True)

QUEUE = "rq:queue:default"


@pytest.fixture(autouse=True)
def _patient(settings: Any) -> Iterator[None]:
    settings.DEDUPJOBS = {"PUSH_TIMEOUT": 30, "LOCK_TIMEOUT": 30}
    dispatch.forget_clients()
    locks.forget_clients()
    yield
    dispatch.forget_clients()
    locks.forget_clients()


def operate(client: Client, action: str, *seen: AsSeen, **more: Any) -> Any:
    """Confirm an action, and return the page that follows."""
    data = {"action": action, "row": [str(s) for s in seen], "confirmed": "1", "reason": "because"}
    return client.post(address("operate"), {**data, **more}, follow=True)


def messages(answer: Any) -> list[str]:
    return [str(message) for message in answer.context["messages"]]


CASES = [
    ("retry", Status.DEAD, Status.PENDING),
    ("retry", Status.CANCELLED, Status.PENDING),
    ("retry", Status.RETRYING, Status.PENDING),
    ("cancel", Status.PENDING, Status.CANCELLED),
    ("cancel", Status.HELD, Status.CANCELLED),
    ("cancel", Status.RUNNING, Status.RUNNING),
    ("hold", Status.RETRYING, Status.HELD),
    ("hold", Status.RUNNING, Status.RUNNING),
    ("unhold", Status.HELD, Status.PENDING),
    ("limit", Status.DEAD, Status.DEAD),
]


@pytest.mark.parametrize(("action", "status", "after"), CASES)
def test_action_changes_the_row_and_says_who_did_what_and_why(
    admin_client: Client, action: str, status: Status, after: Status
) -> None:
    row = make(status)
    answer = operate(admin_client, action, AsSeen.of(row), limit=9)
    assert answer.status_code == 200
    now = fresh(row)
    assert (now.status, now.version) == (after, row.version + 1)
    record = Operation.objects.get()
    assert (record.action, record.by, record.reason) == (action, "admin", "because")
    assert (record.before, record.after) == (status, after)
    entry = LogEntry.objects.get()
    moved = f"{status} → {after}" if status != after else status
    assert entry.change_message == f"{action}: {moved}; because"
    assert (entry.user.username, entry.object_id) == ("admin", str(row.pk))
    history = admin_client.get(address("history", row.pk)).content.decode()
    assert f"{action}: " in history
    if action == "limit":
        assert now.max_attempts == 9


@pytest.mark.parametrize(("action", "status", "after"), CASES)
def test_action_on_a_row_that_moved_on_says_so_and_changes_nothing(
    admin_client: Client, action: str, status: Status, after: Status
) -> None:
    row = make(status)
    seen = AsSeen.of(row)
    ProcessedJob.objects.filter(pk=row.pk).update(version=row.version + 1)
    before = everything()
    answer = operate(admin_client, action, seen, limit=9)
    assert everything() == before
    assert "has changed since it was looked at" in messages(answer)[0]


@pytest.mark.parametrize("action", [deed.name for deed in DEEDS.values()])
def test_action_on_a_row_that_is_gone_says_so(admin_client: Client, action: str) -> None:
    row = make(Status.DEAD)
    seen = AsSeen.of(row)
    ProcessedJob.objects.all().delete()
    answer = operate(admin_client, action, seen, limit=9)
    assert answer.status_code == 200
    assert any("is gone" in words for words in messages(answer))
    assert not LogEntry.objects.exists()


def test_action_without_a_reason_asks_for_it_and_changes_nothing(admin_client: Client) -> None:
    row = make(Status.DEAD)
    before = everything()
    for data in ({"reason": "  "}, {"reason": "x" * 501}, {"confirmed": ""}):
        sent = {"action": "retry", "row": str(AsSeen.of(row)), "reason": "because", **data}
        if not data.get("confirmed", "1"):
            del sent["confirmed"]
        answer = admin_client.post(address("operate"), sent)
        assert answer.status_code == 200
        assert 'name="reason"' in answer.content.decode()
        assert everything() == before


@pytest.mark.parametrize("limit", ["", "0", "-1", "1000001", "nine", "٣x"])
def test_impossible_attempt_limit_is_refused(admin_client: Client, limit: str) -> None:
    row = make(Status.DEAD)
    before = everything()
    answer = operate(admin_client, "limit", AsSeen.of(row), limit=limit)
    assert answer.status_code == 200
    assert everything() == before


@pytest.mark.parametrize(("limit", "override"), [(5, None), (3, None), (8, 8)])
def test_attempt_limit_that_raises_nothing_is_refused(
    admin_client: Client, limit: int, override: int | None
) -> None:
    row = make(Status.DEAD, max_attempts=override)
    before = everything()
    answer = operate(admin_client, "limit", AsSeen.of(row), limit=limit)
    assert everything() == before
    assert f"may fail {override or 5} times already" in messages(answer)[0]


@pytest.mark.parametrize(
    "value", ["", "x", "1", "1:2", "٣:0:DEAD", "1:-1:DEAD", "9" * 40 + ":0:DEAD"]
)
def test_forged_row_changes_nothing(admin_client: Client, value: str) -> None:
    make(Status.DEAD)
    before = everything()
    sent = {"action": "retry", "row": value, "confirmed": "1", "reason": "because"}
    assert admin_client.post(address("operate"), sent, follow=True).status_code == 200
    assert everything() == before


def test_unknown_action_is_not_found(admin_client: Client) -> None:
    row = make(Status.DEAD)
    for action in ("", "explode", "__class__"):
        sent = {"action": action, "row": str(AsSeen.of(row)), "confirmed": "1", "reason": "x"}
        assert admin_client.post(address("operate"), sent).status_code == 404


def test_confirmation_shows_rows_and_leaves_out_those_that_moved(admin_client: Client) -> None:
    stays, moves = make(Status.DEAD), make(Status.DEAD)
    sent = {"action": "retry", "row": [str(AsSeen.of(stays)), str(AsSeen.of(moves))]}
    ProcessedJob.objects.filter(pk=moves.pk).update(version=7)
    page = admin_client.post(address("operate"), sent).content.decode()
    assert stays.key in page
    assert moves.key not in page
    assert f"Row {moves.pk} has changed" in page


def test_selected_rows_go_through_one_confirmation(admin_client: Client) -> None:
    rows = [make(Status.DEAD) for _ in range(3)] + [make(Status.SUCCEEDED)]
    chosen = {"action": "retry", "_selected_action": [row.pk for row in rows]}
    page = admin_client.post(address("changelist"), chosen)
    assert page.status_code == 200
    assert all(fresh(row).status == row.status for row in rows)
    answer = operate(admin_client, "retry", *(AsSeen.of(row) for row in rows))
    assert [fresh(row).status for row in rows] == ["PENDING"] * 3 + ["SUCCEEDED"]
    assert LogEntry.objects.count() == Operation.objects.count() == 3
    assert "SUCCEEDED, which retry does not apply to" in messages(answer)[0]
    assert "3 of 4 jobs were changed" in messages(answer)[1]


def test_purged_row_is_gone_but_its_line_in_the_log_stays(admin_client: Client) -> None:
    row = make(Status.DEAD)
    try_of(row, outcome="FAILED", ended_at=DbNow())
    operate(admin_client, "purge", AsSeen.of(row))
    assert not ProcessedJob.objects.exists()
    assert not JobAttempt.objects.exists()
    entry = LogEntry.objects.get()
    assert (entry.action_flag, entry.object_id) == (DELETION, str(row.pk))
    assert entry.change_message == "purge: DEAD → gone; because"


def test_purge_leaves_a_tombstone_while_the_key_is_held(admin_client: Client) -> None:
    row = make(Status.SUCCEEDED, result='"x"')
    operate(admin_client, "purge", AsSeen.of(row))
    now = fresh(row)
    assert (now.is_tombstone, now.result, now.status) == (True, None, "SUCCEEDED")
    assert Operation.objects.get().action == "purge"
    page = admin_client.get(address("change", row.pk)).content.decode()
    assert "Pruned." in page


@pytest.mark.parametrize(
    "status", [s for s in Status if s not in ("SUCCEEDED", "DEAD", "CANCELLED")]
)
def test_purge_of_a_row_that_is_not_final_is_refused(admin_client: Client, status: Status) -> None:
    row = make(status)
    before = everything()
    answer = operate(admin_client, "purge", AsSeen.of(row))
    assert everything() == before
    assert f"is {status}, which purge does not apply to" in messages(answer)[0]


def test_line_in_the_log_that_can_not_be_written_undoes_the_action(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = make(Status.DEAD)
    before = everything()
    monkeypatch.setattr(deeds.journal, "line", lambda *_: None)  # NOT NULL
    answer = operate(admin_client, "retry", AsSeen.of(row))
    assert answer.status_code == 200
    assert everything() == before


# ---- healing


def test_stuck_job_is_taken_from_its_lost_worker(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = make(Status.RUNNING)
    attempt = expired(row)
    locks.acquire(row.pk, attempt.owner, ttl=60)
    noted = clock.utcnow()
    monkeypatch.setattr(clock, "utcnow", lambda: noted)
    page = admin_client.get(address("change", row.pk))
    assert "stuck: the worker of attempt 1" in page.content.decode()
    assert "Take the job from it" in page.content.decode()
    early = operate(admin_client, "reclaim", AsSeen.of(row), seen=page.context["watch"])
    assert "watched for 0 s only; look again in 20 s" in messages(early)[0]
    assert fresh(row).status == "RUNNING"
    monkeypatch.setattr(clock, "utcnow", lambda: noted + timedelta(seconds=21))
    done = operate(admin_client, "reclaim", AsSeen.of(row), seen=page.context["watch"])
    assert messages(done)[0].startswith("Take the job from a lost worker")
    now, lost = fresh(row), JobAttempt.objects.get()
    assert (now.status, now.lost_count, lost.outcome) == ("RETRYING", 1, "LOST")
    assert lost.reason == "lost: taken by admin"
    assert locks.holder(row.pk) is None
    assert LogEntry.objects.get().change_message == "reclaim: RUNNING → RETRYING; because"


@pytest.mark.parametrize("what", ["beats again", "another's note", "forged note", "no note"])
def test_reclaim_without_two_witnesses_is_refused(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    row = make(Status.RUNNING)
    attempt = expired(row)
    note = deeds.watch(row.pk if what != "another's note" else row.pk + 1, attempt.beat_at)
    if what == "beats again":
        JobAttempt.objects.update(beat_at=DbNow())
    note = {"forged note": f"{note}x", "no note": ""}.get(what, note)
    real = clock.utcnow
    monkeypatch.setattr(clock, "utcnow", lambda: real() + timedelta(seconds=100))
    before = everything()
    answer = operate(admin_client, "reclaim", AsSeen.of(row), seen=note)
    assert everything() == before
    assert messages(answer)[0].startswith("Nothing was changed")


def test_orphaned_lock_is_freed_and_one_at_work_is_not(admin_client: Client) -> None:
    dead, running = make(Status.DEAD), make(Status.RUNNING)
    attempt = JobAttempt.objects.get(job=running)
    locks.acquire(dead.pk, "ghost", ttl=60)
    locks.acquire(running.pk, attempt.owner, ttl=60)
    page = admin_client.get(address("change", dead.pk)).content.decode()
    assert "An orphan: ghost holds the lock" in page
    operate(admin_client, "free lock", AsSeen.of(dead))
    refused = operate(admin_client, "free lock", AsSeen.of(running))
    assert locks.holder(dead.pk) is None
    assert locks.holder(running.pk) == attempt.owner
    assert "no orphaned lock" in messages(refused)[0]
    assert LogEntry.objects.get().change_message == "free lock: DEAD; because"


def test_lock_of_a_job_that_waits_for_its_retry_is_no_orphan(admin_client: Client) -> None:
    row = make(Status.RETRYING, run_after=DbNow(60))
    attempt = try_of(row, outcome="FAILED", ended_at=DbNow())
    locks.acquire(row.pk, attempt.owner, ttl=60)
    assert "orphan" not in admin_client.get(address("change", row.pk)).content.decode()
    operate(admin_client, "free lock", AsSeen.of(fresh(row)))
    assert locks.holder(row.pk) == attempt.owner


def test_lock_is_given_back_to_the_attempt_that_runs(admin_client: Client) -> None:
    row = make(Status.RUNNING)
    locks.acquire(row.pk, "thief", ttl=600)
    page = admin_client.get(address("change", row.pk)).content.decode()
    assert "The lock belongs to thief, but attempt 1 runs by the row." in page
    operate(admin_client, "put back", AsSeen.of(row))
    seen = locks.seen([row.pk])[row.pk]
    assert seen.owner == JobAttempt.objects.get().owner
    assert seen.ttl is not None
    assert 0 < seen.ttl <= 60


@committing
def test_lost_message_is_sent_again(admin_client: Client, redis_client: redis.Redis) -> None:
    row = jobs.record.enqueue(tag="a").job
    redis_client.flushdb()
    ProcessedJob.objects.update(dispatched_at=DbNow(-10), run_after=DbNow(-10))
    page = admin_client.get(address("change", row.pk)).content.decode()
    assert "Its message is lost" in page
    operate(admin_client, "send again", AsSeen.of(fresh(row)))
    now = fresh(row)
    assert now.dispatch_id != row.dispatch_id
    assert redis_client.lrange(QUEUE, 0, -1) == [str(now.dispatch_id).encode()]
    assert "All stores agree" in admin_client.get(address("change", row.pk)).content.decode()


ENDED = {"dedupjobs_gone": 1e9}  # in 2001
ENDS_LATER = {"dedupjobs_gone": 4e9}  # in 2096


@committing
@pytest.mark.parametrize(
    ("registry", "entry", "drifts"),
    [
        ("finished", ENDED, False),
        ("failed", ENDED, False),
        ("finished", ENDS_LATER, True),
        ("canceled", ENDED, True),  # its score is no end
        ("wip", {"dedupjobs_gone:execution": 1e9}, True),
    ],
)
def test_entry_that_rq_has_not_cleaned_up_yet_is_no_drift(
    admin_client: Client,
    redis_client: redis.Redis,
    registry: str,
    entry: dict[str, float],
    drifts: bool,
) -> None:
    row = make(Status.SUCCEEDED, dispatch_id="dedupjobs_gone")
    redis_client.zadd(f"rq:{registry}:default", entry)
    page = admin_client.get(address("change", row.pk)).content.decode()
    assert ("which has no hash any more" in page) is drifts
    assert ("All stores agree" in page) is not drifts


@committing
def test_registry_entry_without_hash_is_removed(
    admin_client: Client, redis_client: redis.Redis
) -> None:
    row = make(Status.SUCCEEDED, dispatch_id="dedupjobs_gone")
    redis_client.zadd("rq:failed:default", {"dedupjobs_gone": 2e9})
    redis_client.zadd("rq:wip:default", {"dedupjobs_gone:execution": 2e9, "another:e": 2e9})
    page = admin_client.get(address("change", row.pk)).content.decode()
    assert "which has no hash any more" in page
    operate(admin_client, "forget", AsSeen.of(row))
    assert redis_client.zrange("rq:failed:default", 0, -1) == []
    assert redis_client.zrange("rq:wip:default", 0, -1) == [b"another:e"]
    assert lifecycle.jobs().get(pk=row.pk).version == row.version


@committing
def test_entry_of_the_cache_that_is_older_than_its_row_is_forgotten(admin_client: Client) -> None:
    row = jobs.record.enqueue(tag="a").job
    run_pending()
    assert jobs.record.status(tag="a") is Status.SUCCEEDED
    ProcessedJob.objects.update(version=9)  # by hand, so that nobody was told
    page = admin_client.get(address("change", row.pk)).content.decode()
    assert "The cache knows version 2 as a success, the row has version 9" in page
    operate(admin_client, "uncache", AsSeen.of(fresh(row)))
    assert cache.stored(row.key_hash) is None
    healed = admin_client.get(address("change", row.pk)).content.decode()
    assert "The cache knows" not in healed
