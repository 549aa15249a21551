"""Nothing on the page is cut, printed over or struck through, whatever the fleet and its names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser import incident, states
from tests.browser.boxes import faults
from tests.browser.browser import Watched
from tests.browser.staged import staged
from tests.browser.test_staged import now_us
from tests.effort import some

WIDE, PHONE = (1400, 900), (390, 844)
FLEETS: dict[str, Any] = {
    "incident": incident.fleet,
    "pods": states.pods,
    "many pods": lambda now: states.pods(now, 14, 18),
    "flooded": states.flooded,
    "no point yet": states.no_point_yet,
}
SIZES = [WIDE, PHONE]
SCHEMES = some(["light", "dark"], 1)
SHOTS = os.environ.get("BATON_SCREENSHOTS")
"""A folder for pictures of everything that is looked at."""


def look(page: Page, name: str) -> list[str]:
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / f"{name}.png", full_page=True)
    return faults(page)


@pytest.mark.parametrize("fleet", FLEETS)
def test_no_text_is_cut_or_printed_over(browser: Browser, fleet: str) -> None:
    found = {}
    with staged(fleet=lambda: FLEETS[fleet](now_us()), **states.sources(now_us())) as router:
        pages = Watched(browser, router.url)
        for size in SIZES:
            for scheme in SCHEMES:
                with pages.page(size=size, scheme=scheme) as page:
                    for view in states.VIEWS:
                        if fleet != "pods" and view != "fleet":
                            continue
                        page.evaluate(f"location.hash = '#/{view}'")
                        expect(page).to_have_title(f"{view.capitalize()} · Baton")
                        page.locator("main .card").first.wait_for()
                        if view == "requests" and size == PHONE:
                            page.locator(".row").click()
                        if view == "requests":
                            page.get_by_role("button", name="Whole request").click()
                        name = f"{fleet} {view} {size[0]} {scheme}".replace(" ", "-")
                        found[name] = look(page, name)
        pages.assert_clean()
    assert {name: each for name, each in found.items() if each} == {}
