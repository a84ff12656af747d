"""Events by webhook: signed and checked as the Standard Webhooks specification has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.test import Client, RequestFactory, override_settings
from django.urls import path

from dedupjobs import clock, envelope, inbox, outbox
from dedupjobs.backoff import Constant
from dedupjobs.inbox import handlers
from dedupjobs.models import OutboxEvent
from dedupjobs.outbox import shelf
from dedupjobs.outbox.relay import Relay
from tests import outlet
from tests.app import events
from tests.app.models import Ledger
from tests.hook import Hook
from tests.outlet import relayed, statuses
from tests.test_event_settings import NEW, OLD, verify

pytestmark = pytest.mark.django_db(transaction=True)

urlpatterns = [path("events/", inbox.webhook_view("ledger"))]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be due again by itself while a test looks."""
    monkeypatch.setattr(shelf, "BACKOFF", Constant(60.0))


@pytest.fixture
def hook() -> Iterator[Hook]:
    found = Hook("hook", (204, {}))
    yield found
    found.close()


def target(url: str, **more: Any) -> dict[str, Any]:
    one = {"webhook": url, "secrets": [NEW, OLD], "timeout": 5, **more}
    return {"TARGETS": {"partner": one}}


# ---- going out


def test_webhook_gets_an_event_signed_by_all_secrets(hook: Hook) -> None:
    with outlet.outbox(target(hook.url)):
        event_id = outbox.publish("order.paid", {"order": 7}, key="order:7")
        assert relayed() == 1
    [(headers, body)] = hook.got
    now = clock.utcnow().timestamp()
    for secret in (OLD, NEW):
        assert verify(headers, text=body.decode(), now=now, secrets=[secret]) == event_id
    got = json.loads(body)
    assert got.pop("timestamp").startswith("20")
    assert got == {"type": "order.paid", "key": "order:7", "data": {"order": 7}}
    assert headers["content-type"] == "application/json"


@pytest.mark.parametrize("answer", [(500, {}), (302, {"Location": "/other"}), (404, {})])
def test_answer_other_than_2xx_is_a_failure_and_no_redirect_is_followed(
    hook: Hook, answer: tuple[int, dict[str, str]]
) -> None:
    hook.answers = [answer, (200, {})]
    with outlet.outbox(target(hook.url)):
        outbox.publish("order.paid", 1, key="k")
        outbox.publish("order.paid", 2, key="k")
        relayed()
        assert statuses() == ["RETRYING", "BEHIND"]
        assert OutboxEvent.objects.order_by("pk")[0].error == f"Refused: it answered {answer[0]}"
        assert len(hook.got) == 1
        outlet.make_due()
        relayed()
        assert statuses() == ["DELIVERED", "DELIVERED"]
    ids = [headers["webhook-id"] for headers, _ in hook.got]
    assert ids[0] == ids[1]


def test_webhook_that_hangs_is_cut_off(hook: Hook) -> None:
    hook.gate.clear()
    with outlet.outbox(target(hook.url, timeout=0.3)):
        outbox.publish("order.paid", 1)
        begun = clock.monotonic()
        relayed()
        assert clock.monotonic() - begun < 10
        assert statuses() == ["RETRYING"]


def test_webhook_where_nobody_listens_costs_no_event_a_try(hook: Hook) -> None:
    url = hook.url
    hook.close()
    with outlet.outbox(target(url)):
        outbox.publish("order.paid", 1)
        assert Relay("partner").round().away
        assert statuses() == ["WAITING"]


# ---- coming in


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    events.before.clear()
    monkeypatch.setattr(handlers, "_handlers", {})
    events.register()
    consumers = {"ledger": {"secrets": [NEW], "attempts": 2}, "audit": {"stream": "orders"}}
    with (
        outlet.outbox({}, INBOX={"CONSUMERS": consumers}),
        override_settings(ROOT_URLCONF="tests.test_event_hooks"),
    ):
        yield Client(enforce_csrf_checks=True)


def post(client: Client, body: Any, *, event_id: str = "e1", secret: str = NEW) -> HttpResponse:
    text = body if isinstance(body, str) else json.dumps(body)
    headers = envelope.headers(event_id, text, now=clock.utcnow().timestamp(), secrets=[secret])
    return client.post("/events/", text, content_type="application/json", headers=headers)  # type: ignore[return-value]


PAID = {"type": "order.paid", "data": "7"}


def ledger() -> list[str]:
    return list(Ledger.objects.values_list("tag", flat=True))


def test_signed_event_is_applied_once_however_often_it_is_posted(client: Client) -> None:
    assert [post(client, PAID).status_code for _ in range(3)] == [204, 204, 204]
    assert ledger() == ["7"]


def test_event_that_nobody_signed_is_refused(client: Client) -> None:
    assert post(client, PAID, secret=OLD).status_code == 401
    assert client.post("/events/", "{}", content_type="application/json").status_code == 401
    assert client.get("/events/").status_code == 405
    assert ledger() == []


@pytest.mark.parametrize(
    "body",
    ["{", "[]", '{"type": "order.paid"}', '{"type": "Order", "data": 1}', '{"type": 7, "data": 1}'],
)
def test_body_that_is_no_event_is_refused(client: Client, body: str) -> None:
    answer = post(client, body)
    assert (answer.status_code, ledger()) == (400, [])


def test_body_that_is_too_large_is_refused(client: Client) -> None:
    with override_settings(DATA_UPLOAD_MAX_MEMORY_SIZE=10):
        assert post(client, PAID).status_code == 413


def test_event_that_fails_is_asked_for_again_until_it_is_held(client: Client) -> None:
    def fail() -> None:
        raise ValueError

    events.before["7"] = fail
    first, second, third = (post(client, PAID) for _ in range(3))
    assert (first.status_code, first["Retry-After"]) == (503, "5")
    assert (second.status_code, third.status_code) == (204, 204), "a person has it now"
    assert ledger() == []


def test_event_that_failed_is_applied_when_it_is_posted_again(client: Client) -> None:
    def fail() -> None:
        raise ValueError

    events.before["7"] = fail
    assert post(client, PAID).status_code == 503
    events.before.clear()
    assert post(client, PAID).status_code == 204
    assert ledger() == ["7"]


def test_view_of_a_consumer_without_secrets_is_refused(client: Client) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"audit.* has no secrets"):
        inbox.receive(RequestFactory().post("/"), consumer="audit")
    with pytest.raises(ImproperlyConfigured, match=r"no consumer 'legder'. Did you mean 'ledger'"):
        inbox.receive(RequestFactory().post("/"), consumer="legder")


def test_events_go_from_one_project_into_another_by_webhook(
    client: Client, live_server: Any
) -> None:
    given = target(f"{live_server.url}/events/")
    consumers = {"ledger": {"secrets": [NEW]}}
    with outlet.outbox(given, INBOX={"CONSUMERS": consumers}):
        outbox.publish("order.paid", "7")
        assert relayed() == 1
    assert ledger() == ["7"]
