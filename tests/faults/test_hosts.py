"""The harness of several hosts has teeth: a cut cuts, a broken guard is caught, nothing is left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import network as networks
from tests.faults.network import CanNotCut, Network, Way, both
from tests.mutants.__main__ import apply
from tests.mutants.table import ALL

ROOT = Path(__file__).parents[2]
STALE = "an ending moves a job that is not RUNNING by its attempt"

# It fails where networks can not be made: whoever runs this file wants to know.
SERVE = (
    "import socket; s = socket.create_server(('', 7000)); print(flush=True)\nwhile s.accept(): 0"
)
CALL = "import socket, sys; socket.create_connection((sys.argv[1], 7000), float(sys.argv[2]))"


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two hosts, each of which takes connections on port 7000."""
    with Network(("a", "b")) as made:
        servers = [_start(made, name, SERVE) for name in made.names]
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline()
        yield made
    for server in servers:
        assert server.wait(10) != 0  # leaving has killed it
        assert server.stdout is not None
        server.stdout.close()


def _start(made: Network, name: str, code: str, *words: str) -> subprocess.Popen[bytes]:
    command = [*made.inside(name), sys.executable, "-c", code, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def reaches(made: Network, one: str, other: str, seconds: float = 0.7) -> bool:
    """Return whether a connection from one host to another comes about."""
    probe = _start(made, one, CALL, made.address(other), str(seconds))
    assert probe.stdout is not None
    probe.stdout.close()
    return probe.wait(20) == 0


def test_host_that_is_cut_off_reaches_nobody_until_it_heals(network: Network) -> None:
    assert reaches(network, "a", "b", 5)
    with network.cut(*both("a", "b")):
        assert not reaches(network, "a", "b")
        assert not reaches(network, "b", "a")
        assert network.dropped() > 0
    assert reaches(network, "a", "b", 5)


def test_cut_of_one_way_lets_no_answer_come_back(network: Network) -> None:
    with network.cut(Way("b", "a")):
        assert not reaches(network, "a", "b")
        assert network.dropped() > 0


def test_cut_leaves_other_hosts_alone(network: Network) -> None:
    with network.cut(Way("a", networks.SWITCH)):
        assert reaches(network, "a", "b", 5)


def test_some_packets_of_a_lossy_way_arrive(network: Network) -> None:
    assert reaches(network, "a", "b", 5)  # or what is lost may be all that ARP asks
    with network.cut(Way("*", "*", loss=30)):
        assert reaches(network, "a", "b", 10)


def test_left_network_leaves_nothing() -> None:
    with Network(("a",)) as made:
        sleeper = _start(made, "a", "import time; time.sleep(60)")
    assert sleeper.wait(10) != 0
    assert sleeper.stdout is not None
    sleeper.stdout.close()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert made.mark not in listed.stdout


def test_host_that_can_not_be_made_is_told() -> None:
    with pytest.raises(CanNotCut, match=r"\S"), Network(("a", "a")):
        pass


def test_command_says_why_it_can_not_run(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": str(tmp_path)}
    command = [sys.executable, "-m", "tests.faults.hosts", "--brief"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Networks can not be cut here: there is no `ip`" in done.stdout


@pytest.mark.large
@pytest.mark.timeout(400)
def test_stale_attempt_that_is_let_through_is_caught(tmp_path: Path) -> None:
    (mutant,) = (one for one in ALL if one.name == STALE)
    for part in ("dedupjobs", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part)
    apply(mutant, tmp_path / "dedupjobs")
    command = [sys.executable, "-m", "tests.faults.hosts", "--fleet", "stock", "--rounds", "2"]
    done = subprocess.run(
        [*command, "--only", "worker A ↔ everyone"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED: I" in done.stdout, done.stdout
