from __future__ import annotations

import json
from argparse import ArgumentParser
from datetime import UTC, datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone, translation

from dedupjobs.management import asked
from dedupjobs.models import ProcessedJob
from dedupjobs.story import telling
from dedupjobs.story.telling import Story
from dedupjobs.visible import line

MOST = 20  # rows of one key that are listed


class Command(BaseCommand):
    help = (
        "Tells the whole story of one job, newest last, and why it is where it is. Exit codes: 0, "
        "1 nothing has this key or id, 2 it can not be answered as it was asked."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "what", metavar="KEY|ID", help="A key, the row's id, its key hash or its RQ id."
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def handle(self, *args: Any, **options: Any) -> None:
        rows = telling.find(options["what"], most=MOST)
        if not rows:
            near = ", ".join(line(key) for key in telling.near(options["what"]))
            hint = f" Keys that begin like it: {near}." if near else ""
            words = f"No job has the key or id {line(options['what'])!r}.{hint}"
            raise CommandError(words)
        if len(rows) > 1:
            raise asked.refused(_choice(rows))
        with translation.override("en"), timezone.override(UTC):
            story = telling.tell(rows[0])
        if options["json"]:
            self.stdout.write(json.dumps(story.as_dict(), ensure_ascii=False))
        else:
            self._write(story)

    def _write(self, story: Story) -> None:
        row = story.row
        write = self.stdout.write
        write(f"{line(row.name)} {line(row.key)}")
        write(f"  row {row.pk}, queue {line(row.queue)}, key hash {row.key_hash[:16]}…")
        scope = f", scope {line(row.scope)}" if row.scope else ""
        write(
            f"  {row.status}, version {row.version}, generation {row.generation}, "
            f"{row.attempts} attempt(s), {row.duplicates} duplicate(s){scope}"
        )
        if story.left_out:
            write(f"  … {story.left_out} earlier attempts are left out")
        for event in story.events:
            write(f"  {_at(event.at)}  {line(event.words, 500)}")
        for store, words in story.stores.items():
            write(f"{store}: {line(words, 500)}")
        write(f"Why: {line(story.why.now, 1_000)}")
        write(f"Next: {line(story.why.next, 1_000)}")


def _at(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03} UTC"


def _choice(rows: list[ProcessedJob]) -> str:
    lines = [
        f"  {row.pk}  {line(row.name)}  {row.status}"
        + (f"  {line(row.scope)}" if row.scope else "")
        for row in rows
    ]
    return "\n".join(["Several jobs have this key. Ask for one of their ids:", *lines])
