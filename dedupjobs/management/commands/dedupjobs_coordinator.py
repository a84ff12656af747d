from __future__ import annotations

import signal
import threading
from typing import Any

from django.core.management.base import BaseCommand

from dedupjobs import hardening, vitals
from dedupjobs.coordinator import Coordinator


class Command(BaseCommand):
    help = (
        "Hands over due jobs, recovers jobs of dead workers and re-sends lost messages, until "
        "SIGTERM or Ctrl-C. Needed beside stock RQ workers; a DedupWorker brings its own. Any "
        "number may run."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        stop = threading.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: stop.set())

        def wait(seconds: float) -> bool:
            vitals.sign()
            return stop.wait(seconds)

        if error := vitals.sign():
            self.stderr.write(f"Who watches this process will miss it: {error}")
        hardening.harden_connections()
        self.stdout.write("Coordinator started.")
        Coordinator().run(wait)
        self.stdout.write("Coordinator stopped.")
