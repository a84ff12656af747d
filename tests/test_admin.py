"""The admin shows the tables, at a fixed cost, and changes nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from dedupjobs.clock import DbNow
from dedupjobs.models import (
    AttemptOutcome,
    Cause,
    DuplicateCount,
    DuplicateSample,
    JobAttempt,
    Operation,
    ProcessedJob,
    Status,
)

pytestmark = pytest.mark.django_db

MODELS = (ProcessedJob, JobAttempt, DuplicateCount, DuplicateSample, Operation)
NASTY = "<script>alert('key')</script>"
WRITES = re.compile(r"\b(INSERT|UPDATE|DELETE|REPLACE)\b")


def url_of(model: type[Any], page: str = "") -> str:
    return f"/admin/dedupjobs/{model._meta.model_name}/{page}"


def fill(number: int, *, attempts: int = 3) -> None:
    """Make that many rows of each table."""
    start = ProcessedJob.objects.count()
    rows = ProcessedJob.objects.bulk_create(
        ProcessedJob(
            key_hash=f"{start + i:064}",
            key=f"key {start + i} {NASTY}",
            name=f"app.job{i % 3}",
            queue="default",
            status=list(Status)[i % 7],
            args='{"token": "in the arguments"}',
            fingerprint="f" * 64,
            run_after=DbNow(),
            created_at=DbNow(),
            enqueued_at=DbNow(),
        )
        for i in range(number)
    )
    rows = list(ProcessedJob.objects.order_by("-pk")[: len(rows)])
    JobAttempt.objects.bulk_create(
        JobAttempt(
            job=row,
            number=n,
            generation=1,
            owner=f"{row.pk}.{n}",
            lease_until=DbNow(),
            beat_at=DbNow(),
            claimed_at=DbNow(),
            outcome=AttemptOutcome.FAILED,
            reason=NASTY,
            traceback="a long traceback",
        )
        for row in rows
        for n in range(1, attempts + 1)
    )
    for i, row in enumerate(rows):
        DuplicateCount.objects.create(
            name=f"app.{row.pk}", cause=Cause.RACE, count=i, first_at=DbNow(), last_at=DbNow()
        )
    DuplicateSample.objects.bulk_create(
        DuplicateSample(job=row, cause=Cause.RACE, at=DbNow(), detail=NASTY) for row in rows
    )
    Operation.objects.bulk_create(
        Operation(
            job=row, action="hold", by=NASTY, reason=NASTY, before="DEAD", after="HELD", at=DbNow()
        )
        for row in rows
    )


def statements_of(client: Client, url: str) -> list[str]:
    """Open a page and return what it asked the database."""
    with CaptureQueriesContext(connection) as captured:
        assert client.get(url).status_code == 200
    return [query["sql"] for query in captured.captured_queries]


def columns_of(statements: list[str], table: str) -> set[str]:
    """Return the columns of a table that the statements select."""
    selected = " ".join(text.split(" FROM ")[0] for text in statements if "SELECT" in text)
    quote = "`" if connection.vendor == "mysql" else '"'
    return set(re.findall(f"{quote}{table}{quote}\\.{quote}(\\w+){quote}", selected))


@pytest.mark.parametrize("model", MODELS)
def test_list_costs_the_same_queries_for_ten_rows_and_a_hundred(
    admin_client: Client, model: type[Any]
) -> None:
    fill(10)
    few = statements_of(admin_client, url_of(model))
    fill(90)
    many = statements_of(admin_client, url_of(model))
    assert len(few) == len(many) < 15


def test_page_of_a_job_costs_the_same_queries_for_ten_attempts_and_a_hundred(
    admin_client: Client,
) -> None:
    costs = []
    for attempts in (1, 10, 100):
        fill(1, attempts=attempts)
        pk = ProcessedJob.objects.latest("pk").pk
        costs.append(len(statements_of(admin_client, url_of(ProcessedJob, f"{pk}/change/"))))
    assert costs[1] == costs[2] < 20  # the first page of all has filled Django's own caches


def test_page_of_a_job_shows_a_bounded_number_of_attempts(admin_client: Client) -> None:
    fill(1, attempts=300)
    pk = ProcessedJob.objects.get().pk
    page = admin_client.get(url_of(ProcessedJob, f"{pk}/change/"))
    shown = page.content.count(b"failed</td>") + page.content.count(b">failed<")
    assert 0 < shown <= 100


@pytest.mark.parametrize("model", MODELS)
def test_pages_write_nothing_and_lock_nothing(admin_client: Client, model: type[Any]) -> None:
    fill(3)
    pk = model.objects.latest("pk").pk
    for page in ("", f"{pk}/change/", f"{pk}/history/", "?q=key", "?o=1"):
        for text in statements_of(admin_client, url_of(model, page)):
            assert not WRITES.search(text), text
            assert "FOR UPDATE" not in text


@pytest.mark.parametrize("model", [ProcessedJob, JobAttempt, DuplicateSample, Operation])
def test_list_leaves_large_columns_in_the_database(admin_client: Client, model: type[Any]) -> None:
    fill(3)
    statements = statements_of(admin_client, url_of(model))
    large = {"args", "rerun_args", "result"}
    assert columns_of(statements, "dedupjobs_processedjob") & large == set()
    assert columns_of(statements, "dedupjobs_jobattempt") & {"traceback"} == set()


@pytest.mark.parametrize("model", MODELS)
def test_list_counts_no_whole_table(admin_client: Client, model: type[Any]) -> None:
    fill(3)
    found = admin.site._registry[model]
    assert found.show_full_result_count is False


@pytest.mark.parametrize("model", MODELS)
def test_superuser_can_add_change_and_delete_nothing(
    admin_client: Client, model: type[Any]
) -> None:
    fill(2)
    before = [list(m.objects.order_by("pk").values()) for m in MODELS]
    pk = model.objects.latest("pk").pk
    assert admin_client.get(url_of(model, "add/")).status_code == 403
    for page in ("add/", f"{pk}/change/", f"{pk}/delete/"):
        answer = admin_client.post(url_of(model, page), {"name": "os.system", "post": "yes"})
        assert answer.status_code == 403, page
    action = {"action": "delete_selected", "_selected_action": [pk], "post": "yes"}
    admin_client.post(url_of(model), action)
    assert [list(m.objects.order_by("pk").values()) for m in MODELS] == before
    page = admin_client.get(url_of(model, f"{pk}/change/")).content.decode()
    assert 'name="_save"' not in page
    assert "deletelink" not in page
    assert not re.search(r'<(input|select|textarea)[^>]*name="(args|status|key|name|by)"', page)


@pytest.mark.parametrize("model", MODELS)
def test_user_without_permission_sees_nothing(client: Client, model: type[Any]) -> None:
    fill(1)
    pk = model.objects.latest("pk").pk
    pages = (url_of(model), url_of(model, f"{pk}/change/"))
    for page in pages:
        answer = client.get(page)
        assert (answer.status_code, answer.url) == (302, f"/admin/login/?next={page}")
    user = User.objects.create_user("sam", is_staff=True)
    client.force_login(user)
    for page in pages:
        assert client.get(page).status_code == 403
    user.user_permissions.add(Permission.objects.get(codename=f"view_{model._meta.model_name}"))
    for page in pages:
        assert client.get(page).status_code == 200


@pytest.mark.parametrize("model", MODELS)
def test_markup_in_a_key_is_shown_as_text(admin_client: Client, model: type[Any]) -> None:
    fill(1)
    pk = model.objects.latest("pk").pk
    for page in ("", f"{pk}/change/"):
        text = admin_client.get(url_of(model, page)).content.decode()
        assert NASTY not in text
        if model is not DuplicateCount:
            assert "&lt;script&gt;alert(&#x27;key&#x27;)&lt;/script&gt;" in text


def test_search_finds_a_job_by_its_exact_key_or_rq_id(admin_client: Client) -> None:
    fill(3)
    ProcessedJob.objects.filter(key_hash=f"{1:064}").update(key="the one", dispatch_id="dedup_1")
    for question in ("the one", "dedup_1", f"{1:064}"):
        page = admin_client.get(url_of(ProcessedJob), {"q": f'"{question}"'})
        assert b"the one" in page.content
        assert page.content.count(b'class="field-name"') == 1


@pytest.mark.parametrize(
    ("model", "query"),
    [
        (ProcessedJob, "status__exact=DEAD"),
        (ProcessedJob, "name=app.job1"),
        (ProcessedJob, "queue=default"),
        (JobAttempt, "outcome__exact=FAILED"),
        (DuplicateCount, "cause__exact=race"),
        (DuplicateSample, "cause__exact=race"),
        (Operation, "action=hold"),
    ],
)
def test_filter_shows_what_it_names(admin_client: Client, model: type[Any], query: str) -> None:
    fill(14)
    page = admin_client.get(url_of(model, f"?{query}"))
    assert page.status_code == 200
    field, _, value = query.replace("__exact", "").partition("=")
    shown = page.context["cl"].result_list
    assert {getattr(row, field) for row in shown} == {value}
