from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from dedupjobs import controls, levers, lifecycle
from dedupjobs.exceptions import ControlError
from dedupjobs.levers import Wish
from dedupjobs.management import asked
from dedupjobs.models import Aim, Control, ControlKind
from dedupjobs.visible import line

EXAMPLES = """
examples:
  dedupjobs_control                                  what is in force
  dedupjobs_control pause --queue mail --for 30m --by anna --reason "SMTP is down"
  dedupjobs_control lease 5m --job shop.charge --by anna --reason "the bank is slow"
  dedupjobs_control concurrency 2 --group tenant:7 --by anna --reason "spares their API"
  dedupjobs_control filter --prefix order:9 --hold --by anna --reason "wrong prices"
  dedupjobs_control end 3 4 --by anna --reason "over"
"""
KINDS = {kind.value.replace("_", "-"): kind.value for kind in ControlKind}
AIMS = ("job", "queue", "key", "prefix", "scope", "group")


class Command(BaseCommand):
    help = (
        "Shows, adds and ends live controls, which hold in all processes within seconds: pauses, "
        "drains, filters of calls, limits, other leases and time-outs. Exit codes: 0, 2 for what "
        "makes no sense or contradicts a control in force."
    )

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        from argparse import RawDescriptionHelpFormatter  # noqa: PLC0415

        parser = super().create_parser(prog_name, subcommand, epilog=EXAMPLES, **kwargs)
        parser.formatter_class = RawDescriptionHelpFormatter
        return parser

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "what", nargs="?", default="list", metavar="list|end|KIND",
            help=f"list, end, or a kind of control: {', '.join(KINDS)}.",
        )  # fmt: skip
        parser.add_argument(
            "values", nargs="*", metavar="VALUE",
            help="Of a limit: how many; of a lease or time-out: 90, 90s, 5m, 2h (a time-out: none, "
            "too); for end: the numbers of controls.",
        )  # fmt: skip
        about = parser.add_argument_group("what it is about")
        for aim in AIMS:
            about.add_argument(f"--{aim}", metavar=aim.upper())
        about.add_argument("--all", action="store_true", help="Everything; of a list: ended, too.")
        parser.add_argument("--hold", action="store_true", help="Accept calls and hold them.")
        parser.add_argument("--for", dest="lasts", metavar="SPAN", help="How long: 30m, 2h, 7d.")
        parser.add_argument("--replace", action="store_true", help="End the one in its place.")
        parser.add_argument("--by", default="", help="Who does it.")
        parser.add_argument("--reason", default="", help="Why.")
        parser.add_argument("--list", action="store_true", help="As the word list.")
        parser.add_argument("--json", action="store_true", help="Of a list: an object per line.")

    def handle(self, *args: Any, **options: Any) -> None:
        what = "list" if options["list"] else options["what"]
        try:
            if what == "list":
                self._list(options)
            elif what == "end":
                self._end(options)
            else:
                self._add(what, options)
        except ControlError as error:
            raise asked.refused(str(error)) from None

    def _list(self, options: dict[str, Any]) -> None:
        shown = controls.table() if options["all"] else controls.in_force()
        rows = list(shown.order_by("-pk")[:1000])
        for row in reversed(rows):
            self.stdout.write(json.dumps(_plain(row)) if options["json"] else _line(row))
        if not rows and not options["json"]:
            self.stdout.write("No control is in force.")

    def _end(self, options: dict[str, Any]) -> None:
        numbers = options["values"]
        if not numbers or not all(number.isascii() and number.isdigit() for number in numbers):
            raise asked.refused("end: give the numbers of controls, as the list shows them.")
        for number in numbers:
            ended = levers.end(int(number[:18]), by=options["by"], reason=options["reason"])
            self.stdout.write(f"Ended: {_line(ended)}")

    def _add(self, what: str, options: dict[str, Any]) -> None:
        kind = KINDS[asked.one_of("control", what, KINDS, what="no such kind")]
        aim, target = _aim(options)
        wish = Wish(
            kind=kind,
            aim=aim,
            target=target,
            value=_value(kind, options["values"]),
            holds=options["hold"],
            lasts=None if options["lasts"] is None else levers.seconds_of(options["lasts"]),
        )
        facts = {"by": options["by"], "reason": options["reason"]}
        made = levers.add(wish, replaces=options["replace"], **facts)
        self.stdout.write(f"In force: {_line(made)}")


def _aim(options: dict[str, Any]) -> tuple[str, str]:
    given = [(aim, options[aim]) for aim in AIMS if options[aim] is not None]
    given += [(Aim.ALL.value, "")] if options["all"] else []
    if len(given) != 1:
        named = ", ".join(f"--{aim}" for aim, _ in given) or "nothing"
        flags = ", ".join(f"--{aim}" for aim in (*AIMS, "all"))
        raise asked.refused(f"Say what it is about by exactly one of {flags}; given: {named}.")
    return given[0]


def _value(kind: str, words: list[str]) -> float | None:
    if len(words) > 1:
        raise asked.refused(f"{line(' '.join(words), 60)}: give one value at the most.")
    return levers.value_of(kind, words[0] if words else "")


def _line(row: Control) -> str:
    until = "" if row.until is None else f" until {row.until:%Y-%m-%d %H:%M:%S} UTC"
    words = f"#{row.pk} {line(controls.spoken(row), 300)}"
    since = f"since {row.created_at:%Y-%m-%d %H:%M:%S} UTC{until}"
    text = f"{words}  {since}, by {line(row.by, 60)}: {line(row.reason, 200)}"
    if row.ended_at is not None:
        ended = f"{row.ended_at:%Y-%m-%d %H:%M:%S} UTC"
        return f"{text}  [ended {ended} {_by(row)}: {line(row.end_reason, 200)}]"
    if row.kind in (ControlKind.PAUSE, ControlKind.DRAIN):
        return f"{text}  ({levers.progress(row)})"
    return text


def _by(row: Control) -> str:
    return f"by {line(row.ended_by, 60)}" if row.ended_by else "by itself"


def _plain(row: Control) -> dict[str, Any]:
    return {
        "control": row.pk,
        "kind": row.kind,
        "aim": row.aim,
        "target": row.target,
        "value": row.value,
        "holds": row.holds,
        "by": row.by,
        "reason": row.reason,
        "since": row.created_at.isoformat(),
        "until": row.until and row.until.isoformat(),
        "ended": row.ended_at and row.ended_at.isoformat(),
        "ended_by": row.ended_by,
        "end_reason": row.end_reason,
        "now": lifecycle.database_now().isoformat(),
    }
