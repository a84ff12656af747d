"""Sphinx's settings; `make docs` builds the pages into build/docs."""

from __future__ import annotations

from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

project = "dedupjobs"
release = version = installed("dedupjobs")

extensions = ["myst_parser"]
myst_heading_anchors = 3
nitpicky = True

html_theme = "furo"
html_title = f"dedupjobs {release}"
html_copy_source = False
html_show_copyright = False


def setup(app: Any) -> None:
    """Let a page that no list of the index names stand in its last one."""
    app.connect("source-read", _add_newcomers)


def _add_newcomers(_app: Any, name: str, source: list[str]) -> None:
    if name == "index":
        listed = source[0].splitlines()
        pages = sorted(page.stem for page in Path(__file__).parent.glob("*.md"))
        newcomers = [page for page in pages if page not in (*listed, "index")]
        source[0] = source[0].replace("(other pages)", "\n".join(newcomers))
