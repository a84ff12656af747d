"""The lists of events sent and received, as people with and without permissions see them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from dedupjobs import inbox, outbox
from dedupjobs.envelope import Event
from dedupjobs.inbox import handlers, marks
from dedupjobs.models import InboxMessage, OutboxEvent
from tests import outlet
from tests.app import events
from tests.outlet import NOTED, relayed, statuses

pytestmark = pytest.mark.django_db(transaction=True)


def client_with(*names: str) -> Client:
    user = User.objects.create_user("sam", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=names))
    client = Client()
    client.force_login(user)
    return client


def failed() -> OutboxEvent:
    # Words with spaces: no random id on a page has one.
    outlet.refusals["{'token': 'not for you', 'the sum': 7}"] = ValueError("<b>no</b>\u202e")
    outbox.publish("order.paid", {"token": "not for you", "the sum": 7}, key="k")
    relayed()
    return OutboxEvent.objects.get()


def page(client: Client, row: Any) -> str:
    name = f"admin:dedupjobs_{row._meta.model_name}_change"
    return client.get(reverse(name, args=[row.pk])).content.decode()


def lists(client: Client, model: Any, query: str = "") -> Any:
    address = reverse(f"admin:dedupjobs_{model._meta.model_name}_changelist")
    return client.get(f"{address}{query}")


def act(client: Client, row: Any, action: str) -> Any:
    address = reverse(f"admin:dedupjobs_{row._meta.model_name}_changelist")
    return client.post(address, {"action": action, "_selected_action": [row.pk]}, follow=True)


def test_list_shows_filters_and_finds_events() -> None:
    with outlet.outbox(NOTED):
        row = failed()
        client = client_with("view_outboxevent")
        for query in ("", "?status=RETRYING", "?target=noted", f"?q={row.event_id}", "?q=k"):
            assert "order.paid" in lists(client, OutboxEvent, query).content.decode()
        for query in ("?status=DEAD", "?target=other", "?q=order"):
            assert "0 events sent" in lists(client, OutboxEvent, query).content.decode()
        assert lists(client, InboxMessage).status_code == 403


def test_payload_is_for_those_who_may_see_it_and_redacted() -> None:
    with outlet.outbox(NOTED):
        row = failed()
        seen = page(client_with("view_outboxevent"), row)
        assert "&lt;b&gt;no&lt;/b&gt;\\u202e" in seen
        assert "the sum" not in seen
        User.objects.all().delete()
        seen = page(client_with("view_outboxevent", "payload_outboxevent"), row)
        assert "&quot;the sum&quot;: 7" in seen
        assert "not for you" not in seen


def test_retry_sends_the_event_now_and_is_recorded() -> None:
    with outlet.outbox(NOTED):
        row = failed()
        outlet.refusals.clear()
        client = client_with("view_outboxevent", "retry_outboxevent")
        assert "Tried again: 1" in act(client, row, "retry").content.decode()
        assert LogEntry.objects.get().change_message == "tried again: RETRYING"
        relayed()
        assert statuses() == ["DELIVERED"]
        assert "1 left as they are" in act(client, row, "drop").content.decode()


def test_actions_are_not_for_those_who_only_look() -> None:
    with outlet.outbox(NOTED):
        row = failed()
        client = client_with("view_outboxevent")
        assert 'name="action"' not in lists(client, OutboxEvent).content.decode()
        act(client, row, "drop")
        assert statuses() == ["RETRYING"]


def test_held_message_shows_its_reason_and_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_handlers", {})
    events.register()
    with outlet.outbox({}, INBOX={"CONSUMERS": {"ledger": {"stream": "orders"}}}):
        event = Event(id="e1", name="order.paid", body=json.dumps("7"))
        marks.hold(event, consumer="ledger", error="ValueError: bad")
        row = InboxMessage.objects.get()
        names = ("view_inboxmessage", "release_inboxmessage", "payload_inboxmessage")
        client = client_with(*names)
        assert "ValueError: bad" in page(client, row)
        assert "Released: 1" in act(client, row, "release").content.decode()
        [due] = marks.due("ledger", limit=9)
        assert inbox.take(due, consumer="ledger") == inbox.Fate.APPLIED
        assert "1 left as they are" in act(client, row, "release").content.decode()
