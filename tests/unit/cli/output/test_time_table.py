"""The table of where a request's time went, from traces of all shapes."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cli.output.tables import print_table
from cli.output.time_table import time_table

FIRST, REST = "first token", "to the last"


def shown(trace: dict[str, Any]) -> list[list[str]]:
    """The rows: stage, time, words."""
    stream = io.StringIO()
    print_table(Console(file=stream, width=20), time_table(trace))
    text = stream.getvalue().replace("\u00a0", " ")
    rows = [line.strip("│").split("│") for line in text.splitlines() if "│" in line]
    return [[cell.strip() for cell in row] for row in rows]


def stage(name: str, ms: float, part: str = "first_token", where: str = "", text: str = "") -> dict:
    return {"part": part, "stage": name, "where": where, "ms": ms, "text": text}


def trace(prefill: dict | None, decode: dict | None, **fields: Any) -> dict[str, Any]:
    return {
        "request_id": "r-0", "placement": {"reason": "because"}, "outcome": "finished",
        "attempts": [{"attempt": 1, "prefill": prefill, "decode": decode}],
        "num_output_tokens": 20, "blocks_moved": 0, "bytes_moved": 0, "transport": "",
        "first_token_us": 1_009_000, "tpot_ms": 2.1, "stages": [],
        **fields,
    }  # fmt: skip


def test_a_remote_prefill() -> None:
    prefill = {
        "worker_id": "prefill-1",
        "cached_tokens": 16,
        "chunks": [[1000, 2000, 32], [2000, 3000, 17]],
        "writes": [[1500, 2600, 3, 0], [3000, 4500, 1, 1]],
    }
    stages = [
        stage("queue", 0.5, where="prefill-1"),
        stage("between_chunks", 7.0, where="prefill-1", text="between two steps"),
        stage("unexplained", 0.002),
        stage("transfer", 1.25, "rest", "prefill-1 → decode-1", "4 blocks over CMA"),
        stage("decode", 12_040.0, "rest", "decode-1", "19 steps"),
    ]
    moved = {"blocks_moved": 4, "bytes_moved": 65536, "transport": "nixl"}
    assert shown(trace(prefill, {"worker_id": "decode-1"}, stages=stages, **moved)) == [
        ["reason", "", "because"],
        ["prompt", "", "49 tokens in 2 chunks (32 + 17), 16 from the cache"],
        ["KV", "", "4 blocks, 64.0 KiB over nixl; 3 had arrived before the last chunk was done"],
        ["queue", "0.5 ms", "prefill-1"],
        ["between chunks", "7.0 ms", "prefill-1: between two steps"],
        [FIRST, "7.5 ms", "received to first token sent"],
        ["transfer", "1.2 ms", "prefill-1 → decode-1: 4 blocks over CMA"],
        ["decode", "12,040.0 ms", "decode-1: 19 steps"],
        [REST, "12,041.2 ms", "20 tokens on decode-1, 2.10 ms per token"],
    ]


def test_what_was_predicted_stands_beside_what_happened() -> None:
    other = {"prefill": "p1", "decode": "d1", "cost_ms": 210.0, "ttft_ms": 90.0}
    placement = {"reason": "because", "cost_ms": 132.0, "alternative": other}
    told = trace(None, None, placement=placement, predicted_ttft_ms=95.0)
    words = "to the first token; everybody's time: 132 ms, on p1 → d1: 210 ms"
    assert shown(told)[1] == ["forecast", "95.0 ms", words]
    alone = trace(None, None, placement=placement | {"alternative": None}, predicted_ttft_ms=95.0)
    assert shown(alone)[1][2] == "to the first token; everybody's time: 132 ms"


@given(st.lists(st.floats(0.1, 20_000), min_size=1, max_size=9))
def test_the_rows_add_up_to_their_part_as_they_are_written(times_ms: list[float]) -> None:
    stages = [stage("queue", each) for each in times_ms]
    *rows, total = [row[1] for row in shown(trace(None, None, stages=stages))[1:]]
    written = [float(each.removesuffix(" ms").replace(",", "")) for each in (*rows, total)]
    assert sum(written[:-1]) == pytest.approx(written[-1], abs=1e-6)


def test_a_local_prefill_has_no_transfer() -> None:
    decode = {"worker_id": "decode-1", "cached_tokens": 0, "chunks": [[0, 7000, 15]]}
    rows = shown(trace(None, decode))
    assert rows == [["reason", "", "because"], ["prompt", "", "15 tokens in 1 chunk"]]


def test_a_request_that_failed_says_why() -> None:
    found = shown(trace(None, None, outcome="failed", error="deadline_exceeded"))
    assert found[:2] == [["reason", "", "because"], ["error", "", "deadline_exceeded"]]


@pytest.mark.parametrize(("outcome", "until"), [("running", "now"), ("failed", "the end")])
def test_a_request_without_a_token(outcome: str, until: str) -> None:
    prefill = {"worker_id": "prefill-1", "cached_tokens": 48, "chunks": [], "writes": []}
    stages = [stage("waiting", 80.0, text="workers report with the first token")]
    found = shown(
        trace(prefill, None, stages=stages, tpot_ms=None, first_token_us=0, outcome=outcome)
    )
    assert found[1:] == [
        ["prompt", "", "0 tokens in 0 chunks, 48 from the cache"],
        ["KV", "", "0 blocks, 0 B over no transport"],
        ["waiting", "80.0 ms", "workers report with the first token"],
        [FIRST, "80.0 ms", f"until {until}, without a token"],
    ]
