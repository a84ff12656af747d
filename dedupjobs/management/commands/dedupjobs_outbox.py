from __future__ import annotations

from argparse import ArgumentParser
from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from dedupjobs import conf, lifecycle, traffic, turns
from dedupjobs.management import asked
from dedupjobs.outbox import relay, shelf
from dedupjobs.story.spoken import span
from dedupjobs.traffic import Outgoing


class Command(BaseCommand):
    help = (
        "Shows what waits for each target of the outbox (status), sends what waits here and now "
        "(relay), or lets delivered events go out once more (replay), under the ids that they had: "
        "consumers that keep marks apply none twice."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("action", choices=("status", "relay", "replay"))
        parser.add_argument("--target", metavar="NAME", help="Only this target.")
        parser.add_argument(
            "--since",
            help="replay: delivered since then (90m, 2h, 2026-11-29T12:00Z); all, if not.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        known = sorted({*conf.outbox().targets, *shelf.targets()})
        if options["target"]:
            asked.one_of("--target", options["target"], known, what="no such target")
        names = [options["target"]] if options["target"] else known
        if options["action"] == "relay":
            self._relay([name for name in names if name in conf.outbox().targets])
            return
        now = lifecycle.database_now()
        if options["action"] == "status":
            for seen in traffic.outgoing():
                if seen.target in names:
                    self.stdout.write(_words(seen, now))
            return
        since = asked.since(options["since"], now) if options["since"] else None
        for name in names:
            with turns.anybodys(turns.sending(name)):
                number = shelf.again(name, since=since)
            self.stdout.write(f"{name}: {number} events go out once more.")

    def _relay(self, names: list[str]) -> None:
        done = {name: relay.relay_one(name) for name in names}
        self.stdout.write(f"{sum(sent for sent, _ in done.values())} events delivered.")
        away = [
            f"Target {name} takes no events, they wait: {why}"
            for name, (_, why) in done.items()
            if why
        ]
        if away:
            raise CommandError("\n".join(away))


def _words(seen: Outgoing, now: datetime) -> str:
    age = f", the oldest for {span((now - seen.oldest).total_seconds())}" if seen.oldest else ""
    gone = "" if seen.target in conf.outbox().targets else " (no target of this name in settings)"
    parts = f"{seen.retrying} failed and are tried again, {seen.behind} are behind one of these"
    return f"{seen.target}{gone}: {seen.due} to be delivered{age}; {parts}; {seen.dead} dead."
