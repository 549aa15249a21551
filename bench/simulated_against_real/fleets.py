"""A small CPU fleet, as real processes and as the simulator's description of the same."""

from __future__ import annotations

from dataclasses import dataclass

from bench.replay.player import Manner, Player
from bench.replay.vocabulary import Target, learn_vocabulary
from bench.tools.fleet import BenchFleet, FleetConfig
from protocol.messages import Role
from router.routing.decision import decide
from router.routing.placement import Targets
from scheduling.scheduler import SchedulerConfig
from simulator.delays import Delays
from simulator.devices.step_noise import StepNoise
from simulator.devices.step_times import StepTimes
from simulator.fleet import FleetSpec
from simulator.worker_spec import WorkerSpec

BLOCK_TOKENS = 16
NUM_BLOCKS = 2048
MAX_BATCH = 64
CHUNK_MIN, CHUNK_MAX = 16, 512
ITL_TARGET_MS = 50.0
TTFT_TARGET_MS = 1000.0
_BYTES_PER_BLOCK = 1 << 18  # the time to move them is part of the measured latency
_BYTES_PER_S = 1e10


@dataclass(frozen=True)
class Shape:
    """The workers of a fleet, each with one thread."""

    name: str
    num_prefill: int
    num_decode: int


SHAPES = {each.name: each for each in (Shape("split", 1, 1), Shape("colocated", 0, 2))}


def real_fleet(model: str, shape: Shape) -> BenchFleet:
    """The fleet's processes, not started yet."""
    return BenchFleet(fleet_config(model, shape))


def fleet_config(model: str, shape: Shape) -> FleetConfig:
    """The settings of the fleet's processes."""
    return FleetConfig(
        model,
        1,
        shape.num_prefill,
        shape.num_decode,
        worker_flags=(
            "--device=cpu",
            "--torch-threads=1",
            f"--block-size={BLOCK_TOKENS}",
            f"--num-blocks={NUM_BLOCKS}",
            f"--max-batch-size={MAX_BATCH}",
            f"--chunk-min-tokens={CHUNK_MIN}",
            f"--chunk-max-tokens={CHUNK_MAX}",
            f"--itl-target-ms={ITL_TARGET_MS}",
        ),
        # The simulator's workers do not fetch either.
        router_flags=("--kv-fetch=off", f"--ttft-target-ms={TTFT_TARGET_MS}"),
    )


def player_of(fleet: BenchFleet) -> tuple[Player, Target]:
    """The player that sends a trace to the fleet. Raises BatonError."""
    url = fleet.url("router-1")
    model = Target(url, "").ask("/v1/models")["data"][0]["id"]
    target = Target(url, model)
    return Player(target, Manner(learn_vocabulary(target), as_text=False)), target


def max_context(target: Target) -> int:
    """The longest prompt and output together."""
    found: int = Target(target.url, "").ask("/v1/models")["data"][0]["max_model_len"]
    return found


@dataclass(frozen=True)
class Timing:
    """The machine's times for the simulator: steps of a worker, messages, the latency of a
    transfer, the part of a step's time between two steps, and what other processes add to steps."""

    times: StepTimes
    delays: Delays
    link_s: float
    turn_s: float = 0.0
    noise: StepNoise | None = None


def simulated_fleet(shape: Shape, context: int, timing: Timing) -> FleetSpec:
    """The simulator's description of the measured fleet."""
    config = SchedulerConfig(
        block_size=BLOCK_TOKENS,
        max_batch_size=MAX_BATCH,
        chunk_min_tokens=CHUNK_MIN,
        chunk_max_tokens=CHUNK_MAX,
        itl_target_s=ITL_TARGET_MS / 1000,
    )
    pools = tuple(
        (
            WorkerSpec(
                role,
                config,
                NUM_BLOCKS,
                _BYTES_PER_BLOCK,
                context,
                timing.times,
                noise=timing.noise,
                learns_every_step=True,
                turn_s=timing.turn_s,
            ),
            count,
        )
        for role, count in ((Role.PREFILL, shape.num_prefill), (Role.DECODE, shape.num_decode))
        if count
    )
    return FleetSpec(
        pools,
        lambda: decide,
        _BYTES_PER_S,
        timing.link_s,
        timing.delays,
        targets=Targets(TTFT_TARGET_MS),
    )
