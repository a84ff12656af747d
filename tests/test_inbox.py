"""A message takes effect once for each consumer, however often and wherever it arrives."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection, transaction

from dedupjobs import clock, inbox, outbox
from dedupjobs.backoff import Constant
from dedupjobs.clock import DbNow
from dedupjobs.coordinator import Coordinator
from dedupjobs.envelope import Event
from dedupjobs.exceptions import EventError
from dedupjobs.inbox import Fate, handlers, marks
from dedupjobs.inbox.reading import DEATHS, Reader
from dedupjobs.models import InboxMessage
from tests import outlet
from tests.app import events
from tests.app.models import Ledger
from tests.outlet import STREAM, make_messages_due, relayed
from tests.rows import PATIENCE, Pause, Side, at, until_blocked

pytestmark = pytest.mark.django_db(transaction=True)

CONSUMERS: dict[str, Any] = {
    "ledger": {"stream": "orders", "attempts": 3},
    "audit": {"stream": "orders"},
}


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"url": "redis://127.0.0.1:1/0"}, "Error"),
    ({"cache": "nope"}, "cache 'nope' is no Redis"),
]


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[redis.Redis]:
    """A stream that two consumers read; its client."""
    events.before.clear()
    monkeypatch.setattr(handlers, "_handlers", {})
    monkeypatch.setattr(marks, "BACKOFF", Constant(60.0))  # nothing is due again by itself
    events.register()
    with (
        outlet.outbox(STREAM, INBOX={"CONSUMERS": CONSUMERS}),
        redis.Redis.from_url(settings.CACHE_URL, decode_responses=True) as client,
    ):
        yield client


def event(payload: object = "7", *, id: str = "", name: str = "order.paid", key: str = "") -> Event:
    return Event(id=id or clock.uuid(), name=name, body=json.dumps(payload), key=key)


def take(given: Event, **more: Any) -> Fate:
    return inbox.take(given, consumer="ledger", **more)


def published(*payloads: object, key: str = "") -> None:
    for payload in payloads:
        outbox.publish("order.paid", payload, key=key)
    relayed()


def read(reader: Reader | None = None) -> dict[str, int]:
    """Let a consumer read until nothing is left, and return what became of it."""
    reader = reader or Reader("ledger")
    total: dict[str, int] = {}
    while fates := reader.round(block=0.01):
        for fate, number in fates.items():
            total[fate] = total.get(fate, 0) + number
    return total


def ledger() -> list[str]:
    return list(Ledger.objects.order_by("pk").values_list("tag", flat=True))


def fail(error: Exception) -> Any:
    def act() -> None:
        raise error

    return act


def rows() -> list[tuple[str, str, int]]:
    found = InboxMessage.objects.order_by("pk")
    return [(row.status, row.payload, row.tries) for row in found]


# ---- once


def test_message_takes_effect_once_however_often_it_arrives(stream: redis.Redis) -> None:
    given = event()
    assert [take(given) for _ in range(3)] == [Fate.APPLIED, Fate.DUPLICATE, Fate.DUPLICATE]
    assert ledger() == ["7"]


def test_each_consumer_applies_a_message_for_itself(stream: redis.Redis) -> None:
    given = event()
    assert take(given) == inbox.take(given, consumer="audit") == Fate.APPLIED
    assert ledger() == ["7", "audit 7"]


def test_consumer_that_nobody_named_is_an_error_and_says_which_is_meant(
    stream: redis.Redis,
) -> None:
    with pytest.raises(EventError, match=r"no consumer 'legder'. Did you mean 'ledger'?"):
        inbox.take(event(), consumer="legder")
    assert take(event(name="user.left")) == Fate.UNKNOWN
    assert ledger() == []


def test_effect_and_mark_are_one_transaction(stream: redis.Redis) -> None:
    given = event()

    def die() -> None:
        raise SystemExit

    for point in ("inbox.marked", "inbox.handled"):
        with at(point, die), pytest.raises(SystemExit):
            take(given)
        assert (ledger(), rows()) == ([], [])
    with at("inbox.committed", die), pytest.raises(SystemExit):
        take(given)
    assert take(given) == Fate.DUPLICATE
    assert ledger() == ["7"]


def test_of_two_deliveries_at_once_the_second_waits_and_does_nothing(stream: redis.Redis) -> None:
    given = event()
    with Pause("inbox.handled") as pause:
        first = Side(take, given)
        pause.wait()
        second = Side(take, given)
        until_blocked(second)
        pause.go_on()
        assert (first.result(), second.result()) == (Fate.APPLIED, Fate.DUPLICATE)
    assert ledger() == ["7"]


def test_second_delivery_takes_the_message_if_the_first_rolls_back(stream: redis.Redis) -> None:
    given, began, end = event(), threading.Event(), threading.Event()

    def die_first() -> None:
        if not began.is_set():
            began.set()
            assert end.wait(PATIENCE)
            raise SystemExit

    events.before[given.id] = die_first
    first = Side(take, given)
    assert began.wait(PATIENCE)
    second = Side(take, given)
    until_blocked(second)
    end.set()
    with pytest.raises(SystemExit):
        first.result()
    assert second.result() == Fate.APPLIED
    assert ledger() == ["7"]


# ---- failures


def test_message_that_fails_is_tried_again_and_holds_up_nothing(stream: redis.Redis) -> None:
    events.before["1"] = fail(ValueError("secret amount"))
    published("1", "2")
    assert read() == {"failed": 1, "applied": 1}
    assert ledger() == ["2"]
    assert stream.xpending("orders", "ledger")["pending"] == 0
    events.before.clear()
    assert read() == {}
    make_messages_due()
    assert read() == {"applied": 1}
    assert ledger() == ["2", "1"]
    assert rows()[0] == ("APPLIED", "", 1)


def test_poison_message_is_held_with_its_reason_until_a_person_releases_it(
    stream: redis.Redis,
) -> None:
    events.before["1"] = fail(ValueError("bad"))
    published("1")
    fates = []
    for _ in range(3):
        fates.append(read())
        make_messages_due()
    assert fates == [{"failed": 1}, {"failed": 1}, {"held": 1}]
    row = InboxMessage.objects.get()
    assert (row.status, row.tries, row.error, row.payload) == ("HELD", 3, "ValueError: bad", '"1"')
    assert read() == {}
    events.before.clear()
    assert marks.release(row.pk)
    assert read() == {"applied": 1}
    assert ledger() == ["1"]
    assert not marks.release(row.pk)


def test_message_that_is_dropped_is_never_applied(stream: redis.Redis) -> None:
    events.before["1"] = fail(ValueError())
    published("1")
    read()
    assert marks.drop(InboxMessage.objects.get().pk)
    make_messages_due()
    events.before.clear()
    stream.flushdb()
    relayed()
    assert read() == {"duplicate": 1}
    assert ledger() == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"id": "", "name": "order.paid", "data": "1"}, "id is ''"),
        ({"id": "a", "name": "Order", "data": "1"}, "name is 'Order'"),
        ({"id": "a", "name": "order.paid", "data": "{"}, "payload is no JSON"),
        ({"any": "thing"}, "id is ''"),
    ],
)
def test_message_that_nobody_can_read_is_held(
    stream: redis.Redis, fields: dict[str, str], words: str
) -> None:
    stream.xadd("orders", fields)
    assert read() == {"held": 1}
    assert words in InboxMessage.objects.get().error
    assert stream.xpending("orders", "ledger")["pending"] == 0


def test_bytes_that_are_no_text_are_held_and_not_lost(stream: redis.Redis) -> None:
    stream.xadd("orders", {"id": "a", "name": b"\xff\0", "data": b"\xff\0{"})  # type: ignore[dict-item]
    assert read() == {"held": 1}


def test_event_that_no_handler_takes_is_acknowledged(stream: redis.Redis) -> None:
    stream.xadd("orders", {"id": "a", "name": "user.left", "data": "1"})
    assert read() == {"unknown": 1}
    assert rows() == []


def test_message_whose_handler_is_gone_when_it_is_tried_again_is_held(
    stream: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    events.before["1"] = fail(ValueError())
    published("1")
    read()
    make_messages_due()
    monkeypatch.setattr(handlers, "_handlers", {})
    assert read() == {"held": 1}
    assert "No handler" in InboxMessage.objects.get().error


# ---- streams and processes


def test_entry_is_acknowledged_after_its_commit(stream: redis.Redis) -> None:
    published("1", "2")
    seen = []

    def look() -> None:
        seen.append((stream.xpending("orders", "ledger")["pending"], Side(ledger).result()))

    with at("inbox.ack", look):
        read()
    assert seen == [(2, ["1", "2"])]
    assert stream.xpending("orders", "ledger")["pending"] == 0


def test_entries_of_a_dead_process_are_taken_over(stream: redis.Redis) -> None:
    def die() -> None:
        raise SystemExit

    published("1", "2")
    dead = Reader("ledger")
    with at("inbox.ack", die), pytest.raises(SystemExit):
        dead.round(block=0.01)
    assert stream.xpending("orders", "ledger")["pending"] == 2
    assert read() == {}  # not yet: it may live
    let_be_idle(stream)
    assert read() == {"duplicate": 2}
    assert ledger() == ["1", "2"]


def let_be_idle(stream: redis.Redis, *, times: int | None = None) -> None:
    """Let all entries in somebody's hands have been there for long, and be taken so often."""
    for known in stream.xpending_range("orders", "ledger", "-", "+", 100):
        stream.xclaim(
            "orders",
            "ledger",
            known["consumer"],
            0,
            [known["message_id"]],
            idle=3_600_000,
            retrycount=times,
        )


def test_entry_that_kills_every_process_is_held(stream: redis.Redis) -> None:
    published("1")
    dead = Reader("ledger")
    read()
    published("2")
    dead._read(">", block=0.01)
    let_be_idle(stream, times=DEATHS)
    assert read() == {}
    assert "none has said what became of it" in InboxMessage.objects.get(status="HELD").error
    assert ledger() == ["1"]
    assert stream.xpending("orders", "ledger")["pending"] == 0


def test_process_that_is_told_to_stop_gives_back_what_it_has_not_begun(stream: redis.Redis) -> None:
    published("1", "2", "3")
    reader = Reader("ledger", stop=lambda: bool(ledger()))
    reader.round(block=0.01)
    assert ledger() == ["1"]
    reader.leave()
    assert read() == {"applied": 2}
    assert ledger() == ["1", "2", "3"]


def test_wiped_redis_loses_no_event_and_applies_none_twice(stream: redis.Redis) -> None:
    published("1", "2")
    read()
    published("3")  # relayed, and not consumed when Redis is wiped
    stream.flushdb()
    published("4")
    assert read() == {"duplicate": 2, "applied": 2}
    assert ledger() == ["1", "2", "3", "4"]


def test_group_that_vanished_is_made_again_from_the_begin(
    stream: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    published("1")
    read()
    stream.xgroup_destroy("orders", "ledger")
    caplog.clear()
    assert read() == {"duplicate": 1}
    assert "had no group of this name, because it is new or Redis was wiped" in caplog.text
    assert ledger() == ["1"]


def test_database_that_is_away_loses_and_counts_no_message(stream: redis.Redis) -> None:
    published("1")
    reader = Reader("ledger")

    def cut() -> None:
        connection.close()
        raise OperationalError("the server closed the connection")

    events.before["1"] = cut
    with pytest.raises(OperationalError):
        reader.round(block=0.01)
    events.before.clear()
    reader._owes = True
    assert read(reader) == {"applied": 1}
    assert rows() == [("APPLIED", "", 0)]


# ---- in order, where asked for


@pytest.fixture
def ordered(stream: redis.Redis) -> Iterator[redis.Redis]:
    consumers = {"ledger": {"stream": "orders", "attempts": 2, "ordered": True}}
    with outlet.outbox(STREAM, INBOX={"CONSUMERS": consumers}):
        yield stream


def test_later_messages_of_a_key_wait_for_one_that_failed(ordered: redis.Redis) -> None:
    events.before["1"] = fail(ValueError())
    published("1", "2", "3", key="k")
    published("4", key="other")
    reader = Reader("ledger")
    assert read(reader) == {"failed": 1, "behind": 2, "applied": 1}
    events.before.clear()
    make_messages_due()
    assert read(reader) == {"applied": 3}
    assert ledger() == ["4", "1", "2", "3"]


def test_later_messages_of_a_key_wait_for_one_that_is_held_until_it_is_dropped(
    ordered: redis.Redis,
) -> None:
    events.before["1"] = fail(ValueError())
    published("1", "2", key="k")
    reader = Reader("ledger")
    read(reader)
    make_messages_due()
    assert read(reader) == {"held": 1}
    assert [status for status, *_ in rows()] == ["HELD", "BEHIND"]
    assert marks.drop(InboxMessage.objects.order_by("pk")[0].pk)
    assert read(reader) == {"applied": 1}
    assert ledger() == ["2"]


def test_one_process_at_a_time_reads_where_an_order_is_kept(ordered: redis.Redis) -> None:
    first, second = Reader("ledger"), Reader("ledger")
    first.round(block=0.01)
    published("1", "2", key="k")
    first._read(">", block=0.01)  # has them in its hands, and is gone
    assert read(second) == {}
    first.leave()
    assert read(second) == {"applied": 2}
    assert ledger() == ["1", "2"]


# ---- handlers


def test_two_functions_for_one_event_of_a_consumer_are_refused(stream: redis.Redis) -> None:
    with pytest.raises(EventError, match=r"book takes 'order.paid' for consumer 'ledger' already"):
        inbox.handler("order.paid", consumer="ledger")(lambda event: None)
    with pytest.raises(EventError, match="give a name such as"):
        inbox.handler("Order Paid")


class Later:
    async def __call__(self, event: Event) -> None:
        """Do nothing when it is only called."""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (outlet.note_async, "note_async is async: a call of it runs nothing"),
        (Later(), "is async"),
        (functools.partial(outlet.note_async), "is async"),
        (outlet.note_in_parts, "note_in_parts is a generator"),
        ("book", "'book' can not be called"),
    ],
)
def test_handler_that_would_do_nothing_is_refused(function: Any, words: str) -> None:
    with pytest.raises(EventError, match=words):
        inbox.handler("order.late", consumer="ledger")(function)
    assert handlers.find("ledger", "order.late") is None


def test_event_is_not_applied_by_a_handler_that_hides_an_async_one(stream: redis.Redis) -> None:
    inbox.handler("hidden", consumer="ledger")(outlet.note_hidden)
    assert take(event(name="hidden")) == Fate.FAILED
    assert "returned what nobody runs" in InboxMessage.objects.get().error


def test_handler_without_a_consumer_is_the_only_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_handlers", {})
    inbox.handler("order.*")(events.book)
    inbox.handler("*")(events.audit)
    with outlet.outbox({}, INBOX={"CONSUMERS": {"ledger": {"stream": "orders"}}}):
        assert handlers.find("ledger", "order.paid") is events.book
        assert handlers.find("ledger", "user.left") is events.audit
        assert handlers.problems() == []
    with outlet.outbox({}):
        assert "the only consumer, and there is not one (none)" in handlers.problems()[0]


# ---- the command, and retention


def test_command_consumes_and_ends(stream: redis.Redis, capsys: pytest.CaptureFixture[str]) -> None:
    published("1", "2")
    call_command("dedupjobs_consume", "--consumer", "ledger", "--once")
    assert "ledger: 2 messages." in capsys.readouterr().out


@pytest.mark.parametrize(("more", "words"), UNFIT)
def test_command_names_the_consumer_whose_stream_it_can_not_read(
    stream: redis.Redis, more: dict[str, Any], words: str
) -> None:
    consumers = {"ledger": {"stream": "orders", **more}}
    with (
        outlet.outbox({}, INBOX={"CONSUMERS": consumers}),
        pytest.raises(CommandError, match=f"Consumer ledger can not read stream 'orders': {words}"),
    ):
        call_command("dedupjobs_consume", "--once")


def test_marks_out_of_retention_are_pruned_and_what_waits_stays(stream: redis.Redis) -> None:
    events.before["2"] = fail(ValueError())
    published("1", "2", "3")
    read()
    old = DbNow(-40 * 86_400)
    InboxMessage.objects.filter(event_id=outlet.entries()[0]["id"]).update(due_at=old)
    InboxMessage.objects.filter(status="RETRYING").update(due_at=old)
    assert Coordinator().prune_events() == 1
    assert sorted(status for status, *_ in rows()) == ["APPLIED", "RETRYING"]


def test_handler_works_within_the_transaction_of_the_mark(stream: redis.Redis) -> None:
    seen = []
    given = event()
    events.before[given.id] = lambda: seen.append(transaction.get_connection().in_atomic_block)
    take(given)
    assert seen == [True]
