"""Commands with flags that can not be meant: a sentence and an exit code of 2."""

from __future__ import annotations

import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest
from django.core.management import get_commands, load_command_class
from django.core.management.base import CommandError

pytestmark = pytest.mark.django_db

OURS = sorted(name for name, app in get_commands().items() if app == "dedupjobs")
WRONG = {
    "dedupjobs_duplicates --top 0": "--top 0: give a whole number of at least 1",
    "dedupjobs_duplicates --top many": "argument --top: invalid int value: 'many'",
    "dedupjobs_schedule --count -1": "--count -1: give a whole number of at least 1",
    "dedupjobs_reclaim --limit 0": "--limit 0: give a whole number of at least 1",
    "dedupjobs_prune --limit -3": "--limit -3: give a whole number of at least 1",
    "dedupjobs_prune --name testapp.recrod": "no such job. Did you mean testapp.record?",
    "dedupjobs_prune --name zzz": "--name zzz: no such job. Known are: ",
    "dedupjobs_operate explode 1 --by ada": "invalid choice: 'explode'",
    "dedupjobs_operate cancel 1": "the following arguments are required: --by",
    "dedupjobs_operate cancel one --by ada": "invalid int value: 'one'",
    "dedupjobs_operate cancel 1 --by ": "--by '' names nobody; say who does it",
    "dedupjobs_listen --limit 0": "--limit 0: give a whole number of at least 1",
    "dedupjobs_listen --exec no.such.function": "--exec no.such.function: No module named 'no'",
    "dedupjobs_listen --exec tests.app.heard.NOTHING": "a str can not be called",
    "dedupjobs_doubts --since soon": "--since 'soon': give a time span such as 90m",
    "dedupjobs_doubts --since 2h --limit 0": "--limit 0: give a whole number of at least 1",
    "dedupjobs_doubts --since 2h --job testapp.recrod": "Did you mean testapp.record?",
    "dedupjobs_doubts --since 2h --csv --json": "not allowed with argument --csv",
    "dedupjobs_stats --watch 0": "--watch 0: give from 0.1 to",
    "dedupjobs_control pasue --queue default": "no such kind. Did you mean pause?",
    "dedupjobs_control pause --queue defalt --by a --reason b": "Did you mean default?",
    "dedupjobs_control pause --job testapp.recrod --by a --reason b": "Did you mean testapp.record",
    "dedupjobs_control pause --by a --reason b": "exactly one of --job, --queue",
    "dedupjobs_control pause --all --by a --reason b": "pause can be about job, queue, not about a",
    "dedupjobs_control pause --queue default --reason b": "Say who does it",
    "dedupjobs_control pause --queue default --by a": "Say why",
    "dedupjobs_control pause 3 --queue default --by a --reason b": "this kind takes no value",
    "dedupjobs_control pause --queue default --hold --by a --reason b": "nothing to hold",
    "dedupjobs_control pause --queue default --for never --by a --reason b": "give a number, or",
    "dedupjobs_control pause --queue default --for 0 --by a --reason b": "1 second to 366 days",
    "dedupjobs_control lease --job testapp.record --by a --reason b": "a lease must end",
    "dedupjobs_control lease 0.01 --job testapp.record --by a --reason b": "0.1 s to 366 days",
    "dedupjobs_control lease 0 --job testapp.record --by a --reason b": (
        "0 s: give 0.1 s to 366 days, such as 90, 90s, 5m, 2h."
    ),
    "dedupjobs_control lease soon --job testapp.record --by a --reason b": "or a time such as 90s",
    "dedupjobs_control pause soon --queue default --by a --reason b": "this kind takes no value",
    "dedupjobs_control concurrency two --job testapp.record --by a --reason b": (
        "'two': give a whole number from 1 to 1,000,000."
    ),
    "dedupjobs_control max-attempts 2m --job testapp.record --by a --reason b": (
        "'2m': give a whole number from 1 to 1,000,000."
    ),
    "dedupjobs_control timeout --job testapp.record --by a --reason b": "Give a time such as 90s",
    "dedupjobs_control concurrency 0 --job testapp.record --by a --reason b": "pause it",
    "dedupjobs_control concurrency 1.5 --job testapp.record --by a --reason b": "a whole number",
    "dedupjobs_control max-attempts --job testapp.record --by a --reason b": "a whole number",
    "dedupjobs_control filter --prefix order:* --by a --reason b": "with wildcards",
    "dedupjobs_control filter --key a --prefix b --by a --reason b": "given: --key, --prefix",
    "dedupjobs_control filter --key {order} --by a --reason b": "is a template",
    "dedupjobs_control end --by a --reason b": "give the numbers of controls",
    "dedupjobs_control end 4711 --by a --reason b": "There is no control 4711",
    "dedupjobs_invalidate": "Say which jobs: --key, --name",
    "dedupjobs_invalidate --all --name testapp.record": "Say which jobs: --key, --name",
    "dedupjobs_invalidate --status SUCEEDED": "no such choice. Did you mean SUCCEEDED?",
    "dedupjobs_invalidate --name testapp.recrod": "Did you mean testapp.record?",
    "dedupjobs_invalidate --older-than -1": "--older-than -1: give 0 to",
    "dedupjobs_invalidate --older-than soon": "'soon': give seconds, or a time such as 90s, 10m",
    "dedupjobs_invalidate --older-than nan": "--older-than nan: give 0 to",
    "dedupjobs_invalidate --older-than inf": "--older-than inf: give 0 to",
}


def run(line: str) -> tuple[int, str]:
    """
    Run a command line, and return the exit code and what was said of it.

    As `manage.py` does, but for one thing: that closes the connection, in mid-transaction here.
    """
    name, *arguments = line.split(" ")
    command = load_command_class("dedupjobs", name)
    command._called_from_command_line = True
    with redirect_stderr(StringIO()) as said, redirect_stdout(said):
        try:
            options = vars(command.create_parser("manage.py", name).parse_args(arguments))
            command.execute(*options.pop("args", ()), **options)
        except CommandError as error:
            return error.returncode, str(error)
        except SystemExit as ended:
            return int(ended.code or 0), said.getvalue()
    return 0, said.getvalue()


@pytest.mark.parametrize(("line", "words"), WRONG.items())
def test_wrong_flag_is_refused_with_a_sentence(line: str, words: str) -> None:
    code, said = run(line)
    assert code == 2
    assert words in said


def test_refusal_reaches_the_shell() -> None:
    command = [sys.executable, "-m", "django", "dedupjobs_schedule", "--count", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "CommandError: --count 0: give a whole number of at least 1.\n"


@pytest.mark.parametrize("command", OURS)
def test_unknown_flag_is_refused(command: str) -> None:
    code, said = run(f"{command} --colour")
    assert code == 2
    assert "unrecognized arguments: --colour" in said or "arguments are required" in said


@pytest.mark.parametrize("command", OURS)
def test_every_command_explains_itself(command: str) -> None:
    code, said = run(f"{command} --help")
    assert code == 0
    assert len(said) > 200
