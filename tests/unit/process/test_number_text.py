"""Numbers for people are written by one module, whose functions every other text calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from process import number_text
from tests.paths import ROOT

NBSP = "\u00a0"
SHOWN = [
    *ROOT.glob("console/**/*.py"),
    *ROOT.glob("cli/output/*.py"),
    *ROOT.glob("router/routing/*.py"),
    ROOT / "router/requests/stages.py",
    ROOT / "router/fleet/history.py",
    ROOT / "router/fleet/conditions.py",
]
"""Modules whose texts the page, the doctor or a terminal shows."""
PAGE = sorted((ROOT / "console/dashboard/page").glob("*.js"))
NOUNS = (
    "attempt|block|check|chunk|finding|minute|pair|preemption|prompt|request|router|sample|second|"
    "sequence|step|stream|token|worker"
)
COUNTED = rf"[ {NBSP}](?!of )(?:\w+ )?(?:{NOUNS})s\b(?![/=])"
UNITS = rf"[ {NBSP}](?:%|(?:ms|s|min|h|B|[kKMGT]i?B)\b)"
WRITTEN = re.compile(f"{UNITS}|{COUNTED}|[%×]")
"""What follows a number that was not written by the module."""
POOLS = ("pool", "pool_name", "role")
"""Names of values that are words before a noun: `{pool} workers`."""


def unwritten(source: str) -> Iterator[tuple[int, str]]:
    """The numbers of f-strings that no function of the module wrote, by line."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for i, part in enumerate(node.values):
            if not isinstance(part, ast.FormattedValue):
                continue
            after = node.values[i + 1] if i + 1 < len(node.values) else None
            text = str(after.value) if isinstance(after, ast.Constant) else ""
            value = ast.unparse(part.value)
            spec = "" if part.format_spec is None else ast.unparse(part.format_spec)
            is_formatted = bool(re.search(r"[,_%]|\.\d", spec)) and "%H" not in spec
            is_counted = WRITTEN.match(text) and not value.endswith(POOLS)
            if is_formatted or (is_counted and not value.startswith(tuple(dir(number_text)))):
                yield part.lineno, f"{{{value}}}{text[:20]}"


@pytest.mark.parametrize("text", ["{x:,.0f}", "{x:.0%}", "{x} workers", "{len(x)} prefill workers"])
def test_a_number_that_is_written_elsewhere_is_found(text: str) -> None:
    assert list(unwritten(f'f"{text}"'))


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_number_for_people_is_written_by_the_module(path: Path) -> None:
    assert list(unwritten(path.read_text(encoding="utf-8"))) == []


OF_PAGE = re.compile(
    rf"toFixed|toLocaleString|toPrecision|(?<!role)\}}(?:</b>)?(?:{UNITS}|{COUNTED})"
)


@pytest.mark.parametrize("path", PAGE, ids=lambda path: path.name)
def test_the_page_writes_numbers_in_one_module(path: Path) -> None:
    if path.name != "numbers.js":
        lines = path.read_text(encoding="utf-8").splitlines()
        assert [each.strip() for each in lines if OF_PAGE.search(each)] == []


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (number_text.ms(7286), "7.29 s"),
        (number_text.ms(999.5), "1.00 s"),
        (number_text.ms(999.4), "999 ms"),
        (number_text.ms(0.418), "0.42 ms"),
        (number_text.ms(99.97), "100 ms"),
        (number_text.ms(9.996), "10.0 ms"),
        (number_text.ms(0), "0 ms"),
        (number_text.ms(None), "–"),
        (number_text.percent(0.02), "2.0 %"),
        (number_text.percent(0), "0 %"),
        (number_text.percent(0.996), "100 %"),
        (number_text.times(1.416), "1.42×"),
        (number_text.size(65536), "64.0 KiB"),
        (number_text.size(12), "12 B"),
        (number_text.rate(1.4e6), "1.40 MB/s"),
        (number_text.rate(38.1e9), "38.1 GB/s"),
        (number_text.tenths(12_041.25), "12,041.2"),
        (number_text.exact(1000.0), "1,000"),
        (number_text.exact(0.95), "0.95"),
        (number_text.count(1, "prefill worker"), "1 prefill worker"),
        (number_text.count(0, "request"), "0 requests"),
        (number_text.count(1204, "request"), "1,204 requests"),
    ],
)
def test_the_forms(written: str, expected: str) -> None:
    assert written.replace(NBSP, " ") == expected
