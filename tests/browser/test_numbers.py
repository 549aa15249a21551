"""The figures of the Fleet view are those of `/metrics`, on a fleet in its first minute: all of its
requests are of the last minute, which the page sums up."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from cli.fleet import Fleet
from tests.browser.browser import Browser, Watched
from tests.browser.figures import number
from tests.browser.traffic import metrics, running_fleet_for_pages, send
from tests.http_client import HTTP
from tests.integration.fleets import assert_idle, wait_for

NUM_REQUESTS = 20
SIDES = ("prefill", "decode")
DASH = "–"
ROUNDING = 0.02
"""Of the router's sketches, and of the page's three digits."""
FIGURES = """() => Object.fromEntries([
    ...[...document.querySelectorAll(".strip div")].map((each) => [
        each.querySelector("dt").innerText, each.querySelector("dd").innerText]),
    ...["prefill", "decode"].map((side) => [
        side, document.querySelector(`.pd-side.${side[0]} .pd-name b`).innerText]),
])"""
"""All figures at once: between two readings the page may draw the next summary."""


@pytest.fixture(scope="module")
def fleet(browser: Browser) -> Iterator[Fleet]:
    with running_fleet_for_pages() as made:
        yield made


@pytest.fixture(scope="module")
def sending_s(fleet: Fleet) -> float:
    """How long it took to send all requests; no first token took longer."""
    began = time.monotonic()
    send(fleet, NUM_REQUESTS)
    took_s = time.monotonic() - began
    assert_idle(fleet)
    return took_s


@pytest.fixture(scope="module")
def readings(
    browser: Browser, fleet: Fleet, sending_s: float
) -> tuple[dict[str, str], dict[str, float]]:
    """The text of each figure in the strip and of both pressures by its name, and `/metrics`: from
    when both tell the pressure that the router measured after the last request."""
    pages = Watched(browser, fleet.url, fleet.access.key or "")
    with pages.page("fleet") as page:
        expect(page.locator(".strip")).to_contain_text(re.compile(r"TTFT p95\s*\d"))

        def read() -> tuple[dict[str, str], dict[str, float]] | None:
            found, counted = page.evaluate(FIGURES), metrics(fleet)
            sides = [(found[side], pressure(counted, side)) for side in SIDES]
            agree = all(text != DASH and is_near(number(text), told) for text, told in sides)
            return (found, counted) if agree else None

        found = wait_for("the pressure of an idle fleet", read)
    pages.assert_clean()
    return found


@pytest.fixture(scope="module")
def shown(readings: tuple[dict[str, str], dict[str, float]]) -> dict[str, str]:
    return readings[0]


@pytest.fixture(scope="module")
def counted(readings: tuple[dict[str, str], dict[str, float]]) -> dict[str, float]:
    return readings[1]


def pressure(counted: dict[str, float], side: str) -> float:
    return counted[f'baton_fleet_pressure{{side="{side}"}}']


def is_near(shown: float, told: float) -> bool:
    return shown == pytest.approx(told, abs=0.02)


def bucket_of(counted: dict[str, float], name: str, share: float) -> tuple[float, float]:
    """The bounds of the bucket that holds this percentile of a histogram."""
    bounds = {
        math.inf if found[1] == "+Inf" else float(found[1]): value
        for sample, value in counted.items()
        if (found := re.fullmatch(rf'{name}_bucket{{le="(.+)"}}', sample))
    }
    rank = math.ceil(share * bounds[math.inf])
    below = 0.0
    for bound, value in sorted(bounds.items()):
        if value >= rank:
            return below, bound
        below = bound
    raise AssertionError(f"{name} has no buckets")


def test_tpot(shown: dict[str, str], counted: dict[str, float]) -> None:
    name = "baton_time_per_output_token_seconds"
    assert counted[f"{name}_count"] == NUM_REQUESTS
    low, high = bucket_of(counted, name, 0.95)
    assert low * (1 - ROUNDING) <= number(shown["TPOT p95"]) <= high * (1 + ROUNDING)


def test_ttft(
    fleet: Fleet, shown: dict[str, str], counted: dict[str, float], sending_s: float
) -> None:
    """The page shows traces' times; the histogram's end when the answer takes the token, which is
    later."""
    rows = HTTP.get(f"{fleet.url}/requests").raise_for_status().json()["rows"]
    times_ms = sorted(each["ttft_ms"] for each in rows)
    assert len(times_ms) == NUM_REQUESTS
    rank = math.ceil(0.95 * NUM_REQUESTS)
    figure = number(shown["TTFT p95"])
    assert figure == pytest.approx(times_ms[rank - 1] / 1000, rel=ROUNDING)
    name = "baton_time_to_first_token_seconds"
    assert counted[f"{name}_count"] == NUM_REQUESTS
    low, high = bucket_of(counted, name, 0.95)
    assert figure <= high * (1 + ROUNDING)
    assert low <= sending_s


def test_totals(shown: dict[str, str], counted: dict[str, float]) -> None:
    assert number(shown["In flight"]) == counted["baton_router_inflight"] == 0
    goodput = counted["baton_fleet_goodput_ratio"]
    assert number(shown["Goodput"]) == pytest.approx(goodput, abs=0.001)
    requests_per_s = float(re.search(r"of ([\d.]+) req/s", shown["Goodput"])[1])
    tokens = counted["baton_output_tokens_total"]
    finished = counted['baton_router_generations_total{outcome="finished"}']
    assert finished == NUM_REQUESTS
    assert tokens == 12 * NUM_REQUESTS
    rounded = 0.05 + 0.5 * finished / tokens
    expected = pytest.approx(requests_per_s * tokens / finished, abs=rounded * tokens / finished)
    assert number(shown["Output"]) == expected


def test_targets_and_pressures(shown: dict[str, str], counted: dict[str, float]) -> None:
    for figure, name in (("TTFT p95", "ttft"), ("TPOT p95", "tpot")):
        target = shown[figure].partition("target ")[2]
        assert number(target) == pytest.approx(counted[f"baton_fleet_{name}_target_seconds"])
    for side in SIDES:
        assert is_near(number(shown[side]), pressure(counted, side))
