"""What docs/deployment.md and contrib/deploy/ say holds: on real servers, or by schema."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from django.core.management import call_command, get_commands
from jsonschema import Draft202012Validator

from dedupjobs import conf, operations, registry
from dedupjobs.models import AttemptOutcome
from tests import live
from tests.app import jobs
from tests.live import PATIENCE, Spawn
from tests.servers import HOST, Sentinel, Valkey
from tests.tls import Terminator, certificate
from tests.waiting import until

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "contrib" / "deploy"
PAGE = (ROOT / "docs" / "deployment.md").read_text()

with_database = pytest.mark.django_db(transaction=True)
heavy = pytest.mark.large


def settings_of(heading: str, /, **changes: str) -> dict[str, Any]:
    """Return the settings that a section of the page shows, with other servers in them."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n# settings.py\n(.*?)```", section, re.S)
    for before, after in changes.items():
        assert before in code, f"{before} does not stand under {heading}"
        code = code.replace(before, after)
    names: dict[str, Any] = {"DATABASES": {"default": {}}}
    exec(code, names)
    found = {name: names[name] for name in names if name.isupper() and name in SETTINGS}
    return {name: value for name, value in found.items() if value != {"default": {}}}


SETTINGS = ("CACHES", "DATABASES", "DEDUPJOBS", "DJANGO_REDIS_CONNECTION_FACTORY", "RQ_QUEUES")


def live_a_life(spawn: Spawn, given: Mapping[str, Any]) -> None:
    """Let callers, a worker and operators do what they do, with these settings."""
    outcomes = [jobs.record.enqueue(tag=str(n)) for n in range(3)]
    assert jobs.record.enqueue(tag="1").kind == "DUPLICATE"
    held = jobs.record.enqueue(tag="held")
    operations.hold(held.job, by="tests")
    worker = start(spawn, given)
    for outcome in [*outcomes, jobs.fail.enqueue(tag="twice", times=2)]:
        live.wait_for(outcome)
    dying = jobs.leave.enqueue(tag="dies", how="os._exit")
    live.wait_for_outcome(dying, AttemptOutcome.LOST)
    operations.unhold(live.row_of(held), by="tests")
    live.wait_for(held)
    assert jobs.record.enqueue(tag="1").kind == "REPLAYED"
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


def start(spawn: Spawn, given: Mapping[str, Any], **changes: Any) -> Any:
    """Start a worker that has these settings."""
    env = {
        "DJANGO_SETTINGS_MODULE": "tests.deployed_settings",
        "DEDUPJOBS_TEST_DEPLOYED": json.dumps(given),
    }
    return live.start_worker(spawn, env=env, **changes)


# ---- Redis


@heavy
@with_database
def test_jobs_live_beside_a_cache_that_is_cleared(spawn: Spawn) -> None:
    with Valkey("--maxmemory-policy", "noeviction") as held, Valkey() as cache:
        given = settings_of(
            "Redis for jobs, Redis for the cache",
            **{
                "jobs.example:6379": f"{HOST}:{held.port}",
                "cache.example:6379": f"{HOST}:{cache.port}",
            },
        )
        with live.changed(**given):
            live_a_life(spawn, given)
        with cache.client() as client:
            assert client.dbsize() == 0
        with held.client(1) as client:
            assert client.dbsize() > 0


@heavy
@with_database
def test_jobs_live_with_redis_behind_tls(spawn: Spawn, tmp_path: Path) -> None:
    made, key = certificate(tmp_path)
    with Valkey() as server, Terminator(server.port, made, key) as tls:
        given = settings_of(
            "TLS",
            **{"jobs.example:6379": f"{HOST}:{tls.port}", "/etc/shop/redis-ca.pem": str(made)},
        )
        with live.changed(**given):
            live_a_life(spawn, given)


@with_database
def test_nothing_is_sent_to_a_server_with_another_certificate(tmp_path: Path) -> None:
    made, key = certificate(tmp_path)
    other, _ = certificate(tmp_path, "other")
    with Valkey() as server, Terminator(server.port, made, key) as tls:
        given = settings_of(
            "TLS",
            **{"jobs.example:6379": f"{HOST}:{tls.port}", "/etc/shop/redis-ca.pem": str(other)},
        )
        with live.changed(**given):
            row = live.row_of(jobs.record.enqueue(tag="a"))
        assert row.dispatched_at is None
        with server.client() as client:
            assert client.dbsize() == 0


@pytest.fixture
def acl(tmp_path: Path) -> Iterator[Valkey]:
    """A server with our user, and one of the test's own who may look at all of it."""
    text = (DEPLOY / "users.acl").read_text()
    assert text.startswith("user default off\n")
    file = tmp_path / "users.acl"
    file.write_text(text.replace("user default off", "user default on nopass ~* &* +@all", 1))
    with Valkey("--aclfile", str(file)) as server:
        yield server


@heavy
@with_database
def test_user_of_the_recipe_may_do_all_that_jobs_need(
    spawn: Spawn, acl: Valkey, admin_client: Any
) -> None:
    given = settings_of("A user that may do little", **{"jobs.example:6379": f"{HOST}:{acl.port}"})
    with live.changed(**given):
        live_a_life(spawn, given)
        with suppress(SystemExit):  # it has findings, as that no worker is there any more
            call_command("dedupjobs_doctor")
        for command in ("dedupjobs_stats", "dedupjobs_duplicates"):
            call_command(command)
        for page in ("processedjob", "dashboard"):
            assert admin_client.get(f"/admin/dedupjobs/{page}/").status_code == 200
    with acl.client() as client:
        refused = [(e["reason"], e["object"], e["username"]) for e in client.acl_log()]
    assert refused == []


@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("CONFIG", "GET", "*"),
        ("KEYS", "*"),
        ("ACL", "LIST"),
        ("SHUTDOWN",),
        ("MONITOR",),
        ("GET", "session:7"),
        ("SET", ":1:page", "x"),
        ("SUBSCRIBE", "other"),
        ("PUBLISH", "other", "x"),
        ("EVAL", "return redis.call('get', 'session:7')", "0"),
    ],
    ids=" ".join,
)
def test_user_of_the_recipe_may_do_nothing_else(acl: Valkey, command: tuple[str, ...]) -> None:
    url = f"redis://shop:change-this-password@{HOST}:{acl.port}/0"
    with redis.Redis.from_url(url) as client, pytest.raises(redis.ResponseError) as refused:
        client.execute_command(*command)
    assert "NOPERM" in str(refused.value) or "permission" in str(refused.value).lower()


@heavy
@with_database
def test_work_goes_on_after_a_failover(spawn: Spawn) -> None:
    with Valkey(bundled=True) as master:
        replica = Valkey("--replicaof", HOST, str(master.port), bundled=True)
        with replica, Sentinel(master) as sentinel:
            given = settings_of(
                "Sentinel",
                **{
                    f'"sentinel-{number}.example", 26379': f'"{HOST}", {port}'
                    for number, port in enumerate((1, sentinel.port, 1), 1)
                },
            )
            with live.changed(**given):
                live_a_life(spawn, given)
                worker = start(spawn, given, PUSH_TIMEOUT=1)
                until(lambda: sentinel.replicas() == 1, PATIENCE)
                master.kill()
                until(lambda: sentinel.primary_port() == replica.port, PATIENCE)
                live.wait_for(jobs.record.enqueue(tag="after"), seconds=90)
                assert worker.is_alive()


# ---- systemd


@pytest.mark.parametrize("name", ["shop-worker@.service", "shop-coordinator.service"])
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
def test_systemd_finds_nothing_wrong_with_our_units(tmp_path: Path, name: str) -> None:
    text = (DEPLOY / "systemd" / name).read_text()
    assert "/srv/shop/.venv/bin/python" in text
    unit = tmp_path / name.replace("@", "@1")
    unit.write_text(text.replace("/srv/shop/.venv/bin/python", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if unit.name in line]
    assert said == []


def test_systemd_waits_longer_for_a_worker_than_its_longest_job_takes() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd" / "shop-worker@.service")
    service = unit["Service"]
    timeout = registry.Options().timeout
    assert timeout is not None
    assert int(service["TimeoutStopSec"]) > timeout + conf.Settings().TIMEOUT_GRACE
    assert int(service["TimeoutStopSec"]) > shutdown_takes()
    assert service["KillMode"] == "mixed"
    assert (service["Type"], service["NotifyAccess"]) == ("notify", "main")
    assert int(service["WatchdogSec"]) >= SILENCE
    assert service["ExecStart"].split()[1:3] == ["manage.py", "rqworker"]


SILENCE = 120  # seconds for which a worker that is well may give no sign, and then some


def shutdown_takes() -> float:
    """Return the seconds after which a DedupWorker that was told to stop has ended."""
    return conf.Settings().SHUTDOWN_GRACE + conf.Settings().TIMEOUT_GRACE


# ---- containers


def seconds(text: str) -> int:
    """Return a duration as compose writes it."""
    return int(text.removesuffix("s"))


TEXT = {"type": "string", "minLength": 1}
WORDS = {"type": "array", "items": TEXT, "minItems": 1}
COMMAND = {"oneOf": [TEXT, WORDS]}
COMPOSE = {  # what we use of https://github.com/compose-spec/compose-spec/blob/main/spec.md
    "type": "object",
    "required": ["services"],
    "additionalProperties": False,
    "patternProperties": {"^x-": {}},
    "properties": {
        "name": TEXT,
        "volumes": {"type": "object", "additionalProperties": {"type": "null"}},
        "services": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "image": TEXT,
                    "build": TEXT,
                    "command": COMMAND,
                    "environment": {"type": "object", "additionalProperties": TEXT},
                    "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
                    "volumes": WORDS,
                    "ports": WORDS,
                    "stop_grace_period": {"type": "string", "pattern": "^[0-9]+s$"},
                    "deploy": {
                        "type": "object",
                        "properties": {"replicas": {"type": "integer", "minimum": 1}},
                        "additionalProperties": False,
                    },
                    "healthcheck": {
                        "type": "object",
                        "required": ["test"],
                        "additionalProperties": False,
                        "properties": {
                            "test": WORDS,
                            "interval": {"type": "string", "pattern": "^[0-9]+s$"},
                            "start_period": {"type": "string", "pattern": "^[0-9]+s$"},
                        },
                    },
                    "depends_on": {
                        "type": "object",
                        "additionalProperties": {
                            "type": "object",
                            "required": ["condition"],
                            "properties": {
                                "condition": {
                                    "enum": [
                                        "service_started",
                                        "service_healthy",
                                        "service_completed_successfully",
                                    ]
                                }
                            },
                        },
                    },
                },
            },
        },
    },
}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def test_compose_file_fits_its_schema(compose: dict[str, Any]) -> None:
    Draft202012Validator(COMPOSE).validate(compose)
    services = compose["services"]
    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)
        for other, needs in service.get("depends_on", {}).items():
            assert needs["condition"] != "service_healthy" or "healthcheck" in services[other]


def test_compose_gives_a_worker_the_time_that_it_needs(compose: dict[str, Any]) -> None:
    worker = compose["services"]["worker"]
    assert seconds(worker["stop_grace_period"]) > registry.Options().lease
    assert seconds(worker["stop_grace_period"]) > shutdown_takes()
    assert worker["environment"]["HEARTBEAT_FILE"] in worker["healthcheck"]["test"][1]


@pytest.mark.parametrize(
    ("name", "policy", "appends"), [("jobs", "noeviction", "yes"), ("cache", "allkeys-lru", "no")]
)
def test_servers_of_the_compose_file_start_with_what_they_are_told(
    compose: dict[str, Any], name: str, policy: str, appends: str
) -> None:
    program, *options = shlex.split(compose["services"][name]["command"])
    assert program == "valkey-server"
    with Valkey(*options, bundled=True) as server, server.client() as client:
        told = client.config_get("maxmemory-policy", "appendonly")
    assert told == {"maxmemory-policy": policy, "appendonly": appends}


PROBE = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "exec": {"type": "object", "required": ["command"], "properties": {"command": WORDS}},
        "httpGet": {"type": "object", "required": ["path", "port"]},
        **{
            name: {"type": "integer", "minimum": 1}
            for name in (
                "periodSeconds", "failureThreshold", "timeoutSeconds", "initialDelaySeconds",
            )
        },
    },
}  # fmt: skip
CONTAINER = {
    "type": "object",
    "required": ["name", "image", "command"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9-]{1,63}$"},
        "image": TEXT,
        "command": WORDS,
        "envFrom": {"type": "array", "items": {"required": ["secretRef"]}},
        "env": {"type": "array", "items": {"required": ["name", "value"]}},
        "ports": {"type": "array", "items": {"required": ["containerPort"]}},
        **dict.fromkeys(("startupProbe", "livenessProbe", "readinessProbe"), PROBE),
        "lifecycle": {
            "type": "object",
            "required": ["preStop"],
            "properties": {"preStop": {"type": "object", "required": ["exec"]}},
        },
        "resources": {"type": "object", "required": ["requests", "limits"]},
        "securityContext": {"type": "object", "required": ["runAsNonRoot"]},
    },
}
DEPLOYMENT = {  # what we use of the API's apps/v1 Deployment
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "apps/v1"},
        "kind": {"const": "Deployment"},
        "metadata": {"type": "object", "required": ["name", "labels"]},
        "spec": {
            "type": "object",
            "required": ["selector", "template"],
            "additionalProperties": False,
            "properties": {
                "replicas": {"type": "integer", "minimum": 1},
                "selector": {"type": "object", "required": ["matchLabels"]},
                "template": {
                    "type": "object",
                    "required": ["metadata", "spec"],
                    "properties": {
                        "spec": {
                            "type": "object",
                            "required": ["containers", "terminationGracePeriodSeconds"],
                            "additionalProperties": False,
                            "properties": {
                                "terminationGracePeriodSeconds": {"type": "integer"},
                                "containers": {"type": "array", "items": CONTAINER},
                                "initContainers": {"type": "array", "items": CONTAINER},
                            },
                        }
                    },
                },
            },
        },
    },
}


def manifest(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "kubernetes" / f"{name}.yaml").read_text())
    return found


@pytest.mark.parametrize("name", ["worker", "web"])
def test_manifest_fits_its_schema(name: str) -> None:
    found = manifest(name)
    Draft202012Validator(DEPLOYMENT).validate(found)
    labels = found["spec"]["template"]["metadata"]["labels"]
    assert found["spec"]["selector"]["matchLabels"] == labels == found["metadata"]["labels"]


@pytest.mark.parametrize("name", ["worker", "web"])
def test_pod_has_the_time_that_it_needs_to_stop(name: str) -> None:
    pod = manifest(name)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    before = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    left = pod["terminationGracePeriodSeconds"] - before
    needed = max(registry.Options().lease, shutdown_takes()) if name == "worker" else 30
    assert left > needed
    assert container["command"][0] not in ("sh", "bash")


def test_probe_of_the_manifest_tells_a_worker_that_is_well_from_one_that_is_not(
    tmp_path: Path,
) -> None:
    (container,) = manifest("worker")["spec"]["template"]["spec"]["containers"]
    assert {"name": "HEARTBEAT_FILE", "value": "/tmp/beat"} in container["env"]
    (probe,) = {
        tuple(container[f"{kind}Probe"]["exec"]["command"]) for kind in ("startup", "liveness")
    }
    beat = tmp_path / "beat"

    def is_well() -> bool:
        command = [word.replace("/tmp/beat", str(beat)) for word in probe]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    assert not is_well()
    beat.touch()
    assert is_well()
    old = beat.stat().st_mtime - SILENCE - 61
    os.utime(beat, (old, old))
    assert not is_well()


# ---- commands


def test_recipes_name_no_command_that_is_not_there() -> None:
    texts = [path.read_text() for path in DEPLOY.rglob("*") if path.is_file()] + [PAGE]
    named = {n for text in texts for n in re.findall(r"manage\.py[\"', ]+([a-z_]+)", text)}
    assert {"rqworker", "migrate", "dedupjobs_coordinator", "dedupjobs_doctor"} <= named
    assert named <= set(get_commands())


def test_page_names_every_file_of_the_recipes() -> None:
    for path in DEPLOY.rglob("*"):
        assert not path.is_file() or path.name in PAGE, path
