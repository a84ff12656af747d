"""Commands with flags that can not be meant: a sentence and an exit code of 2."""

from __future__ import annotations

import pytest
from django.core.management import execute_from_command_line, get_commands

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
    "dedupjobs_invalidate": "Say which jobs: --key, --name",
    "dedupjobs_invalidate --all --name testapp.record": "Say which jobs: --key, --name",
    "dedupjobs_invalidate --status SUCEEDED": "no such choice. Did you mean SUCCEEDED?",
    "dedupjobs_invalidate --name testapp.recrod": "Did you mean testapp.record?",
    "dedupjobs_invalidate --older-than -1": "--older-than -1: give 0 to",
    "dedupjobs_invalidate --older-than nan": "--older-than nan: give 0 to",
    "dedupjobs_invalidate --older-than inf": "--older-than inf: give 0 to",
}


def refusal(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command line as `manage.py` does, and return what it said when it ended with 2."""
    with pytest.raises(SystemExit) as ended:
        execute_from_command_line(["manage.py", *line.split(" ")])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("line", "words"), WRONG.items())
def test_wrong_flag_is_refused_with_a_sentence(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(line, capsys)
    assert words in said
    assert "Traceback" not in said


@pytest.mark.parametrize("command", OURS)
def test_unknown_flag_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(f"{command} --colour", capsys)
    assert "unrecognized arguments: --colour" in said or "arguments are required" in said


@pytest.mark.parametrize("command", OURS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        execute_from_command_line(["manage.py", command, "--help"])
    assert ended.value.code == 0
    assert len(capsys.readouterr().out) > 200
