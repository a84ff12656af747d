"""
A work horse: a process that runs deliveries, one after the other, while its parent watches.

    parent   forks it, gives it an order, hears what it says, sees it die
    horse    takes an order, shows which attempt it claims and that it has settled, answers

Orders and answers go through pipes; an answer says what makes the horse leave, if there is
something. What it shows stands in memory that both see, so that it wakes nobody.
"""

from __future__ import annotations

import marshal
import mmap
import os
import select
import signal
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any, cast

from django.core.cache import caches
from django.db import connections

from dedupjobs import clock, conf, controls, counters, interrupts, load, runner, spans
from dedupjobs.heartbeat import B, Heart, Pacemaker
from dedupjobs.lifecycle import Claim
from dedupjobs.models import Aim, ControlKind
from dedupjobs.registry import Options
from dedupjobs.slate import Memory, Slate

GLANCE = 1.0  # seconds between two looks of the parent at a running horse
IDLE = 5  # seconds without an order after which a horse gives its databases' connections up
GOING = 5.0  # seconds that a horse told to leave may take

_SIZE = struct.Struct("=I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """
    One delivery as a horse gets it. ``timeout``: RQ's, in seconds; -1 for none. ``description``:
    what the message says of itself.
    """

    owner: str
    rq_id: str
    description: str
    execution_id: str
    queue: str
    timeout: int
    data: bytes

    def packed(self) -> bytes:
        return _message({f.name: getattr(self, f.name) for f in fields(self)})


class Sheet:
    """
    What a horse's parent may know of the present attempt, in memory that both see.

    Writing it wakes nobody, unlike a pipe. The number at its head says how often it was written,
    and so which half is valid; the other one is written next, so that a horse that dies in the
    middle leaves the last whole sheet.
    """

    HALF = 2048
    _HEAD = struct.Struct("=Q")
    _PART = struct.Struct("=II")  # length, checksum

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._HEAD.size + 2 * self.HALF)

    def write(self, facts: dict[str, Any]) -> None:
        text = marshal.dumps(facts)
        (count,) = self._HEAD.unpack_from(self._memory)
        start = self._start(count + 1)
        self._PART.pack_into(self._memory, start, len(text), zlib.crc32(text))
        start += self._PART.size
        self._memory[start : start + len(text)] = text
        self._HEAD.pack_into(self._memory, 0, count + 1)

    def read(self) -> dict[str, Any]:
        while True:
            (count,) = self._HEAD.unpack_from(self._memory)
            if count == 0:
                return {}
            start = self._start(count)
            length, checksum = self._PART.unpack_from(self._memory, start)
            start += self._PART.size
            text = self._memory[start : start + length]
            if zlib.crc32(text) == checksum:  # else it was written twice meanwhile
                return cast(dict[str, Any], marshal.loads(text))  # noqa: S302 - our own

    def close(self) -> None:
        self._memory.close()

    def _start(self, count: int) -> int:
        return self._HEAD.size + count % 2 * self.HALF


@dataclass(slots=True)
class HorseHost(runner.Host):
    """In a horse: shows its parent which attempt runs."""

    sheet: Sheet = field(default_factory=Sheet)
    pacemaker: Pacemaker = field(default_factory=Pacemaker)

    def claimed(
        self, claim: Claim, options: Options, *, since: float | None = None, alone: bool = True
    ) -> None:
        self.sheet.write(
            {
                "fence": claim.fence,
                "job_pk": claim.job_pk,
                "owner": claim.owner,
                "name": claim.name,
                "job": controls.canonical(claim.name),
                "lease": options.lease,
                "timeout": options.timeout,
                # One clock for all processes of a machine.
                "since": clock.monotonic() if since is None else since,
                "alone": alone,
            }
        )

    def settled(self, claim: Claim) -> None:
        self.sheet.write({})

    def beating(self, heart: B) -> AbstractContextManager[B]:
        return self.pacemaker.beating(heart)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a horse says of an order. ``raised``: a traceback; ``leaves``: why this one goes."""

    raised: str | None
    leaves: str


# ---- as its parent sees it


class Horse:
    """The parent's end of a horse's pipes, and its process."""

    def __init__(self, pid: int, sheet: Sheet, *, orders: int = -1, answers: int = -1) -> None:
        self.pid = pid
        self.sheet = sheet
        self.status: int | None = None  # of wait, once it was reaped
        self._orders = orders
        self._answers = answers
        self._exit = Exit(pid, answers)

    @property
    def is_dead(self) -> bool:
        """Reap it if it has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is not None

    def give(self, order: Order) -> None:
        """Hand an order over; raises BrokenPipeError if nobody takes it any more."""
        _write(self._orders, order.packed())

    def wait(self, seconds: float) -> Answer | None:
        """Return its answer, or None if it has ended or ``seconds`` have passed."""
        if not self._exit.wait(seconds):
            return None
        text = _read_message(self._answers)
        return Answer(**marshal.loads(text)) if text else None  # noqa: S302 - our own

    def dismiss(self) -> None:
        """Let it end by itself, which an idle one does at once; kill it if it does not."""
        self._close_orders()
        deadline = clock.monotonic() + GOING
        while not self.is_dead and clock.monotonic() < deadline:
            self._exit.wait(GOING)
        if not self.is_dead:
            os.kill(self.pid, signal.SIGKILL)
            _, self.status = os.waitpid(self.pid, 0)
        self.close()

    def close(self) -> None:
        """Close our ends, also in another child of ours, which must not hold them open."""
        self._close_orders()
        if self._answers >= 0:
            os.close(self._answers)
        self._exit.close()
        self.sheet.close()

    def _close_orders(self) -> None:
        if self._orders >= 0:
            os.close(self._orders)
            self._orders = -1


class Exit:
    """
    Waits for the end of a process, or for what it says on a pipe.

    By a pidfd where the system has them; elsewhere by waiting in small steps.
    """

    def __init__(self, pid: int, pipe: int = -1) -> None:
        self._pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
        self._pipe = pipe
        self._poller = select.poll()
        for fd in (self._pidfd, pipe):
            if fd >= 0:
                self._poller.register(fd, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Return whether there is something to read, after ``seconds`` at the most."""
        says = False
        for fd, event in self._poller.poll((seconds if self._pidfd >= 0 else 0.05) * 1000):
            if fd != self._pipe:
                continue
            says = bool(event & select.POLLIN)
            if event & select.POLLHUP and not says:  # it would be ready for ever
                self._poller.unregister(fd)
                self._pipe = -1
        return says

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)


@dataclass(slots=True)
class Ride:
    """One delivery on a horse as the parent sees it."""

    owner: str
    horse: Horse
    begun: float
    heart: Heart | None = None
    answer: Answer | None = None
    killed: str = ""  # why we killed it: "timeout", "shutdown" or "stopped"
    term_sent: float | None = None
    left: dict[str, Any] = field(default_factory=dict)  # what ran when the horse was let go

    @property
    def running(self) -> dict[str, Any]:
        """What is known of the present attempt; nothing if none runs now."""
        facts = self.horse.sheet.read()
        return facts if facts.get("owner", "").startswith(self.owner) else {}

    def acquits(self, claim: Claim) -> bool:
        """Whether it is known that another attempt of the batch has brought the horse down."""
        known = self.left.get("alone", False) or self.killed == "timeout"
        return bool(known and self.left and self.left["fence"] != claim.fence)

    @property
    def deadline(self) -> float | None:
        """When the horse must have ended its present attempt; never asks the database."""
        facts = self.running
        if not facts:
            return None
        # What a person has set since, by what this process's own beats have read.
        rule = controls.known().at(ControlKind.TIMEOUT, Aim.JOB, facts["job"])
        timeout = rule.value if rule else facts["timeout"]
        if timeout is None:
            return None
        return float(facts["since"] + timeout + conf.get().TIMEOUT_GRACE)

    def beat(self) -> None:
        """Beat for a horse that has run for a moment; short jobs need no beat."""
        facts = self.running
        if self.heart is not None and self.heart.fence != facts.get("fence"):
            self.rest()
        due = facts and self.heart is None
        if due and clock.monotonic() - facts["since"] >= min(GLANCE, facts["lease"] / 6):
            self.heart = Heart(
                job_pk=facts["job_pk"],
                fence=facts["fence"],
                owner=facts["owner"],
                name=facts["name"],
                lease=facts["lease"],
                tells=False,
                kin=self.owner if facts["owner"] != self.owner else "",
            )
            self.heart.start()

    def rest(self) -> None:
        """Stop beating; the heart's connection closes before the next fork."""
        if self.heart is not None:
            self.heart.stop()
            self.heart = None


# ---- the process itself


Perform = Callable[[Order], str | None]
"""Runs an order; returns the traceback of what it has raised, if anything."""


def fork(become: Callable[[], Perform]) -> Horse:
    """Fork a horse, which first calls ``become``; no database connection may be open here."""
    sheet = Sheet()
    orders, giving = os.pipe()
    hearing, answers = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgrp()
            os.close(giving)
            os.close(hearing)
            _serve(orders, answers, _host(sheet), become())
        except BaseException:
            os._exit(1)
        os._exit(0)
    with suppress(OSError):  # whoever is first; a group that is killed must be the horse's own
        os.setpgid(pid, pid)
    os.close(orders)
    os.close(answers)
    return Horse(pid, sheet, orders=giving, answers=hearing)


def _host(sheet: Sheet) -> HorseHost:
    spans.stay()
    return HorseHost(sheet=sheet, pays_when_idle=True)


def _serve(orders: int, answers: int, host: HorseHost, perform: Perform) -> None:
    """Run orders until they end, or something makes this horse leave."""
    runner.host = host
    _open_caches()
    slate, memory = Slate.now(), Memory()
    for served, order in enumerate(_orders(orders), 1):
        host.owner, host.rq_id = order.owner, order.rq_id
        host.description = order.description
        os.environ["RQ_JOB_ID"] = order.rq_id
        raised = copy_context().run(perform, order)
        os.environ.pop("RQ_JOB_ID", None)
        leaves = slate.wipe() or _worn(served, memory)
        clock.sleep(load.rest())
        _write(answers, _message({"raised": raised, "leaves": leaves}))
        if leaves:
            break
    _tell_what_is_owed()
    connections.close_all()


def _tell_what_is_owed() -> None:
    counters.pay()
    spans.leave()


def _open_caches() -> None:
    # What a job's context opens is gone with it; what is there before is shared by all.
    for alias in caches.settings:
        with suppress(Exception):  # a wrong cache is a check's business, not the horse's end
            caches[alias]


def _worn(served: int, memory: Memory) -> str:
    settings = conf.get()
    if interrupts.shutting_down.is_set():
        return "told to end"
    if settings.HORSE_MEMORY and (grown := memory.grown()) > settings.HORSE_MEMORY:
        return f"it has grown by {grown:,} bytes"
    return f"it has run {served:,} deliveries" if served >= settings.HORSE_JOBS else ""


def _orders(pipe: int) -> Iterator[Order]:
    parent = os.getppid()
    while _waits_for_order(pipe, parent) and (text := _read_message(pipe)):
        yield Order(**marshal.loads(text))  # noqa: S302 - our own


def _waits_for_order(pipe: int, parent: int) -> bool:
    """Return True once there is one, or none any more; False if this horse is to end."""
    with _leaving_at_once():
        if interrupts.shutting_down.is_set():  # it came after the last look
            return False
        for second in count(1):  # of idleness
            if select.select([pipe], [], [], 1.0)[0]:
                return True
            if second == 1:
                _tell_what_is_owed()
            elif second == IDLE:
                connections.close_all()
            if os.getppid() != parent:
                return False
    raise AssertionError("the seconds never end")


@contextmanager
def _leaving_at_once() -> Iterator[None]:
    """While there is nothing to lose, a SIGTERM ends this process."""

    def leave(*_: Any) -> None:
        os._exit(0)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


# ---- messages in a pipe; both ends are one program, so marshal does


def _message(fields: dict[str, Any]) -> bytes:
    text = marshal.dumps(fields)
    return _SIZE.pack(len(text)) + text


def _write(pipe: int, text: bytes) -> None:
    while text:
        text = text[os.write(pipe, text) :]


def _read_message(pipe: int) -> bytes:
    """Return a message, or nothing if the other end is gone."""
    head = _read(pipe, _SIZE.size)
    return _read(pipe, _SIZE.unpack(head)[0]) if len(head) == _SIZE.size else b""


def _read(pipe: int, size: int) -> bytes:
    text = b""
    while len(text) < size and (part := os.read(pipe, size - len(text))):
        text += part
    return text
