"""Texts that reach the page stay texts: names, models, keys, errors, findings."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from tests.browser import incident
from tests.browser.browser import PHONE, Browser, Watched, open_view
from tests.browser.staged import staged
from tests.effort import some

MARKUP = (
    "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'>"
    "<svg onload='window.hit = 1'><a href=\"javascript:window.hit = 1\">x</a>"
    "\"' onmouseover='window.hit = 1' style='position:fixed;inset:0'"
    " </main></body>${window.hit = 1}"
)
LONG = "x" * 250
TURNED = "\u202e\u2066evil\u0000\u001b]52;c;"
TEXTS = {"both": MARKUP + TURNED, "markup": MARKUP, "turned": TURNED}
VIEWS = ("fleet", "doctor", "cache", "requests")
LAYOUT = frozenset({"state", "role", "kind", "severity", "outcome", "unit", "offers", "id", "view"})
"""Keys whose values decide what the page draws; a router chooses them itself."""
NAMES = frozenset({"worker_id", "model", "prefill", "decode", "key", "cluster", "host", "error"})
"""Keys whose values others choose, and that may be long."""


def spoiled(value: Any, text: str, of_names: bool = False, key: str = "") -> Any:
    """The same data with `text` in front of every text, or of every name."""
    match value:
        case dict():
            return {name: spoiled(each, text, of_names, name) for name, each in value.items()}
        case list() | tuple():
            return [spoiled(each, text, of_names, key) for each in value]
        case str() if key not in LAYOUT and (key in NAMES or not of_names):
            return text + value
    return value


def row(now_us: int) -> dict[str, Any]:
    return {
        "request_id": "chatcmpl-1", "received_us": now_us, "outcome": "failed", "ttft_ms": 20,
        "prefill": "prefill-1", "decode": "decode-1", "key": "team-a", "num_attempts": 1,
        "stages": [], "error": "an error",
    }  # fmt: skip


def incident_of(text: str, of_names: bool = False) -> dict[str, Any]:
    """The sources of a router in trouble, with such texts."""
    now_us = time.time_ns() // 1000
    sources = {
        "fleet": incident.fleet(now_us),
        "doctor": incident.doctor(now_us),
        "cache": incident.cache(now_us),
        "requests": {"rows": [row(now_us)]},
    }
    return {name: spoiled(each, text, of_names) for name, each in sources.items()}


@pytest.mark.parametrize("kind", some(TEXTS, 1))
def test_text_stays_text(browser: Browser, kind: str) -> None:
    with staged(**incident_of(TEXTS[kind])) as router:
        pages = Watched(browser, router.url)
        with pages.page() as page:
            for view in VIEWS:
                open_view(page, view)
                expect(page.locator("main h1")).to_be_visible()
                assert page.evaluate("window.hit") is None, "a script ran"
                assert page.locator("main :is(script, img, iframe, object)").count() == 0
                assert page.locator("[onmouseover], [onload], [onerror]").count() == 0
                assert page.locator('[href^="javascript:" i]').count() == 0
        assert [each for each in pages.complaints if "404" not in each and "500" not in each] == []


def test_long_names_leave_the_page_its_width(browser: Browser) -> None:
    with staged(**incident_of(LONG, of_names=True)) as router:
        pages = Watched(browser, router.url)
        with pages.page(size=PHONE) as page:
            for view in VIEWS:
                open_view(page, view)
                expect(page.locator("main h1")).to_be_visible()
                width = page.evaluate("document.documentElement.scrollWidth")
                assert width <= PHONE[0], f"{view} is wider than its window"


def test_the_page_s_policy_allows_nothing_inline_and_no_other_host(browser: Browser) -> None:
    """The browser itself refuses what slipped through."""
    with staged(fleet=incident.fleet(time.time_ns() // 1000)) as router:
        policy = httpx.get(f"{router.url}/dashboard/").headers["content-security-policy"]
        rules = dict(each.strip().partition(" ")[::2] for each in policy.split(";"))
        assert rules["default-src"] in ("'none'", "'self'")
        assert "unsafe" not in rules.get("script-src", "")
        assert rules["frame-ancestors"] == "'none'"
        with Watched(browser, router.url).page("fleet") as page:
            expect(page.locator("main h1")).to_be_visible()
            page.evaluate(
                "() => { const s = document.createElement('script');"
                " s.textContent = 'window.hit = 1'; document.body.append(s); }"
            )
            assert page.evaluate("window.hit") is None
