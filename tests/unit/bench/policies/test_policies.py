"""Cells of policies: what is kept, and where Baton stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.policies.__main__ import Done, main, standing
from bench.policies.cells import Cell, Score

CELL = Cell("azure-code", "baton", 0)


def good(share: float) -> Score:
    return Score(share, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0)


def test_done_cells_are_kept_by_version(tmp_path: Path) -> None:
    path = tmp_path / "cells"
    Done(path, "one").add(CELL, good(0.5))
    with path.open("ab") as file:
        file.write(b'{"cell": {"traf')
    Done(path, "one").add(Cell("agents", "baton", 0), good(0.7))
    again = Done(path, "one")
    assert again.score(CELL) == good(0.5)
    assert again.score(Cell("agents", "baton", 0)) == good(0.7)
    assert CELL not in Done(path, "other")


@pytest.mark.parametrize(
    ("baton", "words", "holds"),
    [(0.9, "Baton has the most", True), (0.79, "1.2% behind random", True), (0.7, "12.5%", False)],
)
def test_where_baton_stands(baton: float, words: str, holds: bool) -> None:
    verdict, is_near = standing({"baton": [good(baton)], "random": [good(0.7), good(0.9)]})
    assert words in verdict
    assert is_near is holds


def test_what_is_done_is_not_simulated_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "azure_2023_code.csv"
    row = "2023-11-16 18:17:03.9799600,400,8\n"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + row * 5)
    kept = tmp_path / "kept"
    flags = ["--traces", str(tmp_path), "--traffic", "azure-code", "--policies", "baton", "random"]
    flags += ["--seeds", "0", "--resume", str(kept)]
    assert main(flags) == 0
    first = capsys.readouterr().out
    assert "Baton has the most good requests" in first
    assert len([json.loads(each) for each in kept.read_text().splitlines() if each]) == 2
    trace.unlink()
    assert main(flags) == 0
    assert capsys.readouterr().out == first
