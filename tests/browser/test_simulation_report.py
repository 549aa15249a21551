"""The page that `baton simulate --html` writes, in Chromium: it fits, and shows what it draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.main import main
from tests.browser.boxes import faults
from tests.browser.browser import Browser

SIZES = [((1400, 900), "light"), ((800, 900), "light"), ((400, 900), "dark")]
WIDTHS = "() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten fleets, so more lines than there are colours, in a table that is wider than the page."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    policies = "baton,random,lmetric,dynamo,always-split"
    command = ["simulate", "--trace", "poisson:requests=12", "--model", "Llama-3-8B"]
    fleets = ["--prefill", "1", "--decode", "1", "--colocated", "2", "--policies", policies]
    assert main([*command, *fleets, "--html", str(path)]) == 0
    return path


@pytest.mark.parametrize(("size", "scheme"), SIZES)
def test_a_report_fits_into_its_window(
    browser: Browser, report: Path, size: tuple[int, int], scheme: str
) -> None:
    with browser.tab(size, scheme) as page:
        page.goto(report.as_uri())
        width, shown = page.evaluate(WIDTHS)
        assert width == shown == size[0]
        table = page.locator("table").bounding_box()
        assert table is not None
        assert table["width"] > size[0], "the table scrolls in a box of its own"
        for each in page.locator("figure svg").all():
            box = each.bounding_box()
            assert box is not None
            assert box["x"] + box["width"] <= size[0]
        strokes = page.locator(".key line").evaluate_all("all => all.map(e => e.outerHTML)")
        assert len(set(strokes)) == 10
        assert faults(page) == []
