"""
A work horse: a process that runs deliveries, one after the other, while its parent watches.

    parent   forks it, gives it an order, hears what it says, sees it die
    horse    takes an order, says which attempt it claims and that it has settled, answers

Both directions are pipes. Orders are marshalled, since both ends are the same program; what the
horse says is a line of JSON each. A horse answers with what makes it leave, if there is something.
"""

from __future__ import annotations

import gc
import json
import marshal
import os
import select
import signal
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from django.core.cache import caches
from django.db import connections

from dedupjobs import clock, conf, interrupts, runner
from dedupjobs.heartbeat import Heart
from dedupjobs.lifecycle import Claim
from dedupjobs.registry import Options
from dedupjobs.slate import Memory, Slate

GLANCE = 1.0  # seconds between two looks of the parent at a running horse
IDLE = 5.0  # seconds without an order after which a horse gives its databases' connections up
GOING = 5.0  # seconds that a horse told to leave may take

_SIZE = struct.Struct("=I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One delivery as a horse gets it. ``timeout``: RQ's, in seconds; -1 for none."""

    owner: str
    rq_id: str
    execution_id: str
    queue: str
    timeout: int
    data: bytes

    def packed(self) -> bytes:
        fields = (self.owner, self.rq_id, self.execution_id, self.queue, self.timeout, self.data)
        text = marshal.dumps(fields)
        return _SIZE.pack(len(text)) + text

    @classmethod
    def unpacked(cls, text: bytes) -> Order:
        owner, rq_id, execution_id, queue, timeout, data = marshal.loads(text)  # noqa: S302 - ours
        return cls(
            owner=owner,
            rq_id=rq_id,
            execution_id=execution_id,
            queue=queue,
            timeout=timeout,
            data=data,
        )


@dataclass(slots=True)
class HorseHost(runner.Host):
    """In a horse: tells the parent over a pipe which attempt runs."""

    pipe: int = -1

    def claimed(self, claim: Claim, options: Options) -> None:
        self._tell(
            fence=claim.fence,
            job_pk=claim.job_pk,
            owner=claim.owner,
            name=claim.name,
            lease=options.lease,
            timeout=options.timeout,
        )

    def settled(self, claim: Claim) -> None:
        self._tell()

    def _tell(self, **facts: Any) -> None:
        with suppress(OSError):  # the parent is gone, or asleep; the horse goes on
            os.write(self.pipe, _line(facts))

    def answer(self, *, raised: str | None, leaves: str) -> None:
        """Say that the order is done; ``raised``: what came out of it, ``leaves``: why we go."""
        rest = _line({"raised": raised, "leaves": leaves})
        while rest:
            try:
                rest = rest[os.write(self.pipe, rest) :]
            except BlockingIOError:
                select.select([], [self.pipe], [])


def _line(facts: Mapping[str, Any]) -> bytes:
    return json.dumps(facts).encode() + b"\n"


# ---- as its parent sees it


class Horse:
    """The parent's end of a horse's pipes, and its process."""

    def __init__(self, pid: int, *, orders: int = -1, answers: int) -> None:
        self.pid = pid
        self.status: int | None = None  # of wait, once it was reaped
        self._orders = orders
        self._answers = answers
        self._heard = b""
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
        rest = order.packed()
        while rest:
            rest = rest[os.write(self._orders, rest) :]

    def wait(self, seconds: float) -> None:
        """Return once it has said something or ended, ``seconds`` later at the most."""
        self._exit.wait(seconds)

    def hear(self) -> list[dict[str, Any]]:
        """Return what it has said since the last time."""
        try:
            while part := os.read(self._answers, 65536):
                self._heard += part
        except BlockingIOError:
            pass
        *lines, self._heard = self._heard.split(b"\n")
        return [json.loads(line) for line in lines]

    def dismiss(self) -> None:
        """Let it end by itself, which an idle one does at once; kill it if it does not."""
        self.close_orders()
        deadline = clock.monotonic() + GOING
        while not self.is_dead and clock.monotonic() < deadline:
            self.wait(GOING)
        if not self.is_dead:
            os.kill(self.pid, signal.SIGKILL)
            _, self.status = os.waitpid(self.pid, 0)
        self.close()

    def close_orders(self) -> None:
        if self._orders >= 0:
            os.close(self._orders)
            self._orders = -1

    def close(self) -> None:
        """Close our ends, also in another child of ours, which must not hold them open."""
        self.close_orders()
        os.close(self._answers)
        self._exit.close()


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

    def wait(self, seconds: float) -> None:
        for fd, event in self._poller.poll((seconds if self._pidfd >= 0 else 0.05) * 1000):
            if fd == self._pipe and event & select.POLLHUP:  # it would be ready for ever
                self._poller.unregister(fd)
                self._pipe = -1

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)


@dataclass(slots=True)
class Ride:
    """One delivery on a horse as the parent sees it."""

    owner: str
    horse: Horse
    heart: Heart | None = None
    running: dict[str, Any] = field(default_factory=dict)
    answer: dict[str, Any] | None = None
    killed: str = ""  # why we killed it: "timeout", "shutdown" or "stopped"
    term_sent: float | None = None

    @property
    def deadline(self) -> float | None:
        """When the horse must have ended its present attempt; never asks the database."""
        timeout = self.running.get("timeout")
        if timeout is None:
            return None
        return float(self.running["since"] + timeout + conf.get().TIMEOUT_GRACE)

    def hear(self) -> None:
        """Take in what the horse has said; an empty fact sheet says that nothing runs now."""
        for facts in self.horse.hear():
            self.rest()
            if "leaves" in facts:
                self.answer = facts
            else:
                self.running = {**facts, "since": clock.monotonic()} if facts else {}

    def beat(self) -> None:
        """Start beating for a horse that has run for a moment; short jobs need no beat."""
        facts = self.running
        due = facts and self.heart is None
        if due and clock.monotonic() - facts["since"] >= min(GLANCE, facts["lease"] / 6):
            self.heart = Heart(
                job_pk=facts["job_pk"],
                fence=facts["fence"],
                owner=facts["owner"],
                name=facts["name"],
                lease=facts["lease"],
            )
            self.heart.start()

    def rest(self) -> None:
        """Stop beating; the heart's connection closes before the next fork."""
        if self.heart is not None:
            self.heart.stop()
            self.heart = None


# ---- the process itself


def fork(become: Callable[[], Perform]) -> Horse:
    """Fork a horse, which first calls ``become``; no database connection may be open here."""
    orders, giving = os.pipe()
    hearing, answers = os.pipe()
    for fd in (hearing, answers):
        os.set_blocking(fd, False)
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgrp()
            os.close(giving)
            os.close(hearing)
            _serve(orders, HorseHost(pipe=answers), become())
        except BaseException:
            os._exit(1)
        os._exit(0)
    with suppress(OSError):  # whoever is first; a group that is killed must be the horse's own
        os.setpgid(pid, pid)
    os.close(orders)
    os.close(answers)
    return Horse(pid, orders=giving, answers=hearing)


Perform = Callable[[Order], str | None]
"""Runs an order; returns the traceback of what it has raised, if anything."""


def _serve(orders: int, host: HorseHost, perform: Perform) -> None:
    """Run orders until they end, or something makes this horse leave."""
    runner.host = host
    _open_caches()
    slate, memory = Slate.now(), Memory()
    for served, order in enumerate(_orders(orders), 1):
        host.owner, host.rq_id = order.owner, order.rq_id
        os.environ["RQ_JOB_ID"] = order.rq_id
        raised = copy_context().run(perform, order)
        os.environ.pop("RQ_JOB_ID", None)
        leaves = slate.wipe() or _worn(served, memory)
        host.answer(raised=raised, leaves=leaves)
        if leaves:
            break
    connections.close_all()


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
    while _waits_for_order(pipe, parent):
        head = _read(pipe, _SIZE.size)
        if not head:
            return
        yield Order.unpacked(_read(pipe, _SIZE.unpack(head)[0]))


def _waits_for_order(pipe: int, parent: int) -> bool:
    """Return True once there is one, or none any more; False if the parent is gone."""
    with _leaving_at_once():
        while not select.select([pipe], [], [], IDLE)[0]:
            connections.close_all()
            if os.getppid() != parent:
                return False
    return True


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


def _read(pipe: int, size: int) -> bytes:
    text = b""
    while len(text) < size and (part := os.read(pipe, size - len(text))):
        text += part
    return text


def freeze() -> None:
    """Keep what is in memory now out of the horses' garbage collections, which would copy it."""
    gc.collect()
    gc.freeze()
