"""
Who does what when: the provider, the shoppers and the faults at the same time, a live line
meanwhile, and then rest.
"""

from __future__ import annotations

import queue
import shutil
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from django.db.models import Count

from dedupjobs.models import ACTIVE, ProcessedJob, Status
from project.demo import faults, ledger, plan
from project.demo.faults import Faults
from project.demo.replay import Answer, Provider, Shoppers, recorded_deliveries
from project.demo.stack import Stack

REDRAW_SECONDS = 0.25  # of the one line on a terminal
PLAIN_LINE_SECONDS = 1.0


@dataclass(slots=True, kw_only=True)
class Story:
    """Play it once; then ``answers`` and ``faults`` tell what happened."""

    stack: Stack
    answers: list[Answer] = field(default_factory=list)
    events: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    stop: threading.Event = field(default_factory=threading.Event)
    faults: Faults = field(init=False)

    def __post_init__(self) -> None:
        self.faults = Faults(self.stack, self.events.put, self.stop)

    def play(self) -> None:
        deliveries = recorded_deliveries()
        provider = Provider(
            shop_url=self.stack.shop_url,
            secret=self.stack.webhook_secret,
            answers=self.answers,
            stop=self.stop,
        )
        shoppers = Shoppers(shop_url=self.stack.shop_url, answers=self.answers, stop=self.stop)
        line = LiveLine(len(deliveries), self)
        with ThreadPoolExecutor() as cast:
            try:
                acts = [
                    cast.submit(provider.replay, deliveries),
                    cast.submit(shoppers.shop, deliveries[-1].at_ms / 1000),
                    cast.submit(self.faults.strike),
                ]
                self._watch(acts, line)
                self._settle(line)
            finally:
                self.stop.set()  # or the threads would play on after Ctrl-C
        line.end()

    def _watch(self, acts: list[Future[None]], line: LiveLine) -> None:
        while not all(act.done() for act in acts):
            self._tick(line)
            for act in acts:
                if act.done():
                    act.result()

    def _tick(self, line: LiveLine) -> None:
        time.sleep(REDRAW_SECONDS)
        for sentence in self.stack.supervise():
            self.events.put(sentence)
        line.draw()

    def _settle(self, line: LiveLine) -> None:
        """Wait until no job is active and no event on its way; what is by then counts as lost."""
        deadline = time.monotonic() + plan.SETTLE_WITHIN_SECONDS
        active = ProcessedJob.objects.filter(status__in=ACTIVE)
        while active.exists() or ledger.is_behind(self.stack.ledger):
            if time.monotonic() > deadline:
                return
            self._tick(line)


class LiveLine:
    """One line that renews itself on a terminal; elsewhere a line every second."""

    def __init__(self, deliveries: int, story: Story) -> None:
        self.deliveries = deliveries
        self.story = story
        self.started = time.monotonic()
        self.terminal = sys.stdout.isatty()
        self.drawn_at = 0.0
        self.charges = 0

    def draw(self) -> None:
        while not self.story.events.empty():
            self._print(f"  {self._clock()}  >>> {self.story.events.get()}")
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{self._text()[:width]}", end="", flush=True)
        elif time.monotonic() - self.drawn_at >= PLAIN_LINE_SECONDS:
            self.drawn_at = time.monotonic()
            self._print(self._text())

    def end(self) -> None:
        self._print(self._text())

    def _print(self, text: str) -> None:
        print(f"\r\033[K{text}" if self.terminal else text, flush=True)

    def _text(self) -> str:
        """What fits into 80 columns."""
        sent = sum(answer.origin == "webhook" for answer in self.story.answers)
        with suppress(ConnectionError):  # you may have killed the service
            self.charges = len(faults.charges())
        counts = ProcessedJob.objects.values_list("status").annotate(Count("pk"))
        jobs = dict(counts.order_by())
        waiting = jobs.get(Status.PENDING, 0) + jobs.get(Status.RETRYING, 0)
        return (
            f"  {self._clock()}  deliveries {sent:>3}/{self.deliveries}"
            f"  charges {self.charges:>3}"
            f"  jobs {waiting:>3} waiting {jobs.get(Status.RUNNING, 0)} running"
            f" {jobs.get(Status.SUCCEEDED, 0):>3} done"
        )

    def _clock(self) -> str:
        return f"{time.monotonic() - self.started:5.1f} s"
