"""Workers of several ranks, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from process.number_text import integer, percent


def layout_text(worker: Mapping[str, Any]) -> str:
    """How many ranks share each layer of a worker, as `GET /fleet` shows it, and the number of
    stages if there are several. An older router reports neither."""
    ranks, stages = (worker.get(f"{kind}_parallel", 1) for kind in ("tensor", "pipeline"))
    return integer(ranks) if stages == 1 else f"{integer(ranks)} x {integer(stages)} stages"


def bubbles_text(worker: Mapping[str, Any]) -> str:
    """The part of its busy time in which the stages of a worker's pipeline did not compute; "" for
    workers of one stage."""
    stages, counters = worker.get("pipeline_parallel", 1), worker.get("counters", {})
    under_way_us = stages * counters.get("under_way_us", 0)
    if stages == 1 or not under_way_us:
        return ""
    return percent(counters.get("bubble_us", 0) / under_way_us)


def ranks_text(worker: Mapping[str, Any]) -> str:
    """The layout of a worker of several ranks, the rank that the others wait for, and its bubbles;
    "" for other workers."""
    if worker.get("tensor_parallel", 1) * worker.get("pipeline_parallel", 1) == 1:
        return ""
    parts = [f"ranks {layout_text(worker)}"]
    waits = worker.get("rank_wait_us", ())
    if any(waits):
        parts.append(f"slowest {waits.index(min(waits))}")
    if bubbles := bubbles_text(worker):
        parts.append(f"bubbles {bubbles}")
    return ", ".join(parts)
