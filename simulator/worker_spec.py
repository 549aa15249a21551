"""The common properties of the workers of one simulated pool: limits, memory, and the time of
steps.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.layout import KvLayout
from protocol.messages import Role
from scheduling.block_manager import BlockManager
from scheduling.block_pools import BlockPools
from scheduling.pool_sizes import pages_of
from scheduling.scheduler import SchedulerConfig
from scheduling.step_model import StepCost, StepModel, attended_pairs
from simulator.devices.step_noise import StepNoise
from simulator.devices.step_times import ChunkWork, StepTimes
from simulator.leaps import MAX_STEPS
from worker.moved_blocks import bytes_by_group

_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class WorkerSpec:
    """What workers of one pool have in common.

    `num_blocks` blocks of all layers, of `block_bytes` each, fit into memory. If layers are in
    groups, `layout` says which. `windows` are those of the model. `max_leap` 1 computes every step
    by itself. So do `learns_every_step`, with which the step model learns from the warm-up and from
    every step, as those of real workers do, and `noise`, with which steps take longer or shorter
    than `times` says. `turn_s` is the part of each step's time that lies between two steps, of
    which step models do not learn.
    """

    role: Role
    config: SchedulerConfig
    num_blocks: int
    block_bytes: float
    max_context: int
    times: StepTimes
    num_cards: int = 1
    max_leap: int = MAX_STEPS
    noise: StepNoise | None = None
    learns_every_step: bool = False
    turn_s: float = 0.0
    layout: KvLayout | None = None
    windows: tuple[int, ...] = ()

    @property
    def is_stepwise(self) -> bool:
        """Whether equal steps may take or teach something else."""
        return self.noise is not None or self.learns_every_step

    @property
    def most_steps(self) -> int:
        """How many steps may be leapt over at once."""
        return 1 if self.is_stepwise else self.max_leap

    @property
    def bytes_by_group(self) -> tuple[float, ...]:
        """The bytes of a block of each group of layers."""
        if self.layout is None:
            return (self.block_bytes,)
        scale = self.block_bytes / self.layout.block_bytes
        return tuple(scale * each for each in bytes_by_group(self.layout))

    def pools(self) -> BlockPools:
        """The blocks of a worker. Raises ConfigError if memory does not suffice for all groups."""
        if self.layout is None:
            return BlockPools.of_one(BlockManager(self.num_blocks), self.config.block_size)
        return BlockPools.of(self.layout, pages_of(self.layout, self.num_blocks))

    def step_model(self) -> StepModel:
        """The step model of a worker that has just started; see `Engine.warm_up`."""
        model = StepModel()
        room = min(self.num_blocks * self.config.block_size, self.max_context)
        if not self.learns_every_step or room < 2:
            return model
        prompt = min(self.config.chunk_max_tokens, room - 1)
        pairs = attended_pairs(prompt, 0)
        seconds = self.times.seconds(0, 0, ChunkWork(prompt, pairs, prompt, 1))
        self.teach(model, StepCost(prompt, pairs), seconds)
        fixed_s, slope_s = self.times.decode_line(1)
        for context in range(prompt + 1, min(prompt + _WARM_UP_TOKENS, room)):
            self.teach(model, StepCost(1, context), fixed_s + slope_s * context)
        return model

    def teach(self, model: StepModel, cost: StepCost, seconds: float) -> None:
        """Let a step model learn from a step that took `seconds`, the turn included."""
        model.observe(cost, max(0.0, seconds - self.turn_s))
