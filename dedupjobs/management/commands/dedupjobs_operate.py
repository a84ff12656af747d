from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from dedupjobs import lifecycle, operations
from dedupjobs.exceptions import StaleVersion
from dedupjobs.management import asked

ACTIONS = {
    "cancel": operations.cancel,
    "hold": operations.hold,
    "unhold": operations.unhold,
    "retry": operations.retry,
}


class Command(BaseCommand):
    help = "Cancels, holds, unholds or retries jobs by their rows' primary keys, and records it."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("action", choices=ACTIONS)
        parser.add_argument("pk", nargs="+", type=int)
        parser.add_argument("--by", required=True, help="Who does it.")
        parser.add_argument("--reason", default="", help="Why.")

    def handle(self, *args: Any, **options: Any) -> None:
        if not options["by"].strip():
            raise asked.refused("--by '' names nobody; say who does it.")
        failed = 0
        for pk in options["pk"]:
            row = lifecycle.jobs().filter(pk=pk).first()
            try:
                if row is None:
                    raise StaleVersion(f"{options['action']}: there is no row {pk}")
                act = ACTIONS[options["action"]]
                status = act(row, by=options["by"], reason=options["reason"])
                self.stdout.write(f"row {pk} ({row}): {row.status} → {status}")
            except StaleVersion as error:
                failed += 1
                self.stderr.write(str(error))
        if failed:
            raise CommandError(f"{failed} of {len(options['pk'])} rows were left as they are")
