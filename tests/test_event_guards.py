"""Each guard of outbox and inbox is needed: without it a story ends differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import redis
from django.conf import settings
from django.db import connection, transaction

from dedupjobs import outbox, turns
from dedupjobs.backoff import Constant
from dedupjobs.inbox import Fate, handlers, marks
from dedupjobs.inbox.reading import Reader
from dedupjobs.models import InboxMessage
from dedupjobs.outbox import publishing, relay, shelf
from dedupjobs.outbox.relay import Relay
from tests import outlet, sessions, test_inbox
from tests.app import events
from tests.outlet import NOTED, STREAM, payloads, relayed, sent
from tests.rows import PATIENCE, Side, at, has_row_locks

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.large]

CONSUMERS = {"ledger": {"stream": "orders", "attempts": 3}}


@contextmanager
def world(given: Any = NOTED, **consumer: Any) -> Iterator[None]:
    mine = {"ledger": {**CONSUMERS["ledger"], **consumer}}
    with outlet.outbox(given, INBOX={"CONSUMERS": mine}):
        events.before.clear()
        handlers._handlers.clear()
        events.register()
        yield


@pytest.fixture(autouse=True)
def _no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_handlers", {})
    monkeypatch.setattr(shelf, "BACKOFF", Constant(60.0))
    monkeypatch.setattr(marks, "BACKOFF", Constant(60.0))


# ---- stories: each is true, and says so


def commits_in_order() -> bool:
    with world():
        with transaction.atomic():
            outbox.publish("a", 1, key="k")
            second = Side(outbox.publish, "a", 2, key="k")
            sessions.until_one_waits(unless=lambda: not second.is_alive())
            Side(relayed).result()
        second.result()
        relayed()
        return payloads() == [1, 2]


def later_ones_wait() -> bool:
    with world():
        outlet.refusals["1"] = ValueError()
        outbox.publish("a", 1, key="k")
        relayed()
        outbox.publish("a", 2, key="k")
        relayed()
        outlet.refusals.clear()
        outlet.make_due()
        relayed()
        return payloads() == [1, 2]


def frozen_relay_writes_nothing() -> bool:
    with world():
        first, second = Relay("noted"), Relay("noted")
        outbox.publish("a", 1)

        def lose_turn() -> None:
            outlet.take_turn_away(first, by=second.owner)
            outlet.refusals["1"] = ValueError()
            second.round()

        with at("relay.after", lose_turn), suppress(turns.TurnLost):
            first.round()
        return outlet.statuses() == ["RETRYING"]


def wiped_stream_gets_all_again() -> bool:
    with world(STREAM), redis.Redis.from_url(settings.CACHE_URL) as client:
        outbox.publish("a", 1)
        relayed()
        client.flushdb()
        relayed()
        return sent() == ["1"]


def delivered_twice_applied_once() -> bool:
    with world(STREAM):
        given = test_inbox.event()
        both = [marks.take(given, consumer="ledger") for _ in range(2)]
        return test_inbox.ledger() == ["7"] and both[1] == Fate.DUPLICATE


def failure_leaves_no_effect() -> bool:
    with world(STREAM):
        given = test_inbox.event()
        events.before["7"] = test_inbox.fail(ValueError())
        marks.take(given, consumer="ledger")
        return test_inbox.ledger() == []


def behind_one_that_failed() -> bool:
    with world(STREAM, ordered=True):
        events.before["1"] = test_inbox.fail(ValueError())
        test_inbox.published("1", "2", key="k")
        reader = Reader("ledger")
        test_inbox.read(reader)
        events.before.clear()
        outlet.make_messages_due()
        test_inbox.read(reader)
        return test_inbox.ledger() == ["1", "2"]


def death_before_the_commit_loses_nothing() -> bool:
    def die() -> None:
        raise SystemExit

    with world(STREAM):
        test_inbox.published("1")
        with at("inbox.handled", die), suppress(SystemExit):
            Reader("ledger").round(block=0.01)
        with redis.Redis.from_url(settings.CACHE_URL, decode_responses=True) as client:
            test_inbox.let_be_idle(client)
        test_inbox.read()
        return test_inbox.ledger() == ["1"]


STORIES = (
    commits_in_order,
    later_ones_wait,
    frozen_relay_writes_nothing,
    wiped_stream_gets_all_again,
    delivered_twice_applied_once,
    failure_leaves_no_effect,
    behind_one_that_failed,
    death_before_the_commit_loses_nothing,
)


def skip_where_it_can_not_be(story: Callable[[], bool]) -> None:
    if story is commits_in_order and not has_row_locks:
        pytest.skip("SQLite has one writer, who commits before the next")


@pytest.mark.parametrize("story", STORIES)
def test_story_is_true(story: Callable[[], bool]) -> None:
    skip_where_it_can_not_be(story)
    assert story()


# ---- the guards, taken away one by one


@contextmanager
def nobodys(name: str, owner: str, **_: Any) -> Iterator[None]:
    """Stands for a turn that nobody looks at."""
    with transaction.atomic():
        yield


@contextmanager
def committed_anyhow() -> Iterator[None]:
    """Stands for a transaction that does not care what becomes of the effect."""
    error = None
    with transaction.atomic():
        try:
            yield
        except Exception as raised:
            error = raised
    if error:
        raise error


def no_mark(event: Any, consumer: str) -> bool:
    return True


def acknowledged_first(self: Reader, entries: Any) -> Any:
    entries = list(entries)
    if entries:
        self.redis.xack(self.stream, self.consumer, *[entry_id for entry_id, _ in entries])
    return SETTLE(self, entries)


SETTLE = Reader._settle

MUTANTS: dict[str, tuple[Callable[[], bool], Any, str, Any]] = {
    "nobody lines up": (commits_in_order, publishing, "_line_up", lambda keys: None),
    "nobody is put behind": (later_ones_wait, shelf, "_free", lambda name, target, posts: posts),
    "turns are not looked at": (frozen_relay_writes_nothing, relay.turns, "mine", nobodys),
    "what was lost is not asked for": (
        wiped_stream_gets_all_again,
        shelf,
        "again",
        lambda name, since: 0,
    ),
    "no mark is made": (delivered_twice_applied_once, marks, "_mark", no_mark),
    "effect and mark are two": (
        failure_leaves_no_effect,
        marks,
        "_plain",
        committed_anyhow,
    ),
    "nobody looks for those before": (
        behind_one_that_failed,
        marks,
        "_is_behind",
        lambda event, consumer: False,
    ),
    "acknowledged before the commit": (
        death_before_the_commit_loses_nothing,
        Reader,
        "_settle",
        acknowledged_first,
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_story_is_false_without_its_guard(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    story, home, name, instead = MUTANTS[mutant]
    skip_where_it_can_not_be(story)
    monkeypatch.setattr(home, name, instead)
    assert not story()


@pytest.mark.skipif(not has_row_locks, reason="SQLite has one writer, who commits before the next")
def test_unique_constraint_is_what_stops_two_deliveries_at_once() -> None:
    [one] = [c for c in InboxMessage._meta.constraints if c.name == "dedupjobs_one_mark"]
    inner: list[Side] = []

    def take_again() -> None:
        if not inner:
            inner.append(Side(marks.take, given, consumer="ledger"))
            inner[0].join(PATIENCE)

    with world(STREAM):
        given = test_inbox.event()
        with connection.schema_editor() as editor:
            editor.remove_constraint(InboxMessage, one)
        try:
            events.before["7"] = take_again
            assert marks.take(given, consumer="ledger") == inner[0].result() == Fate.APPLIED
            InboxMessage.objects.all().delete()
        finally:
            with connection.schema_editor() as editor:
                editor.add_constraint(InboxMessage, one)
        assert test_inbox.ledger() == ["7", "7"]
