"""A browser, and pages that are watched: what they ask for, and what they complain about."""

from __future__ import annotations

import os
import shutil
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 60_000.0
DESKTOP, PHONE = (1440, 900), (390, 844)


def find_chromium() -> str:
    """The browser's program. Skips the test if there is none; in continuous integration it
    fails."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        reason = "no Chromium: install the package `chromium`"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Headless Chromium. Its sandbox needs rights that containers lack; it only loads our page."""
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium(),
            args=["--no-sandbox", "--disable-gpu"],
            timeout=2 * WAIT_MS,
        )
        yield browser
        browser.close()


class Watched:
    """Opens pages of one router's dashboard, with a key; notes what goes wrong on them."""

    def __init__(self, browser: Browser, url: str, key: str = "") -> None:
        self.url = url
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self._browser = browser
        self._key = key

    @contextmanager
    def page(
        self, view: str = "", size: tuple[int, int] = DESKTOP, scheme: str = "light"
    ) -> Iterator[Page]:
        """A page at `#/view` that has read its first summary."""
        width, height = size
        context = self._browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if scheme == "dark" else "light",
        )
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        page.on("console", lambda m: self._note(m.type, m.text))
        page.on("pageerror", lambda error: self._note("error", str(error)))
        page.on("request", self._note_request)
        if self._key:
            page.add_init_script(f"sessionStorage.setItem('baton-key', '{self._key}')")
        page.goto(f"{self.url}/dashboard/#/{view}")
        try:
            yield page
        finally:
            context.close()

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def _note_request(self, request: Request) -> None:
        parts = urllib.parse.urlsplit(request.url)
        if parts.scheme not in ("blob", "data"):
            self.hosts.add(parts.netloc)

    def assert_clean(self) -> None:
        """Nothing was complained about, and nothing was asked of another host."""
        assert self.complaints == []
        assert self.hosts <= {urllib.parse.urlsplit(self.url).netloc}
