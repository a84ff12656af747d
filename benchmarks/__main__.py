"""Run the benchmarks: python -m benchmarks [--help]."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import report, rounds, servers
from benchmarks.servers import CannotRun

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_CANNOT_RUN = 2
EXIT_INTERRUPTED = 130


def main() -> int:
    options = _options()
    # Whatever ends us stops what was started; a job of a shell script ignores SIGINT by default.
    for signum in SIGNALS:
        signal.signal(signum, signal.default_int_handler)
    try:
        measured = _measure(options)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        print("\nInterrupted; everything that was started is stopped.", file=sys.stderr)
        return EXIT_INTERRUPTED
    tables = report.text(measured)
    print(tables)
    if options.write:
        report.put_into(options.write, tables)
    if options.json:
        options.json.write_text(json.dumps(measured, indent=2, ensure_ascii=False) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Compare dedupjobs with plain RQ on a no-op job."
    )
    parser.add_argument(
        "--jobs",
        type=_at_least(5),
        default=40,
        metavar="N",
        help=f"jobs per drain (40); {rounds.FAST} times as many where nothing forks",
    )
    parser.add_argument(
        "--rounds", type=_at_least(1), default=3, metavar="N", help="how often to measure each (3)"
    )
    parser.add_argument(
        "--database",
        choices=servers.DATABASES,
        action="append",
        help="this one only; may be repeated (all that are installed)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="PAGE",
        help="put the tables between this page’s marks",
    )
    return parser.parse_args()


def _at_least(lowest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < lowest:
            raise argparse.ArgumentTypeError(f"at least {lowest}")
        return int(text)

    return number


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    databases = options.database or servers.installed_databases()
    measured: dict[str, Any] = {"jobs": options.jobs, "rounds": options.rounds, "databases": {}}
    with ExitStack() as stack:
        try:
            _measure_with(stack, databases, measured)
        finally:
            # An impatient second Ctrl-C must not leave servers behind.
            for signum in SIGNALS:
                signal.signal(signum, signal.SIG_IGN)
    return measured


def _measure_with(stack: ExitStack, databases: list[str], measured: dict[str, Any]) -> None:
    folder = tempfile.TemporaryDirectory(prefix="dedupjobs-bench-", ignore_cleanup_errors=True)
    home = Path(stack.enter_context(folder))
    redis_url = stack.enter_context(servers.redis_server(home))
    measured["machine"] = report.machine(redis_url)
    for name in databases:
        database = stack.enter_context(servers.database(name, home))
        found = rounds.run(name, redis_url, database, measured["jobs"], measured["rounds"])
        measured["databases"][name] = report.summary(**found)


if __name__ == "__main__":
    sys.exit(main())
