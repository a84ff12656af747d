"""The admin's pages of live controls: who may use them, what they say, what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from dedupjobs import controls, levers, lifecycle
from dedupjobs.levers import Wish
from dedupjobs.models import Control, Status
from tests.admin_rows import address, make

pytestmark = pytest.mark.django_db

FORM = {
    "kind": "pause",
    "aim": "queue",
    "target": "default",
    "value": "",
    "lasts": "30m",
    "reason": "SMTP is down",
}
WHO = {"by": "anna", "reason": "SMTP is <b>down</b>"}


def page(name: str, *args: Any) -> str:
    return reverse(f"admin:dedupjobs_control_{name}", args=args)


def client_with(*permissions: str) -> Client:
    user = User.objects.create_user("sam", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def paused(**changes: Any) -> Control:
    wish = {"kind": "pause", "aim": "queue", "target": "default", **changes}
    return levers.add(Wish(**wish), **WHO)


@pytest.mark.parametrize(
    ("permissions", "may_see", "may_use"),
    [
        ((), False, False),
        (("use_control",), False, False),
        (("view_control",), True, False),
        (("view_control", "use_control"), True, True),
    ],
    ids=str,
)
def test_pages_open_for_exactly_those_who_may(
    permissions: tuple[str, ...], may_see: bool, may_use: bool
) -> None:
    control = paused()
    client = client_with(*permissions)
    seen = 200 if may_see else 403
    assert client.get(page("changelist")).status_code == seen
    assert client.get(page("change", control.pk)).status_code == seen
    assert client.get(page("add")).status_code == (200 if may_use else 403)
    offered = b"End it" in client.get(page("change", control.pk)).content
    assert offered is may_use
    answer = client.post(page("add"), {**FORM, "target": "low"})
    assert answer.status_code == (302 if may_use else 403)
    answer = client.post(page("change", control.pk), {"reason": "it is up"})
    assert answer.status_code == (302 if may_use else 403)
    control.refresh_from_db()
    assert (control.ended_by == "sam") is may_use
    assert Control.objects.filter(target="low").exists() is may_use


def test_looking_changes_nothing() -> None:
    control = paused()
    client = client_with("view_control", "use_control")
    for address_ in (page("changelist"), page("add"), page("change", control.pk)):
        client.get(address_, FORM)
    assert Control.objects.get().ended_at is None


def test_control_that_is_added_is_in_force_and_says_who_and_why() -> None:
    client = client_with("view_control", "use_control")
    answer = client.post(page("add"), FORM, follow=True)
    assert "In force in all processes within seconds" in answer.content.decode()
    control = Control.objects.get()
    assert (control.by, control.reason, control.kind) == ("sam", "SMTP is down", "pause")
    assert round((control.until - control.created_at).total_seconds()) == 1_800
    assert controls.current(at_most=0).pause("testapp.record", "default") is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"aim": "prefix", "target": "a"}, "pause can be about job, queue, not about prefix."),
        ({"target": "defalt"}, "Did you mean default?"),
        ({"value": "3"}, "3: this kind takes no value."),
        ({"lasts": "soon"}, "give a number, or a time such as 90s"),
        ({"reason": ""}, "This field is required."),
        ({"kind": "timeout", "aim": "job", "target": "testapp.record"}, "Give a time such as"),
        ({"kind": "filter", "aim": "prefix", "target": "a*"}, "looks like a pattern with wildcard"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_wish_is_refused_with_its_cure(changes: dict[str, str], words: str) -> None:
    answer = client_with("view_control", "use_control").post(page("add"), {**FORM, **changes})
    assert answer.status_code == 200
    assert words in answer.content.decode()
    assert not Control.objects.exists()


def test_contradiction_names_the_control_in_the_way_unless_it_is_replaced() -> None:
    control = paused()
    client = client_with("view_control", "use_control")
    text = client.post(page("add"), FORM).content.decode()
    assert f"Control {control.pk} is in force there already: pause --queue default" in text
    assert "<b>down</b>" not in text
    assert client.post(page("add"), {**FORM, "replaces": "on"}).status_code == 302
    assert [c.by for c in controls.in_force()] == ["sam"]


def test_control_can_be_ended_once() -> None:
    control = paused()
    client = client_with("view_control", "use_control")
    assert client.post(page("change", control.pk), {"reason": ""}).status_code == 200
    assert client.post(page("change", control.pk), {"reason": "it is up"}).status_code == 302
    again = client.post(page("change", control.pk), {"reason": "it is up"})
    assert "has ended already" not in client.get(page("change", control.pk)).content.decode()
    assert again.status_code == 200
    control.refresh_from_db()
    assert (control.ended_by, control.end_reason) == ("sam", "it is up")
    listed = client.get(page("changelist"), {"state": "ended"}).content.decode()
    assert "ended by sam" in listed
    assert "ended by sam" not in client.get(page("changelist"), {"state": "force"}).content.decode()


def test_list_says_how_far_a_pause_is() -> None:
    paused()
    make(Status.PENDING)
    make(Status.RUNNING)
    listed = client_with("view_control").get(page("changelist")).content.decode()
    assert "in force: 1 waiting, 1 running" in listed
    assert "<b>down</b>" not in listed


def test_pages_of_a_job_and_the_dashboard_show_what_is_in_force() -> None:
    control = paused()
    other = levers.add(Wish(kind="pause", aim="queue", target="low"), **WHO)
    mark = controls.pause_mark(str(control.pk))
    row = make(Status.PENDING, dispatch_id=mark, dispatched_at=lifecycle.BEYOND)
    client = client_with("view_processedjob", "view_control")
    text = client.get(address("change", row.pk)).content.decode()
    assert f"#{control.pk} pause --queue default" in text
    assert f"#{other.pk} pause" not in text
    assert f"set aside: paused by control {control.pk}" in text
    assert "waiting costs it no attempt" in text
    assert "not yet: set aside" in text
    board = client.get(reverse("admin:dedupjobs_dashboard_changelist")).content.decode()
    assert f"#{control.pk} pause --queue default" in board
    assert f"#{other.pk} pause --queue low" in board
    assert "<b>down</b>" not in text + board


def test_row_whose_reason_to_wait_is_over_says_so() -> None:
    mark = controls.pause_mark("4711")
    row = make(Status.RETRYING, dispatch_id=mark, dispatched_at=lifecycle.BEYOND)
    text = client_with("view_processedjob").get(address("change", row.pk)).content.decode()
    assert "the coordinator lets it go" in text
