"""Each mutant must fit the present code, or it proves nothing."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.__main__ import ROOT
from tests.mutants.table import ALL, Mutant


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_mutant_fits_the_code(mutant: Mutant) -> None:
    texts: dict[str, str] = {}
    for name, old, new in mutant.changes:
        text = texts.setdefault(name, (ROOT / "dedupjobs" / name).read_text())
        assert text.count(old) == 1
        texts[name] = text.replace(old, new)
    for text in texts.values():
        ast.parse(text)


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in ALL}) == len(ALL)
