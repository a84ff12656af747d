"""What READMEs and pages show is code that runs, and what they link to is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shop import Project

ROOT = Path(__file__).parent.parent
READMES = ["README.md", "README.id.md"]
PAGES = [ROOT / name for name in READMES] + sorted((ROOT / "docs").glob("*.md"))
PYTHON = re.compile(r"```python\n(.*?)```", re.S)
LINK = re.compile(r"\]\(((?!https?:)[^)#\s]+)[^)]*\)")

PAYMENTS = """
class payments:
    charged = []

    @classmethod
    def find(cls, reference):
        return next((c for c in cls.charged if c["reference"] == reference), None)

    @classmethod
    def charge(cls, reference, amount):
        cls.charged.append({"reference": reference, "amount": amount})
        print("charged", amount)
        return cls.charged[-1]
"""
VIEW = """
from django.http import JsonResponse
from shop.jobs import charge


def pay(request, order_id):
{code}
    return JsonResponse({{"kind": str(outcome.kind), "created": outcome.created}})
"""


@pytest.fixture
def project(tmp_path: Path) -> Callable[[], Project]:
    return lambda: Project(tmp_path)


def blocks(page: str) -> dict[str, str]:
    """Return the page's files by their names, without the line that names them."""
    text = (ROOT / page).read_text()
    return dict(re.findall(r"```python\n# (\S+)\n(.*?)```", text, re.S))


@pytest.mark.large
@pytest.mark.parametrize("page", READMES)
def test_ten_lines_of_the_readme_charge_once(page: str, project: Callable[[], Project]) -> None:
    files = blocks(page)
    shop = project()
    shop.put("shop/settings.py", files["settings.py"])
    shop.put("shop/jobs.py", PAYMENTS + files["shop/jobs.py"])
    code = "".join(f"    {line}\n" for line in files["shop/views.py"].splitlines())
    shop.put("shop/views.py", VIEW.format(code=code))
    shop.manage("migrate", "--verbosity", "0")
    said = shop.pay(1, 1)
    assert said.splitlines() == [
        "{'kind': 'CREATED', 'created': True}",
        "{'kind': 'DUPLICATE', 'created': False}",
    ]
    assert shop.manage("rqworker", "--burst").count("charged 9.90") == 1
    assert "'REPLAYED'" in shop.pay(1)


def test_readmes_show_the_same_code() -> None:
    english, indonesian = (blocks(page) for page in READMES)
    assert english.keys() == indonesian.keys()
    for name, text in english.items():
        assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(indonesian[name]))


def test_readme_is_a_door_and_no_manual() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    assert text.count("```\nmake demo\n```") == text.count("```\nmake test\n```") == 1
    assert re.search(r"!\[[^]]+\]\(docs/images/\S+\)", text)


@pytest.mark.large
def test_last_line_of_defence_stands_where_a_script_goes_past_the_job(
    project: Callable[[], Project],
) -> None:
    files = blocks("docs/choosing.md")
    shop = project()
    shop.put("shop/settings.py", blocks("README.md")["settings.py"])
    shop.put("shop/models.py", files["shop/models.py"])
    shop.put("shop/jobs.py", files["shop/jobs.py"])
    shop.put("shop/views.py", "def pay(request, order_id): ...\n")
    shop.manage("makemigrations", "shop")
    shop.manage("migrate", "--verbosity", "0")
    book = "from shop.jobs import book; book.enqueue(payment_id='p-1', amount='9.90')"
    past = "from shop.models import Booking; Booking.objects.create(payment_id='p-1', amount=1)"
    count = "from shop.models import Booking; print(Booking.objects.count())"
    for _ in range(2):
        shop.manage("shell", "--verbosity", "0", "-c", book)
        shop.work()
    with pytest.raises(AssertionError, match="UNIQUE constraint failed"):
        shop.manage("shell", "--verbosity", "0", "-c", past)
    assert shop.manage("shell", "--verbosity", "0", "-c", count).strip() == "1"


WEBHOOK = """
import json

from django.http import JsonResponse
from django.test import TestCase
from django.urls import path

from dedupjobs import FOREVER, job
from dedupjobs.testing import inline
from shop.models import Charge

event = {"payment": "p-1"}


@job(key="payment:{payment}", unique_for=FOREVER)
def charge(*, payment: str) -> None:
    Charge.objects.create(payment=payment)


def webhook(request):
    charge.enqueue(payment=request.POST["payment"])
    return JsonResponse({})


urlpatterns = [path("webhook/", webhook)]
"""
CHARGE = """
from django.db import models


class Charge(models.Model):
    payment = models.CharField(max_length=50)
"""


@pytest.mark.large
def test_tests_of_the_page_on_testing_pass_in_a_project(project: Callable[[], Project]) -> None:
    case, fixture = PYTHON.findall((ROOT / "docs" / "testing.md").read_text())
    shop = project()
    shop.put("shop/settings.py", blocks("README.md")["settings.py"])
    shop.put("shop/models.py", CHARGE)
    shop.put("shop/urls.py", WEBHOOK)
    head = "from shop.urls import *\n\n\n"
    shop.put("shop/test_case.py", head + case)
    shop.put("shop/test_fixture.py", head.replace("*", "charge, event") + fixture)
    shop.manage("makemigrations", "shop")
    shop.manage("test", "shop")
    said = shop.run(
        *("-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"),
        *("--ds", "shop.settings", "shop/test_fixture.py", "shop/test_case.py"),
        *("-m", "not none", "--override-ini", "addopts=", "-c", "/dev/null", "--rootdir", "."),
    )
    assert "2 passed" in said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_python_is_python(page: Path) -> None:
    for code in PYTHON.findall(page.read_text()):
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
        compile(code.replace("\\n", "\n"), page.name, "exec", flags=flags)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    missing = [
        target
        for target in LINK.findall(page.read_text())
        if not (page.parent / target.replace("&amp;", "&")).exists()
    ]
    assert missing == []


def test_every_row_of_the_comparison_has_a_source_or_a_command() -> None:
    text = (ROOT / "docs" / "comparison.md").read_text()
    section = text.split("## What each promises")[1].split("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| **")]
    assert len(rows) == 8
    for row in rows:
        first, *cells = row.strip("|").split("|")
        for cell in cells:
            plain = cell.strip()
            is_short = plain in ("–", "no", "no: its end is written to Redis")
            has_source = "](" in plain or re.search(r"\(M\d\)", plain) or "dedupjobs" in first
            assert is_short or has_source, (first, cell)
    for rest in text.split("\n## ")[2:4]:
        assert "make bench" in rest
