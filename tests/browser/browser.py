"""A browser, and pages that are watched: what they ask for, and what they complain about."""

from __future__ import annotations

import os
import shutil
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import Page, Request, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 60_000.0
STORE_ONLY = """(key) => {
    localStorage.clear();
    sessionStorage.clear();
    if (key) sessionStorage.setItem("baton-key", key);
}"""
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


class Browser:
    """Chromium with one tab that tests use in turn: a new one costs two seconds of CPU time."""

    def __init__(self, chromium: Chromium) -> None:
        self._tab = chromium.new_context().new_page()
        self._tab.set_default_timeout(WAIT_MS)
        # Chromium asks for it beside a page that names no icon, as `base.css` does.
        self._tab.route("**/favicon.ico", lambda route: route.fulfill(status=204))

    @contextmanager
    def tab(self, size: tuple[int, int], scheme: str) -> Iterator[Page]:
        """The tab, with a window of this size, in a "light" or "dark" scheme."""
        width, height = size
        self._tab.set_viewport_size({"width": width, "height": height})
        self._tab.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        try:
            yield self._tab
        finally:
            self._tab.mouse.move(0, 0)
            self._tab.goto("about:blank")


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Headless Chromium. Its sandbox needs rights that containers lack; it only loads our page."""
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=find_chromium(),
            args=["--no-sandbox", "--disable-gpu"],
            timeout=2 * WAIT_MS,
        )
        yield Browser(chromium)
        chromium.close()


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
        watchers = {
            "console": lambda message: self._note(message.type, message.text),
            "pageerror": lambda error: self._note("error", str(error)),
            "request": self._note_request,
        }
        with self._browser.tab(size, scheme) as page:
            page.goto(f"{self.url}/dashboard/base.css")  # of the same origin, but without scripts
            page.evaluate(STORE_ONLY, self._key)
            for event, watcher in watchers.items():
                page.on(event, watcher)  # type: ignore[call-overload]
            try:
                page.goto(f"{self.url}/dashboard/#/{view}")
                yield page
            finally:
                for event, watcher in watchers.items():
                    page.remove_listener(event, watcher)

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def _note_request(self, request: Request) -> None:
        parts = urllib.parse.urlsplit(request.url)
        if parts.scheme not in ("blob", "data"):
            self.hosts.add(parts.netloc)

    def assert_clean(self) -> None:
        """Assert that pages reported no errors and sent no request to another host."""
        assert self.complaints == []
        assert self.hosts <= {urllib.parse.urlsplit(self.url).netloc}


def open_view(page: Page, view: str) -> None:
    """Show another view on a page that is already open."""
    page.evaluate(f"location.hash = '#/{view}'")
    expect(page.locator(f'nav a[href="#/{view}"]')).to_have_attribute("aria-current", "page")
    expect(page.locator("main h1").first).to_be_attached()
