"""A browser for all of these tests, and a fleet under load. While the browser is open, it runs an
event loop in this process: tests of other folders run after it is closed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cli.fleet import Fleet
from tests.browser.browser import Browser, Watched, running_browser
from tests.browser.traffic import running_fleet_for_pages, send


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with running_browser() as made:
        yield made


@pytest.fixture(scope="module")
def fleet(browser: Browser) -> Iterator[Fleet]:
    """Two workers of each role, after some requests."""
    with running_fleet_for_pages() as made:
        send(made, 24)
        yield made


@pytest.fixture
def pages(browser: Browser, fleet: Fleet) -> Iterator[Watched]:
    made = Watched(browser, fleet.url, fleet.access.key or "")
    yield made
    made.assert_clean()
