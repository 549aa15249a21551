"""A small scheduler and its sequences, and steps that give every sequence the same token."""

from __future__ import annotations

from protocol.hashing import chain_root
from protocol.sampling import SamplingParams
from scheduling.batch import Batch
from scheduling.block_manager import BlockManager
from scheduling.scheduler import Scheduler, SchedulerConfig
from scheduling.sequence import Sequence
from scheduling.step_model import StepModel

BLOCK = 4
ROOT = chain_root("model")


def make_scheduler(num_blocks: int = 32, **config: object) -> Scheduler:
    defaults: dict[str, object] = {
        "block_size": BLOCK,
        "max_batch_size": 8,
        "chunk_min_tokens": BLOCK,
        "chunk_max_tokens": 16,
        "itl_target_s": 0.05,
    }
    return Scheduler(
        SchedulerConfig(**{**defaults, **config}),  # type: ignore[arg-type]
        BlockManager(num_blocks),
        StepModel(fixed_s=0.001, per_token_s=0.001, per_attended_s=0.0),
    )


def make_sequence(name: str, prompt: list[int], max_tokens: int = 4, **fields: object) -> Sequence:
    values: dict[str, object] = {
        "request_id": name,
        "attempt": 0,
        "tokens": list(prompt),
        "num_prompt": len(prompt),
        "sampling": SamplingParams(max_tokens=max_tokens, seed=0),
        "root_hash": ROOT,
        "block_size": BLOCK,
        "arrival": 0.0,
        "deadline": 1e9,
    }
    return Sequence(**{**values, **fields})  # type: ignore[arg-type]


def run_step(scheduler: Scheduler, now: float = 0.0, token: int = 7) -> Batch:
    batch = scheduler.schedule(now)
    scheduler.commit(batch, [token] * len(batch.sampled), now)
    return batch


def drain(scheduler: Scheduler, steps: int = 1000) -> None:
    for _ in range(steps):
        if not scheduler.has_work:
            return
        run_step(scheduler)
    raise AssertionError("the scheduler did not come to an end")


def make_prompt(name: str, num_blocks: int, target: str) -> Sequence:
    start = 1000 * len(name) + ord(name[0])
    prompt = list(range(start, start + num_blocks * BLOCK))
    return make_sequence(name, prompt, prefill_only=True, target=target)


def admitted(batch: Batch) -> list[str]:
    return [chunk.sequence.request_id for chunk in batch.chunks]
