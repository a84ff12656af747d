from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand
from django.db import DatabaseError, InterfaceError

from dedupjobs.alerts import book, couriers, watch
from dedupjobs.models import Alert, Severity
from dedupjobs.visible import line

CODES = {Severity.WARNING: 1, Severity.CRITICAL: 2}


class Command(BaseCommand):
    help = (
        "Lists the alerts that are open, each with what to do. Exit codes: 0 none, 1 warnings, "
        "2 critical ones, 3 the database does not answer."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="Print a JSON object per line.")
        parser.add_argument("--all", action="store_true", help="Also those that were cleared.")
        parser.add_argument(
            "--tell",
            action="store_true",
            help="Raise and deliver it if no coordinator is at work; for cron, since who would "
            "tell of it otherwise is what is missing.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            if options["tell"]:
                self._tell()
            found = book.everything() if options["all"] else book.standing()
        except (DatabaseError, InterfaceError) as error:
            self.stderr.write(f"The database does not answer: {line(error, 300)}")
            raise SystemExit(3) from error
        for alert in found:
            self.stdout.write(json.dumps(_facts(alert)) if options["json"] else _words(alert))
        if not found and not options["json"]:
            self.stdout.write("No alert is open.")
        worst = max((CODES[Severity(a.severity)] for a in found if a.is_open), default=0)
        if worst:
            raise SystemExit(worst)

    def _tell(self) -> None:
        watch.Watch().round(leads=False)
        for channel in book.channels():
            couriers.deliver(channel)


def _facts(alert: Alert) -> dict[str, Any]:
    moments = {
        name: at.isoformat() if (at := getattr(alert, name)) else None
        for name in ("raised_at", "seen_at", "cleared_at")
    }
    names = ("kind", "subject", "severity", "words", "cure", "is_open", "times")
    return {**{name: getattr(alert, name) for name in names}, **moments}


def _words(alert: Alert) -> str:
    since = f" since {alert.raised_at:%Y-%m-%d %H:%M:%S} UTC" if alert.raised_at else ""
    if not alert.is_open and alert.cleared_at:
        since += f", cleared {alert.cleared_at:%Y-%m-%d %H:%M:%S} UTC"
    about = f" ({line(alert.subject)})" if alert.subject else ""
    head = f"{alert.severity.upper()}  {alert.kind}{about}{since}: {line(alert.words, 1_000)}"
    return f"{head}\n     → {line(alert.cure, 1_000)}"
