"""Spans in which workers computed, and steps that only decode, from the traces of requests."""

from __future__ import annotations

from typing import Any

import pytest

from bench.replay.player import Played
from bench.simulated_against_real.computing import Computing, timed_decodes

MS = 1000


def trace(worker: str, *steps: tuple[int, int, int, int, int]) -> dict[str, Any]:
    """Steps by begin and end in ms, sequences, number of steps and prompt tokens."""
    spans = [[start * MS, end * MS, *rest] for start, end, *rest in steps]
    decode = {"worker_id": worker, "chunks": [], "steps": spans}
    return {"attempts": [{"prefill": None, "decode": decode}]}


def test_decodes_are_timed_until_an_equal_step_that_follows_at_once() -> None:
    found = timed_decodes(
        Played("s", 0, 0.0, num_prompt=100),
        trace(
            "d1",
            (0, 20, 2, 2, 0),  # two steps, followed at once
            (22, 30, 2, 1, 0),  # followed by a pause
            (40, 50, 2, 1, 0),  # followed by a step with prompt tokens
            (50, 70, 2, 1, 5),
            (70, 80, 2, 1, 0),  # followed by a step of more sequences
            (80, 90, 3, 1, 0),
            (91, 95, 3, 1, 0),
        ),
    )
    assert [(each.rows, each.context, each.seconds) for each in found] == [
        (2, 200, pytest.approx(0.011)),
        (3, 3 * 106, pytest.approx(0.011)),
    ]


def test_a_span_is_shared_with_other_workers_however_their_requests_overlap() -> None:
    computing = Computing(
        [
            trace("d1", (0, 100, 1, 1, 0)),
            trace("d2", (20, 40, 1, 1, 0)),
            trace("d2", (30, 60, 1, 1, 0)),
            trace("d3", (30, 50, 1, 1, 0)),
        ]
    )
    assert computing.share_beside("d1", 0.0, 0.1) == pytest.approx(0.4)
    assert computing.share_beside("d1", 0.02, 0.06) == 1.0
    assert computing.share_beside("d1", 0.06, 0.1) == 0.0
    assert (computing.number(0.035), computing.number(0.035, "d1")) == (3, 2)
