"""Every view of the dashboard on a real fleet: true numbers, whole layouts, no complaint."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from cli.fleet import Fleet
from tests.browser.browser import DESKTOP, PHONE, Watched, open_view
from tests.browser.figures import number
from tests.browser.traffic import metrics
from tests.effort import in_turn, some
from tests.http_client import HTTP
from tests.integration.fleets import assert_idle, trace_of

VIEWS = ("fleet", "requests", "doctor", "cache", "controls")
NAMES = "process_name"
Layout = tuple[tuple[int, int], str]
LAYOUTS: list[Layout] = some(
    [(DESKTOP, "light"), (PHONE, "light"), (DESKTOP, "dark"), (PHONE, "dark")], 2
)
AUDITS = in_turn(VIEWS, LAYOUTS)
"""Which views are looked at by axe, and how."""


def rows(fleet: Fleet, query: str) -> list[dict]:
    return HTTP.get(f"{fleet.url}/requests?{query}").raise_for_status().json()["rows"]


@pytest.mark.parametrize("layout", [*LAYOUTS, ((800, 900), "light")], ids=str)
def test_every_view_fits_its_window_and_is_accessible(pages: Watched, layout: Layout) -> None:
    size, scheme = layout
    with pages.page(size=size, scheme=scheme) as page:
        for view in VIEWS:
            open_view(page, view)
            if view == "requests":
                expect(page.locator(".req-list .row").first).to_be_attached()
            too_wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert too_wide <= 0, f"{view} is {too_wide} pixels too wide"
            if (view, layout) in AUDITS:
                assert serious_violations(page) == [], view


def serious_violations(page: Page) -> list[tuple[str, list[str]]]:
    """What axe finds on a page, and the elements."""
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        (each["id"], [node["html"][:200] for node in each["nodes"][:3]])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


def test_the_fleet_view_shows_what_the_router_counts(pages: Watched, fleet: Fleet) -> None:
    assert_idle(fleet)
    with pages.page("fleet") as page:
        counted = metrics(fleet)
        for role in ("prefill", "decode"):
            number = int(counted[f'baton_router_workers{{role="{role}"}}'])
            heading = page.locator(f".pools > h3.{role[0]}")
            expect(heading).to_contain_text(f"{number} of {number} ready")
        workers = HTTP.get(f"{fleet.url}/fleet").json()["workers"]
        assert page.locator("[data-worker]").count() == len(workers)
        for worker in workers:
            card = page.locator(f'[data-worker="{worker["worker_id"]}"]')
            expect(card.locator(".state")).to_have_text("ready")
            expect(card.locator(".kv")).to_have_attribute(
                "title",
                f"KV blocks: {worker['blocks_used']:,} in use, {worker['blocks_cached']:,} cached, "
                f"{worker['blocks_total']:,} in all",
            )


def test_a_requests_stages_add_up_to_its_latency(pages: Watched, fleet: Fleet) -> None:
    remote = next(each for each in rows(fleet, "order=slow") if each["prefill"])
    trace = HTTP.get(f"{fleet.url}/requests/{remote['request_id']}/trace").json()
    with pages.page(f"requests/{remote['request_id']}") as page:
        expect(page.locator(".title h1")).to_have_text(remote["request_id"])
        page.locator(".facts").first.wait_for()
        sums = page.evaluate(
            """() => Object.fromEntries([...document.querySelectorAll("tbody[data-part]")].map(
                (part) => [part.dataset.part, [...part.querySelectorAll("tr[data-ms]")].map(
                    (row) => [row.dataset.stage, Number(row.dataset.ms)])]))"""
        )
        shown = page.locator(".facts dd").nth(2).inner_text()
    first = dict(map(tuple, sums["first_token"]))
    ttft_ms = (trace["first_token_us"] - trace["received_us"]) / 1000
    assert sum(first.values()) == pytest.approx(ttft_ms, abs=0.002)
    assert first["unexplained"] <= 0.02 * ttft_ms
    rest = sum(ms for _, ms in sums["rest"])
    assert rest == pytest.approx(
        (trace["last_token_us"] - trace["first_token_us"]) / 1000, abs=0.01
    )
    assert number(shown) == pytest.approx(ttft_ms / 1000, rel=0.01)
    assert {"tokenize", "prefill", "delivery"} <= first.keys()


def test_the_waterfall_has_a_bar_for_each_span(pages: Watched, fleet: Fleet) -> None:
    remote = next(each for each in rows(fleet, "order=slow") if each["prefill"])
    trace = trace_of(fleet, remote["request_id"])
    chunks = trace["attempts"][-1]["prefill"]["chunks"]
    with pages.page(f"requests/{remote['request_id']}") as page:
        page.get_by_role("button", name="Whole request").click()
        drawing = page.locator(".wf svg")
        drawing.focus()
        read = page.locator(".read")
        said = []
        for _ in range(60):
            page.keyboard.press("ArrowRight")
            said.append(read.inner_text())
        named = {re.match(r"Chunk \d+|[A-Z][a-z]+", text).group() for text in said}
        assert {f"Chunk {i + 1}" for i in range(len(chunks))} <= named
        assert {"Receive", "Queue", "Transfer", "Handoff", "Decode"} <= named


def test_the_spans_of_a_request_open_in_perfetto(pages: Watched, fleet: Fleet) -> None:
    remote = next(each for each in rows(fleet, "order=slow") if each["prefill"])
    trace = trace_of(fleet, remote["request_id"])
    prefill = trace["attempts"][-1]["prefill"]
    with pages.page(f"requests/{remote['request_id']}") as page:
        with page.expect_download() as download:
            page.get_by_role("button", name="Perfetto").click()
        events = json.loads(Path(download.value.path()).read_text())["traceEvents"]
    processes = {each["args"]["name"]: each["pid"] for each in events if each["name"] == NAMES}
    assert {"router", prefill["worker_id"], remote["decode"]} <= processes.keys()
    where = processes[prefill["worker_id"]]
    chunks = [
        (each["ts"], each["dur"])
        for each in events
        if each["pid"] == where and each["name"].startswith("chunk")
    ]
    assert chunks == [(a, b - a) for a, b, _ in prefill["chunks"]]


def test_requests_are_found_by_their_id(pages: Watched, fleet: Fleet) -> None:
    one = rows(fleet, "order=recent&limit=1")[0]["request_id"]
    with pages.page("requests") as page:
        page.locator(".req-list .row").first.wait_for()
        page.keyboard.press("/")
        page.keyboard.type(one[:20])
        expect(page.locator(".req-list .row")).to_have_count(1)
        page.locator(".req-list .row").click()
        expect(page.locator(".title h1")).to_have_text(one)
        assert one in page.url, "the address leads back to it"
        page.keyboard.press("Escape")
        page.locator("#q").fill("no-such-request")
        expect(page.locator(".req-list .empty")).to_contain_text("No request that is kept")


def test_keys_lead_from_view_to_view(pages: Watched) -> None:
    with pages.page() as page:
        page.locator(".verdict").wait_for()
        for number, view in enumerate(VIEWS, start=1):
            page.keyboard.press(str(number))
            expect(page.locator(f'nav a[href="#/{view}"]')).to_have_attribute(
                "aria-current", "page"
            )
        page.keyboard.press("t")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        page.keyboard.press("p")
        expect(page.locator("#live")).to_contain_text("paused")
        page.keyboard.press("p")
        expect(page.locator("#live")).to_contain_text("live")
        page.keyboard.press("?")
        expect(page.get_by_role("dialog")).to_contain_text("search by request id")
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)


def test_the_link_to_the_content_stays_in_its_view(pages: Watched) -> None:
    with pages.page("doctor") as page:
        skip = page.get_by_role("link", name="Skip to the content")
        skip.focus()
        page.keyboard.press("Enter")
        expect(page.locator("#main")).to_be_focused()
        expect(page).to_have_title("Doctor · Baton")


def test_single_key_shortcuts_can_be_switched_off(pages: Watched) -> None:
    with pages.page("requests") as page:
        page.locator(".req-list .row").nth(1).wait_for()
        page.keyboard.press("j")
        address = page.evaluate("location.hash")
        assert address.startswith("#/requests/")
        first_tokens = page.get_by_role("button", name="First tokens")
        first_tokens.wait_for()
        page.keyboard.press("?")
        page.get_by_label("Single-key shortcuts").uncheck()
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        for key in ("j", "k", "z", "1"):
            page.keyboard.press(key)
        assert page.evaluate("location.hash") == address
        expect(first_tokens).to_have_attribute("aria-pressed", "true")


def test_numbers_are_written_as_operators_read_them(pages: Watched) -> None:
    with pages.page() as page:
        written = page.evaluate(
            """async () => {
                const n = await import(document.baseURI.split("#")[0] + "numbers.js");
                const c = await import(document.baseURI.split("#")[0] + "charts.js");
                const { merged } = await import(document.baseURI.split("#")[0] + "live.js");
                return [
                    [0.42, 4.213, 22.44, 418.2, 999.6, 1484, 61234].map(n.ms),
                    [4194304, 2415919104, 12].map(n.bytes),
                    [1.24e9, 412e6, 0, null].map(n.linkRate),
                    [1607, 14900, 1.2e6].map(n.kilo),
                    [0.714, 0.095, 0, 1].map(n.share),
                    [n.int(null), n.ms(undefined), n.times(1.416), n.ticks(1480), n.ticks(0.7)],
                    c.spread([10, 12, 95], 100, 20),
                    c.linePath([1, null, 2, 3], (i) => i, (v) => v),
                    merged({ workers: [{ worker_id: "a", x: 1 }], worker_ids: ["a"] },
                        { workers: [{ worker_id: "a", y: 2 }] }).workers,
                ];
            }"""
        )
    nb = "\u00a0"
    assert written[0] == [
        f"0.42{nb}ms", f"4.21{nb}ms", f"22.4{nb}ms", f"418{nb}ms", f"1.00{nb}s", f"1.48{nb}s",
        f"61.2{nb}s",
    ]  # fmt: skip
    assert written[1] == [f"4.00{nb}MiB", f"2.25{nb}GiB", f"12{nb}B"]
    assert written[2] == [f"1.24{nb}GB/s", f"0.41{nb}GB/s", f"0{nb}GB/s", "–"]
    assert written[3] == ["1,607", "14.9k", "1.20M"]
    assert written[4] == [f"71{nb}%", f"9.5{nb}%", f"0{nb}%", f"100{nb}%"]
    assert written[5] == ["–", "–", "1.42×", [0, 1000, 2000], [0, 0.5, 1.0]]
    assert written[6] == [-8, 12, 95]
    assert written[7] == "M0.0 1.0M2.0 2.0L3.0 3.0"
    assert written[8] == [{"worker_id": "a", "x": 1, "y": 2}]
