"""Every block of the docs that shows a session is run."""

from __future__ import annotations

import doctest
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from django.core.management import get_commands, load_command_class
from django.urls import resolve

from dedupjobs import conf, registry
from dedupjobs.inbox import handlers
from dedupjobs.models import Kind
from docs import generate

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
PAGES = [page for page in sorted(DOCS.glob("*.md")) if ">>> " in page.read_text()]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_shows_what_really_happens(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_handlers", {})
    before = set(registry.names())
    test = doctest.DocTestParser().get_doctest(
        page.read_text().replace("```", ""), {"__name__": f"docs_{page.stem}"}, page.name, None, 0
    )
    report: list[str] = []
    runner = doctest.DocTestRunner()
    result = runner.run(test, out=report.append)
    for name in set(registry.names()) - before:
        registry.forget(name)
    assert result.attempted > 0
    assert result.failed == 0, "".join(report)


def test_reference_is_what_the_code_says() -> None:
    assert generate.PAGE.read_text() == generate.page(), "run `make reference`"


def test_reference_says_what_every_kind_of_outcome_means() -> None:
    told = generate.PAGE.read_text()
    for kind in Kind:
        assert re.search(rf"^\| `{kind}` \| \w.+ \|$", told, re.MULTILINE), kind


def test_reference_leaves_out_no_setting_option_check_or_command() -> None:
    text = generate.PAGE.read_text()
    named = [f.name for kind in (conf.Settings, registry.Options) for f in fields(kind)]
    source = "".join(path.read_text() for path in (TESTS.parent / "dedupjobs").rglob("*.py"))
    checks = {
        f"dedupjobs.{number}" for number in re.findall(r'"(?:dedupjobs\.)?([EW]\d{3})"', source)
    }
    commands = [name for name, app in get_commands().items() if app == "dedupjobs"]
    assert len(checks) >= 36
    assert [n for n in (*named, *sorted(checks)) if f"`{n}`" not in text] == []
    assert [name for name in commands if f"### {name}\n" not in text] == []


@pytest.mark.parametrize(
    ("page", "least"), [("verification", 51), ("dashboard", 15), ("security", 50), ("alerts", 21)]
)
def test_every_test_that_a_page_names_is_there(page: str, least: int) -> None:
    named = set(re.findall(r"`(test_\w+)`", (DOCS / f"{page}.md").read_text()))
    files = list(TESTS.rglob("test_*.py"))
    there = {file.stem for file in files}
    for file in files:
        there |= set(re.findall(r"def (test_\w+)", file.read_text()))
    assert len(named) >= least
    assert named <= there


RUNBOOK = (DOCS / "runbook.md").read_text()
SHOWN = sorted(set(re.findall(r"^\$ manage\.py (.+)$", RUNBOOK, re.MULTILINE)))


@pytest.mark.parametrize("shown", SHOWN)
def test_runbook_shows_commands_that_exist_with_options_that_they_take(shown: str) -> None:
    name, *arguments = shlex.split(shown)
    parser = load_command_class("dedupjobs", name).create_parser("manage.py", name)
    assert parser.parse_args(arguments)


def test_runbook_names_commands_and_screens_that_exist() -> None:
    named = set(re.findall(r"\bdedupjobs_[a-z]+\b", RUNBOOK))
    assert named <= set(get_commands())
    for path in set(re.findall(r"`(/admin/[^`?]*)", RUNBOOK)):
        assert resolve(path).func, path


def test_runbook_has_seven_steps_five_levers_and_four_steps_back() -> None:
    parts = re.split(r"^## ", RUNBOOK, flags=re.MULTILINE)[1:]
    steps = {part.splitlines()[0]: len(re.findall(r"^### \d\. ", part, re.M)) for part in parts}
    assert list(steps.values()) == [7, 5, 4, 0, 0, 0, 0]
    assert list(steps)[3:] == ["Stuck jobs", "Lost Redis", "Events", "A bad deploy"]
