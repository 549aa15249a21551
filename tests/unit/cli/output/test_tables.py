"""Tables in terminals of several widths: nothing is cut off, no line is broken."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from cli.output.tables import print_table, print_workers, workers_table

HEADINGS = [
    "WORKER", "ROLE", "STATE", "MODEL", "TRANSPORT", "KV BLOCKS", "USED", "CACHED", "RUNNING",
    "WAITING", "QUEUED TOKENS", "HOST", "PID",
]  # fmt: skip
WORKERS: list[dict[str, Any]] = [
    {
        "worker_id": f"{role}-0a1b2c",
        "role": role,
        "state": "draining",
        "host": "node-17",
        "pid": 123456,
        "model": "Qwen3-0.6B",
        "transport": "nixl",
        "transport_paths": ["CUDA IPC", "TCP"],
        "blocks_total": 201_887,
        "blocks_used": 1_234,
        "blocks_cached": 98_765,
        "num_running": 64,
        "num_waiting": 12,
        "queued_tokens": 7_654_321,
    }
    for role in ("prefill", "decode")
]


def shown(width: int, with_load: bool = True, terminal: bool = True) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=terminal, color_system=None)
    print_workers(console, WORKERS, with_load)
    return stream.getvalue().splitlines()


def assert_complete(lines: list[str]) -> None:
    words = " ".join(lines)
    for heading in HEADINGS:
        assert heading in words
    for text in (
        "prefill-0a1b2c",
        "201,887",
        "1,234",
        "98,765",
        "7,654,321",
        "node-17",
        "123456",
        "nixl: CUDA IPC",
    ):
        assert text in words


def test_wide_terminal_shows_one_table() -> None:
    lines = shown(160)
    assert len(lines) == 3
    assert_complete(lines)


def test_80_columns_show_all_without_a_broken_line() -> None:
    lines = shown(80)
    assert_complete(lines)
    assert max(len(line) for line in lines) <= 80
    assert len(lines) == 7, "two tables of three lines, and a line between"
    assert [line.split()[0] for line in lines if line] == [
        "WORKER", "decode-0a1b2c", "prefill-0a1b2c",
    ] * 2  # fmt: skip


def test_a_pipe_gets_a_line_for_each_worker_whatever_its_width() -> None:
    lines = shown(80, terminal=False)
    assert len(lines) == 3
    assert_complete(lines)


@pytest.mark.parametrize("width", [80, 120])
def test_words_fold_in_a_terminal(width: int) -> None:
    table = Table("phase", "what happened")
    words = [f"word{number}" for number in range(40)]
    table.add_row("prefill", " ".join(words))
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, force_terminal=True, color_system=None, soft_wrap=True
    )
    print_table(console, table)
    lines = stream.getvalue().splitlines()
    assert max(len(line) for line in lines) <= width
    assert [word for word in words if word not in stream.getvalue()] == []


def test_ranks_have_a_column_where_a_worker_has_several() -> None:
    """A worker in the answer of an older router says nothing of ranks."""
    prefill, decode = WORKERS
    table = workers_table([prefill, {**decode, "tensor_parallel": 4}], with_load=True)
    ranks = next(each for each in table.columns if each.header == "RANKS")
    assert list(ranks.cells) == ["4", "1"]
    counters = {"under_way_us": 1_000_000, "bubble_us": 500_000}
    staged = workers_table(
        [{**decode, "pipeline_parallel": 2, "counters": counters}, prefill], with_load=True
    )
    cells = {each.header: list(each.cells) for each in staged.columns}
    assert cells["RANKS"] == ["1 x 2 stages", "1"]
    assert cells["BUBBLES"] == ["25\N{NO-BREAK SPACE}%", ""], (
        "half a second of the two seconds of two stages"
    )
    alone = workers_table([{**decode, "tensor_parallel": 1}], with_load=True)
    assert "RANKS" not in [each.header for each in alone.columns]
