"""The page on fleets in trouble, large fleets and no fleet, behind a path prefix."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from process import number_text
from tests.browser import incident, states
from tests.browser.browser import Browser, Watched
from tests.browser.staged import StagedRouter, staged

NO_NUMBERS = {
    "cluster": "prod", "offers": ["fleet"], "workers": [], "pairs": [], "totals": {},
    "pressure": {"verdict": "No request in the last minute", "tone": "idle"}, "targets": {},
    "events": [],
    "history": {
        "start_us": None, "step_ms": 30_000, "goodput": [], "ttft_p50_ms": [], "ttft_p95_ms": [],
        "tpot_p50_ms": [], "tpot_p95_ms": [], "queue_p95_ms": [],
    },
}  # fmt: skip


def now_us() -> int:
    return time.time_ns() // 1000


@pytest.fixture(scope="module")
def router() -> Iterator[StagedRouter]:
    with staged(
        fleet=lambda: incident.fleet(now_us()),
        doctor=incident.doctor(now_us()),
        cache=incident.cache(now_us()),
    ) as made:
        yield made


@pytest.fixture
def pages(browser: Browser, router: StagedRouter) -> Iterator[Watched]:
    made = Watched(browser, router.url)
    yield made
    made.assert_clean()


def test_a_system_clock_that_is_set_leaves_ages_and_shows_its_time(browser: Browser) -> None:
    """The clock of the router's reports stands two hours behind its system clock."""
    behind_us = 7_200_000_000

    def fleet() -> dict[str, Any]:
        at_us = now_us() - behind_us
        clock = {"now_us": at_us, "step_us": behind_us}
        return incident.fleet(at_us) | {"clock": clock}

    with staged(fleet=fleet) as router:
        pages = Watched(browser, router.url)
        with pages.page("fleet") as page:
            lost = card(page, "prefill-3")
            expect(lost).to_contain_text(re.compile("\\(19\u00a0min\\): its lease ended"))
            shown = page.locator("header .dim.mid").inner_text().removesuffix(" UTC")
            hours = {time.strftime("%H", time.gmtime(time.time() - ago_s)) for ago_s in (0, 60)}
            assert shown[:2] in hours
        pages.assert_clean()


def card(page: Page, worker_id: str):
    return page.locator(f'[data-worker="{worker_id}"]')


def test_an_incident_in_words(pages: Watched) -> None:
    with pages.page("fleet") as page:
        expect(page.locator(".verdict h1")).to_contain_text("Prefill is short")
        expect(page.locator(".verdict p")).to_have_text(
            re.compile(r"Since \d\d:\d\d:\d\d\. What to change$")
        )
        expect(page.locator(".pd-side.p")).to_contain_text("1.42×")
        expect(page.locator(".pd-side.p .tag")).to_have_text("short")
        expect(page.locator(".pd-side.p .over")).to_have_count(1)
        expect(page.locator(".pd-side.d .over")).to_have_count(0)
        strip = page.locator(".strip")
        for text in (
            "71.4\u00a0%",
            "1.48\u00a0s",
            "23.4\u00a0ms",
            "168",
            "6,710",
            "8.17\u00a0GB/s",
        ):
            expect(strip).to_contain_text(text)
        expect(card(page, "prefill-3")).to_contain_text("its lease ended. 31\u00a0requests moved.")
        expect(card(page, "prefill-4")).to_contain_text(
            "it loads its weights. The last start in this pool took 74\u00a0s."
        )
        expect(card(page, "decode-4")).to_contain_text("hands over after")
        expect(card(page, "decode-5").locator(".state")).to_contain_text("report")
        flagged = page.locator(".cell.flag")
        expect(flagged).to_have_count(2)
        expect(flagged.first).to_contain_text("▲ TCP")
        expect(page.locator(".flow.off")).to_have_count(2)
        expect(page.locator(".cell.sum b").last).to_have_text("8.17\u00a0GB/s")
        expect(page.locator(".ch .tag")).to_have_text(["missed", "missed"])
        expect(page.locator('nav a[href="#/doctor"]')).to_contain_text("2")
        assert page.locator(".events li").count() == 4
        started = "Started in 10 s: weights 8.1 s, warm up 1.5 s, process 0.9 s"
        expect(card(page, "prefill-1").locator("b").first).to_have_attribute(
            "title", started.replace(" s", "\u00a0s")
        )


def test_findings_keep_the_routers_order_and_are_text(pages: Watched) -> None:
    with pages.page("doctor") as page:
        expect(page.locator("main h1")).to_have_text("2 findings, 2 checks passed")
        first, last = page.locator(".dx h2").all_inner_texts()
        assert "Prefill is short" in first
        assert "over TCP" in last
        expect(page.locator(".dx").first).to_contain_text("<b>28.6 %</b> miss a target.")
        expect(page.locator(".dx").first.locator(".hb")).to_contain_text("914\u00a0ms")
        expect(page.locator(".dx").last.locator(".hb")).to_contain_text("2.20\u00a0GB/s")
        expect(page.locator(".hb .exposed")).to_have_count(1)
        expect(page.locator(".dx").first).to_contain_text("prefill 1.19×, decode 0.83×")


def test_the_cache_and_other_sizes(pages: Watched) -> None:
    with pages.page("cache") as page:
        expect(page.locator("main h1")).to_have_text("59\u00a0% of prompt tokens came from a cache")
        hot = page.locator("tr.hot").all_inner_texts()
        assert len(hot) == 1
        assert "▲ 312" in hot[0]
        chosen = page.locator("tr.chosen")
        expect(chosen).to_contain_text("109,568")
        expect(chosen).to_contain_text("60\u00a0%")


def test_the_axis_of_evictions_is_the_last_hour(pages: Watched) -> None:
    """A label every ten minutes; `incident.cache` was made up to a minute ago."""
    before = now_us()
    with pages.page("cache") as page:
        chart = page.get_by_label("Blocks evicted per second on the worst worker, last hour")
        chart.wait_for()
        shown = [each for each in chart.locator("text").all_text_contents() if ":" in each]
    times = [before // 1_000_000 - ago for ago in range(-60, 4200)]
    marks = {time.strftime("%H:%M", time.gmtime(each)) for each in times if each % 600 == 0}
    assert len(shown) >= 5
    assert set(shown) <= marks


def test_without_enough_requests_the_doctor_says_how_many_it_needs(browser: Browser) -> None:
    doctor = {"findings": [], "passed": [], "num_requests": 7, "min_requests": 80}
    with staged(fleet=NO_NUMBERS | {"offers": ["fleet", "doctor"]}, doctor=doctor) as router:
        pages = Watched(browser, router.url)
        with pages.page("doctor") as page:
            told = "the doctor needs 80 requests within ten minutes. It has 7."
            expect(page.locator("main")).to_contain_text(told)
        pages.assert_clean()


def test_a_request_in_the_list_shows_the_name_of_its_key(browser: Browser) -> None:
    """The staged router has no trace of it, about which the browser complains."""
    row = {
        "request_id": "chatcmpl-1", "received_us": now_us(), "outcome": "finished", "ttft_ms": 20,
        "prefill": "prefill-1", "decode": "decode-1", "key": "team-a", "num_attempts": 1,
        "stages": [["prefill", 20]],
    }  # fmt: skip
    fleet = NO_NUMBERS | {"offers": ["fleet", "requests"]}
    with staged(fleet=fleet, requests={"rows": [row]}) as router:
        pages = Watched(browser, router.url)
        with pages.page("requests") as page:
            told = "prefill 100\u00a0%, prefill-1 → decode-1, team-a"
            expect(page.locator("a.row")).to_contain_text(told)


def test_a_request_is_explained_by_findings_about_its_stages_and_by_lost_workers(
    pages: Watched,
) -> None:
    trace = {
        "received_us": 100_000_000, "finished_us": 103_000_000,
        "stages": [
            {"stage": "queue", "ms": 900}, {"stage": "transfer", "ms": 400},
            {"stage": "lost_attempt", "ms": 600},
        ],
        "attempts": [{"prefill": {"worker_id": "prefill-3"}, "decode": {"worker_id": "decode-1"}}],
    }  # fmt: skip
    findings = [
        {"title": "slow link", "stages": ["transfer"], "text": ["It is slow."]},
        {"title": "short", "stages": ["queue"]},
        {"title": "thrash", "stages": ["stall"]},
        {"title": "found later", "stages": ["queue"], "since_us": 113_000_000},
        {"title": "too late", "stages": ["queue"], "since_us": 113_000_001},
    ]
    lost = {"kind": "lost", "at_us": 101_000_000, "worker_id": "prefill-3", "text": "lost"}
    events = [lost, lost | {"worker_id": "prefill-9"}, lost | {"at_us": 20_000_000}]
    with pages.page("fleet") as page:
        explained = page.evaluate(
            """async ([trace, doctor, events]) => {
                const { explanations } = await import("./why.js");
                return explanations(trace, doctor, events).map((each) => [each.title, each.ms]);
            }""".replace("./why.js", f"{pages.url}/dashboard/why.js"),
            [trace, {"findings": findings, "window_s": 10}, events],
        )
    assert explained == [
        ["short", 900],
        ["found later", 900],
        ["00:01:41: lost", 600],
        ["slow link", 400],
    ]


def test_a_worker_that_gets_no_requests_says_why(browser: Browser) -> None:
    """As a card, and as a row of a large pool; such a worker is not ready."""
    with staged(fleet=lambda: states.pods(now_us())) as router:
        pages = Watched(browser, router.url)
        with pages.page("fleet") as page:
            expect(page.locator(".pools h3.p")).to_contain_text("2 of 4 ready")
            expect(page.locator(".pools h3.d")).to_contain_text("4 of 5 ready")
            refused = card(page, states.pod("prefill", 0))
            expect(refused.locator(".state")).to_have_text("refused")
            expect(refused).to_contain_text("Since ")
            expect(refused).to_contain_text("it serves 'Qwen3-8B-Instruct'")
            away = card(page, states.pod("decode", 4))
            expect(away.locator(".state")).to_have_text("not connected")
            expect(away).to_contain_text("has not answered there for 5 s.")
            busy = card(page, states.pod("prefill", 2)).locator(".l3")
            expect(busy).to_contain_text("runs 2, queue 19: 115k tok")
            expect(card(page, states.pod("decode", 0)).locator(".l3")).to_contain_text("76 wait")
        pages.assert_clean()
    with staged(fleet=lambda: states.pods(now_us(), 14, 18)) as router:
        pages = Watched(browser, router.url)
        with pages.page("fleet") as page:
            row = card(page, states.pod("decode", 17))
            expect(row).to_contain_text("not connected")
            expect(row).to_contain_text("has not answered there for 5 s")
        pages.assert_clean()


def test_a_pool_without_a_usable_worker(browser: Browser) -> None:
    with staged(fleet=lambda: states.no_decode_left(now_us())) as router:
        pages = Watched(browser, router.url)
        with pages.page("fleet") as page:
            expect(page.locator(".verdict h1")).to_have_text("No decode worker is left")
            expect(page.locator(".pools h3.d")).to_contain_text("0 of 5 ready")
            expect(page.locator(".door tbody tr")).to_contain_text("without a key")
            expect(page.locator(".door tbody")).to_contain_text("450")
            expect(card(page, "decode-1")).to_contain_text("its connection broke.")
        pages.assert_clean()


def test_what_became_of_requests_at_the_door(browser: Browser) -> None:
    """By key; a key leads to its requests."""
    with staged(fleet=lambda: states.flooded(now_us()), requests={"rows": []}) as router:
        pages = Watched(browser, router.url)
        with pages.page("fleet") as page:
            rows = page.locator(".door tbody tr")
            expect(rows).to_have_count(2)
            first, second = rows.all_inner_texts()
            assert first.split() == ["crawler", "12", "0", "944", "0", "3", "0", "2"]
            assert second.split() == ["chat", "1,204", "7", "0", "2", "1", "65", "9"]
            banners = ("requests go on with the workers", "router-7c9 is silent", "12 lines lost")
            for banner, text in zip(page.locator(".banner").all(), banners, strict=True):
                expect(banner).to_contain_text(text)
            page.get_by_role("link", name="crawler").click()
            expect(page.get_by_label("Search by request id or key")).to_have_value("crawler")
        pages.assert_clean()


ALIKE = {
    "int": number_text.integer, "sig3": number_text.significant,
    "ms": number_text.ms, "ms1": number_text.tenths,
    "share": number_text.percent, "times": number_text.times, "bytes": number_text.size,
    "linkRate": number_text.rate, "age": number_text.age,
}  # fmt: skip
"""The page's functions for numbers, and those of the texts that it is sent."""


def test_the_page_writes_numbers_as_its_texts_do(pages: Watched) -> None:
    values = [0, 0.0123, 0.0996, 0.418, 0.72, 1, 7, 9.996, 12.34, 99.96, 999.4, 999.6, 7286, 10_050,
              65_536, 119_900, 1.4e6, 9.99e6, 38.1e9, None]  # fmt: skip
    with pages.page("fleet") as page:
        shown = page.evaluate(
            f"""async ([names, values]) => {{
                const written = await import("{pages.url}/dashboard/numbers.js");
                return names.map((name) => values.map((each) => written[name](each)));
            }}""",
            [list(ALIKE), values],
        )
    told = [[write(each) for each in values] for write in ALIKE.values()]
    assert dict(zip(ALIKE, shown, strict=True)) == dict(zip(ALIKE, told, strict=True))


def test_no_worker(browser: Browser) -> None:
    with staged(fleet=NO_NUMBERS) as router:
        pages = Watched(browser, router.url)
        with pages.page("fleet") as page:
            expect(page.locator("main h1")).to_have_text("No worker has joined")
            expect(page.locator("pre")).to_contain_text("baton prefill")
            page.evaluate("location.hash = '#/doctor'")
            expect(page.locator("main")).to_contain_text("does not offer this view")
        pages.assert_clean()


def test_two_hundred_workers(browser: Browser) -> None:
    """A pool of many shows those that matter; all of them scroll, and few are drawn."""

    def fleet() -> dict:
        now = now_us()
        some = [incident.worker(now, f"decode-{i:03}", step_ms=20.0) for i in range(200)]
        some[7] |= {"state": "draining"}
        some[90] |= {"blocks_used": 16_000}
        return {**NO_NUMBERS, "workers": [incident.worker(now, "prefill-1"), *some]}

    with staged(fleet=fleet) as router:
        pages = Watched(browser, router.url)
        with pages.page("fleet") as page:
            rows = page.locator(".wk.d tbody tr")
            expect(rows).to_have_count(20)
            expect(card(page, "decode-007")).to_be_visible()
            expect(card(page, "decode-090")).to_be_visible()
            page.get_by_role("button", name="Show all 200").click()
            expect(card(page, "decode-000")).to_be_visible()
            page.locator(".rows.whole").evaluate("(box) => { box.scrollTop = box.scrollHeight; }")
            expect(card(page, "decode-199")).to_be_visible()
            assert rows.count() < 40
        pages.assert_clean()


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_page_left_open_for_a_day_does_not_grow(browser: Browser) -> None:
    """86,400 summaries; the heap after a forced collection stays as it was after 3,600."""
    start = now_us()
    moments = [{**incident.fleet(start + i * 30_000_000), "offers": ["fleet"]} for i in range(50)]
    summaries = itertools.cycle(moments)
    with staged(period_s=0.0005, fleet=lambda: next(summaries)) as router:
        pages = Watched(browser, router.url)
        assert router.feed is not None
        with pages.page("fleet") as page:
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable")

            def heap_after(number: int) -> float:
                deadline = time.monotonic() + 2000
                while router.feed.number < number:
                    assert time.monotonic() < deadline
                    page.wait_for_timeout(200)
                session.send("HeapProfiler.collectGarbage")
                found = session.send("Performance.getMetrics")["metrics"]
                return next(each["value"] for each in found if each["name"] == "JSHeapUsedSize")

            first = heap_after(3_600)
            assert heap_after(86_400) <= 1.1 * first
        pages.assert_clean()
