"""Bad input: shown as text, and always a page; whatever stands in the rows, Redis or an address."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape
from typing import Any
from urllib.parse import urlencode

import pytest
import redis
from django.conf import settings as django_settings
from django.db import connection
from django.test import Client

from dedupjobs import dispatch, locks
from dedupjobs.admin.text import pairs, plain, shown
from dedupjobs.clock import DbNow
from dedupjobs.models import (
    Cause,
    DuplicateSample,
    JobAttempt,
    Operation,
    ProcessedJob,
    Status,
)
from tests.admin_rows import address, everything, make, try_of

pytestmark = pytest.mark.django_db

IMAGE = "<img src=x onerror=alert(1)>"
SCRIPT = "</script><script>alert(1)</script>"
TEMPLATE = "{{7*7}}{% now 'Y' %}"
BIDI = "abc\u202egnp.exe\u2066\u200f"
NASTY = f"{IMAGE}{SCRIPT}{TEMPLATE}{BIDI}"
PAGES = ("changelist", "change", "history", "locks")


@pytest.fixture(autouse=True)
def _own_clients() -> Iterator[None]:
    dispatch.forget_clients()
    locks.forget_clients()
    yield
    dispatch.forget_clients()
    locks.forget_clients()


def planted() -> ProcessedJob:
    """Make a job with hostile text wherever foreign text can stand."""
    row = make(
        Status.DEAD,
        key=NASTY[:200],
        scope=NASTY[:200],
        name=NASTY[:200],
        queue="default",
        args=f'{{"{IMAGE}":"{SCRIPT}","b":"{TEMPLATE}","c":"\\u202e\\ud800\\u0000"}}',
        rerun_args='{"x":"<img src=x onerror=alert(2)>"}',
        result=f'"{IMAGE}"',
        error=NASTY,
        dispatch_id="x" * 64,
    )
    try_of(
        row,
        outcome="FAILED",
        ended_at=DbNow(),
        host=NASTY[:200],
        owner=IMAGE,
        rq_id=IMAGE,
        error_class=IMAGE,
        error_message=NASTY,
        traceback=NASTY,
        reason=NASTY,
        late_ending="<b>",
        progress=json.dumps([5, 14, NASTY]),
    )
    Operation.objects.create(
        job=row, action="hold", by=NASTY[:200], reason=NASTY, before="DEAD", after="<i>", at=DbNow()
    )
    DuplicateSample.objects.create(
        job=row, cause=Cause.RACE, at=DbNow(), host=IMAGE, request_id=IMAGE, detail=NASTY
    )
    locks.acquire(row.pk, NASTY, ttl=60)
    return row


def pages_of(client: Client, row: ProcessedJob) -> Iterator[str]:
    for page in PAGES:
        args = [row.pk] if page in ("change", "history") else []
        answer = client.get(address(page, *args))
        assert answer.status_code == 200, page
        yield answer.content.decode()
    chosen = {"action": "retry", "_selected_action": [row.pk]}
    yield client.post(address("changelist"), chosen).content.decode()
    across = client.post(address("changelist"), {**chosen, "select_across": "1"})
    assert across.status_code == 200
    yield across.content.decode()
    for query in ({"q": NASTY}, {"scope": NASTY}, {"error": IMAGE}):
        yield client.get(address("changelist"), query).content.decode()


def test_planted_markup_is_shown_as_text(admin_client: Client) -> None:
    row = planted()
    for page in pages_of(admin_client, row):
        assert "<img src=x" not in page
        assert "<script>alert" not in page
        assert "<b>" not in page
        assert "49" not in page.replace(TEMPLATE, "").partition("onerror")[2][:60]
        assert "\x00" not in page
    page = admin_client.get(address("change", row.pk)).content.decode()
    assert f"5 of 14 · {escape(IMAGE)}" in page
    assert escape(TEMPLATE) in page
    assert "\\u202e" in page
    assert "\\ud800" in page
    for page in ("changelist", "change", "locks"):  # Django's own history shows texts as they are
        args = [row.pk] if page == "change" else []
        text = admin_client.get(address(page, *args)).content.decode()
        assert "\u202e" not in re.sub(r'aria-label="[^"]*"', "", text), page


@pytest.mark.parametrize("length", [10_000, 100_000])
def test_very_long_texts_make_a_bounded_page(admin_client: Client, length: int) -> None:
    text = "x" * length
    row = make(Status.DEAD, args=f'{{"a":"{text}"}}', error=text, result=f'"{text}"')
    try_of(row, outcome="FAILED", ended_at=DbNow(), traceback=text, error_message=text)
    page = admin_client.get(address("change", row.pk))
    assert page.status_code == 200
    assert len(page.content) < 150_000
    listed = admin_client.get(address("changelist"), {"q": text})
    assert listed.status_code == 200


BROKEN = [
    "",
    "{",
    "[1,2]",
    '"text"',
    "null",
    "7",
    "\\x00",
    "[" * 50_000,
    '{"$":"enum","t":"os:system"}',
    '[NaN, Infinity, "x"]',
    '[1e999, 1e-320, ""]',
    f"[1, {'9' * 5_000}, null]",
]


@pytest.mark.parametrize("stored", BROKEN)
def test_arguments_that_are_no_arguments_make_a_page(admin_client: Client, stored: str) -> None:
    row = make(Status.DEAD, args=stored, rerun_args=stored, result=stored)
    attempt = try_of(row, outcome="FAILED", ended_at=DbNow())
    JobAttempt.objects.filter(pk=attempt.pk).update(progress=stored)
    assert admin_client.get(address("change", row.pk)).status_code == 200


QUESTIONS = [
    "\x00", "a\x00b", "\ud800", "%", "_", "\\", "'", '"', '""', "=", "a=", "=b", "a=\x00", "9" * 40,
    "-1", "٣", "x" * 10_000, "order_id=" + "9" * 5_000, "order_id=1e999999", "order_id=NaN",
    "order_id=" + "[" * 5_000, '"\x00"', "\u202e", "a=%", "a=_",
]  # fmt: skip


FIELDS = ("q", "scope", "error", "state", "condition", "name", "age", "queue")


@pytest.mark.parametrize("name", FIELDS)
def test_any_text_in_the_address_makes_a_page(admin_client: Client, name: str) -> None:
    make(Status.DEAD, args='{"order_id":7}')
    for question in QUESTIONS:
        text = question.encode("utf-8", "surrogatepass")
        answer = admin_client.get(address("changelist"), {name: text})
        assert answer.status_code == 200, question
        form = urlencode({"action": "retry", "reason": "", name: text})
        kind = "application/x-www-form-urlencoded"
        answer = admin_client.post(address("bulk_start"), form, content_type=kind)
        assert answer.status_code == 200, question


@pytest.mark.parametrize("query", ["o=99", "o=x", "o=-", "p=x", "p=-1", "p=99999", "all=1", "e=1"])
def test_any_page_or_order_in_the_address_makes_a_page(admin_client: Client, query: str) -> None:
    make(Status.DEAD)
    answer = admin_client.get(f"{address('changelist')}?{query}", follow=True)
    assert answer.status_code == 200


@pytest.mark.parametrize("pk", ["0", "99999999999999999999999", "x", "1%00", "_3C", "-1", "1e3"])
def test_job_that_is_not_there_is_a_message_not_an_error(admin_client: Client, pk: str) -> None:
    for page in ("change", "history"):
        answer = admin_client.get(f"/admin/dedupjobs/processedjob/{pk}/{page}/", follow=True)
        assert answer.status_code in (200, 404)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("reason", ["a\x00b", "\u202e", IMAGE, "x" * 501])
def test_any_reason_makes_a_page(admin_client: Client, reason: str) -> None:
    row = make(Status.DEAD)
    form = {"action": "retry", "row": f"{row.pk}:0:DEAD", "confirmed": "1", "reason": reason}
    answer = admin_client.post(address("operate"), form, follow=True)
    assert answer.status_code == 200
    assert "<img src=x" not in answer.content.decode()


# ---- what is away or broken


@pytest.fixture
def redis_away(settings: Any) -> None:
    nowhere = "redis://127.0.0.1:1/0"
    settings.RQ_QUEUES = {name: {"URL": nowhere} for name in django_settings.RQ_QUEUES}
    settings.CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": nowhere}}
    dispatch.forget_clients()
    locks.forget_clients()


@pytest.mark.usefixtures("redis_away")
def test_pages_and_buttons_work_without_redis(admin_client: Client) -> None:
    row = make(Status.RUNNING, dispatch_id="dedupjobs_x")
    dead = make(Status.DEAD, dispatch_id="dedupjobs_y")
    for page in PAGES:
        args = [row.pk] if page in ("change", "history") else []
        assert admin_client.get(address(page, *args)).status_code == 200
    page = admin_client.get(address("change", row.pk)).content.decode()
    assert "can not be asked: ConnectionError" in page
    for action in ("put back", "free lock", "forget", "retry"):
        form = {"action": action, "row": f"{dead.pk}:0:DEAD", "confirmed": "1", "reason": "x"}
        answer = admin_client.post(address("operate"), form, follow=True)
        assert answer.status_code == 200, action
        assert len(answer.context["messages"]) == 1
    assert ProcessedJob.objects.get(pk=dead.pk).status == "PENDING"


def test_strange_things_under_our_names_in_redis_make_a_page(
    admin_client: Client, redis_client: redis.Redis
) -> None:
    row = make(Status.PENDING, dispatch_id="dedupjobs_x", dispatched_at=DbNow(-60))
    with redis.Redis.from_url(django_settings.CACHE_URL) as cache:
        cache.lpush(f":1:dedupjobs:lock:{{{row.pk}}}", b"a list")
    redis_client.set("rq:job:dedupjobs_x", b"\xff\xfe")
    redis_client.zadd("rq:wip:default", {b"\xff\xfe:x": 2e9, "dedupjobs_x:e": 2e9})
    redis_client.set("rq:failed:default", b"no set")
    page = admin_client.get(address("change", row.pk))
    assert page.status_code == 200
    assert "WRONGTYPE" in page.content.decode()
    redis_client.set("rq:queue:default", b"no list")
    assert admin_client.get(address("change", row.pk)).status_code == 200


def test_pickle_in_redis_is_never_loaded(admin_client: Client, redis_client: redis.Redis) -> None:
    import pickle

    class Bomb:
        def __reduce__(self) -> Any:
            return (exec, ("raise SystemExit('loaded')",))

    row = make(Status.PENDING, dispatch_id="dedupjobs_x", dispatched_at=DbNow(-60))
    redis_client.hset(
        "rq:job:dedupjobs_x", mapping={"data": pickle.dumps(Bomb()), "status": "queued"}
    )
    redis_client.rpush("rq:queue:default", "dedupjobs_x")
    with redis.Redis.from_url(django_settings.CACHE_URL) as cache:
        cache.set(f":1:dedupjobs:lock:{{{row.pk}}}", pickle.dumps(Bomb()))
    for page in ("change", "locks"):
        args = [row.pk] if page == "change" else []
        assert admin_client.get(address(page, *args)).status_code == 200


@pytest.mark.parametrize("queue", ["nowhere", "", IMAGE])
def test_job_of_an_unknown_name_and_queue_makes_a_page(admin_client: Client, queue: str) -> None:
    row = make(Status.PENDING, name="gone.job", queue=queue, dispatch_id="dedupjobs_x")
    page = admin_client.get(address("change", row.pk)).content.decode()
    assert "No job of this name is known here" in page
    assert "UnknownQueue" in page


def test_opening_every_page_changes_nothing(admin_client: Client) -> None:
    row = planted()
    before = everything()
    with connection.execute_wrapper(_refusing_writes):
        for page in PAGES:
            args = [row.pk] if page in ("change", "history") else []
            admin_client.get(address(page, *args))
            admin_client.get(f"{address(page, *args)}?action=retry&confirmed=1&o=1&q=x")
    assert everything() == before


def _refusing_writes(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    assert not sql.startswith(("INSERT", "UPDATE", "DELETE", "REPLACE")), sql
    assert "FOR UPDATE" not in sql
    return execute(sql, params, many, context)


# ---- text


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("a\x00b", "a\\x00b"),
        ("a\u202eb", "a\\u202eb"),
        ("\ud800", "\\ud800"),
        ("\u200b\ufeff", "\\u200b\\ufeff"),
        ("Zoë 東京 🎉", "Zoë 東京 🎉"),
        ("x" * 10_001, "x" * 10_000 + "…"),
    ],
)
def test_every_character_can_be_seen(text: str, visible: str) -> None:
    assert shown(text) == visible


def test_values_of_redacted_names_are_masked_at_any_depth(settings: Any) -> None:
    stored = (
        '{"API_TOKEN":"a","user":{"password":"b","name":"ann"},"list":[{"secret_key":"c"}],'
        '"amount":{"$":"decimal","v":"9.90"},"n":7}'
    )
    found = dict(pairs(stored))
    assert found["API_TOKEN"] == "••••••"
    assert found["user"] == '{"password": "••••••", "name": "ann"}'
    assert found["list"] == '[{"secret_key": "••••••"}]'
    assert (found["amount"], found["n"]) == ("9.90", "7")
    assert "secret" not in plain('{"credentials":{"a":"secret"}}')
    settings.DEDUPJOBS = {"REDACT": ("iban",)}
    assert dict(pairs('{"iban":"DE1","password":"p"}')) == {"iban": "••••••", "password": "p"}


def test_secrets_of_a_job_are_on_no_page(admin_client: Client) -> None:
    row = make(
        Status.DEAD,
        args='{"token":"s3cret","email":"a@b.c"}',
        rerun_args='{"token":"s3cret"}',
        result='{"access_token":"s3cret"}',
    )
    for page in pages_of(admin_client, row):
        assert "s3cret" not in page
