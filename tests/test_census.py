"""What is wrong among lock servers, in words that name it and its cure."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from django.conf import settings
from django.core.checks import run_checks

from dedupjobs import census, conf, diagnosis, fleet
from dedupjobs.admin import troubles
from dedupjobs.alerts.sight import _known_servers
from dedupjobs.census import Member
from tests import live
from tests.servers import HOST, Valkey, free_port
from tests.test_quorum import Servers, lock_servers


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
        ({"trouble": "gone"}, "W020", False, "2 of 3 lock servers answer, 2 must: 0 more may fail"),
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


def test_minority_that_is_alive_is_fatal_and_a_majority_is_not() -> None:
    away = {"trouble": "ConnectionError: refused"}
    assert found(member("a"), member("b", **away), member("c", **away)) == {"W020": True}
    five = [member(alias, **(away if alias in "de" else {})) for alias in "abcde"]
    assert found(*five) == {"W020": False}


def test_only_server_that_is_a_replica_is_named_too() -> None:
    assert found(member("a", is_replica=True, upstream="h:1")) == {"E041": True}


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
        names = [name for name, *_ in _known_servers()]
        assert names[:3] == ["locks and counters", "locks locks1", "locks locks2"]
        assert ids(deploy=False) == [], "asks nobody"


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
    with lock_servers(3) as servers:
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
