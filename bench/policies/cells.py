"""One cell: a trace, a policy and a seed on a simulated fleet of H200 with Llama-3-70B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from simulator.commands.fleets import Size
from simulator.commands.runs import Run, simulate
from simulator.commands.settings import SimulationSettings


@dataclass(frozen=True)
class Traffic:
    """A trace, the part of it that is used (`limit`, None: all), how fast it comes, the fleet that
    serves it, and its targets."""

    file: str
    size: Size
    ttft_ms: int
    tpot_ms: int = 50
    speed: float = 1.0
    limit: int | None = None
    span_s: float = 1800.0
    max_context: int | None = None


TRAFFIC: Mapping[str, Traffic] = {
    "mooncake-conversation": Traffic("mooncake_conversation.jsonl", Size(4, 4), 4000),
    "mooncake-synthetic": Traffic("mooncake_synthetic.jsonl", Size(4, 4), 4000),
    "azure-conversation": Traffic("azure_2023_conv.csv", Size(2, 2), 1000, speed=8.0),
    "azure-code": Traffic("azure_2023_code.csv", Size(2, 2), 1000, speed=4.0),
    "agents": Traffic(
        "agent_sessions.jsonl", Size(4, 4), 4000, limit=40, span_s=600.0, max_context=262_144
    ),
}


class Cell(msgspec.Struct, frozen=True):
    """The input of one simulation. `limit` replaces the traffic's own limit if it is lower."""

    traffic: str
    policy: str
    seed: int
    limit: int | None = None


class Score(msgspec.Struct, frozen=True):
    """The results of a cell; latencies in milliseconds."""

    good_share: float
    good_per_s: float
    ttft_mean: float
    ttft_p99: float
    tpot_mean: float
    tpot_p99: float
    hit_share: float
    split_share: float


def score(cell: Cell, traces: Path) -> Score:
    """Simulate a cell. Raises ConfigError."""
    traffic = TRAFFIC[cell.traffic]
    limits = [each for each in (cell.limit, traffic.limit) if each is not None]
    settings = SimulationSettings(
        trace=str(traces / traffic.file),
        model="Llama-3-70B",
        gpu="H200",
        ttft_ms=traffic.ttft_ms,
        tpot_ms=traffic.tpot_ms,
        seed=cell.seed,
        speed=traffic.speed,
        limit=min(limits) if limits else None,
        span_s=traffic.span_s,
        max_context=traffic.max_context,
    )
    found = simulate(settings, Run(cell.policy, traffic.size, cell.policy)).summary
    ttft, tpot = found.ttft_ms, found.tpot_ms
    return Score(
        found.goodput_share,
        found.goodput_per_s,
        ttft.mean if ttft is not None else 0.0,
        ttft.p99 if ttft is not None else 0.0,
        tpot.mean if tpot is not None else 0.0,
        tpot.p99 if tpot is not None else 0.0,
        found.hit_share,
        found.split_share,
    )
