"""A real Chromium that clicks through the admin, on a real server."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.test import Client

REQUIRED = os.environ.get("DEDUPJOBS_REQUIRE_BROWSER") == "1"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# Playwright's own loop runs in this thread, and Django would refuse its ORM there.
os.environ.setdefault("DJANGO_ALLOW_ASYNC_UNSAFE", "true")

IMAGES = Path(__file__).parents[2] / "docs" / "images"
LARGEST = 150_000  # bytes of an image
QUALITY = 80
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
# Good practice, not WCAG, that Django's own frame around our pages does not follow.
DJANGOS = [
    "empty-table-header",
    "heading-order",
    "label-title-only",
    "landmark-one-main",
    "landmark-unique",
    "region",
]

# Told by the page itself, before any of its scripts: what the policy has refused.
LISTEN = """
window.refused = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.refused.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`);
});
"""


def _missing(words: str) -> Any:
    if REQUIRED:
        pytest.fail(f"DEDUPJOBS_REQUIRE_BROWSER=1, but {words}")
    pytest.skip(words)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The system's Chromium, driven over its own protocol."""
    path = os.environ.get("DEDUPJOBS_TEST_BROWSER") or next(
        filter(None, map(shutil.which, BROWSERS)), ""
    )
    if not path:
        _missing("there is no Chromium here; on Debian: apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("playwright is not installed; it belongs to the extra [test]")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


class Visitor:
    """A person at a page; what the page did wrong is collected in ``troubles``."""

    def __init__(self, page: Any, base: str) -> None:
        self.page = page
        self.base = base
        self.troubles: list[str] = []
        page.on("dialog", self._on_dialog)
        page.on("pageerror", lambda error: self.troubles.append(f"error: {error}"))
        page.on("console", self._on_console)
        page.on("response", self._on_response)

    def open(self, address: str) -> Any:
        """Open an address of the server, and return the page."""
        self.page.goto(self.base + address)
        return self.page

    def press(self, name: str, *, within: Any = None) -> Any:
        """Press a button, and wait for the page that follows."""
        button = (within or self.page).get_by_role("button", name=name, exact=True)
        with self.page.expect_navigation():
            button.first.click()
        return self.page

    def inaccessible(self) -> list[str]:
        """What axe finds wrong with the present page; its browser must be ``inspected``."""
        from axe_playwright_python.base import AXE_SCRIPT

        self.page.evaluate(AXE_SCRIPT)
        off = {rule: {"enabled": False} for rule in DJANGOS}
        options = {"runOnly": RULES, "rules": off, "preload": False}
        found = self.page.evaluate("(options) => axe.run(options)", options)
        return [
            f"{wrong['id']}: {node['target']} {node['failureSummary']}"
            for wrong in found["violations"]
            for node in wrong["nodes"]
        ]

    def picture(self, name: str) -> None:
        """Make the picture ``docs/images/<name>.webp`` of what the window shows."""
        session = self.page.context.new_cdp_session(self.page)
        how = {"format": "webp", "quality": QUALITY}
        data = base64.b64decode(session.send("Page.captureScreenshot", how)["data"])
        assert len(data) < LARGEST
        IMAGES.mkdir(exist_ok=True)
        (IMAGES / f"{name}.webp").write_bytes(data)

    def refused(self) -> list[str]:
        """What the policy has refused on the present page."""
        return self.page.evaluate("window.refused")

    def _on_dialog(self, dialog: Any) -> None:
        self.troubles.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _on_console(self, message: Any) -> None:
        if message.type == "error" and "favicon" not in str(message.location):
            self.troubles.append(f"console: {message.text}")

    def _on_response(self, response: Any) -> None:
        if response.status >= 500:
            self.troubles.append(f"{response.status}: {response.url}")


@pytest.fixture
def visit(django_db_setup: None, chromium: Any, live_server: Any) -> Iterator[Any]:
    """
    ``visit(user, width=…, dark=…)``: a new browser, logged in; nothing may go wrong in it.
    ``inspected``: axe may look at it, which no policy would let in.

    The database first: the server would share the connection of one that is still in memory.
    """
    contexts: list[Any] = []
    visitors: list[Visitor] = []

    def start(
        user: User | None = None,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        inspected: bool = False,
    ) -> Visitor:
        context = chromium.new_context(
            viewport={"width": width, "height": height},
            bypass_csp=inspected,
            color_scheme="dark" if dark else "light",
        )
        contexts.append(context)
        context.add_init_script(LISTEN)
        if user is not None:
            client = Client()
            client.force_login(user)
            name = settings.SESSION_COOKIE_NAME
            context.add_cookies(
                [{"name": name, "value": client.cookies[name].value, "url": live_server.url}]
            )
        page = context.new_page()
        page.set_default_timeout(15_000)
        visitors.append(Visitor(page, live_server.url))
        return visitors[-1]

    yield start
    refused = [words for visitor in visitors for words in visitor.refused()]
    for context in contexts:
        context.close()
    assert [words for visitor in visitors for words in visitor.troubles] == []
    assert refused == []
