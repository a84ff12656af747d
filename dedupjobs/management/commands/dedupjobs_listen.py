from __future__ import annotations

import json
import signal
import threading
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils.module_loading import import_string

from dedupjobs import cache, clock, invalidation
from dedupjobs.invalidation import Message
from dedupjobs.management import asked


class Command(BaseCommand):
    help = (
        "Follows the changes of all jobs as they are announced, until Ctrl-C. Connects again by "
        'itself; what was told meanwhile is missed, and the line "connected" says where.'
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="Print a JSON object per line.")
        parser.add_argument(
            "--exec",
            action="append",
            default=[],
            metavar="PATH",
            help="Call this function (dotted path) with each Message; may be given several times.",
        )
        parser.add_argument("--limit", type=int, help="End after this many messages.")

    def handle(self, *args: Any, **options: Any) -> None:
        if not cache.is_on():
            raise CommandError('There is no status cache: DEDUPJOBS["STATUS_CACHE"] is None.')
        asked.at_least_one("--limit", options["limit"])
        self._as_json = options["json"]
        handlers = [_imported(path) for path in options["exec"]]
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        heard = 0
        for raw in invalidation.messages(stopped.is_set, poll=0.2):
            if raw is None:
                self._say({"event": "connected", "channel": invalidation.channel()})
                continue
            message = invalidation.handle(raw)
            if message is None:
                continue
            self._say(asdict(message))
            for handler in handlers:
                self._call(handler, message)
            heard += 1
            if heard == options["limit"]:
                stopped.set()
        self.stderr.write(f"Ended. {dict(invalidation.counts)}")

    def _call(self, handler: Callable[[Message], Any], message: Message) -> None:
        try:
            handler(message)
        except Exception as error:
            self.stderr.write(f"{handler.__name__}: {type(error).__name__}: {error}")

    def _say(self, facts: dict[str, Any]) -> None:
        if self._as_json:
            self.stdout.write(json.dumps(facts))
        elif facts["event"] == "connected":
            self.stdout.write(f"{clock.utcnow():%H:%M:%S} connected to {facts['channel']}")
        else:
            self.stdout.write(
                f"{clock.utcnow():%H:%M:%S} {facts['name']} {facts['key'][:12]}… is now "
                f"{facts['event']} (version {facts['version']})"
            )
        self.stdout.flush()


def _imported(path: str) -> Callable[[Message], Any]:
    try:
        handler = import_string(path)
    except ImportError as error:
        raise asked.refused(f"--exec {path}: {error}.") from error
    if not callable(handler):
        raise asked.refused(f"--exec {path}: a {type(handler).__name__} can not be called.")
    return handler  # type: ignore[no-any-return]
