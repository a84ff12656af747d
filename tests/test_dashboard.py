"""The dashboard says what the tables say, to those who may see it, at a bounded cost."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from dedupjobs import conf, counters, criteria, dispatch, fleet, lifecycle, locks, summaries
from dedupjobs.admin import board, tiles
from dedupjobs.admin.charts import Plan, Series, draw
from dedupjobs.admin.tiles import Tile
from dedupjobs.alerts import book, rules
from dedupjobs.alerts.watch import Watch
from dedupjobs.coordinator import Coordinator
from dedupjobs.models import (
    AttemptOutcome,
    Cause,
    DuplicateCount,
    DuplicateSample,
    ProcessedJob,
    Status,
    Summary,
)
from dedupjobs.summaries import MINUTE
from dedupjobs.testing import frozen_clock
from tests import outlet
from tests.admin_rows import address, everything, expired, make, person, try_of
from tests.processes import Spawned
from tests.servers import Valkey
from tests.waiting import until

pytestmark = pytest.mark.django_db

DASHBOARD = "admin:dedupjobs_dashboard_changelist"


@pytest.fixture(autouse=True)
def _patient(settings: Any) -> Iterator[None]:
    settings.DEDUPJOBS = {"PUSH_TIMEOUT": 30, "LOCK_TIMEOUT": 30}
    dispatch.forget_clients()
    locks.forget_clients()
    yield
    dispatch.forget_clients()
    locks.forget_clients()


def url(**query: str) -> str:
    return f"{reverse(DASHBOARD)}?" + "&".join(f"{name}={value}" for name, value in query.items())


def text(page: Any) -> str:
    """Return what a page says, without its marks."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.content.decode()))


def values(found: board.Board) -> dict[str, str]:
    return {tile.key: tile.value for tile in (*found.tiles, *found.happened)}


def tiles_of(span: str) -> dict[str, Tile]:
    return {tile.key: tile for tile in board.read(span).happened}


def one_of_each() -> dict[str, ProcessedJob]:
    """Make a row for every tile, and return the rows by the tile."""
    rows = {status.lower(): make(status) for status in Status}
    rows["stuck"] = make(Status.RUNNING)
    expired(rows["stuck"])
    now = lifecycle.database_now()
    rows["recovered"] = make(Status.SUCCEEDED)
    try_of(rows["recovered"], outcome=AttemptOutcome.LOST, ended_at=now)
    rows["duplicates"] = make(Status.SUCCEEDED, duplicates=3)
    rows["contended"] = make(Status.SUCCEEDED)
    DuplicateSample.objects.create(job=rows["contended"], cause=Cause.RACE, at=now)
    return rows


# ---- who may see it


@pytest.mark.parametrize(
    ("name", "status"),
    [("view", 200), ("retry", 403), ("", 403), ("view retry", 200)],
)
def test_page_opens_for_those_who_may_see_jobs(name: str, status: int) -> None:
    client = Client()
    client.force_login(person("sam", *name.split()))
    assert client.get(url()).status_code == status
    assert client.get(url(part="live")).status_code == status


def test_strangers_are_sent_to_the_login() -> None:
    answer = Client().get(url(part="live"))
    assert (answer.status_code, answer["Location"].split("?")[0]) == (302, "/admin/login/")
    customer = Client()
    customer.force_login(person("customer", "view", staff=False))
    assert customer.get(url()).status_code == 302


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_nothing_but_looking_is_allowed(admin_client: Client, method: str) -> None:
    make(Status.DEAD)
    before = everything()
    assert admin_client.generic(method, url()).status_code == 405
    assert everything() == before


def test_index_of_the_admin_leads_to_it(admin_client: Client) -> None:
    for page in (reverse("admin:index"), address("changelist")):
        assert f'href="{reverse(DASHBOARD)}"' in admin_client.get(page).content.decode()
    reader = Client()
    reader.force_login(person("reader", "view"))
    assert f'href="{reverse(DASHBOARD)}"' in reader.get(reverse("admin:index")).content.decode()
    other = Client()
    other.force_login(person("other"))
    assert reverse(DASHBOARD) not in other.get(reverse("admin:index")).content.decode()


# ---- what it says


def test_tiles_say_what_the_tables_say(admin_client: Client) -> None:
    """S-112: counters and lists do not contradict each other."""
    one_of_each()
    Coordinator().tick()
    found = board.read("hour")
    shown = values(found)
    for status in (Status.PENDING, Status.RUNNING, Status.RETRYING, Status.HELD, Status.DEAD):
        assert shown[status.lower()] == str(ProcessedJob.objects.filter(status=status).count())
    assert (shown["stuck"], shown["silent"], shown["recovered"]) == ("1", "0", "1")
    for tile in (*found.tiles, *found.happened):
        listed = admin_client.get(f"{address('changelist')}?{tile.query}").context["cl"]
        if tile.key in ("pending", "running", "retrying", "held", "dead", "stuck", "silent"):
            assert str(listed.result_count) == tile.value, tile.key


def test_each_tile_leads_to_the_list_behind_it(admin_client: Client) -> None:
    rows = one_of_each()
    page = admin_client.get(url()).content.decode()
    for tile, row in rows.items():
        if tile in ("cancelled", "succeeded"):
            continue
        link = re.search(rf'id="dj-link-{tile}" href="([^"]+)"', page)
        assert link, tile
        listed = admin_client.get(link.group(1).replace("&amp;", "&"))
        assert row in listed.context["cl"].result_list, tile
        assert listed.context["cl"].result_count <= 4


def test_all_numbers_of_rqs_own_are_not_believed(admin_client: Client, redis_client: Any) -> None:
    """S-112: RQ's registries may say what they like."""
    redis_client.zadd("rq:failed:default", {f"ghost{i}": 9e9 for i in range(50)})
    redis_client.rpush("rq:queue:default", *(f"ghost{i}" for i in range(50)))
    shown = values(board.read("hour"))
    assert {shown[key] for key in ("pending", "dead", "failures", "retrying")} == {"0"}


def test_longest_wait_is_that_of_the_job_that_is_due_longest() -> None:
    now = lifecycle.database_now()
    make(Status.PENDING, run_after=now - timedelta(minutes=9), dispatched_at=now, dispatch_id="a")
    # Sent again a moment ago, which must not hide how long it has waited.
    make(Status.PENDING, run_after=now - timedelta(hours=3), dispatched_at=now, dispatch_id="b")
    make(Status.PENDING, run_after=now + timedelta(days=1))
    make(Status.RETRYING, run_after=now - timedelta(days=1))
    assert values(board.read("hour"))["oldest"] == "3 h"
    make(Status.PENDING, run_after=now - timedelta(hours=5))
    assert values(board.read("hour"))["oldest"] == "5 h"


def test_number_beyond_the_bound_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(7):
        make(Status.DEAD)
    monkeypatch.setattr(tiles, "LIVE", 5)
    assert values(board.read("hour"))["dead"] == "> 5"
    summaries.keep()
    assert values(board.read("hour"))["dead"] == "≈ 7"
    Summary.objects.all().delete()
    monkeypatch.setattr(summaries, "COUNTED", 6)
    summaries.keep()
    assert values(board.read("hour"))["dead"] == "> 6"


def test_duplicates_are_told_by_cause_and_time() -> None:
    minute = summaries.floor(lifecycle.database_now(), MINUTE)
    for minutes, replays, races in ((90, 1, 1), (30, 5, 1), (29, 5, 4), (10, 15, 4)):
        gauges = f'{{"duplicates": {{"replay": {replays}, "race": {races}}}}}'
        Summary.objects.create(
            span=MINUTE, begin=minute - timedelta(minutes=minutes), counted=True, gauges=gauges
        )
    found = board.read("hour")
    shown = {tile.key: tile for tile in found.happened}
    # What was counted before the hour is no news; nor is what stood there at its first look.
    assert (shown["duplicates"].value, shown["contended"].value) == ("13", "3")
    assert shown["duplicates"].hint == "10 after success, 3 at the same time"
    chart = next(chart for chart in found.charts if chart.key == "duplicates")
    sums = [(series.label, sum(v or 0 for v in series.values)) for series in chart.series]
    assert sums == [("after success", 10), ("at the same time", 3)]


@pytest.mark.parametrize("span", ["hour", "day"])
def test_charts_show_what_ended(span: str) -> None:
    row, now = make(Status.SUCCEEDED), lifecycle.database_now()
    for outcome in ("SUCCEEDED", "SUCCEEDED", "FAILED", "LOST"):
        try_of(row, outcome=outcome, ended_at=now, run_time=0.4, queue_delay=30.0)
    summaries.keep()
    charts = {chart.key: chart for chart in board.read(span).charts}
    assert charts["throughput"].series[0].total == "2"
    assert [series.total for series in charts["failures"].series] == ["1", "0", "1"]
    assert len(charts["throughput"].places) == (60 if span == "hour" else 24)
    assert len(charts["throughput"].rows) == 1
    assert charts["run"].series[0].total.endswith(" ms")
    assert "30 s" in charts["delay"].places[-1].words or charts["delay"].series[0].total


def test_span_that_nobody_knows_is_the_hour(admin_client: Client) -> None:
    page = admin_client.get(url(span="century"))
    assert page.status_code == 200
    assert page.context["board"].span == "hour"


# ---- what is wrong


def test_without_a_coordinator_it_says_so_until_one_leads(admin_client: Client) -> None:
    page = text(admin_client.get(url()))
    assert "No coordinator runs" in page
    assert "Something is down" in page
    Coordinator().tick()
    page = text(admin_client.get(url()))
    assert "No coordinator runs" not in page
    assert "A coordinator leads" in page
    assert "No worker runs" in page


def test_numbers_that_are_old_are_called_old(admin_client: Client) -> None:
    Coordinator().tick()
    assert "The charts are old" not in text(admin_client.get(url()))
    past = lifecycle.database_now() - timedelta(minutes=30)
    Summary.objects.all().delete()
    Summary.objects.create(span=MINUTE, begin=summaries.floor(past, MINUTE), counted=True)
    assert "The charts are old: they end" in text(admin_client.get(url()))


def test_redis_that_is_away_is_named_and_the_rest_is_shown(
    admin_client: Client, settings: Any
) -> None:
    make(Status.DEAD)
    with Valkey() as server:
        settings.RQ_QUEUES = {"default": {"URL": f"{server.url}/0"}}
        settings.CACHES = {
            "default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": f"{server.url}/1"}
        }
        settings.DEDUPJOBS = {"PUSH_TIMEOUT": 1, "LOCK_TIMEOUT": 1}
        dispatch.forget_clients()
        locks.forget_clients()
        server.stop()
        page = admin_client.get(url())
    assert page.status_code == 200
    assert "can not be asked" in text(page)
    assert "No job is lost" in text(page)
    assert "Who coordinates can not be asked." in text(page)
    assert "No coordinator leads" not in text(page), "which nobody knows"
    assert values(page.context["board"])["dead"] == "1"


def test_stuck_jobs_are_the_headline(admin_client: Client) -> None:
    Coordinator().tick()
    Watch().round()
    expired(make(Status.RUNNING))
    assert "1 job is stuck." in text(admin_client.get(url()))
    ProcessedJob.objects.all().delete()
    make(Status.DEAD)
    make(Status.HELD)
    assert "2 jobs need a person." in text(admin_client.get(url()))


def test_open_alert_is_the_headline_where_all_is_up_and_who_needs_a_person_is_in_it(
    admin_client: Client,
) -> None:
    def headline() -> str:
        return str(admin_client.get(url()).context["board"].headline)

    Coordinator().tick()
    Watch().round()
    retries = rules.Found(subject="testapp.fail", words="100 runs did not succeed.", cure="Look.")
    book.announce("retries", retries)
    assert headline() == "1 critical alert is open."
    make(Status.DEAD)
    assert headline() == "1 critical alert is open. 1 job needs a person."
    book.announce("stuck", retries)
    expired(make(Status.RUNNING))
    assert headline() == "1 job is stuck. 1 job needs a person."
    ProcessedJob.objects.all().delete()
    assert headline() == "2 critical alerts are open."


def test_what_is_not_measured_is_not_a_zero() -> None:
    summaries.keep()  # a coordinator that could not ask Redis
    shown = tiles_of("hour")
    for key in ("reads", "waits"):
        assert (shown[key].value, shown[key].hint) == ("–", "a coordinator has not counted yet")


@frozen_clock()  # what is an hour old now is not in a minute
def test_reads_of_the_cache_and_waits_for_locks_are_those_of_the_span() -> None:
    minute = summaries.floor(lifecycle.database_now(), MINUTE)
    for minutes, reads, waits in (
        (90, {"process": 1, "missed": 1}, {"0.1": 1}),
        (60, {"process": 900, "missed": 100}, {"0.1": 7}),
        (30, {"process": 960, "redis": 20, "missed": 110}, {"0.1": 9, "0.5": 38}),
        (20, {"missed": 10}, {}),  # the Redis that counted was lost
        (10, {"process": 100, "missed": 10}, {}),
    ):
        gauges = json.dumps({"reads": reads, "waits": waits})
        Summary.objects.create(
            span=MINUTE, begin=minute - timedelta(minutes=minutes), gauges=gauges
        )
    shown = tiles_of("hour")
    assert (shown["reads"].value, shown["reads"].hint) == (
        "90.0 %", "of 200 reads spared the database",
    )  # fmt: skip
    # 40 waits in all; the slowest 38 lie between 200 and 500 ms.
    assert shown["waits"].hint == "p95 of 40 runs that met a busy lock"
    assert 400 < float(shown["waits"].value.removesuffix(" ms")) < 500


def test_coordinator_keeps_what_is_counted_in_redis() -> None:
    first = Coordinator()
    assert first.tick().leads
    shown = tiles_of("hour")
    assert shown["reads"].hint == "a coordinator has not counted yet"
    counters.add("cache_hits_total", "process", number=30)
    counters.add("cache_misses_total", number=10)
    counters.observe("lock_wait_seconds", "testapp.record", seconds=0.3, number=4)
    counters.observe("lock_wait_seconds", "testapp.other", seconds=0.3)

    def is_paid() -> bool:
        counters.pay()
        return counters.sums()["reads"].get("process") == 30

    until(is_paid, 30, what="Redis has the counts")
    minute = summaries.floor(lifecycle.database_now(), MINUTE)
    looked = Summary.objects.filter(span=MINUTE).exclude(gauges="{}")
    assert looked.update(begin=minute - timedelta(minutes=3)) == 1
    assert Coordinator(owner=first.owner).tick().leads
    shown = tiles_of("hour")
    assert (shown["reads"].value, shown["waits"].value) == ("75.0 %", "485 ms")
    assert shown["waits"].hint == "p95 of 5 runs that met a busy lock"


def test_empty_system_says_what_to_do_next(admin_client: Client) -> None:
    page = text(admin_client.get(url()))
    assert "No job yet" in page
    assert "manage.py rqworker default" in page
    make(Status.PENDING)
    assert "No job yet" not in text(admin_client.get(url()))


@pytest.mark.django_db(transaction=True)
@pytest.mark.large
def test_workers_show_with_the_age_of_their_heartbeat(admin_client: Client, spawn: Any) -> None:
    worker: Spawned = spawn("rqworker", "default", "high")
    until(lambda: fleet.look().workers and fleet.look().leader, 30, what="it leads")
    found = fleet.look()
    (seen,) = found.workers
    assert seen.pid == str(worker.pid)
    assert (set(seen.queues), seen.busy) == ({"default", "high"}, False)
    assert seen.beat_age is not None
    assert seen.beat_age < 60
    assert found.leader is not None
    assert found.leader.beat_age <= conf.get().LEADER_TTL
    assert found.servers[0].used > 0
    page = text(admin_client.get(url()))
    assert f"{seen.host}:{seen.pid} default , high" in page
    assert "All is well." in page
    make(Status.PENDING, queue="low")

    def is_told() -> bool:
        Summary.objects.all().delete()  # the coordinator may just be writing what it saw before
        summaries.keep()
        return "Jobs wait where no worker listens: low." in text(admin_client.get(url()))

    until(is_told, 30, what="the queue is named")


def test_events_that_wait_are_shown_by_target_and_consumer(admin_client: Client) -> None:
    outlet.on_the_way("hooks & co", age=90)
    outlet.on_the_way("hooks & co", "DEAD")
    outlet.on_the_way("stream", "DELIVERED")
    outlet.taken_in("shop", "HELD")
    outlet.taken_in("shop", "BEHIND")
    page = admin_client.get(url(part="live"))
    said = text(page)
    assert re.search(r"hooks &amp; co 1 .* ✕ 1 stream 0 – 0", said)
    assert "shop 1 ✕ 1" in said
    for anchor, wanted in (("target-1", 2), ("target-2", 1), ("consumer-1", 2)):
        found = re.search(rf'id="dj-{anchor}" href="([^"]+)"', page.content.decode())
        assert found
        listed = admin_client.get(html.unescape(found[1])).context["cl"]
        assert listed.result_count == wanted


def test_lists_of_events_are_linked_for_those_who_may_see_them() -> None:
    outlet.on_the_way("stream")
    outlet.taken_in("shop", "HELD")
    reader = Client()
    reader.force_login(person("reader", "view"))
    page = reader.get(url(part="live")).content.decode()
    assert "stream" in page
    assert "shop" in page
    assert "dj-target-1" not in page
    assert "dj-consumer-1" not in page


def test_without_events_nothing_is_said_of_them(admin_client: Client) -> None:
    page = admin_client.get(url()).content.decode()
    assert re.search(r'id="dj-traffic" data-part hidden', page)


def test_whatever_stands_in_redis_breaks_no_page(admin_client: Client, redis_client: Any) -> None:
    redis_client.sadd("rq:workers", "rq:worker:<b>evil", "rq:worker:none", b"\xff\xfe")
    redis_client.hset("rq:worker:<b>evil", mapping={"hostname": "<script>", "last_heartbeat": "x"})
    redis_client.set("rq:worker:none", "a text where a hash should be")
    page = admin_client.get(url())
    assert page.status_code == 200
    assert "<script>" not in page.content.decode()
    assert "&lt;script&gt;" in page.content.decode()
    redis_client.delete("rq:workers")
    redis_client.set("rq:workers", "no set")
    assert "can not be asked" in text(admin_client.get(url()))


# ---- its cost, and how it is polled


def test_cost_does_not_grow_with_the_rows() -> None:
    """S-018, S-035: a fixed number of bounded queries."""
    costs = []
    for number in (1, 30):
        for _ in range(number):
            one_of_each()
        Summary.objects.all().delete()
        summaries.keep()
        board.read("hour")
        with CaptureQueriesContext(connection) as asked:
            board.read("hour")
        costs.append(len(asked))
    assert costs[0] == costs[1] <= 19


def test_looking_locks_nothing_and_writes_nothing(admin_client: Client) -> None:
    """S-121: pages take no row locks and write nothing."""
    one_of_each()
    Coordinator().tick()
    row = ProcessedJob.objects.filter(status=Status.DEAD).get()
    before = everything(), list(Summary.objects.order_by("pk").values())
    admin_client.get(url())
    for page in (url(), url(part="live"), address("changelist"), address("change", row.pk)):
        with CaptureQueriesContext(connection) as asked:
            admin_client.get(page)
        for query in asked:
            assert re.match(r"(SELECT|WITH)\b", query["sql"].strip()), query["sql"]
            assert "FOR UPDATE" not in query["sql"]
    assert before == (everything(), list(Summary.objects.order_by("pk").values()))


def test_unchanged_page_is_not_sent_again(admin_client: Client) -> None:
    Coordinator().tick()

    def ask_twice() -> tuple[Any, str]:
        etag = admin_client.get(url(part="live"))["ETag"]
        return admin_client.get(url(part="live"), headers={"If-None-Match": etag}), etag

    # A minute may begin between the two, or Redis's memory grow.
    again, etag = until(lambda: (found := ask_twice())[0].status_code == 304 and found)
    assert (again.content, again["ETag"]) == (b"", etag)
    assert re.fullmatch(r"\d\d:\d\d:\d\d", again["X-Dedupjobs-At"])
    make(Status.DEAD)
    changed = admin_client.get(url(part="live"), headers={"If-None-Match": etag})
    assert changed.status_code == 200
    assert changed["ETag"] != etag
    assert "no-store" in changed["Cache-Control"]
    assert "<html" not in changed.content.decode()


def test_page_has_nothing_inline(admin_client: Client) -> None:
    one_of_each()
    Coordinator().tick()
    page = admin_client.get(url())
    body = page.content.decode()
    assert page["Content-Security-Policy"] == "default-src 'self'"
    ours = body[body.index('id="content-main"') :]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", ours)


def test_times_are_in_the_users_zone_with_the_exact_instant(admin_client: Client) -> None:
    row = make(Status.SUCCEEDED)
    try_of(row, outcome="SUCCEEDED", ended_at=lifecycle.database_now(), run_time=1.0)
    summaries.keep()
    with timezone.override("Asia/Jakarta"):
        found = board.read("hour")
        here = timezone.localtime(found.now)
        chart = found.charts[0]
        assert chart.ticks[-1].words == f"{here:%H:%M}"
    page = admin_client.get(url()).content.decode()
    assert re.search(r'<time datetime="\d{4}-[^"]+" title="\d{4}-\d\d-\d\d [\d:.]+ \w+">', page)


# ---- the drawing


def plan(*values: float | None, stacked: bool = True) -> Plan:
    series = (Series(label="a", values=values), Series(label="b", values=values))
    return Plan(
        key="k", title="t", hint="h", series=series, stacked=stacked, say=str, empty="nothing"
    )


def moments(number: int) -> list[Any]:
    now = summaries.floor(lifecycle.database_now(), MINUTE)
    return [now + timedelta(minutes=i) for i in range(number)]


def test_bars_stand_upon_each_other_and_stay_inside() -> None:
    chart = draw(plan(1, 0, None, 4), moments(4))
    assert len(chart.bars) == 4
    assert all(box.y >= 0 and box.y + box.height <= chart.floor + 0.01 for box in chart.bars)
    lower, upper = (box for box in chart.bars if box.x > 450)
    assert upper.y + upper.height == pytest.approx(lower.y)
    assert chart.places[1].words.endswith("a: 0\nb: 0")
    assert chart.places[2].words.endswith("a: –\nb: –")


def test_lines_break_where_nothing_is_known() -> None:
    chart = draw(plan(1, 2, None, 3, None, 2, 1, stacked=False), moments(7))
    assert [len(stroke.paths) for stroke in chart.strokes] == [2, 2]
    assert [len(stroke.dots) for stroke in chart.strokes] == [1, 1]


@pytest.mark.parametrize("values", [(), (None, None), (0, 0)])
def test_chart_of_nothing_says_so(values: tuple[float | None, ...]) -> None:
    assert draw(plan(*values), moments(len(values))).empty == "nothing"


@pytest.mark.parametrize("highest", [0.0004, 0.9, 1, 3, 7, 1_000, 123_456_789])
def test_axis_ends_at_a_round_number_above_all(highest: float) -> None:
    chart = draw(plan(highest, highest, stacked=False), moments(2))
    top = float(chart.grid[-1].words)
    assert highest <= top * 1.001
    assert top <= highest * 2.5


def test_failed_condition_finds_what_failed_of_late() -> None:
    now = lifecycle.database_now()
    new, old = make(Status.RETRYING), make(Status.RETRYING)
    try_of(new, outcome="FAILED", ended_at=now)
    try_of(old, outcome="FAILED", ended_at=now - timedelta(hours=2))
    found = criteria.matching(lifecycle.jobs(), {"condition": "failed"}, arguments=False)
    assert list(found) == [new]


def test_counts_of_duplicates_reach_the_summary() -> None:
    now = lifecycle.database_now()
    DuplicateCount.objects.create(name="a", cause="race", count=4, first_at=now, last_at=now)
    assert summaries.duplicates() == {"race": 4}
