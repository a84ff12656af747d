from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand

from dedupjobs import diagnosis
from dedupjobs.visible import line

CODES = {diagnosis.OK: 0, diagnosis.WARNING: 1, diagnosis.FAILURE: 2}


class Command(BaseCommand):
    help = (
        "Examines the installation from the inside: settings, jobs, serializers, migrations, "
        "indexes, pools, clocks, Redis, coordinator, workers, versions. Each finding has its cure. "
        "Exit codes: 0 all is well, 1 warnings, 2 errors."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def handle(self, *args: Any, **options: Any) -> None:
        found = diagnosis.examine()
        worst = max((CODES[finding.level] for finding in found), default=0)
        if options["json"]:
            facts = {"code": worst, "findings": [asdict(finding) for finding in found]}
            self.stdout.write(json.dumps(facts))
        else:
            for finding in found:
                mark = "✓" if finding.level == diagnosis.OK else finding.level.upper()
                self.stdout.write(f"{mark}  {finding.about}: {line(finding.words, 1_000)}")
                if finding.cure:
                    self.stdout.write(f"     → {line(finding.cure, 1_000)}")
        if worst:
            raise SystemExit(worst)
