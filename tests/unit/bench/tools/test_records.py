"""Records of measurements, and the documents that are made from them."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.table import Table

from bench.tools.records import command_line, keep_table, read_record, write_record
from scripts import measured_tables
from tests.paths import ROOT

RECORDS = sorted((ROOT / "docs/measured").glob("*.json"))


@pytest.mark.parametrize("document", measured_tables.documents(), ids=lambda path: path.name)
def test_documents_have_the_tables_of_the_records(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert measured_tables.current(document) == text, "run: scripts/measured_tables.py --write"


def test_a_figure_that_no_record_has_is_replaced(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    shutil.copy(ROOT / "docs/performance.md", document)
    text = document.read_text()
    document.write_text(text.replace("1.29 / 1.34", "9.99 / 1.34"))
    assert document.read_text() != text
    assert measured_tables.current(document) == text


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_table_of_a_record_is_shown_and_whole(path: Path) -> None:
    shown = "".join(document.read_text() for document in measured_tables.documents())
    record = read_record(path)
    for name, table in record.tables.items():
        assert f"<!-- measured: {path.stem}, {name} -->" in shown
        assert {len(row) for row in table.rows} == {len(table.columns)}, name
        assert re.fullmatch(r"|(by )?\d{4}-\d\d-\d\d( to \d{4}-\d\d-\d\d)?", table.recorded), name


def test_a_new_table_takes_the_place_of_the_one_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/venv/bin/python", "-m", "bench.ranks", "--ranks=2"])
    path = tmp_path / "machine.json"
    for ratio in ("1.10", "1.20"):
        table = Table("work", "ratio", title="ranks")
        table.add_row("decode 1", ratio)
        keep_table(path, "ranks M1", table)
    keep_table(path, "ranks M2", table)
    record = read_record(path)
    assert record.machine
    assert list(record.tables) == ["ranks M1", "ranks M2"]
    found = record.tables["ranks M1"]
    assert found.column("ratio") == {"decode 1": "1.20"}
    assert found.command == "python -m bench.ranks --ranks=2"
    assert found.recorded
    write_record(path, replace(record, tables={}))
    assert read_record(path).tables == {}


def test_a_table_that_is_measured_in_pieces_keeps_the_rows_of_other_pieces(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for piece, first, second in (("b", "1", "2"), ("a", "3", "4"), ("b", "5", "6")):
        table = Table("model", "load", "ratio")
        table.add_row(piece, "light", first)
        table.add_row(piece, "busy", second)
        keep_table(path, "pieces", table, num_keys=2)
    rows = read_record(path).tables["pieces"].rows
    assert rows == [
        ["a", "busy", "4"], ["a", "light", "3"], ["b", "busy", "6"], ["b", "light", "5"],
    ]  # fmt: skip


def test_without_a_file_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keep_table(None, "ranks M1", Table("work"))
    assert list(tmp_path.iterdir()) == []


def test_a_command_names_no_place_of_its_machine() -> None:
    words = ["/venv/bin/python", "-m", "bench.engine", "--model", "/models/a.gguf"]
    words += ["--peer-python", "vllm=/v/bin/python", "--record=/x.json", "--only", "decode 8"]
    assert command_line(words) == "python -m bench.engine --model a.gguf --only 'decode 8'"
