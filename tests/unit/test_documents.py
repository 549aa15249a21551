"""The documents speak of files, headings and constants that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.paths import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|h|cuh|tpl|yaml|toml|sh|md|json)|(?:[\w.-]+/)+)`")
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


@cache
def anchors(document: Path) -> frozenset[str]:
    """The headings of a document, as GitHub names them in links."""
    text = _FENCE.sub("", document.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return frozenset(
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
    )


def dead_links(document: Path) -> list[str]:
    """The links of a document to files and headings that do not exist."""
    found = []
    for link in _LINK.findall(document.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if "://" in link or path.startswith("mailto:"):
            continue
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_link_leads_somewhere(document: Path) -> None:
    assert dead_links(document) == []


def test_a_link_to_nothing_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page: two\n[a](gone.md) [b](#a-page-two) [c](#other) [d](https://x/y)\n")
    assert dead_links(page) == ["gone.md", "#other"]


def missing_files(text: str) -> list[str]:
    """The files and folders in a table's rows that do not exist.

    A name without its folder is in the one of a file before it in the row, or a folder of that.
    """
    found = []
    for row in re.findall(r"^\|.*\|$", text, re.MULTILINE):
        folders = [ROOT]
        for name in _FILE.findall(row):
            if not any((folder / name).exists() for folder in folders):
                found.append(name)
            path = ROOT / name
            folders += [path if name.endswith("/") else path.parent]
    return found


def test_files_in_the_tables_of_the_readme_exist() -> None:
    assert missing_files((ROOT / "README.md").read_text(encoding="utf-8")) == []


def test_a_file_that_does_not_exist_is_found() -> None:
    assert missing_files("| x | `worker/loop.py`, `intake.py`, `gone.py`, `router/` |\n") == [
        "gone.py"
    ]
