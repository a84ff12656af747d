"""Who may open which address, by which method, and what changes when they may not: nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.test import Client

from dedupjobs import bulk, dispatch, locks
from dedupjobs.admin.deeds import ACTIONS, DEEDS, AsSeen
from dedupjobs.models import BulkOperation, Operation, ProcessedJob, Status
from tests.admin_rows import PERMISSIONS, address, everything, fresh, make, person, try_of

pytestmark = pytest.mark.django_db

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
SINGLE = [what for what in PERMISSIONS if what != "view"]
PERSONS = (
    "anonymous",
    "customer",
    "staff",
    "only view",
    *(f"only {what}" for what in SINGLE),
    *(f"view and {what}" for what in SINGLE),
    "superuser",
)

# Page, arguments, method, and the permissions that it asks for.
PAGES: list[tuple[str, str, set[str]]] = [
    ("changelist", "GET", {"view"}),
    ("change", "GET", {"view"}),
    ("history", "GET", {"view"}),
    ("locks", "GET", {"view"}),
    ("order", "POST", {"view"}),
    ("operate", "POST", {"view", "retry"}),
    ("bulk_start", "POST", {"view", "retry"}),
    ("bulk", "GET", {"view"}),
    ("progress", "GET", {"view"}),
    ("bulk_stop", "POST", {"view", "retry"}),
]


@pytest.fixture(autouse=True)
def _patient(settings: Any) -> Iterator[None]:
    settings.DEDUPJOBS = {"PUSH_TIMEOUT": 30, "LOCK_TIMEOUT": 30}
    dispatch.forget_clients()
    locks.forget_clients()
    yield
    dispatch.forget_clients()
    locks.forget_clients()


def user_called(name: str) -> User | AnonymousUser:
    if name == "anonymous":
        return AnonymousUser()
    if name == "superuser":
        return User.objects.create_superuser("root")
    if name == "customer":
        return person("customer", *PERMISSIONS, staff=False)
    permissions = {what for what in PERMISSIONS if what in name.split()}
    return person("sam", *permissions)


def has(name: str) -> set[str]:
    if name == "superuser":
        return set(PERMISSIONS)
    return {what for what in PERMISSIONS if what in name.split()}


def client_of(name: str) -> Client:
    client, user = Client(), user_called(name)
    if isinstance(user, User):
        client.force_login(user)
    return client


def bulk_of_somebody() -> BulkOperation:
    other = User.objects.create_superuser("somebody")
    return bulk.start("retry", {"state": "DEAD"}, user=other, reason="x")


def arguments(page: str, row: ProcessedJob, started: BulkOperation) -> list[int]:
    if page in ("change", "history"):
        return [row.pk]
    return [started.pk] if page in ("bulk", "progress", "bulk_stop") else []


def form(row: ProcessedJob, action: str = "retry") -> dict[str, Any]:
    return {
        "action": action,
        "row": str(AsSeen.of(row)),
        "confirmed": "1",
        "reason": "because",
        "limit": "9",
        "state": "DEAD",
        "o": "1.-2",
    }


@pytest.mark.parametrize("name", PERSONS)
@pytest.mark.parametrize(("page", "method", "asked"), PAGES)
def test_page_opens_for_exactly_those_who_may(
    name: str, page: str, method: str, asked: set[str]
) -> None:
    row, started = make(Status.DEAD), bulk_of_somebody()
    client = client_of(name)
    before = everything()
    url = address(page, *arguments(page, row, started))
    answer = client.generic(method, url) if method == "GET" else client.post(url, form(row))
    if name in ("anonymous", "customer"):
        assert (answer.status_code, answer["Location"].split("?")[0]) == (302, "/admin/login/")
    elif asked <= has(name):
        assert answer.status_code == (200 if method == "GET" else 302), page
        assert not answer.get("Location", "").startswith("/admin/login")
    else:
        assert answer.status_code == 403
    if not asked <= has(name) or name == "customer" or method == "GET":
        assert everything() == before


@pytest.mark.parametrize("name", ["anonymous", "staff", "only view", "superuser"])
@pytest.mark.parametrize(("page", "method", "asked"), PAGES)
def test_every_other_method_changes_nothing(
    name: str, page: str, method: str, asked: set[str]
) -> None:
    row, started = make(Status.DEAD), bulk_of_somebody()
    client = client_of(name)
    before = everything()
    url = address(page, *arguments(page, row, started))
    for other in METHODS:
        if other != method:
            answer = client.generic(other, f"{url}?action=retry&confirmed=1&reason=x")
            assert answer.status_code in (200, 302, 400, 403, 405), (other, page)
            assert everything() == before, (other, page)
            if method == "POST":
                assert answer.status_code in (302, 405), (other, page)


def specimen(action: str) -> ProcessedJob:
    """Make a row to which an action applies."""
    statuses = {"cancel": Status.RETRYING, "hold": Status.RETRYING, "unhold": Status.HELD}
    row = make(statuses.get(action, Status.DEAD))
    if action == "free lock":
        locks.acquire(row.pk, "nobody", ttl=60)
    return fresh(row)


@pytest.mark.parametrize("name", ["only view", *(f"view and {what}" for what in SINGLE)])
@pytest.mark.parametrize("action", [deed.name for deed in ACTIONS])
def test_action_needs_its_own_permission_alone(name: str, action: str) -> None:
    row = specimen(action)
    client = client_of(name)
    before = everything()
    allowed = DEEDS[action].permission in has(name)
    answer = client.post(address("operate"), form(row, action))
    assert answer.status_code == (302 if allowed else 403)
    assert (everything() != before) is allowed
    started = client.post(address("bulk_start"), form(row, action))
    assert started.status_code == (302 if allowed else 403)
    assert BulkOperation.objects.filter(action=action).exists() is allowed


@pytest.mark.parametrize("name", ["only view", *(f"view and {what}" for what in SINGLE)])
@pytest.mark.parametrize("action", [deed.name for deed in DEEDS.values() if deed.heals])
def test_heal_needs_its_own_permission_alone(name: str, action: str) -> None:
    row = make(Status.RUNNING)
    client = client_of(name)
    before = everything()
    answer = client.post(address("operate"), form(row, action))
    allowed = DEEDS[action].permission in has(name)
    assert answer.status_code == (302 if allowed else 403)
    if not allowed:
        assert everything() == before
    assert client.post(address("bulk_start"), form(row, action)).status_code in (403, 404)


def test_staff_who_may_only_look_see_no_button_and_no_action() -> None:
    row = make(Status.RUNNING)
    locks.acquire(row.pk, "nobody", ttl=60)
    client = client_of("only view")
    page = client.get(address("change", row.pk)).content.decode()
    main = page[page.index('id="content-main"') :]
    assert "<button" not in main
    assert "<form" not in main
    assert "The lock belongs to nobody" in main  # what is wrong is shown all the same
    listed = client.get(address("changelist")).content.decode()
    assert 'name="action"' not in listed
    assert "action-select" not in listed


@pytest.mark.parametrize("what", SINGLE)
def test_buttons_are_those_of_the_permission(what: str) -> None:
    row = make(Status.DEAD)
    page = client_of(f"view and {what}").get(address("change", row.pk)).content.decode()
    offered = {deed.name for deed in ACTIONS if f'value="{deed.name}"' in page}
    expected = {"retry": {"retry", "limit"}, "cancel": set(), "hold": set(), "purge": {"purge"}}
    assert offered == expected.get(what, set())


@pytest.mark.parametrize(("name", "sees"), [("only view", False), ("view and arguments", True)])
def test_arguments_and_results_have_their_own_permission(name: str, sees: bool) -> None:
    row = make(
        Status.SUCCEEDED, args='{"tag":"the argument"}', rerun_args='{"tag":"the rerun"}',
        result='"the result"',
    )  # fmt: skip
    client = client_of(name)
    page = client.get(address("change", row.pk)).content.decode()
    for words in ("the argument", "the rerun", "the result"):
        assert (words in page) is sees
    found = client.get(address("changelist"), {"q": "tag=the argument"})
    assert (len(found.context["cl"].result_list) == 1) is sees


@pytest.mark.parametrize(
    "lookup", ["args__contains", "args__startswith", "result", "error__regex", "attempt_set__owner"]
)
def test_address_can_not_guess_columns_that_nobody_filters_by(
    admin_client: Client, lookup: str
) -> None:
    make(Status.DEAD)
    answer = admin_client.get(address("changelist"), {lookup: "a"})
    assert answer.status_code in (302, 400)


@pytest.mark.parametrize("action", [deed.name for deed in DEEDS.values()])
def test_post_without_csrf_token_is_refused(action: str) -> None:
    row = specimen(action if action in {d.name for d in ACTIONS} else "retry")
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_superuser("root"))
    before = everything()
    for page in ("operate", "bulk_start", "order"):
        assert client.post(address(page), form(row, action)).status_code == 403
    assert everything() == before


def test_user_who_has_lost_the_permission_meanwhile_runs_no_bulk() -> None:
    row = make(Status.DEAD)
    user = person("sam", "view", "retry")
    started = bulk.start("retry", {"state": "DEAD"}, user=user, reason="x")
    user.user_permissions.clear()
    assert bulk.page(started.pk) == "sam may not retry any more"
    assert fresh(row).status == Status.DEAD
    assert not Operation.objects.exists()


def test_no_form_adds_or_edits_a_job(admin_client: Client) -> None:
    row = make(Status.DEAD)
    before = everything()
    for url in ("/admin/dedupjobs/processedjob/add/", address("change", row.pk)):
        assert admin_client.post(url, {"name": "os.system", "args": "rm"}).status_code == 403
    assert admin_client.post(address("delete", row.pk), {"post": "yes"}).status_code == 403
    assert everything() == before


def test_attempt_that_runs_is_shown_with_its_owner(admin_client: Client) -> None:
    row = make(Status.PENDING)
    try_of(row, outcome=None)
    ProcessedJob.objects.filter(pk=row.pk).update(status=Status.RUNNING)
    assert b"worker-1:4711" in admin_client.get(address("changelist")).content
