"""The table of where a request's time went, from traces of all shapes."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from cli.output.tables import print_table
from cli.output.time_table import time_table


def shown(trace: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Rows by phase: time and words."""
    stream = io.StringIO()
    print_table(Console(file=stream, width=20), time_table(trace))
    rows = [line.strip("│").split("│") for line in stream.getvalue().splitlines() if "│" in line]
    return {row[0].strip(): (row[1].strip(), row[2].strip()) for row in rows}


def trace(prefill: dict | None, decode: dict | None, **fields: Any) -> dict[str, Any]:
    return {
        "request_id": "r-0",
        "placement": {"reason": "because"},
        "attempts": [{"attempt": 1, "prefill": prefill, "decode": decode}],
        "num_output_tokens": 20,
        "blocks_moved": 0,
        "bytes_moved": 0,
        "transport": "",
        "ttft_ms": 9.0,
        "queue_ms": 0.5,
        "prefill_ms": 7.0,
        "handoff_ms": None,
        "decode_ms": 40.0,
        "tpot_ms": 2.1,
        **fields,
    }


def test_a_remote_prefill() -> None:
    prefill = {
        "worker_id": "prefill-1",
        "cached_tokens": 16,
        "chunks": [[1000, 2000, 32], [2000, 3000, 17]],
        "writes": [[1500, 2600, 3, 0], [3000, 4500, 1, 1]],
    }
    rows = shown(
        trace(
            prefill,
            {"worker_id": "decode-1"},
            blocks_moved=4,
            bytes_moved=65536,
            transport="nixl",
            handoff_ms=1.25,
        )
    )
    assert rows["placement"] == ("", "because")
    assert rows["queue"] == ("0.50 ms", "waited on prefill-1")
    assert rows["prefill"] == ("7.00 ms", "49 tokens in 2 chunks (32 + 17), 16 from the cache")
    assert rows["transfer"] == (
        "3.00 ms",
        "4 blocks, 64 KiB over nixl; 3 had arrived before the last chunk was done",
    )
    assert rows["handoff"][0] == "1.25 ms"
    assert rows["decode"] == ("40.00 ms", "20 tokens on decode-1, 2.10 ms per token")


def test_a_local_prefill_has_no_transfer() -> None:
    decode = {"worker_id": "decode-1", "cached_tokens": 0, "chunks": [[0, 7000, 15]]}
    rows = shown(trace(None, decode))
    assert rows["prefill"] == ("7.00 ms", "15 tokens in 1 chunks")
    assert {"transfer", "handoff"}.isdisjoint(rows)


def test_what_is_not_known_is_a_dash() -> None:
    prefill = {"worker_id": "prefill-1", "cached_tokens": 48, "chunks": [], "writes": []}
    rows = shown(trace(prefill, None, queue_ms=None, tpot_ms=None, decode_ms=None))
    assert rows["queue"][0] == "-"
    assert rows["transfer"] == ("-", "0 blocks, 0 KiB over no transport")
    assert rows["decode"] == ("-", "20 tokens")
