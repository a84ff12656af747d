from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from dedupjobs import coordinator, lifecycle, registry
from dedupjobs.lifecycle import Pruned
from dedupjobs.management import asked


class Command(BaseCommand):
    help = (
        "Deletes final rows that are out of retention (retain_for, 30 days by default). Where a "
        "key is still held, a tombstone stays that answers for it. Coordinators do this by "
        "themselves every PRUNE_EVERY."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="Only count.")
        parser.add_argument("--name", help="Only this job.")
        parser.add_argument("--limit", type=int, help="Prune at most this many rows per job.")
        parser.add_argument(
            "--purge", action="store_true", help="Regardless of retention: all final rows."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        asked.at_least_one("--limit", options["limit"])
        if options["name"]:
            asked.job_name(options["name"], "--name")
        names = [options["name"]] if options["name"] else lifecycle.names()
        for name in names:
            older_than = 0.0 if options["purge"] else registry.options_of(name).retain_for
            if options["dry_run"]:
                rows = lifecycle.prunable(name, older_than=older_than)
                kept = rows.filter(lifecycle.held(name)).count()
                gone = rows.count() - kept + sum(r.count() for r in lifecycle.free_tombstones(name))
                self.stdout.write(f"{name}: {gone} would go, {kept} would become tombstones.")
                continue
            done = self._prune(name, older_than, options["limit"])
            self.stdout.write(f"{name}: {done.deleted} gone, {done.tombstones} tombstones.")

    def _prune(self, name: str, older_than: float, limit: int | None) -> Pruned:
        total, batch = Pruned(), coordinator.PRUNE_PAGE
        while True:
            left = batch if limit is None else limit - total.deleted - total.tombstones
            page = coordinator.prune_page(name, older_than=older_than, limit=min(batch, left))
            total += page
            pruned = page.deleted + page.tombstones
            if pruned < batch or pruned == left:
                return total
            if self.stdout.isatty():
                self.stdout.write(f"{name}: {total.deleted + total.tombstones} so far …")
