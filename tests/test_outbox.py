"""Events are published with the caller's transaction, and relayed in order per key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
import redis
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import transaction

from dedupjobs import conf, outbox, turns
from dedupjobs.backoff import Constant
from dedupjobs.clock import DbNow
from dedupjobs.coordinator import Coordinator
from dedupjobs.exceptions import EventError, PayloadTooLarge
from dedupjobs.models import OutboxEvent, Turn
from dedupjobs.outbox import shelf
from dedupjobs.outbox.relay import Relay, standing
from dedupjobs.testing.stage import without_redis
from tests import outlet
from tests.outlet import NOTED, STREAM, payloads, relayed, sent, statuses
from tests.rows import Pause, Side, at, has_row_locks, until_blocked
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)


BACKOFF = shelf.BACKOFF


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be due again by itself while a test looks."""
    monkeypatch.setattr(shelf, "BACKOFF", Constant(60.0))


@pytest.fixture
def noting() -> Iterator[None]:
    with outlet.outbox(NOTED):
        yield


@pytest.fixture
def streaming() -> Iterator[redis.Redis]:
    with (
        outlet.outbox(STREAM),
        redis.Redis.from_url(settings.CACHE_URL, decode_responses=True) as client,
    ):
        yield client


# ---- publishing


def test_event_is_stored_with_the_transaction_that_publishes_it(noting: None) -> None:
    with transaction.atomic():
        event_id = outbox.publish("order.paid", {"order": 7}, key="order:7")
        assert OutboxEvent.objects.count() == 1
    row = OutboxEvent.objects.get()
    assert (row.event_id, row.name, row.key, row.ordered) == (
        event_id,
        "order.paid",
        "order:7",
        True,
    )
    assert json.loads(row.payload) == {"order": 7}


def test_event_of_a_transaction_that_rolls_back_is_told_to_nobody(noting: None) -> None:
    with transaction.atomic():
        outbox.publish("order.paid", 1)
        transaction.set_rollback(True)
    assert not OutboxEvent.objects.exists()
    assert relayed() == 0


def test_event_is_published_outside_a_transaction_too(noting: None) -> None:
    outbox.publish("order.paid", 1, key=7)
    assert relayed() == 1
    assert payloads() == [1]


def test_each_target_whose_pattern_fits_gets_a_row_of_its_own() -> None:
    targets = {name: {"call": "tests.outlet.note"} for name in ("a", "b", "c")}
    routes = {"order.*": ["a", "b"], "order.paid": "b", "*": "c"}
    with outlet.outbox({"TARGETS": targets, "ROUTES": routes}):
        outbox.publish("order.paid", 1)
        outbox.publish("user.left", 2)
    got = OutboxEvent.objects.values_list("payload", "target").order_by("pk")
    assert list(got) == [("1", "a"), ("1", "b"), ("1", "c"), ("2", "c")]


def test_many_events_are_stored_in_their_order_by_few_statements(
    noting: None, django_assert_max_num_queries: Any
) -> None:
    with django_assert_max_num_queries(4), transaction.atomic():
        ids = outbox.publish_many({"name": "order.paid", "payload": n} for n in range(100))
    assert list(OutboxEvent.objects.order_by("pk").values_list("event_id", flat=True)) == ids
    assert sorted(ids) == sorted(set(ids))


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "Order Paid"}, "name is 'Order Paid'"),
        ({"name": "order..paid"}, "name is 'order..paid'"),
        ({"name": "x" * 101}, "100 characters at most"),
        ({"name": None}, "name is None"),
        ({"name": "a", "ordered": True}, "ordered=True without a key"),
        ({"name": "a", "ordered": "yes", "key": "k"}, "a: ordered='yes'; give True, False or None"),
        ({"name": "a", "key": None}, "key=None must be a text"),
        ({"name": "a", "key": "k" * 201}, "200 characters at most"),
        ({"name": "a", "key": "\0"}, "none of them NUL"),
        ({"name": "a", "payload": {"sum": Decimal(1)}}, "payload['sum'] is a Decimal"),
        ({"name": "a", "payload": {"a": [1, {2: 3}]}}, "payload['a'][1] has the name 2"),
        ({"name": "a", "payload": float("nan")}, "payload is nan"),
        ({"name": "a", "payload": "\ud800"}, "half a character"),
        ({"name": "a", "payload": LOOP}, "contains itself"),
    ],
)
def test_event_that_makes_no_sense_is_refused_by_name_and_cure(
    noting: None, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(EventError) as caught:
        outbox.publish(**arguments)
    assert words in str(caught.value)
    assert not OutboxEvent.objects.exists()


def test_events_that_are_no_dicts_are_refused(noting: None) -> None:
    with pytest.raises(EventError, match=r"An event is 'x'; give dicts of publish\(\)'s arguments"):
        outbox.publish_many(["x"])  # type: ignore[list-item]
    assert not OutboxEvent.objects.exists()


def test_payload_that_is_too_large_is_refused_by_its_size(noting: None) -> None:
    with pytest.raises(PayloadTooLarge, match=r"order\.paid: the payload has 65,538 bytes"):
        outbox.publish("order.paid", "x" * 65_536)


def test_event_that_nobody_gets_is_refused_with_the_routes_that_there_are() -> None:
    routes = {"TARGETS": {"a": {"signal": True}}, "ROUTES": {"order.*": "a"}}
    with outlet.outbox(routes), pytest.raises(EventError, match=r"no route .* \(there: order"):
        outbox.publish("user.left")
    with outlet.outbox({}), pytest.raises(EventError, match=r"there: none"):
        outbox.publish("user.left")


# ---- order


@pytest.mark.skipif(not has_row_locks, reason="SQLite has one writer, who commits before the next")
def test_events_of_a_key_have_the_order_of_their_commits(noting: None) -> None:
    with transaction.atomic():
        outbox.publish("order.paid", "first", key="order:7")
        second = Side(outbox.publish, "order.shipped", "second", key="order:7")
        until_blocked(second)
        other = Side(outbox.publish, "order.paid", "of another key", key="order:8")
        other.result()  # waits for nobody
        assert Side(relayed).result() == 1
    second.result()
    assert relayed() == 2
    assert payloads() == ["of another key", "first", "second"]


@pytest.mark.skipif(not has_row_locks, reason="SQLite has one writer, who commits before the next")
def test_event_committed_after_later_numbers_is_not_passed_over(noting: None) -> None:
    with transaction.atomic():
        outbox.publish("order.paid", "drawn first, committed last")
        Side(outbox.publish, "order.paid", "drawn last, committed first").result()
        assert Side(relayed).result() == 1
    assert relayed() == 1
    assert payloads() == ["drawn last, committed first", "drawn first, committed last"]


def test_event_that_is_refused_holds_up_its_key_alone(noting: None) -> None:
    outlet.refusals["a1"] = ValueError("not yet")
    for text in ("a1", "a2", "b1"):
        outbox.publish("order.paid", text, key=text[0])
    outbox.publish("order.paid", "no key")
    relayed()
    outbox.publish("order.paid", "a3", key="a")
    relayed()
    assert payloads() == ["b1", "no key"]
    assert statuses() == ["RETRYING", "BEHIND", "DELIVERED", "DELIVERED", "BEHIND"]
    assert OutboxEvent.objects.order_by("pk")[0].error == "ValueError: not yet"
    outlet.refusals.clear()
    outlet.make_due()
    relayed()
    assert payloads() == ["b1", "no key", "a1", "a2", "a3"]


def test_event_that_shares_a_key_and_keeps_no_order_waits_for_nothing(noting: None) -> None:
    outlet.refusals["a1"] = ValueError()
    outbox.publish("order.paid", "a1", key="a", ordered=False)
    outbox.publish("order.paid", "a2", key="a", ordered=False)
    relayed()
    assert payloads() == ["a2"]


def test_those_behind_a_head_stay_behind_the_one_of_them_that_fails(noting: None) -> None:
    outlet.refusals.update({"1": ValueError(), "3": ValueError()})
    outbox.publish_many({"name": "a", "payload": n, "key": "k"} for n in (1, 2, 3, 4))
    relayed()
    assert statuses() == ["RETRYING", "BEHIND", "BEHIND", "BEHIND"]
    del outlet.refusals["1"]
    outlet.make_due()
    relayed()
    assert (payloads(), statuses()) == ([1, 2], ["DELIVERED", "DELIVERED", "RETRYING", "BEHIND"])
    outlet.refusals.clear()
    outlet.make_due()
    relayed()
    assert payloads() == [1, 2, 3, 4]


def _die(text: str = "bad", *, behind: str = "next") -> OutboxEvent:
    """Let an event fail until it is dead, with one behind it; return its row."""
    outlet.refusals[text] = ValueError("never")
    outbox.publish("order.paid", text, key="k")
    outbox.publish("order.paid", behind, key="k")
    for _ in range(3):
        relayed()
        outlet.make_due()
    return OutboxEvent.objects.order_by("pk")[0]


def test_event_is_dead_after_its_attempts_and_later_ones_of_its_key_wait(noting: None) -> None:
    row = _die()
    relayed()
    assert (row.status, row.tries, payloads()) == ("DEAD", 3, [])
    assert statuses()[1] == "BEHIND"


def test_dead_event_that_is_retried_goes_out_and_those_behind_it_follow(noting: None) -> None:
    row = _die()
    outlet.refusals.clear()
    assert shelf.retry(row.pk)
    relayed()
    assert payloads() == ["bad", "next"]
    assert not shelf.retry(row.pk)


def test_dead_event_that_is_dropped_is_passed_over(noting: None) -> None:
    row = _die()
    assert shelf.drop(row.pk)
    relayed()
    assert (payloads(), statuses()) == (["next"], ["DROPPED", "DELIVERED"])


def test_event_is_dropped_undelivered_only_if_its_target_is_gone() -> None:
    with outlet.outbox(NOTED):
        for n in range(3):
            outbox.publish("a", n, key="k")
        outlet.refusals["0"] = ValueError("no")
        relayed()
        assert statuses() == ["RETRYING", "BEHIND", "BEHIND"]
        outbox.publish("a", 3)
        pks = list(OutboxEvent.objects.order_by("pk").values_list("pk", flat=True))
        assert [shelf.drop(pk) for pk in pks[1:]] == [False, False, False]
        assert statuses() == ["RETRYING", "BEHIND", "BEHIND", "WAITING"]
    with outlet.outbox({}):
        assert [shelf.drop(pk) for pk in (pks[0], pks[2], pks[3])] == [True, True, True]
        assert statuses() == ["DROPPED", "RETRYING", "DROPPED", "DROPPED"]
        assert not shelf.drop(pks[3])


def test_dead_event_holds_nothing_up_where_settings_say_so() -> None:
    target = {"call": "tests.outlet.note", "attempts": 3, "on_dead": "go_on"}
    with outlet.outbox({"TARGETS": {"noted": target}}):
        _die()
        relayed()
        assert (payloads(), statuses()) == (["next"], ["DEAD", "DELIVERED"])


def test_retries_come_later_and_later_with_jitter(noting: None) -> None:
    longest = [BACKOFF(n, lambda _, high: high) for n in (1, 2, 3, 10, 11, 50)]
    assert longest == [1, 2, 4, 512, 600, 600]
    outlet.refusals["1"] = ValueError()
    outbox.publish("a", 1)
    relayed()
    row = OutboxEvent.objects.annotate(now=DbNow()).get()
    assert row.due_at is not None
    assert timedelta() < row.due_at - row.now <= timedelta(seconds=60)


def test_target_that_is_away_costs_no_event_a_try(noting: None) -> None:
    outlet.refusals["1"] = outbox.Unavailable("at lunch")
    outbox.publish("a", 1)
    assert Relay("noted").round().away
    assert statuses() == ["WAITING"]
    assert OutboxEvent.objects.get().tries == 0


@pytest.mark.parametrize("path", ["note_async", "note_in_parts", "noted"])
def test_target_whose_call_would_do_nothing_gets_nothing_and_loses_nothing(path: str) -> None:
    with outlet.outbox({"TARGETS": {"a": {"call": f"tests.outlet.{path}"}}}):
        outbox.publish("a", 1)
        assert Relay("a").round().away
    assert statuses() == ["WAITING"]


def test_event_is_not_delivered_by_a_function_that_hides_an_async_one() -> None:
    with outlet.outbox({"TARGETS": {"a": {"call": "tests.outlet.note_hidden"}}}):
        outbox.publish("a", 1)
        assert relayed() == 0
    assert statuses() == ["RETRYING"]
    assert "returned what nobody runs" in OutboxEvent.objects.get().error


# ---- whose turn it is


def test_one_process_at_a_time_sends_to_a_target(noting: None) -> None:
    first, second = Relay("noted"), Relay("noted")
    outbox.publish("a", 1)
    with Pause("relay.before") as pause:
        side = Side(first.round)
        pause.wait()
        assert not second.round().mine
        pause.go_on()
        assert side.result().sent == 1


def test_relay_that_was_frozen_while_another_had_its_turn_writes_nothing(noting: None) -> None:
    relay = Relay("noted")
    outbox.publish("a", 1)
    with at("relay.after", lambda: outlet.take_turn_away(relay)), pytest.raises(turns.TurnLost):
        relay.round()
    assert statuses() == ["WAITING"]


def test_event_is_sent_again_under_its_id_by_who_follows_a_relay_that_died(noting: None) -> None:
    event_id = outbox.publish("a", 1)

    def die() -> None:
        raise SystemExit

    relay = Relay("noted")
    with at("relay.after", die), pytest.raises(SystemExit):
        relay.round()
    turns.give(relay.turn, relay.owner)
    relayed()
    assert [event.id for event in outlet.noted] == [event_id, event_id]
    assert statuses() == ["DELIVERED"]


def test_turn_of_a_dead_process_ends_by_the_database_clock(noting: None) -> None:
    outbox.publish("a", 1)
    turns.take("out:noted", "dead")
    assert not Relay("noted").round().mine
    Turn.objects.update(until=DbNow(-1))
    assert Relay("noted").round().sent == 1


# ---- a Redis stream


def test_stream_gets_events_in_their_order_with_all_that_they_are(streaming: redis.Redis) -> None:
    event_id = outbox.publish("order.paid", {"ö": [1, None]}, key="order:7")
    outbox.publish("order.paid", 2)
    assert relayed() == 2
    first, second = outlet.entries()
    row = OutboxEvent.objects.order_by("pk")[0]
    assert first == {
        "id": event_id,
        "name": "order.paid",
        "key": "order:7",
        "ordered": "1",
        "at": row.published_at.isoformat(),
        "traceparent": "",
        "data": '{"ö":[1,null]}',
    }
    assert second["data"] == "2"


def test_stream_is_kept_short() -> None:
    target = {"stream": "orders", "maxlen": 10}
    with outlet.outbox({"TARGETS": {"orders": target}}):
        outbox.publish_many({"name": "a", "payload": n} for n in range(600))
        assert relayed() == 600
        assert 10 <= len(outlet.entries()) < 600


def test_stream_that_can_not_be_written_keeps_events_waiting(streaming: redis.Redis) -> None:
    streaming.set("orders", "a text")
    outbox.publish("a", 1)
    assert Relay("orders").round().away
    assert statuses() == ["WAITING"]


def test_events_of_a_wiped_redis_go_out_again_before_anything_new(streaming: redis.Redis) -> None:
    for n in range(3):
        outbox.publish("a", n, key="k")
    relayed()
    streaming.flushdb()
    outbox.publish("a", 3, key="k")
    relayed()
    assert sent() == ["0", "1", "2", "3"]
    assert set(statuses()) == {"DELIVERED"}


def test_wiped_redis_is_noticed_although_nothing_new_is_published(streaming: redis.Redis) -> None:
    outbox.publish("a", 0)
    relayed()
    streaming.flushdb()
    relayed()
    assert sent() == ["0"]


def test_events_that_a_fail_over_has_lost_go_out_again(streaming: redis.Redis) -> None:
    outbox.publish("a", 0)
    relayed()
    on_the_replica = streaming.dump("orders")
    outbox.publish("a", 1)
    relayed()
    streaming.restore("orders", 0, on_the_replica, replace=True)
    streaming.xadd("orders", {"data": '"of somebody else"'})
    outbox.publish("a", 2)
    relayed()
    assert [data for data in sent() if data in "12"] == ["1", "2"]


def test_each_publisher_of_a_stream_notices_that_it_was_wiped(streaming: redis.Redis) -> None:
    two = {"TARGETS": {name: {"stream": "orders"} for name in ("one", "two")}}
    with outlet.outbox(two):
        outbox.publish("a", 0)
        relayed()
        assert sent() == ["0", "0"]
        streaming.flushdb()
        relayed()
        assert sent() == ["0", "0"]
        relayed()
        assert sent() == ["0", "0"]


def test_publisher_leaves_one_mark_in_a_stream(streaming: redis.Redis) -> None:
    for n in range(3):
        outbox.publish("a", n)
        relayed()
    with transaction.atomic():
        turns.take(turns.sending("orders"), "me", lease=10)
        assert shelf.again("orders") == 3
        turns.give(turns.sending("orders"), "me")
    relayed()
    assert sent() == ["0", "1", "2"] * 2
    [mark] = streaming.xinfo_groups("orders")
    assert mark["last-delivered-id"] == streaming.xinfo_stream("orders")["last-generated-id"]


def test_entries_that_consumers_have_deleted_are_not_missed(streaming: redis.Redis) -> None:
    outbox.publish("a", 0)
    relayed()
    streaming.xtrim("orders", maxlen=0)
    outbox.publish("a", 1)
    relayed()
    assert sent() == ["1"]


def test_command_lets_delivered_events_go_out_once_more(
    streaming: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    for n in range(2):
        outbox.publish("a", n)
    relayed()
    OutboxEvent.objects.filter(payload="0").update(due_at=DbNow(-7200))
    call_command("dedupjobs_outbox", "replay", "--since", "1h")
    call_command("dedupjobs_outbox", "relay")
    call_command("dedupjobs_outbox", "status")
    assert sent() == ["0", "1", "1"]
    out = capsys.readouterr().out
    assert "orders: 1 events go out once more." in out
    assert "orders: 0 to be delivered" in out


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"url": "redis://127.0.0.1:1/0"}, "ConnectionError"),
    ({"cache": "nope"}, "cache 'nope' is no Redis"),
]


@pytest.mark.parametrize(("more", "words"), UNFIT)
def test_command_names_the_target_that_takes_nothing_and_relays_the_others(
    more: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    away = {"stream": "orders", **more}
    with outlet.outbox({"TARGETS": {"orders": away, **NOTED["TARGETS"]}}):
        outbox.publish("a", 1)
        with pytest.raises(CommandError, match=f"Target orders takes no events, .*{words}"):
            call_command("dedupjobs_outbox", "relay")
        assert payloads() == [1]
        assert "target orders takes no events" in caplog.text
        call_command("dedupjobs_outbox", "relay", "--target", "noted")


# ---- beside a coordinator


def test_event_goes_out_soon_after_its_commit_and_not_with_the_next_tick() -> None:
    with outlet.outbox(STREAM, TICK=30, LEADER_TTL=60), standing(lambda: True):
        outbox.publish("a", 0)  # the threads' first look may take this one
        until(lambda: sent() == ["0"], 20, what="the first event is relayed")
        outbox.publish("a", 1)
        until(lambda: sent() == ["0", "1"], 20, what="the second is relayed")


def test_coordinator_that_does_not_lead_relays_nothing() -> None:
    with outlet.outbox(STREAM), standing(lambda: False):
        outbox.publish("a", 0)
        until(outlet.bell_is_rung, 20, what="the bell is rung")
    assert sent() == []


def test_events_out_of_retention_are_pruned_and_others_stay(noting: None) -> None:
    for n in range(3):
        outbox.publish("a", n)
    relayed()
    outbox.publish("a", 3)
    old = -conf.outbox().retain - 60
    OutboxEvent.objects.filter(payload="0").update(due_at=DbNow(old))
    OutboxEvent.objects.filter(payload="3").update(published_at=DbNow(old))
    assert Coordinator().prune_events() == 1
    assert list(OutboxEvent.objects.order_by("pk").values_list("payload", flat=True)) == [
        "1",
        "2",
        "3",
    ]


def test_event_is_published_in_tests_that_have_no_redis(noting: None) -> None:
    with without_redis():
        outbox.publish("order.paid", 1)
        assert relayed() == 1
    assert payloads() == [1]
