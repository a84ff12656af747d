from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from dedupjobs import lifecycle
from dedupjobs.management import asked
from dedupjobs.models import DuplicateCount, DuplicateSample


class Command(BaseCommand):
    help = "Shows what was turned away: counts by job and cause, the top keys, the newest samples."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--top", type=int, default=10, help="Keys and samples shown (10).")

    def handle(self, *args: Any, **options: Any) -> None:
        top = options["top"]
        asked.at_least_one("--top", top)
        using = lifecycle.alias()
        self.stdout.write("By job and cause:")
        for count in DuplicateCount.objects.using(using).order_by("-count", "name"):
            self.stdout.write(f"  {count.count:>9,}  {count.name}  {count.cause}")
        self.stdout.write("Top keys:")
        for row in lifecycle.jobs().filter(duplicates__gt=0).order_by("-duplicates")[:top]:
            self.stdout.write(f"  {row.duplicates:>9,}  {row}  (row {row.pk}, {row.status})")
        self.stdout.write("Newest:")
        samples = DuplicateSample.objects.using(using).select_related("job").order_by("-pk")
        for sample in samples[:top]:
            who = f"{sample.host}:{sample.pid} {sample.request_id}".rstrip()
            when = f"{sample.at:%Y-%m-%d %H:%M:%S} UTC"
            self.stdout.write(f"  {when}  {sample.job}  {sample.cause} by {who}")
