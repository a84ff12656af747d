from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db.models import QuerySet

from dedupjobs import cache, conf, invalidation, lifecycle
from dedupjobs.clock import DbNow
from dedupjobs.invalidation import Reached
from dedupjobs.lifecycle import Change
from dedupjobs.management import asked
from dedupjobs.models import ProcessedJob, Status


class Command(BaseCommand):
    help = (
        "Makes all processes forget what they know of jobs: deletes their entries of the status "
        "cache, tells listeners, and deletes the application's entries that the jobs name "
        "(invalidates=). Reads the rows a page at a time; the server's keys are never scanned."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--key", help="Jobs with this readable key.")
        parser.add_argument("--name", help="Jobs of this name.")
        parser.add_argument("--scope", help="Jobs of this tenant.")
        parser.add_argument("--status", help=f"Jobs in this status: {', '.join(Status)}.")
        parser.add_argument(
            "--older-than", metavar="SPAN", help="Jobs that ended before that: 90, 10m, 2h, 7d."
        )
        parser.add_argument("--all", action="store_true", help="All jobs.")
        parser.add_argument("--dry-run", action="store_true", help="Only count the jobs.")
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def handle(self, *args: Any, **options: Any) -> None:
        if not cache.is_on():
            raise CommandError('There is no status cache: DEDUPJOBS["STATUS_CACHE"] is None.')
        rows = self._chosen(options)
        if options["dry_run"]:
            self._report(options, jobs=rows.count(), reached=None)
            return
        seen, reached = 0, Reached()
        for page in _pages(rows):
            reached += invalidation.announce(
                [Change.of(row, row.status, version=row.version + 1) for row in page],
                patient=True,
            )
            if reached.owed:
                raise CommandError(
                    f"Redis did not take the invalidation of {reached.owed} jobs ({seen} were "
                    "done). Run the command again once it answers."
                )
            seen += len(page)
            if self.stdout.isatty() and not options["json"]:
                self.stdout.write(f"\r{seen} jobs …", ending="")
        self._report(options, jobs=seen, reached=reached)

    def _chosen(self, options: dict[str, Any]) -> QuerySet[ProcessedJob]:
        filters = {name: options[name] for name in ("key", "name", "scope", "status")}
        given = {name: value for name, value in filters.items() if value is not None}
        if options["older_than"] is not None:
            age = asked.lasting("--older-than", str(options["older_than"]))
            given["finished_at__lt"] = DbNow(-age)
        if bool(given) == options["all"]:
            raise asked.refused(
                "Say which jobs: --key, --name, --scope, --status, --older-than; or --all."
            )
        if "status" in given:
            asked.one_of("--status", given["status"], Status.values)
        if "name" in given:
            asked.job_name(given["name"], "--name")
        chosen = lifecycle.jobs().filter(**given)
        if "key" in given and not chosen.exists():
            raise CommandError(f"--key {given['key']}: no job has this key")
        return chosen

    def _report(self, options: dict[str, Any], *, jobs: int, reached: Reached | None) -> None:
        if options["json"]:
            facts: dict[str, Any] = {"jobs": jobs, "dry_run": reached is None}
            if reached is not None:
                facts |= {"entries": reached.entries, "listeners": reached.listeners}
            self.stdout.write(json.dumps(facts))
        elif reached is None:
            self.stdout.write(f"{jobs} job(s) would be invalidated.")
        else:
            self.stdout.write(
                f"{jobs} job(s): {reached.entries} entries deleted, {reached.listeners} listeners "
                "told. (That is no proof that all have heard: without it they forget after "
                f"{conf.get().L1_TTL:g} s.)"
            )


def _pages(rows: QuerySet[ProcessedJob]) -> Iterator[list[ProcessedJob]]:
    last = 0
    while True:
        found = rows.filter(pk__gt=last).defer("result", "error", "rerun_args").order_by("pk")
        page = list(found[: invalidation.PAGE])
        if page:
            yield page
            last = page[-1].pk
        if len(page) < invalidation.PAGE:
            return
