"""Small fleets in virtual time, whose steps take round numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from protocol.layout import KvLayout
from protocol.messages import Role
from router.routing.decision import decide
from scheduling.scheduler import Scheduler, SchedulerConfig
from scheduling.step_model import StepModel
from simulator.devices.step_times import ChunkWork
from simulator.fleet import Fleet, FleetSpec, Outcome
from simulator.leaps import MAX_STEPS
from simulator.policies.choices import Policy
from simulator.traces.sessions import BlockRuns, Session, Trace, Turn
from simulator.worker_spec import WorkerSpec

BLOCK = 4


@dataclass(frozen=True)
class LinearTimes:
    """A step costs `fixed_s`, and more for each token to compute and for each in a context."""

    fixed_s: float = 0.01
    token_s: float = 0.001
    context_s: float = 1e-6

    def decode_line(self, num_rows: int) -> tuple[float, float]:
        return self.fixed_s + self.token_s * num_rows, self.context_s

    def seconds(self, num_rows: int, context: int, chunks: ChunkWork) -> float:
        fixed, slope = self.decode_line(num_rows + chunks.num_tokens)
        return fixed + slope * (context + chunks.read_tokens)


def worker_spec(
    role: Role, num_blocks: int = 64, max_leap: int = MAX_STEPS, layout: KvLayout | None = None
) -> WorkerSpec:
    config = SchedulerConfig(
        BLOCK, max_batch_size=8, chunk_min_tokens=BLOCK, chunk_max_tokens=32, itl_target_s=0.05
    )
    spec = WorkerSpec(
        role, config, num_blocks, 1e6, num_blocks * BLOCK, LinearTimes(), 1, max_leap, layout=layout
    )
    if layout is None:
        return spec
    return replace(spec, max_context=Scheduler(config, spec.pools(), StepModel()).most_tokens)


def small_fleet(
    prefill: int = 1,
    decode: int = 2,
    num_blocks: int = 64,
    max_leap: int = MAX_STEPS,
    policy: Policy = decide,
    layout: KvLayout | None = None,
    **changes: Any,
) -> Fleet:
    """A fleet of small workers; `changes` are those of its `FleetSpec`."""
    pools = tuple(
        (worker_spec(role, num_blocks, max_leap, layout), count)
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode))
        if count
    )
    return Fleet(FleetSpec(pools, lambda: policy, link_bytes_per_s=1e9, **changes), seed=7)


def single(at: float, prompt: int, output: int, ids: tuple[tuple[int, int], ...] = ()) -> Session:
    """A request by itself; `ids` are runs of its blocks."""
    blocks = BlockRuns(0, BLOCK, ids) if ids else None
    return Session(f"s{at}", at, (Turn(0.0, prompt, output, blocks),))


def served(fleet: Fleet, *sessions: Session) -> Outcome:
    return fleet.run(Trace("small", sessions))
