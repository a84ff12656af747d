"""A person clicks through the admin: finds the stuck job, reads why, heals it, stops a bulk."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User

from dedupjobs import bulk, criteria, dispatch, locks
from dedupjobs.models import BulkOperation, JobAttempt, Operation, ProcessedJob, Status
from tests.admin_rows import address, fresh, make, person
from tests.app import jobs
from tests.app.models import Ledger
from tests.processes import Spawned
from tests.test_admin_input import IMAGE, TEMPLATE, planted
from tests.waiting import until

# What sticks out of the window, outside of boxes that scroll by themselves.
WIDER = """(width) => [...document.querySelectorAll("body *")]
  .filter((e) => e.getBoundingClientRect().right > width + 1)
  .filter((e) => !e.closest(".dj-scroll > *, .results > *, pre"))
  .map((e) => `${e.tagName} ${e.className} ${e.getBoundingClientRect().right}`)"""

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]


@pytest.fixture(autouse=True)
def _patient(settings: Any) -> Iterator[None]:
    settings.DEDUPJOBS = {"PUSH_TIMEOUT": 30, "LOCK_TIMEOUT": 30}
    dispatch.forget_clients()
    locks.forget_clients()
    yield
    dispatch.forget_clients()
    locks.forget_clients()


def test_stuck_job_of_a_killed_worker_is_found_understood_and_healed(
    visit: Any, spawn: Callable[..., Spawned], tmp_path: Path
) -> None:
    row, attempt = lost_with_its_host(spawn, str(tmp_path / "never"))
    boss = visit(User.objects.create_superuser("boss"))
    page = boss.open(address("changelist"))
    page.get_by_role("link", name="stuck: lease expired").click()
    page.get_by_role("link", name="wait:order 7").click()
    page.wait_for_url(f"**{address('change', row.pk)}**")
    why = page.locator(".dj-why").inner_text()
    assert "Stuck: the worker of attempt 1" in why or "stuck: the worker of attempt 1" in why
    assert f"on {attempt.host}:{attempt.pid}" in why
    assert "then it is due again" in why

    # The page has been looked at for a third of the lease: that is the second witness.
    seen_at = time.monotonic()
    until(lambda: time.monotonic() - seen_at > 1, what="two thirds of a second have passed")
    boss.press("Take the job from it")
    page.get_by_label("Reason").fill("its host is gone")
    boss.press("Take the job from a lost worker")
    assert page.locator(".messagelist .success").count() == 1
    assert "lost during attempt 1" in page.locator(".dj-why").inner_text()
    now = fresh(row)
    assert (now.status, now.lost_count) == ("RETRYING", 1)
    assert JobAttempt.objects.get().outcome == "LOST"
    assert Operation.objects.get().by == "boss"
    page.get_by_role("link", name="History").first.click()
    assert "reclaim: RUNNING → RETRYING; its host is gone" in page.content()


def test_thousand_dead_jobs_are_retried_and_stopped_half_way(
    visit: Any, spawn: Callable[..., Spawned], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_many(1_000)
    monkeypatch.setattr(bulk, "PAGE", 100)
    boss = visit(User.objects.create_superuser("boss"))
    page = boss.open(f"{address('changelist')}?state=DEAD")
    page.locator("#action-toggle").check()
    page.get_by_text("Select all 1000 jobs").click()
    page.locator("select[name=action]").select_option("retry")
    with page.expect_navigation():  # Django 5.2 calls it "Go", 6.1 "Run"
        page.locator(".actions button[name=index]").first.click()
    assert "1000 jobs match" in page.locator(".dj-count").inner_text().replace(",", "")
    page.get_by_label("Reason").fill("the service is back")
    boss.press("Retry")
    page.get_by_text("waiting for a worker").wait_for()
    started = BulkOperation.objects.get()
    for _ in range(5):
        assert bulk.page(started.pk) == ""
    # The page follows by itself, without a click.
    page.get_by_text("500 of 1000 rows").wait_for()
    boss.press("Stop")
    assert "stopped by boss" in page.locator("#dj-bulk").inner_text()
    spawn("rqworker", "--burst", "default").wait(60)
    retried = Operation.objects.filter(bulk=started).count()
    assert (retried, dead()) == (500, 500)
    assert LogEntry.objects.count() == 500
    assert BulkOperation.objects.get().changed == 500


def test_worker_finishes_a_bulk_while_somebody_watches(
    visit: Any, spawn: Callable[..., Spawned]
) -> None:
    make_many(250)
    boss = visit(User.objects.create_superuser("boss"))
    started = bulk.start(
        "cancel", {"state": "DEAD"}, user=User.objects.get(), reason="DEAD ones can not be"
    )
    page = boss.open(address("bulk", started.pk))
    assert "waiting for a worker" in page.locator("#dj-bulk").inner_text()
    spawn("rqworker", "--burst", "default").wait(60)
    page.get_by_text("250 of 250 rows: 0 changed, 250 left as they were").wait_for()
    page.get_by_text("is DEAD, which cancel does not apply to").first.wait_for()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 360])
def test_hostile_text_opens_no_dialog_and_breaks_no_policy(
    visit: Any, width: int, dark: bool
) -> None:
    row = planted()
    boss = visit(User.objects.create_superuser("boss"), width=width, dark=dark)
    for where in ("changelist", "change", "locks"):
        page = boss.open(address(where, *([row.pk] if where == "change" else [])))
        assert boss.refused() == []
        assert page.locator("img[src=x]").count() == 0
        # Nothing is wider than the window: tables scroll in their own box.
        assert page.evaluate(WIDER, width) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page = boss.open(address("change", row.pk))
    assert IMAGE in page.locator("#content").inner_text()
    assert TEMPLATE in page.locator("#content").inner_text()


def test_reader_sees_why_and_has_no_button(visit: Any) -> None:
    row = make(Status.DEAD)
    locks.acquire(row.pk, "ghost", ttl=60)
    reader = visit(person("reader", "view"))
    page = reader.open(address("change", row.pk))
    assert "An orphan: ghost holds the lock" in page.locator("#content").inner_text()
    assert page.locator("#content button").count() == 0
    assert "You may not see arguments" in page.locator("#content").inner_text()


def test_button_pressed_on_an_old_page_says_that_the_row_moved_on(visit: Any) -> None:
    row = make(Status.DEAD)
    boss = visit(User.objects.create_superuser("boss"))
    page = boss.open(address("change", row.pk))
    ProcessedJob.objects.filter(pk=row.pk).update(version=5)
    boss.press("Retry")
    assert "has changed since it was looked at" in page.locator("#content").inner_text()
    assert page.get_by_label("Reason").count() == 0
    assert (fresh(row).status, fresh(row).version) == ("DEAD", 5)


def lost_with_its_host(
    spawn: Callable[..., Spawned], release: str
) -> tuple[ProcessedJob, JobAttempt]:
    """Let a worker start a job and then kill all its processes, its coordinator among them."""
    worker = spawn("rqworker", "default")
    row = jobs.wait.enqueue(tag="order 7", release=release).job
    until(lambda: Ledger.objects.filter(tag="order 7").exists(), 60, what="it runs")
    worker.signal(signal.SIGKILL)
    worker.wait()
    worker.kill_children()
    stuck = criteria.stuck().values("job_id")
    until(lambda: stuck.all().exists(), what="its lease of 2 s is over")
    return fresh(row), JobAttempt.objects.get()


def make_many(number: int) -> None:
    pattern = make(Status.DEAD)
    columns = {f.attname: getattr(pattern, f.attname) for f in ProcessedJob._meta.fields}
    ProcessedJob.objects.all().delete()
    ProcessedJob.objects.bulk_create(
        ProcessedJob(**{**columns, "id": None, "key_hash": f"{i:064}", "key": f"record:{i}"})
        for i in range(number)
    )


def dead() -> int:
    return ProcessedJob.objects.filter(status=Status.DEAD).count()
