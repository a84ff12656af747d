from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from dedupjobs import keys, lifecycle, operations
from dedupjobs.exceptions import ArgumentError, StaleVersion
from dedupjobs.management import asked
from dedupjobs.visible import line


class Command(BaseCommand):
    help = (
        "Tells how a step in doubt has ended, after somebody has looked it up, and records who. "
        "The job goes on with `dedupjobs_operate unhold`."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("pk", type=int, help="The row's primary key.")
        parser.add_argument("name", help="The step's name.")
        found = parser.add_mutually_exclusive_group(required=True)
        found.add_argument(
            "--done",
            metavar="JSON",
            help="It had its effect, and this is its result: null, or what the function returns.",
        )
        found.add_argument(
            "--not-done", action="store_true", help="It had no effect; the job will run it."
        )
        parser.add_argument("--by", required=True, help="Who says so.")
        parser.add_argument("--reason", default="", help="How that was found out.")

    def handle(self, *args: Any, **options: Any) -> None:
        pk, name = options["pk"], options["name"]
        if not options["by"].strip():
            raise asked.refused("--by '' names nobody; say who says so.")
        result = None if options["not_done"] else _json(options["done"])
        row = lifecycle.jobs().filter(pk=pk).first()
        if row is None:
            raise CommandError(f"there is no row {pk}")
        try:
            operations.decide(row, name, result=result, by=options["by"], reason=options["reason"])
        except StaleVersion as error:
            raise CommandError(str(error)) from error
        found = "not done" if result is None else "done"
        self.stdout.write(f"row {pk} ({row}): step {line(name)!r} is noted as {found}")
        if row.status == "HELD":
            self.stdout.write(f"It goes on with: dedupjobs_operate unhold {pk} --by …")


def _json(text: str) -> str:
    try:
        return keys.encode_value(json.loads(text))
    except (ValueError, ArgumentError) as error:
        raise asked.refused(f"--done {line(text, 80)}: give JSON, such as null: {error}") from error
