"""What is an alert: each rule over what was seen, without tables, servers or clocks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import run_checks
from django.test import override_settings

from dedupjobs import conf
from dedupjobs.alerts import rules
from dedupjobs.alerts.rules import Found, Job, Queue, Server, Sight, Target, Untold
from dedupjobs.alerts.sight import Past, surely
from dedupjobs.alerts.watch import Patience
from dedupjobs.thresholds import KINDS, Thresholds

TOLD = Thresholds()


def found(kind: str, sight: Sight, told: Thresholds = TOLD) -> list[Found]:
    mine = rules.judge(sight, told)[kind]
    assert mine is not None
    return mine


QUIET = Queue(name="default", due=3, oldest=400.0, before=3, ended=1, workers=1, last_sign=1.0)
WELL = Server(name="queue default", took=0.001, used=10, limit=100)

TROUBLES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # kind: what is a trouble, what is just none, the subject
    "stuck": ({"stuck": {"a.job": 1}}, {"stuck": {}}, "a.job"),
    "stalled": (
        {"queues": (Queue(name="q", due=5, oldest=300, before=4),)},
        {"queues": (QUIET, Queue(name="q", due=5, oldest=299, before=4))},
        "q",
    ),
    "retries": (
        {"jobs": (Job(name="a.job", failed=50, timed_out=30, lost=20),)},
        {"jobs": (Job(name="a.job", failed=50, timed_out=30, lost=19),)},
        "a.job",
    ),
    "dead": ({"dead": {"a.job": 1}}, {"dead": {}}, "a.job"),
    "held": ({"held": {"a.job": 1}}, {"held": {}}, "a.job"),
    "near_lease": (
        {"jobs": (Job(name="a.job", p99=48.0, lease=60.0),)},
        {"jobs": (Job(name="a.job", p99=47.9, lease=60.0), Job(name="b.job", p99=None))},
        "a.job",
    ),
    "locks_lost": ({"locks_lost": {"a.job": 1}}, {"locks_lost": {}}, "a.job"),
    "duplicates": (
        {"jobs": (Job(name="a.job", duplicates={"producer": 900, "replay": 100}),)},
        {"jobs": (Job(name="a.job", duplicates={"producer": 900, "replay": 99}),)},
        "a.job",
    ),
    "no_worker": (
        {"queues": (Queue(name="q", due=1, oldest=30, workers=0),)},
        {
            "queues": (
                Queue(name="q", due=1, oldest=29, workers=0),
                Queue(name="r", due=1, oldest=99, workers=1, last_sign=500),
                Queue(name="s", due=1, oldest=99, workers=None),
                Queue(name="t", due=0, oldest=0, workers=0),
            )
        },
        "q",
    ),
    "redis_down": (
        {"servers": (Server(name="s", trouble="ConnectionError: refused"),)},
        {"servers": (WELL,)},
        "s",
    ),
    "redis_slow": (
        {"servers": (Server(name="s", took=0.1),)},
        {"servers": (Server(name="s", took=0.099), Server(name="t", took=9, trouble="away"))},
        "s",
    ),
    "redis_evicting": ({"servers": (Server(name="s", evicted=1),)}, {"servers": (WELL,)}, "s"),
    "redis_full": (
        {"servers": (Server(name="s", used=90, limit=100),)},
        {"servers": (Server(name="s", used=89, limit=100), Server(name="t", used=99, limit=0))},
        "s",
    ),
    "replica_lag": ({"lags": {"database r": 10.0}}, {"lags": {"database r": 9.9}}, "database r"),
    "silent": ({"silent": {"a.job": 1}}, {"silent": {}}, "a.job"),
    "clocks": (
        {"clocks": {"the database": -1.1}},
        {"clocks": {"the database": -1.0, "the Redis of x": 1.0}},
        "the database",
    ),
    "untold": (
        {"untold": (Untold(channel="webhook", waiting=2, age=60, error="TimeoutError: "),)},
        {"untold": (Untold(channel="webhook", waiting=2, age=59, error=""),)},
        "webhook",
    ),
    "outbox_late": (
        {"targets": (Target(name="orders", due=1, age=60),)},
        {"targets": (Target(name="orders", due=1, age=59), Target(name="audit"))},
        "orders",
    ),
    "outbox_dead": (
        {"targets": (Target(name="orders", dead=1),)},
        {"targets": (Target(name="orders", dead=0),)},
        "orders",
    ),
    "inbox_held": ({"inbox_held": {"ledger": 1}}, {"inbox_held": {"ledger": 0}}, "ledger"),
}


@pytest.mark.parametrize("kind", TROUBLES)
def test_rule_finds_its_trouble_and_not_what_is_just_none(kind: str) -> None:
    trouble, none, subject = TROUBLES[kind]
    (mine,) = found(kind, Sight(**trouble))
    assert mine.subject == subject
    assert mine.words.endswith(".") or ":" in mine.words
    assert mine.cure
    assert found(kind, Sight(**none)) == []
    others = {k for k, v in rules.judge(Sight(**trouble), TOLD).items() if v and k != kind}
    assert others == set()


def test_every_kind_has_a_rule_and_a_trouble_that_shows_it() -> None:
    assert tuple(sorted(rules.RULES)) == tuple(sorted(KINDS))
    assert set(TROUBLES) == set(KINDS) - {"no_coordinator"}, "who looks is a coordinator"


@pytest.mark.parametrize("kind", TROUBLES)
def test_kind_that_is_off_finds_nothing(kind: str) -> None:
    assert found(kind, Sight(**TROUBLES[kind][0]), Thresholds(OFF=(kind,))) == []


def test_nothing_at_all_is_no_alert() -> None:
    assert not any(rules.judge(Sight(), TOLD).values())


def test_what_can_not_be_known_is_neither_found_nor_gone() -> None:
    assert rules.judge(Sight(locks_lost=None), TOLD)["locks_lost"] is None


def test_words_tell_the_causes() -> None:
    (mine,) = found("retries", Sight(jobs=(Job(name="a.job", failed=98, lost=3),)))
    assert mine.words == "101 runs of a.job did not succeed within 5 min: 98 failed, 3 lost."
    (mine,) = found("stalled", Sight(queues=(Queue(name="q", due=9, oldest=400, before=5),)))
    assert mine.words == (
        "9 jobs are due in queue q, 4 more than 5 min ago, and none has ended since."
    )


def test_queue_is_not_stalled_while_something_ends_or_nobody_has_looked_before() -> None:
    for queue in (
        Queue(name="q", due=5, oldest=400, before=4, ended=1),
        Queue(name="q", due=5, oldest=400, before=None),
        Queue(name="q", due=4, oldest=400, before=5),
        Queue(name="q", due=0, oldest=0, before=0),
    ):
        assert found("stalled", Sight(queues=(queue,))) == []


@pytest.mark.parametrize("last", [None, 601.0])
def test_worker_without_a_sign_of_life_is_none(last: float | None) -> None:
    queue = Queue(name="q", due=1, oldest=99, workers=2, last_sign=last)
    assert len(found("no_worker", Sight(queues=(queue,)))) == 1


@pytest.mark.parametrize(("waits", "words"), [(True, "wait for them"), (False, "pass them")])
def test_alert_of_dead_events_says_what_later_ones_do(waits: bool, words: str) -> None:
    [alert] = found("outbox_dead", Sight(targets=(Target(name="a", dead=1, waits=waits),)))
    assert f"Later events of their keys {words}." in alert.cure


def locked(name: str, complaint: str = "") -> Server:
    return Server(name=name, trouble=complaint, has_locks=True, complaint=complaint)


@pytest.mark.parametrize(
    ("away", "of", "severity", "words"),
    [
        (1, 3, "warning", "2 of 3 lock server(s) take locks, which is enough: jobs run on."),
        (2, 5, "warning", "3 of 5 lock server(s) take locks, which is enough: jobs run on."),
        (2, 3, "critical", "1 of 3 lock server(s) take locks, 2 must: no lock can be had."),
        (1, 1, "critical", "0 of 1 lock server(s) take locks, 1 must: no lock can be had."),
    ],
)
def test_lock_server_that_takes_none_is_critical_without_a_majority_only(
    away: int, of: int, severity: str, words: str
) -> None:
    refuses = [locked(f"l{at}", "refuses to write: OOM" if at < away else "") for at in range(of)]
    queue = Server(name="queue default", trouble="ConnectionError: refused")
    *mine, other = found("redis_down", Sight(servers=(*refuses, queue)))
    assert [one.subject for one in mine] == [f"l{at}" for at in range(away)]
    assert {one.severity for one in mine} == {severity}
    assert all(one.words.endswith(f"refuses to write: OOM; {words}") for one in mine)
    assert "handed over again" not in "".join(one.cure for one in mine)
    assert (other.subject, other.severity) == ("queue default", "critical")
    assert "handed over again" in other.cure


def test_subjects_are_bounded_and_the_worst_stay() -> None:
    many = found("dead", Sight(dead={f"job{i}": i for i in range(1, 60)}))
    assert len(many) == rules.MOST_SUBJECTS
    assert many[0].subject == "job59"


# ---- no flapping


def test_trouble_lasts_only_as_long_as_it_was_there_at_every_look() -> None:
    patience, key = Patience(), ("dead", "a.job")
    assert patience.lasts(key, present=True, now=100.0) == 0
    assert patience.lasts(key, present=True, now=103.0) == 3
    assert patience.lasts(key, present=False, now=106.0) == 0
    assert patience.lasts(key, present=True, now=109.0) == 0, "it begins anew"
    patience.keep(set())
    assert patience.lasts(key, present=True, now=150.0) == 0


def test_past_tells_what_was_gained_also_over_a_count_that_began_anew() -> None:
    past = Past()
    for now, number in ((0.0, 5), (10.0, 8), (20.0, 2), (30.0, 4)):
        past.note(now, {"a": number}, kept=300)
    assert past.gained("a") == 3 + 2 + 2
    assert past.gained("unknown") == 0
    assert past.ago(30.0, 20.0) == {"a": 8}
    assert past.ago(30.0, 31.0) is None


def test_past_forgets_what_is_too_old() -> None:
    past = Past()
    for second in range(100):
        past.note(float(second), {"a": second}, kept=10)
    assert past.gained("a") == 10
    assert len(past.looks) == 11


@pytest.mark.parametrize(
    ("ahead", "doubt", "sure"),
    [(2.0, 0.5, 1.5), (-2.0, 0.5, -1.5), (0.4, 0.5, 0.0), (-0.4, 0.5, 0)],
)
def test_slow_answer_makes_no_odd_clock(ahead: float, doubt: float, sure: float) -> None:
    assert surely(ahead, doubt) == sure


# ---- thresholds


def problems(**given: Any) -> list[str]:
    with override_settings(DEDUPJOBS=given):
        return list(conf.problems())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ALERTS": {"EVERY": 0}}, "DEDUPJOBS['ALERTS']['EVERY'] = 0: give seconds from 0.001"),
        ({"ALERTS": {"EVERY": "soon"}}, "['EVERY'] = 'soon': give seconds"),
        ({"ALERTS": {"EVERY": True}}, "['EVERY'] = True: give seconds"),
        ({"ALERTS": {"CLOCKS": float("nan")}}, "['CLOCKS'] = nan: give seconds"),
        ({"ALERTS": {"RETRIES": -3}}, "['RETRIES'] = -3: give a whole number of at least 1."),
        ({"ALERTS": {"RETRIES": 1.5}}, "['RETRIES'] = 1.5: give a whole number"),
        ({"ALERTS": {"REDIS_FULL": 90}}, "['REDIS_FULL'] = 90: give a share from 0.001 to 1."),
        ({"ALERTS": {"RETRYS": 3}}, "['RETRYS'] is not a threshold. Did you mean 'RETRIES'?"),
        ({"ALERTS": {"OFF": ["moon"]}}, "['OFF'] = ['moon']: give a tuple of kinds: stuck,"),
        ({"ALERTS": {"WEBHOOK": "ftp://x"}}, "['WEBHOOK'] = 'ftp://x': give an http or https"),
        ({"ALERTS": {"WEBHOOK": "http://x:y/"}}, "give an http or https address"),
        ({"ALERTS": {"WEBHOOK": 7}}, "give an http or https address"),
        ({"ALERTS": {"MAIL": 1}}, "['MAIL'] = 1: give True or False."),
        ({"ALERTS": {"REPLICA": ""}}, "['REPLICA'] = '': name an alias of DATABASES"),
        ({"ALERTS": 5}, "DEDUPJOBS['ALERTS'] is 5; it must be a dict."),
        ({"PRESSURE": {"PENALTY": 0.5}}, "['PENALTY'] = 0.5: give a number from 1 to 100."),
        ({"PRESSURE": {"DELAY": 1}}, "DEDUPJOBS['PRESSURE']['DELAY'] is not a threshold."),
    ],
)
def test_threshold_that_makes_no_sense_is_refused_with_its_value_and_cure(
    given: dict[str, Any], words: str
) -> None:
    (problem,) = problems(**given)
    assert words in problem
    with override_settings(DEDUPJOBS=given):
        told = [message for message in run_checks() if message.id == "dedupjobs.E001"]
    assert [message.msg for message in told] == [problem]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ALERTS": {"EVERY": 30}}, "a coordinator would be missing between two looks"),
        ({"ALERTS": {"REDIS_SLOW": 0.5}}, "a slow Redis would count as down first"),
        ({"ALERTS": {"REPLICA": "nowhere"}}, "'nowhere' is no alias of DATABASES"),
        (
            {"PRESSURE": {"DELAY_FROM": 60}},
            "PRESSURE['DELAY_FROM'] = 60 is not smaller than DELAY_TO = 60",
        ),
    ],
)
def test_thresholds_that_contradict_each_other_are_named(given: dict[str, Any], words: str) -> None:
    with override_settings(DEDUPJOBS=given):
        (told,) = (message for message in run_checks() if message.id == "dedupjobs.W009")
    assert words in told.msg
    assert told.hint


def test_what_is_given_is_used_and_the_rest_has_its_default() -> None:
    given = {"ALERTS": {"EVERY": timedelta(seconds=7), "RETRIES": 3}, "PRESSURE": {"PAUSE": 2}}
    with override_settings(DEDUPJOBS=given):
        assert conf.alerts() == Thresholds(EVERY=7.0, RETRIES=3)
        assert conf.limits().PAUSE == 2
    assert conf.alerts() == Thresholds()
