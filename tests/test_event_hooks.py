"""Events by webhook: signed and checked as the Standard Webhooks specification has it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.test import Client, RequestFactory, override_settings
from django.urls import path

from dedupjobs import clock, conf, envelope, inbox, outbox, routes
from dedupjobs.exceptions import SignatureError
from dedupjobs.inbox import handlers
from dedupjobs.models import OutboxEvent
from dedupjobs.outbox.relay import Relay
from tests import outlet
from tests.app import events
from tests.app.models import Ledger
from tests.outlet import relayed, statuses

pytestmark = pytest.mark.django_db(transaction=True)

OLD = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
NEW = "whsec_" + base64.b64encode(bytes(range(32))).decode()
NOW = 1_614_265_330.0

urlpatterns = [path("events/", inbox.webhook_view("ledger"))]


class Hook:
    """A web server that notes what is posted, and answers what it is told to."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[tuple[int, dict[str, str]]] = [(204, {})]
        self.gate = threading.Event()
        self.gate.set()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.got.append(({n.lower(): v for n, v in self.headers.items()}, body))
                hook.gate.wait(20)
                status, more = hook.answers.pop(0) if len(hook.answers) > 1 else hook.answers[0]
                try:
                    self.send_response(status)
                    for name, value in more.items():
                        self.send_header(name, value)
                    self.end_headers()
                except OSError:
                    pass  # the other side has gone

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def hook() -> Iterator[Hook]:
    found = Hook()
    yield found
    found.close()


def target(url: str, **more: Any) -> dict[str, Any]:
    one = {"webhook": url, "secrets": [NEW, OLD], "timeout": 5, **more}
    return {"TARGETS": {"partner": one}}


# ---- signatures


def test_signature_is_that_of_the_specification() -> None:
    text = '{"test": 2432232314}'
    headers = envelope.headers("msg_p5jXN8AQM9LWM0D4loKWxJek", text, now=NOW, secrets=[OLD])
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert headers["webhook-timestamp"] == "1614265330"


def verify(headers: dict[str, str], *, text: str = "{}", now: float = NOW, **more: Any) -> str:
    return envelope.verify(
        headers, text.encode(), now=now, **{"secrets": [NEW, OLD], "tolerance": 300, **more}
    )


def signed(text: str = "{}", *, secrets: Any = (OLD,), now: float = NOW) -> dict[str, str]:
    return envelope.headers("a", text, now=now, secrets=secrets)


def test_either_of_two_secrets_will_do_while_one_follows_the_other() -> None:
    assert verify(signed(secrets=[OLD])) == "a"
    assert verify(signed(secrets=[NEW])) == "a"
    assert verify(signed(secrets=[NEW, OLD]), secrets=[OLD]) == "a"


@pytest.mark.parametrize(
    ("change", "more", "words"),
    [
        ({"webhook-signature": ""}, {}, "are needed"),
        ({"webhook-id": "b"}, {}, "No secret"),
        ({"webhook-timestamp": "1614265331"}, {}, "No secret"),
        ({"webhook-signature": "v1,AAAA"}, {}, "No secret"),
        ({"webhook-signature": "v1,\udcff é"}, {}, "No secret"),
        ({"webhook-timestamp": "yesterday"}, {}, "not within 300 s"),
        ({"webhook-timestamp": "9" * 4000}, {}, "not within 300 s"),
        ({"webhook-timestamp": "¹"}, {}, "not within 300 s"),
        ({}, {"now": NOW + 301}, "not within 300 s"),
        ({}, {"now": NOW - 301}, "not within 300 s"),
        ({}, {"secrets": [NEW]}, "No secret"),
        ({}, {"secrets": []}, "No secret"),
        ({}, {"text": "{ }"}, "No secret"),
    ],
)
def test_message_that_was_changed_or_is_old_is_refused(
    change: dict[str, str], more: dict[str, Any], words: str
) -> None:
    with pytest.raises(SignatureError, match=words) as caught:
        verify({**signed(), **change}, **more)
    assert "v1," not in str(caught.value)


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


def test_events_go_from_one_project_into_another_by_webhook(
    client: Client, live_server: Any
) -> None:
    given = target(f"{live_server.url}/events/")
    consumers = {"ledger": {"secrets": [NEW]}}
    with outlet.outbox(given, INBOX={"CONSUMERS": consumers}):
        outbox.publish("order.paid", "7")
        assert relayed() == 1
    assert ledger() == ["7"]


# ---- settings


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "must be a dict"),
        ({"TARGET": {}}, "Did you mean 'TARGETS'?"),
        ({"TARGETS": []}, "it must be a dict"),
        ({"TARGETS": {"a b": {"signal": True}}}, "the name 'a b' must be"),
        ({"TARGETS": {"a": {"streem": "x"}}}, "Did you mean 'stream'?"),
        ({"TARGETS": {"a": {}}}, "none of stream, webhook, call, signal"),
        ({"TARGETS": {"a": {"stream": "x", "call": "y"}}}, "says stream, call"),
        ({"TARGETS": {"a": {"stream": "x", "maxlen": 0}}}, "at least 1"),
        ({"TARGETS": {"a": {"stream": "x", "on_dead": "die"}}}, "wait, go_on"),
        ({"TARGETS": {"a": {"stream": "x", "cache": "c", "url": "redis://"}}}, "both"),
        ({"TARGETS": {"a": {"webhook": "http://x.example/", "secrets": [NEW]}}}, "not encrypted"),
        ({"TARGETS": {"a": {"webhook": "ftp://x.example/", "secrets": [NEW]}}}, "https address"),
        ({"TARGETS": {"a": {"webhook": "https://x.example/"}}}, "has no secrets"),
        ({"TARGETS": {"a": {"signal": True, "secrets": [NEW]}}}, "which only a webhook uses"),
        ({"ROUTES": {"order.*": "a"}}, "which TARGETS lacks"),
        ({"TARGETS": {"a": {"signal": True}}, "ROUTES": {"Order": "a"}}, "give a name such as"),
        ({"TARGETS": {"a": {"signal": True}}, "ROUTES": {"*": 7}}, "a list of names"),
        ({"RETAIN": 0}, "from 1 to a year"),
    ],
)
def test_outbox_setting_that_can_not_be_meant_is_named_with_its_cure(
    given: Any, words: str
) -> None:
    with override_settings(DEDUPJOBS={"OUTBOX": given}):
        assert words in next(conf.problems())


@pytest.mark.parametrize("secret", ["short", "whsec_%%%", "whsec_c2hvcnQ=", 7])
def test_secret_that_is_none_is_refused_and_not_shown(secret: Any) -> None:
    one = {"webhook": "https://x.example/", "secrets": [secret]}
    words = list(routes.outbox_problems({"TARGETS": {"a": one}}, "OUTBOX"))
    assert "'secrets' is no list of secrets" in words[0]
    assert str(secret) not in words[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"CONSUMERS": {"a": {}}}, "neither whose 'stream'"),
        ({"CONSUMERS": {"a": {"stream": 7}}}, "name the Redis stream"),
        ({"CONSUMER": {}}, "Did you mean 'CONSUMERS'?"),
    ],
)
def test_inbox_setting_that_can_not_be_meant_is_named_with_its_cure(given: Any, words: str) -> None:
    with override_settings(DEDUPJOBS={"INBOX": given}):
        assert words in next(conf.problems())


def test_marks_that_go_before_the_events_do_are_warned_of() -> None:
    given = {
        "OUTBOX": {"TARGETS": {"a": {"stream": "a"}}},
        "INBOX": {"CONSUMERS": {"a": {"stream": "a"}}, "RETAIN": 60},
    }
    with override_settings(DEDUPJOBS=given):
        [(text, _)] = conf.contradictions()
    assert "an event that is sent again would be applied again" in text
