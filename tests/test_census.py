"""What is wrong among lock servers, in words that name it and its cure."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from django.conf import settings
from django.core.checks import run_checks

from dedupjobs import census, conf, diagnosis, fleet, locks
from dedupjobs.admin import period, tiles, troubles
from dedupjobs.admin.troubles import Banner
from dedupjobs.alerts import rules
from dedupjobs.alerts.rules import Found
from dedupjobs.alerts.sight import Looker
from dedupjobs.alerts.watch import Watch
from dedupjobs.census import Member
from tests import live
from tests.servers import HOST, Valkey, free_port
from tests.test_quorum import TIMEOUT, Servers, lock_servers


def member(alias: str, **said: Any) -> Member:
    return Member(**{"alias": alias, "run_id": f"of {alias}", **said})


WELL = [member("a"), member("b"), member("c")]


def found(*members: Member) -> dict[str, bool]:
    """Return the numbers of what is wrong, and whether it is fatal."""
    return {problem.number: problem.is_fatal for problem in census.problems(members)}


def test_servers_of_which_nothing_is_wrong_are_not_mentioned() -> None:
    assert found(*WELL) == {}
    assert found(member("a")) == {}
    assert found(member("a", is_cluster=True)) == {}, "the only one may be a cluster"


@pytest.mark.parametrize(
    ("wrong", "number", "fatal", "words"),
    [
        ({"run_id": "of a"}, "E040", True, "'a' and 'c' are one server"),
        ({"is_replica": True, "upstream": "h:1"}, "E041", True, "replica of h:1"),
        ({"is_cluster": True}, "E042", True, "node of a Redis Cluster"),
        (
            {"trouble": "gone"},
            "W020",
            False,
            "2 of 3 lock server(s) take locks, 2 must: 0 more may fail (c does not answer: gone).",
        ),
        (
            {"refusal": "NOREPLICAS."},
            "W020",
            False,
            "2 of 3 lock server(s) take locks, 2 must: 0 more may fail (c refuses to write: "
            "NOREPLICAS).",
        ),
        ({"ahead": 90.0}, "W021", False, "'c' is 90.0 s ahead of that of 'a'"),
        ({"ahead": -90.0}, "W021", False, "'b' is 90.0 s ahead of that of 'c'"),
    ],
)
def test_one_wrong_server_is_named_with_a_cure(
    wrong: dict[str, Any], number: str, fatal: bool, words: str
) -> None:
    (problem,) = census.problems([*WELL[:2], member("c", **wrong)])
    assert (problem.number, problem.is_fatal) == (number, fatal)
    assert words in problem.words
    assert problem.cure


@pytest.mark.parametrize("what", ["trouble", "refusal"])
def test_minority_that_is_alive_is_fatal_and_a_majority_is_not(what: str) -> None:
    away = {what: "ConnectionError: refused"}
    assert found(member("a"), member("b", **away), member("c", **away)) == {"W020": True}
    five = [member(alias, **(away if alias in "de" else {})) for alias in "abcde"]
    assert found(*five) == {"W020": False}


def test_only_server_that_is_a_replica_is_named_too() -> None:
    replica = member("a", is_replica=True, upstream="h:1", refusal="READONLY")
    assert found(replica) == {"E041": True}, "once"


def test_only_server_is_named_if_it_refuses_to_write_and_by_others_if_it_is_away() -> None:
    assert found(member("a", refusal="NOREPLICAS")) == {"W020": True}
    assert found(member("a", trouble="gone")) == {}


def test_server_that_has_lost_its_keys_may_come_back_at_once() -> None:
    """As docs/locks.md says: the rows decide."""
    (problem,) = census.problems([*WELL[:2], member("c", trouble="gone")])
    assert "need not stay away" in problem.cure


# ---- servers that are really so


def ids(deploy: bool = True) -> list[str]:
    told = run_checks(include_deployment_checks=deploy)
    return [m.id for m in told if str(m.id) in ("dedupjobs.E040", "dedupjobs.E041",
            "dedupjobs.E042", "dedupjobs.W020", "dedupjobs.W021")]  # fmt: skip


@pytest.mark.large
@pytest.mark.django_db
def test_check_doctor_dashboard_and_alerts_see_servers_that_are_away() -> None:
    with lock_servers(3) as servers:
        assert ids() == []
        assert not fleet.look().lock_troubles
        servers.kill(1)
        assert ids() == ["dedupjobs.W020"]
        assert _level(servers) == "warn"
        servers.kill(2)
        assert _level(servers) == "bad"
        said = [one for one in diagnosis.examine() if one.about == "redis"]
        away = [one.words for one in said if one.level == diagnosis.FAILURE]
        assert [words.partition(" does not")[0] for words in away] == [
            "lock server locks1",
            "lock server locks2",
        ]
        seen = Looker().look()[0].servers
        assert [(one.name, bool(one.complaint)) for one in seen[:3]] == [
            ("locks and counters", False),
            ("locks locks1", True),
            ("locks locks2", True),
        ]
        assert ids(deploy=False) == [], "asks nobody"


REFUSALS = {
    "NOREPLICAS": {"min-replicas-to-write": "1"},
    "OOM": {"maxmemory": "1", "maxmemory-policy": "noeviction"},
}


@pytest.mark.large
@pytest.mark.django_db
@pytest.mark.parametrize("answer", REFUSALS)
def test_servers_that_refuse_to_write_are_named_with_their_answer(answer: str) -> None:
    with lock_servers(3) as servers:
        _refuse(servers.valkeys[1], REFUSALS[answer])
        assert ids() == ["dedupjobs.W020"]
        assert _level(servers) == "warn"
        assert _said_by_doctor(diagnosis.WARNING) == ["lock server locks1"]
        (down,) = _down()
        assert (down.subject, down.severity) == ("locks locks1", "warning")
        assert f"refuses to write: ResponseError: {answer}" in _spelt(down.words)
        _refuse(servers.valkeys[2], REFUSALS[answer])
        assert locks.why_unreachable(), "nor does a job get a lock"
        assert _level(servers) == "bad"
        assert _said_by_doctor(diagnosis.FAILURE) == ["lock server locks1", "lock server locks2"]
        assert {one.severity for one in _down()} == {"critical"}


@pytest.mark.large
@pytest.mark.django_db
def test_only_server_that_refuses_to_write_is_named_and_none_is_said_to_lead_or_not() -> None:
    with Valkey() as server, live.changed(**live.redis_at(server.url)):
        assert ids() == []
        assert not fleet.look().lock_troubles
        _refuse(server, REFUSALS["NOREPLICAS"])
        assert ids() == ["dedupjobs.W020"]
        seen = fleet.look()
        (problem,) = seen.lock_troubles
        assert problem.is_fatal
        assert "default refuses to write: ResponseError: NOREPLICAS" in _spelt(problem.words)
        assert "NOREPLICAS" in seen.leader_trouble, "a coordinator that works has no lease"
        assert _said_by_doctor(diagnosis.FAILURE) == ["the Redis of locks and counters"]
        assert [one.level for one in diagnosis.examine() if one.about == "coordinator"] == [
            diagnosis.WARNING
        ]
        (down,) = _down()
        assert (down.subject, down.severity) == ("locks and counters", "critical")
        assert "no lock can be had" in down.words


def test_question_changes_nothing() -> None:
    with lock_servers(3) as servers:
        assert census.can_lock(census.take())
        for valkey in servers.valkeys:
            with valkey.client() as client:
                assert client.keys() == []
                assert client.info("persistence")["rdb_changes_since_last_save"] == 0


@pytest.mark.large
@pytest.mark.django_db
def test_first_of_three_that_is_away_is_a_warning_and_jobs_are_said_to_run() -> None:
    with lock_servers(3) as servers:
        Watch().round()
        servers.kill(0)
        wrong = {one.about: one for one in diagnosis.examine() if one.level != diagnosis.OK}
        assert {wrong[about].level for about in ("redis", "coordinator")} == {diagnosis.WARNING}
        assert "Jobs run on" in wrong["redis"].cure
        assert "can not be asked for" in wrong["coordinator"].words
        assert "By the database, one has looked" in wrong["coordinator"].words
        assert "clocks" not in wrong, "it is named among the servers"
        (down,) = _down()
        assert down.severity == "warning"
        assert "2 of 3 lock server(s) take locks, which is enough: jobs run on." in down.words
        assert "handed over" not in down.words + down.cure
        assert {banner.level for banner in _banners()} == {"warn"}


@pytest.mark.django_db
def test_lock_server_that_is_away_keeps_nobody_from_looking_for_workers() -> None:
    with lock_servers(3) as servers:
        servers.kill(1)
        seen, _ = Looker().look()
        assert [queue.workers for queue in seen.queues if queue.name == "default"] == [0]


def _refuse(server: Valkey, changes: dict[str, str]) -> None:
    with server.client() as client:
        for name, value in changes.items():
            client.config_set(name, value)


def _spelt(words: str) -> str:
    """Return them as all clients have it: redis-py has classes for some answers, which it cuts."""
    return words.replace("OutOfMemoryError: ", "ResponseError: OOM ")


def _down() -> list[Found]:
    found = rules.judge(Looker().look()[0], conf.alerts())["redis_down"]
    assert found is not None
    return found


def _said_by_doctor(level: str) -> list[str]:
    said = [one.words for one in diagnosis.examine() if (one.about, one.level) == ("redis", level)]
    return [words.partition(" refuses to write")[0] for words in said]


def _banners() -> list[Banner]:
    now = tiles.look()
    return troubles.banners(now, fleet.look(), None, period.read("hour", now.at))


def _level(servers: Servers) -> str:
    (problem,) = fleet.look().lock_troubles
    assert "locks1" in problem.words
    return troubles._among_lock_servers(problem).level


@pytest.mark.large
def test_replica_among_the_servers_is_e041() -> None:
    with lock_servers(3) as servers:
        with servers.valkeys[2].client() as client:
            client.replicaof(HOST, servers.valkeys[0].port)
        (problem,) = census.problems(census.take())
        assert (problem.number, problem.is_fatal) == ("E041", True)
        assert f"replica of {HOST}:{servers.valkeys[0].port}" in problem.words


@pytest.mark.large
def test_node_of_a_cluster_is_e042() -> None:
    mode = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with lock_servers(3) as servers, Valkey(*mode) as node:
        servers.proxies[1].target_port = node.port
        (problem,) = census.problems(census.take())
        assert problem.number == "E042"


@pytest.mark.large
def test_server_that_is_stopped_is_away_within_the_timeout() -> None:
    with lock_servers(3, LOCK_TIMEOUT=TIMEOUT) as servers:
        servers.signal(signal.SIGSTOP, 0)
        (problem,) = census.problems(census.take())
        assert problem.number == "W020"


def test_server_behind_two_addresses_is_known_by_its_process_and_behind_one_by_that() -> None:
    with lock_servers(3) as servers:
        servers.proxies[2].target_port = servers.valkeys[0].port
        (problem,) = census.problems(census.take())
        assert "'locks0' and 'locks2' are one server (they have the run_id" in problem.words
        assert ids(deploy=False) == [], "their addresses differ"
        caches = {**settings.CACHES}
        first = caches["locks0"]["LOCATION"]
        caches["locks2"] = {**caches["locks2"], "LOCATION": first.replace("/0", "/1")}
        with live.changed(CACHES=caches):
            assert ids(deploy=False) == ["dedupjobs.E040"], "another database is no other server"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["a", "b"], "a quorum has 3 servers or more"),
        (["a"], "name one alias as a text"),
        ([], "a quorum has 3 servers or more"),
        (["a", "b", "c", "d"], "4 servers bear the loss of 1 as 3 do"),
        (["a", "b", "c", "d", "e", "f"], "6 servers bear the loss of 2 as 5 do"),
        (["a", "b", "a"], "'a' stands there twice"),
        (["a", "b", ""], "give aliases of CACHES"),
        (["a", "b", 3], "give aliases of CACHES"),
        ({"a", "b", "c"}, "give a non-empty string"),
    ],
)
def test_servers_that_can_be_no_quorum_are_refused_in_words(given: Any, words: str) -> None:
    with live.changed(DEDUPJOBS={"LOCK_CACHE": "default"}):
        settings.DEDUPJOBS = {"LOCK_CACHE": given}
        (problem,) = conf.problems()
        settings.DEDUPJOBS = {"LOCK_CACHE": "default"}
    assert problem.startswith(f"DEDUPJOBS['LOCK_CACHE'] = {given!r}: ")
    assert words in problem


def test_alias_that_caches_lacks_or_that_is_no_redis_is_named() -> None:
    caches = {
        **settings.CACHES,
        "memory": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
    }
    ours = {"LOCK_CACHE": ["default", "memory", "nothing"]}
    with live.changed(CACHES=caches, DEDUPJOBS=ours):
        told = {m.id: m.msg for m in run_checks() if "dedupjobs.E00" in str(m.id)}
    assert "'nothing', which CACHES lacks" in told["dedupjobs.E005"]
    assert "CACHES['memory'] is" in told["dedupjobs.E006"]
