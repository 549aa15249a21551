"""Nothing on the page is cut, printed over or struck through, whatever the fleet and its names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser import incident, states
from tests.browser.boxes import faults
from tests.browser.browser import Browser, Watched
from tests.browser.staged import staged
from tests.browser.test_staged import now_us
from tests.effort import in_turn

WIDE, PHONE = (1400, 900), (390, 844)
FLEETS: dict[str, Any] = {
    "incident": incident.fleet,
    "pods": states.pods,
    "many-pods": lambda now: states.pods(now, 14, 18),
    "flooded": states.flooded,
    "no-point-yet": states.no_point_yet,
    "no-decode-left": states.no_decode_left,
}
STATES = [(fleet, "fleet") for fleet in FLEETS]
STATES += [("pods", "requests"), ("pods", "doctor"), ("incident", "requests"), ("pods", "cache")]
LAYOUTS = [(WIDE, "light"), (PHONE, "dark"), (PHONE, "light"), (WIDE, "dark")]
HIDDEN = """() => [...document.querySelectorAll(".scroll")]
    .filter((each) => each.scrollWidth > each.clientWidth)
    .map((each) => `${each.ariaLabel}: ${each.scrollWidth} in ${each.clientWidth} px`)"""
SHOTS = os.environ.get("BATON_SCREENSHOTS")
"""A folder for pictures of everything that is looked at."""


@pytest.mark.parametrize(
    ("state", "layout"),
    in_turn(STATES, LAYOUTS),
    ids=lambda each: "-".join(str(part).replace(", ", "x").strip("()") for part in each),
)
def test_no_text_is_cut_or_printed_over(
    browser: Browser, state: tuple[str, str], layout: tuple[tuple[int, int], str]
) -> None:
    (fleet, view), (size, scheme) = state, layout
    sources = states.sources(now_us(), states.short if fleet == "incident" else states.pod)
    with staged(fleet=lambda: FLEETS[fleet](now_us()), **sources) as router:
        pages = Watched(browser, router.url)
        with pages.page(view, size, scheme) as page:
            page.locator("main .card").first.wait_for()
            if view == "requests":
                open_request(page, size)
            if SHOTS:
                name = f"{fleet}-{view}-{size[0]}-{scheme}.png"
                page.screenshot(path=Path(SHOTS) / name, full_page=True)
            assert faults(page) == []
            too_wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert too_wide <= 0, f"{too_wide} pixels too wide"
            if size == WIDE:
                assert page.evaluate(HIDDEN) == [], "columns that show only after scrolling"
        pages.assert_clean()


def open_request(page: Page, size: tuple[int, int]) -> None:
    """The whole waterfall of the slow request."""
    if size == PHONE:
        page.locator(".row").click()
    whole = page.get_by_role("button", name="Whole request")
    whole.click()
    expect(whole).to_have_attribute("aria-pressed", "true")


def test_faults_are_found(browser: Browser) -> None:
    """A text that is cut, one that is printed over another, and one that a line runs through."""
    with staged(fleet=lambda: incident.fleet(now_us())) as router:
        with Watched(browser, router.url).page("fleet") as page:
            page.locator(".chart svg").first.wait_for()
            page.evaluate(
                """() => {
                    const add = (text, style) => {
                        const made = document.createElement("div");
                        made.append(text);
                        const usual = { position: "absolute", whiteSpace: "nowrap" };
                        Object.assign(made.style, usual, style);
                        document.querySelector("main").append(made);
                    };
                    add("cut off", { top: "2000px", width: "10px", overflow: "hidden" });
                    add("below", { top: "2100px", left: "50px" });
                    add("above", { top: "2102px", left: "55px" });
                    const target = document.querySelector("svg .target");
                    const text = document.createElementNS("http://www.w3.org/2000/svg", "text");
                    text.append("struck");
                    text.setAttribute("x", 100);
                    text.setAttribute("y", Number(target.getAttribute("y1")) + 4);
                    target.ownerSVGElement.append(text);
                }"""
            )
            found = faults(page)
    assert {each for each in found if "cut off" in each} == {"cut: cut off"}
    assert "printed over: below | above" in found
    assert "struck through: struck" in found
