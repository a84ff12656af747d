from __future__ import annotations

import math
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from dedupjobs import clock, conf
from dedupjobs.coordinator import Coordinator, Suspect
from dedupjobs.management import asked


class Command(BaseCommand):
    help = (
        "Takes the jobs of workers that have died, so that they run again. It first watches each "
        "expired attempt for a third of its lease: one that beats meanwhile is left alone. "
        "Workers and coordinators do this by themselves; this is for when none runs."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="Say what would be taken.")
        parser.add_argument(
            "--explain",
            action="store_true",
            help="Say of every open attempt why it is (not) taken.",
        )
        parser.add_argument("--limit", type=int, help="Take at most this many.")
        parser.add_argument(
            "--loop", action="store_true", help="Go on until Ctrl-C, every RECLAIM_EVERY seconds."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        limit = options["limit"]
        asked.at_least_one("--limit", limit)
        coordinator = Coordinator()
        try:
            while True:
                self._watch(coordinator)
                taken = self._take(coordinator, options)
                verb = "would be taken" if options["dry_run"] else "taken"
                self.stdout.write(f"{taken} attempt(s) {verb}.")
                if not options["loop"]:
                    return
                clock.sleep(conf.get().RECLAIM_EVERY)
        except KeyboardInterrupt:
            self.stdout.write("Stopped.")

    def _watch(self, coordinator: Coordinator) -> None:
        """Look once, then wait until the longest lease among the expired has its third."""
        expired = [s for s in coordinator.suspects() if s.overdue > 0]
        wait = max((s.lease / 3 - s.still for s in expired), default=0.0)
        if wait > 0:
            self.stdout.write(
                f"{len(expired)} attempt(s) with an expired lease; watching them for {wait:.1f} s."
            )
            clock.sleep(wait + 0.05)

    def _take(self, coordinator: Coordinator, options: dict[str, Any]) -> int:
        if options["explain"]:
            for suspect in coordinator.suspects():
                self.stdout.write(_explained(suspect))
        if options["dry_run"]:
            doomed = [s for s in coordinator.suspects() if s.expired or s.ahead]
            for suspect in doomed[: options["limit"]]:
                self.stdout.write(f"would take {_named(suspect)}")
            return len(doomed[: options["limit"]])
        lost = coordinator.reclaim(limit=options["limit"], within=math.inf)
        for one in lost:
            self.stdout.write(f"took row {one.job_pk} ({one.name} {one.key}) → {one.status}")
        return len(lost)


def _named(suspect: Suspect) -> str:
    return f"row {suspect.job_pk} ({suspect.name} {suspect.key}), fence {suspect.fence}"


def _explained(suspect: Suspect) -> str:
    if suspect.expired or suspect.ahead:
        why = f"its lease is over and no beat came for {suspect.still:.1f} s: to be taken"
    elif suspect.overdue > 0:
        why = f"its lease is over, but it was watched only {suspect.still:.1f} s without a beat"
    else:
        why = f"its lease lives for another {-suspect.overdue:.1f} s"
    return f"{_named(suspect)}: {why}"
