from __future__ import annotations

import csv
import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from dedupjobs import lifecycle
from dedupjobs.management import asked
from dedupjobs.story import doubts
from dedupjobs.visible import line


class Command(BaseCommand):
    help = (
        "Lists what may have run twice: attempts that were LOST or TIMED_OUT and whose job "
        "succeeded in a later one, and attempts that ended after they were given up. Their effects "
        "outside the database are in doubt. Exit codes: 0, 2 for bad input."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--since", required=True, help="Those that ended since: 2h, 7d, 2026-11-29T12:00Z."
        )
        parser.add_argument("--job", help="Only this job.")
        parser.add_argument("--limit", type=int, default=10_000, help="At most so many (10,000).")
        form = parser.add_mutually_exclusive_group()
        form.add_argument("--csv", action="store_true", help="Print comma-separated values.")
        form.add_argument("--json", action="store_true", help="Print a JSON object per line.")

    def handle(self, *args: Any, **options: Any) -> None:
        since = asked.since(options["since"], lifecycle.database_now())
        name = asked.job_name(options["job"]) if options["job"] is not None else None
        asked.at_least_one("--limit", options["limit"])
        found = doubts.since(since, name=name, most=options["limit"])
        if options["csv"]:
            writer = csv.writer(self.stdout, lineterminator="\n")
            writer.writerow(doubts.COLUMNS)
            for doubt in found:
                writer.writerow(_safe(value) for value in doubt.as_dict().values())
            return
        number = 0
        for doubt in found:
            number += 1
            if options["json"]:
                self.stdout.write(json.dumps(doubt.as_dict(), ensure_ascii=False))
            else:
                self.stdout.write(
                    f"{doubt.ended_at:%Y-%m-%d %H:%M:%S} UTC  {line(doubt.job)} {line(doubt.key)}  "
                    f"row {doubt.row} attempt {doubt.attempt}: {doubt.words}"
                )
        if not options["json"]:
            self.stdout.write(f"{number} attempt(s) in doubt since {since:%Y-%m-%d %H:%M:%S} UTC.")


def _safe(value: Any) -> Any:
    """Keep a spreadsheet from taking a key for a formula."""
    if not isinstance(value, str):
        return value
    text = line(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
