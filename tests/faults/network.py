"""
Hosts as network namespaces with addresses of their own, on a switch that can lose packets.

    root ── nothing: the switch is a namespace as well, and the machine's own network is left alone
    switch  a bridge at .1, whose filter drops what a cut says: the sender is told nothing
    others  .2, .3, … in the order of their names, an eth0 each

Needs Linux, root, `ip` (iproute2) and `nft` (nftables). ``why_not()`` says what is missing.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

NET = "10.213.77"
SWITCH = "switch"
TABLE = ("bridge", "cuts")


class CanNotCut(Exception):
    """This machine lets us make no networks; the message says why."""


@dataclass(frozen=True, slots=True)
class Way:
    """From one host to another; ``*``: any. ``loss``: of 100 packets, how many are dropped."""

    source: str
    target: str
    loss: int = 100

    def __str__(self) -> str:
        return f"{self.source} → {self.target}" + (f" {self.loss} %" if self.loss < 100 else "")


def both(one: str, other: str) -> tuple[Way, Way]:
    """Return the ways between two hosts."""
    return Way(one, other), Way(other, one)


class Network:
    """Entered, the hosts are there; left, nothing of them is. ``names``: of the hosts."""

    def __init__(self, names: Sequence[str], mark: str = "") -> None:
        self.mark = mark or f"dj{secrets.token_hex(3)}"
        self.names = tuple(names)

    def __enter__(self) -> Network:
        try:
            self._build()
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            said = getattr(error, "stderr", "") or str(error)
            raise CanNotCut(said.strip()) from error
        return self

    def __exit__(self, *exc_info: object) -> None:
        for name in (*self.names, SWITCH):
            with suppress(OSError):
                self._end_all(name)
                subprocess.run(
                    ["ip", "netns", "delete", self.space(name)], capture_output=True, check=False
                )

    def _end_all(self, name: str) -> None:
        """Kill who is still there: nobody else knows this namespace."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.space(name)], capture_output=True, text=True, check=False
        )
        for pid in listed.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _build(self) -> None:
        _run("ip", "netns", "add", self.space(SWITCH))
        switch = self.inside(SWITCH)
        _run(*switch, "ip", "link", "set", "lo", "up")
        _run(*switch, "ip", "link", "add", "br0", "type", "bridge")
        _run(*switch, "ip", "addr", "add", f"{self.address(SWITCH)}/24", "dev", "br0")
        _run(*switch, "ip", "link", "set", "br0", "up")
        for number, name in enumerate(self.names):
            self._plug_in(name, f"port{number}")
        hook = "{ type filter hook forward priority 0 ; }"
        _run(*switch, "nft", f"add table {' '.join(TABLE)}")
        _run(*switch, "nft", f"add chain {' '.join(TABLE)} forward {hook}")

    def _plug_in(self, name: str, port: str) -> None:
        _run("ip", "netns", "add", self.space(name))
        switch, host = self.inside(SWITCH), self.inside(name)
        peer = ("peer", "name", "eth0", "netns", self.space(name))
        _run(*switch, "ip", "link", "add", port, "type", "veth", *peer)
        _run(*switch, "ip", "link", "set", port, "master", "br0", "up")
        _run(*host, "ip", "link", "set", "lo", "up")
        _run(*host, "ip", "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        _run(*host, "ip", "link", "set", "eth0", "up")

    def space(self, name: str) -> str:
        """Return the name of a host's namespace."""
        return f"{self.mark}-{name}"

    def inside(self, name: str) -> tuple[str, ...]:
        """Return what stands before a command that shall run on a host."""
        return ("ip", "netns", "exec", self.space(name))

    def address(self, name: str) -> str:
        """Return a host's address."""
        number = 1 if name == SWITCH else 2 + self.names.index(name)
        return f"{NET}.{number}"

    @contextmanager
    def cut(self, *ways: Way) -> Iterator[None]:
        """Drop what goes these ways while the block runs."""
        for way in ways:
            self._nft("add rule", *self._rule(way))
        try:
            yield
        finally:
            self.heal()

    def heal(self) -> None:
        """Let everything pass."""
        self._nft("flush chain")

    def dropped(self) -> int:
        """Return how many packets the present cuts have dropped."""
        listed = self._nft("list chain")
        words = listed.split()
        return sum(int(words[i + 1]) for i, word in enumerate(words) if word == "packets")

    def _rule(self, way: Way) -> list[str]:
        ends = {"saddr": way.source, "daddr": way.target}
        rule = [f"ip {end} {self.address(name)}" for end, name in ends.items() if name != "*"]
        if way.loss < 100:
            rule.append(f"numgen random mod 100 < {way.loss}")
        return [*rule, "counter drop"]

    def _nft(self, verb: str, *rule: str) -> str:
        words = [verb, *TABLE, "forward", *rule]
        # From wherever we are: the one that drives a stage stands in the switch already.
        return _run(*self.inside(SWITCH), "nft", " ".join(words))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


def why_not() -> str:
    """Return why this machine can not do it, or an empty text; tries it out with two hosts."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    for program, package in (("ip", "iproute2"), ("nft", "nftables")):
        if shutil.which(program) is None:
            return f"there is no `{program}`; Debian has it in {package}"
    try:
        with Network(("a", "b")) as network, network.cut(*both("a", "b")):
            return ""
    except CanNotCut as error:
        return f"the kernel does not let us: {error}"


def main() -> int:
    """Say whether it can be done here: 0 and nothing, or 1 and why not."""
    if reason := why_not():
        print(f"Networks can not be cut here: {reason}.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
