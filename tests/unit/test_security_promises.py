"""Each promise of docs/security.md names the tests that try it, and these tests exist."""

from __future__ import annotations

import re

import pytest

from tests.paths import ROOT

DOCUMENT = ROOT / "docs/security.md"
HEADING = "## What is promised, and how it was tried"
LINK = re.compile(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)")


def promises() -> list[list[str]]:
    """The rows of the table: promise, attackers, tests."""
    section = DOCUMENT.read_text().partition(HEADING)[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_there_are_promises() -> None:
    assert len(promises()) >= 15


@pytest.mark.parametrize("row", promises(), ids=lambda row: row[0][:60])
def test_a_promise_names_tests_that_exist(row: list[str]) -> None:
    promise, attacker, tests = row
    assert promise
    assert attacker
    links = LINK.findall(tests)
    assert links, "a promise without a test"
    assert len(links) == tests.count("]("), "another form of link"
    for name, path in links:
        source = (ROOT / path).read_text()
        pattern = rf"^ *(async )?def {name}\("
        assert re.search(pattern, source, re.MULTILINE), f"{path} has no {name}"
