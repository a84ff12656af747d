from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand
from django.utils import timezone

from dedupjobs import lifecycle, registry, schedule
from dedupjobs.management import asked


class Command(BaseCommand):
    help = "Lists the next slots of the jobs that run by the clock, in UTC and in TIME_ZONE."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--count", type=int, default=3, help="Slots per job (3).")

    def handle(self, *args: Any, **options: Any) -> None:
        count = options["count"]
        asked.at_least_one("--count", count)
        zone = timezone.get_default_timezone()
        now = lifecycle.database_now()
        jobs = [job for job in registry.every() if job.options.scheduled]
        for job in jobs:
            cron, every = job.options.cron, job.options.every
            when = f"cron {cron!r} in {zone}" if cron else f"every {every:g} s"
            self.stdout.write(f"{job.name}: {when}, catch_up={job.options.catch_up!r}")
            for slot in schedule.upcoming(job, now, count):
                local = slot.astimezone(zone)
                self.stdout.write(f"  {slot:%Y-%m-%d %H:%M:%S} UTC  {local:%Y-%m-%d %H:%M:%S %Z}")
        if not jobs:
            self.stdout.write("No job has every= or cron=.")
