"""A person watches the dashboard while jobs run: it moves by itself, and everybody can read it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.urls import reverse

from dedupjobs import bulk, dispatch, lifecycle, locks
from dedupjobs.models import ProcessedJob, Status
from tests.admin_rows import address, expired, make, try_of
from tests.app import jobs
from tests.browser import history
from tests.browser.test_admin import WIDER
from tests.processes import Spawned
from tests.waiting import until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]

QUICK = json.dumps({"SUMMARISE_EVERY": 0.3, "PUSH_TIMEOUT": 30, "LOCK_TIMEOUT": 30})
POLL = "part=live"
OPEN = "document.querySelectorAll('#content-main details').forEach((d) => { d.open = true; })"


@pytest.fixture(autouse=True)
def _patient(settings: Any) -> Iterator[None]:
    settings.DEDUPJOBS = {"PUSH_TIMEOUT": 30, "LOCK_TIMEOUT": 30}
    dispatch.forget_clients()
    locks.forget_clients()
    yield
    dispatch.forget_clients()
    locks.forget_clients()


@pytest.fixture
def boss() -> User:
    return User.objects.create_superuser("boss")


def dashboard() -> str:
    return reverse("admin:dedupjobs_dashboard_changelist")


def value(page: Any, tile: str) -> str:
    return page.locator(f"#dj-tile-{tile} .dj-value").inner_text()


@pytest.mark.parametrize(
    "screen",
    [
        ("dashboard", 1280, False),
        ("dashboard-dark", 1280, True),
        ("dashboard-small", 360, False),
        ("dashboard-small-dark", 360, True),
    ],
)
def test_tiles_move_while_jobs_run(
    visit: Any,
    spawn: Callable[..., Spawned],
    boss: User,
    tmp_path: Path,
    screen: tuple[str, int, bool],
) -> None:
    name, width, dark = screen
    an_hour_of_a_shop()
    visitor = visit(boss, width=width, height=1120 if width > 700 else 900, dark=dark)
    page = visitor.open(dashboard())
    before = value(page, "succeeded")
    assert (value(page, "running"), value(page, "pending")) == ("0", "0")
    assert page.get_by_text("No coordinator runs").count() == 1

    release = tmp_path / "release"
    for tag in range(8):
        jobs.wait.enqueue(tag=f"order {tag}", release=str(release))
    page.locator("#dj-tile-pending", has_text="8").wait_for()
    spawn("rqworker", "high", "default", "low", DEDUPJOBS_TEST_SETTINGS=QUICK)
    page.locator("#dj-tile-running", has_text="1").wait_for()
    until(lambda: value(page, "pending") == "7", what="one of eight runs")
    page.get_by_text("A coordinator leads").wait_for()
    assert page.get_by_text("No coordinator runs").count() == 0
    assert page.locator("#dj-fleet .dj-running").inner_text().endswith("at work")
    page.locator(".dj-headline", has_text="1 job needs a person.").wait_for()
    visitor.picture(name)

    release.touch()
    # The tile of the hour loses its oldest minute meanwhile; the job's own row does not.
    done = page.locator("#dj-jobs-table tr", has_text="testapp.wait").locator("td").nth(1)
    until(lambda: done.count() and done.inner_text() == "8", 60, what="eight have succeeded")
    assert value(page, "succeeded") != before
    until(lambda: (value(page, "running"), value(page, "pending")) == ("0", "0"))
    assert_fits(page, width)
    assert visitor.refused() == []


def an_hour_of_a_shop() -> None:
    history.write()
    make(Status.RETRYING, run_after=lifecycle.database_now().replace(year=2100), failures=1)
    make(Status.DEAD, queue="low", name="shop.build_report")


def assert_fits(page: Any, width: int) -> None:
    """Nothing sticks out of the window but what scrolls by itself."""
    assert page.evaluate(WIDER, width) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 360])
def test_axe_finds_nothing_on_any_page(visit: Any, boss: User, width: int, dark: bool) -> None:
    history.write()
    for status in Status:
        make(status)
    expired(make(Status.RUNNING, duplicates=2))
    failed = make(Status.RETRYING, failures=2, args='{"tag":"a","text":"b"}')
    now = lifecycle.database_now()
    for _ in range(2):
        try_of(failed, outcome="FAILED", ended_at=now, error_class="builtins.ValueError",
               error_message="no", traceback="Traceback: no", run_time=1.0)  # fmt: skip
    locks.acquire(failed.pk, "ghost", ttl=60)
    started = bulk.start("cancel", {"state": "DEAD"}, user=boss, reason="a test")
    bulk.page(started.pk)
    visitor = visit(boss, width=width, dark=dark, inspected=True)
    places = {
        "the dashboard": dashboard(),
        "its day": f"{dashboard()}?span=day",
        "the list": address("changelist"),
        "a job that failed": address("change", failed.pk),
        "a job that is stuck": address("change", ProcessedJob.objects.get(duplicates=2).pk),
        "the locks": address("locks"),
        "a bulk operation": address("bulk", started.pk),
    }
    wrong = {}
    for what, where in places.items():
        page = visitor.open(where)
        page.evaluate(OPEN)
        if found := visitor.inaccessible():
            wrong[what] = found
    assert wrong == {}
    page = visitor.open(address("change", failed.pk))
    visitor.press("Retry")
    assert visitor.inaccessible() == []


def test_page_of_an_empty_system_says_what_to_do(visit: Any, boss: User) -> None:
    visitor = visit(boss)
    page = visitor.open(dashboard())
    assert page.get_by_text("No job yet").count() == 1
    visitor.picture("dashboard-empty")
    make(Status.PENDING)
    page.locator("#dj-tile-pending", has_text="1").wait_for()
    assert page.get_by_text("No job yet").is_hidden()


def test_tile_leads_to_its_list_by_keyboard_and_keeps_the_focus(visit: Any, boss: User) -> None:
    make(Status.DEAD)
    page = visit(boss).open(dashboard())
    page.locator("#dj-link-dead").focus()
    make(Status.DEAD)
    page.locator("#dj-tile-dead", has_text="2").wait_for()
    assert page.evaluate("document.activeElement.id") == "dj-link-dead"
    page.keyboard.press("Enter")
    page.wait_for_url("**state=DEAD")
    assert page.locator("#result_list tbody tr").count() == 2


def test_open_table_stays_open(visit: Any, boss: User) -> None:
    history.write()
    page = visit(boss).open(dashboard())
    page.locator(".dj-chart summary").first.click()
    rows = page.locator("#dj-table-throughput tbody tr")
    assert rows.count() >= 58  # of 60 minutes; one may begin just now
    # A chart and its table say the same.
    cells = "[...document.querySelectorAll('#dj-table-throughput td:nth-child(2)')]"
    listed, total = page.evaluate(  # at once: the page renews both
        f"[{cells}.reduce((sum, cell) => sum + Number(cell.textContent), 0),"
        " document.querySelector('#dj-chart-throughput .dj-legend b').innerText]"
    )
    assert listed == int(total.replace(",", ""))
    make(Status.DEAD)
    page.locator("#dj-tile-dead", has_text="1").wait_for()
    assert rows.first.is_visible()


class Polls:
    """What a page has asked of the server, and what it was answered."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.made: list[str] = []
        self.answers: list[int] = []
        page.on("request", lambda request: POLL in request.url and self.made.append(request.url))
        page.on("response", self._answer)

    def _answer(self, response: Any) -> None:
        if POLL in response.url:
            self.answers.append(response.status)

    def until(self, number: int) -> None:
        """Wait until so many were made."""
        until(lambda: self.page.wait_for_timeout(50) or len(self.made) >= number, 60)

    def gaps(self) -> list[float]:
        """Return the seconds between any two that are over, by the browser's clock."""
        ours = f"performance.getEntriesByType('resource').filter(e => e.name.includes('{POLL}'))"
        at = self.page.evaluate(f"{ours}.map(e => e.startTime / 1000)")
        return [b - a for a, b in pairwise(at)]

    def in_seconds(self, seconds: float) -> int:
        """Return how many are made in the next seconds."""
        before = len(self.made)
        self.page.wait_for_timeout(1000 * seconds)
        return len(self.made) - before


def test_it_asks_each_two_seconds_and_is_told_when_nothing_has_changed(
    visit: Any, boss: User
) -> None:
    page = visit(boss).open(dashboard())
    polls = Polls(page)
    polls.until(4)
    gaps = polls.gaps()
    assert gaps
    assert all(1.8 < gap < 8 for gap in gaps), gaps
    until(lambda: page.wait_for_timeout(50) or 304 in polls.answers, 60)


def test_paused_or_hidden_it_asks_nothing(visit: Any, boss: User) -> None:
    page = visit(boss).open(dashboard())
    polls = Polls(page)
    polls.until(1)
    button = page.get_by_role("button", name="Pause")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    page.wait_for_timeout(500)
    assert polls.in_seconds(5) == 0
    button.click()
    polls.until(len(polls.made) + 1)
    hide = "Object.defineProperty(document, 'hidden', {get: () => %s, configurable: true});"
    tell = "document.dispatchEvent(new Event('visibilitychange'));"
    page.evaluate(hide % "true" + tell)
    page.wait_for_timeout(500)
    assert polls.in_seconds(5) == 0
    page.evaluate(hide % "false" + tell)
    polls.until(len(polls.made) + 1)


def test_server_that_fails_is_asked_less_and_less_often(visit: Any, boss: User) -> None:
    visitor = visit(boss)
    page = visitor.open(dashboard())
    page.route(f"**{POLL}**", lambda route: route.abort())
    polls = Polls(page)
    polls.until(4)
    earlier, later = polls.gaps()[-2:]
    assert earlier > 3.5
    assert later > 7
    assert page.locator("[data-trouble]").inner_text() == "no answer; trying again"
    page.unroute(f"**{POLL}**")
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Pause").click()
    until(lambda: page.wait_for_timeout(50) or page.locator("[data-trouble]").inner_text() == "")
    failed = [words for words in visitor.troubles if "ERR_FAILED" in words]
    visitor.troubles = [words for words in visitor.troubles if words not in failed]
    assert failed


def test_logged_out_it_says_so_and_stops(visit: Any, boss: User) -> None:
    page = visit(boss).open(dashboard())
    polls = Polls(page)
    page.context.clear_cookies()
    page.get_by_text("you are logged out").wait_for()
    assert polls.in_seconds(5) == 0
