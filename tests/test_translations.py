"""The Indonesian translation is complete: every text of code and templates, none of them fuzzy."""

from __future__ import annotations

import ast
import gettext
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils.translation.template import templatize

import dedupjobs
from dedupjobs.models import Status
from tests.admin_rows import address, make, try_of

HOME = Path(dedupjobs.__file__).parent
CATALOG = HOME / "locale/id/LC_MESSAGES/django.po"
CALLS = {"_": 1, "gettext": 1, "gettext_lazy": 1, "ngettext": 2, "ngettext_lazy": 2}
# What the two languages have in common.
SAME = {"status", "RQ", "JSON.", "host", "pid", "%(action)s: %(row)s"}


def texts_of_code(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            for argument in node.args[: CALLS.get(node.func.id, 0)]:
                if isinstance(argument, ast.Constant):
                    yield str(argument.value)


def texts_of_template(path: Path) -> Iterator[str]:
    # templatize() writes what xgettext reads: gettext(u'…') and ngettext(u'…', u'…', …).
    source = templatize(path.read_text())
    for call in re.finditer(r"""\b(n?gettext)\((.*?)\)\s""", f"{source} ", re.DOTALL):
        for text in re.findall(r"""u?('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")""", call.group(2)):
            yield ast.literal_eval(text)


def sources() -> dict[str, str]:
    """Return each text with a file that has it."""
    found = {}
    for path in HOME.rglob("*.py"):
        found |= {text: path.name for text in texts_of_code(path) if text}
    for path in HOME.rglob("*.html"):
        found |= dict.fromkeys(texts_of_template(path), path.name)
    return found


def catalog() -> dict[str, str]:
    """Return the catalogue's texts with their translations."""
    found: dict[str, str] = {}
    ids: list[str] = []
    parts: list[str] = []
    for line in [*CATALOG.read_text().splitlines(), 'msgid ""']:
        keyword, _, rest = line.partition(" ")
        if keyword in ("msgid", "msgid_plural"):
            if parts:
                found |= dict.fromkeys(ids, "".join(parts))
                ids, parts = [], []
            ids.append(ast.literal_eval(rest))
        elif keyword.startswith("msgstr"):
            parts.append(ast.literal_eval(rest))
        elif line.startswith('"'):
            target = parts if parts else ids
            target[-1] += ast.literal_eval(line)
    return found


def test_extraction_finds_what_is_written() -> None:
    found = sources()
    assert found["Take the job from a lost worker"] == "deeds.py"
    assert found["%(count)s jobs match:"] == "bulk_preview.html"
    assert found["The coordinator hands it over then."] == "why.py"
    assert found["row %(number)s, version %(version)s"] == "job.html"
    assert len(found) > 300


def test_no_text_lacks_its_translation() -> None:
    translated = catalog()
    missing = {text: file for text, file in sources().items() if not translated.get(text)}
    assert missing == {}
    assert {text for text, words in translated.items() if text == words and text} <= SAME


def test_no_translation_is_fuzzy_or_left_over() -> None:
    text = CATALOG.read_text()
    assert "fuzzy" not in text
    assert "#~" not in text
    assert set(catalog()) - set(sources()) - {""} == set()


def test_translations_have_the_placeholders_of_their_texts() -> None:
    for text, words in catalog().items():
        if text:
            names = [sorted(re.findall(r"%\(\w+\)s", t)) for t in (text, words)]
            assert names[0] == names[1], text


def test_compiled_catalogue_is_that_of_the_source() -> None:
    with CATALOG.with_suffix(".mo").open("rb") as file:
        compiled = gettext.GNUTranslations(file)
    for text, words in catalog().items():
        if text and "%(n)s" not in text and "%(count)s job" not in text:
            assert compiled.gettext(text) == words
    for one, many in (("%(n)s duplicate", "%(n)s duplicates"),):
        assert compiled.ngettext(one, many, 2) == catalog()[many]


@pytest.mark.django_db
def test_pages_speak_indonesian() -> None:
    row = make(Status.RETRYING, failures=1)
    try_of(row, outcome="FAILED", ended_at=row.created_at, error_class="builtins.ValueError")
    client = Client(headers={"Accept-Language": "id"})
    client.force_login(User.objects.create_superuser("siti"))
    page = client.get(address("change", row.pk)).content.decode()
    for words in ("menunggu percobaan ulang 1 dari 4", "Garis waktu", "Siapa menyatakan apa",
                  "Coba lagi", "Batalkan", "Percobaan", "gagal"):  # fmt: skip
        assert words in page
    for words in ("Timeline", "Attempts", "Who says", "waiting for", "Retry"):
        assert words not in page
    listed = client.get(address("changelist")).content.decode()
    for words in ("macet: masa sewa habis", "kelas galat", "Kunci Redis"):
        assert words in listed
