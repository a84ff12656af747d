from __future__ import annotations

import signal
import threading
from argparse import ArgumentParser
from functools import partial
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import connections
from redis.exceptions import RedisError

from dedupjobs import clock, conf, vitals
from dedupjobs.exceptions import Unavailable
from dedupjobs.inbox.reading import Reader
from dedupjobs.management import asked


class Command(BaseCommand):
    help = (
        "Takes events in from Redis streams, as DEDUPJOBS['INBOX'] says, until SIGTERM or Ctrl-C, "
        "which let the message at hand end. Any number may run."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--consumer",
            action="append",
            metavar="NAME",
            help="Only this one; may be given several times. All, if left out.",
        )
        parser.add_argument(
            "--once", action="store_true", help="End when nothing is left to take for now."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        known = list(conf.inbox().consumers)
        for name in options["consumer"] or ():
            asked.one_of("--consumer", name, known, what="no such consumer")
        names = options["consumer"] or known
        if not names:
            raise asked.refused(
                'No consumer. Name one in settings: DEDUPJOBS["INBOX"] = '
                '{"CONSUMERS": {"ledger": {"stream": "orders"}}}.'
            )
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        readers = [Reader(name, stop=partial(_stops, stop)) for name in names]
        if options["once"]:
            self._once(readers)
            return
        if error := vitals.sign():
            self.stderr.write(f"Who watches this process will miss it: {error}")
        self.stdout.write(f"Consumer started: {', '.join(names)}.")
        self.stdout.flush()
        joins = [
            clock.start(partial(_run, reader, stop), name=f"dedupjobs-consume-{reader.consumer}")
            for reader in readers[1:]
        ]
        readers[0].run(stop.wait)
        stop.set()
        for join in joins:
            join(conf.get().SHUTDOWN_GRACE)
        self.stdout.write("Consumer stopped.")

    def _once(self, readers: list[Reader]) -> None:
        for reader in readers:
            total = 0
            try:
                while done := sum(reader.round(block=0.05).values()):
                    total += done
            except (RedisError, OSError, Unavailable) as error:
                raise CommandError(
                    f"Consumer {reader.consumer} can not read stream {reader.stream!r}: {error}"
                ) from error
            reader.leave()
            self.stdout.write(f"{reader.consumer}: {total} messages.")


def _stops(stop: threading.Event) -> bool:
    vitals.sign()
    return stop.is_set()


def _run(reader: Reader, stop: threading.Event) -> None:
    try:
        reader.run(stop.wait)
    finally:
        connections.close_all()
