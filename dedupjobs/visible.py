"""Foreign text made fit to be read: every character can be seen, and there is an end to it."""

from __future__ import annotations

import unicodedata

LONGEST = 10_000  # characters of one text on a page
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")  # control, format (bidi), surrogate, private, lines


def shown(text: object, longest: int = LONGEST) -> str:
    """Return a text whose every character can be seen, cut to ``longest`` characters."""
    return _cut(text, longest, kept="\n\t")


def line(text: object, longest: int = 200) -> str:
    """Do the same for one line of a log or a terminal: it can not begin another one."""
    whole = str(text)
    if len(whole) <= longest and whole.isascii() and whole.isprintable():
        return whole
    return _cut(whole, longest, kept="")


def _cut(text: object, longest: int, *, kept: str) -> str:
    whole = str(text)
    cut = whole[:longest]
    visible = "".join(c if c in kept or not _is_hidden(c) else _escaped(c) for c in cut)
    return visible if len(whole) <= longest else f"{visible}…"


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in HIDDEN


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
