"""The figures of the Fleet view are those of `/metrics`, on a fleet in its first minute: all of its
requests are of the last minute, which the page sums up."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from cli.fleet import Fleet
from tests.browser.browser import Watched
from tests.browser.traffic import metrics, running_fleet_for_pages, send
from tests.integration.fleets import assert_idle

NUM_REQUESTS = 40
SCALES = {"ms": 1e-3, "s": 1.0, "k": 1e3, "": 1.0, "%": 1e-2, "×": 1.0}
BOUNDARY = 0.15
"""Clocks of a request's begin differ by less than this part of a bucket's bounds."""


@pytest.fixture(scope="module")
def fleet(browser: Browser) -> Iterator[Fleet]:
    with running_fleet_for_pages() as made:
        send(made, NUM_REQUESTS)
        assert_idle(made)
        yield made


@pytest.fixture(scope="module")
def shown(browser: Browser, fleet: Fleet) -> dict[str, str]:
    """The text of each figure in the strip, and of both pressures, by its name."""
    pages = Watched(browser, fleet.url, fleet.access.key or "")
    with pages.page("fleet") as page:
        expect(strip(page, "TTFT p95")).to_contain_text(re.compile(r"\d"))
        names = page.locator(".strip dt").all_inner_texts()
        found = {name: strip(page, name).inner_text() for name in names}
        for side in ("prefill", "decode"):
            found[side] = page.locator(f".pd-side.{side[0]} .pd-name b").inner_text()
    pages.assert_clean()
    return found


@pytest.fixture(scope="module")
def counted(fleet: Fleet, shown: dict[str, str]) -> dict[str, float]:
    return metrics(fleet)


def strip(page: Page, name: str):
    return page.locator(".strip div").filter(has=page.locator("dt", has_text=name)).locator("dd")


def number(text: str) -> float:
    """The first number of a figure, in seconds where it is a time."""
    match = re.match(r"([\d,.]+)\s*(ms|s|k|%|×)?(?!\w)", text)
    assert match is not None, text
    return float(match[1].replace(",", "")) * SCALES[match[2] or ""]


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


@pytest.mark.parametrize(
    ("figure", "name"),
    [
        ("TTFT p95", "baton_time_to_first_token_seconds"),
        ("TPOT p95", "baton_time_per_output_token_seconds"),
    ],
)
def test_percentiles(
    shown: dict[str, str], counted: dict[str, float], figure: str, name: str
) -> None:
    assert counted[f"{name}_count"] == NUM_REQUESTS
    low, high = bucket_of(counted, name, 0.95)
    assert low * (1 - BOUNDARY) <= number(shown[figure]) <= high * (1 + BOUNDARY)


def test_totals(shown: dict[str, str], counted: dict[str, float]) -> None:
    assert number(shown["In flight"]) == counted["baton_router_inflight"] == 0
    goodput = counted["baton_fleet_goodput_ratio"]
    assert number(shown["Goodput"]) == pytest.approx(goodput, abs=0.001)
    requests_per_s = float(re.search(r"of ([\d.]+) req/s", shown["Goodput"])[1])
    tokens = counted["baton_output_tokens_total"]
    finished = counted['baton_router_generations_total{outcome="finished"}']
    assert finished == NUM_REQUESTS
    assert tokens == 12 * NUM_REQUESTS
    per_request = number(shown["Output"]) / requests_per_s
    assert per_request == pytest.approx(tokens / finished, rel=0.15), "both are rounded"


def test_targets_and_pressures(shown: dict[str, str], counted: dict[str, float]) -> None:
    for figure, name in (("TTFT p95", "ttft"), ("TPOT p95", "tpot")):
        target = shown[figure].partition("target ")[2]
        assert number(target) == pytest.approx(counted[f"baton_fleet_{name}_target_seconds"])
    for side in ("prefill", "decode"):
        pressure = counted[f'baton_fleet_pressure{{side="{side}"}}']
        assert number(shown[side]) == pytest.approx(pressure, abs=0.02)
