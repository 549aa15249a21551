"""Processes that run one engine together, for tests of its tokens and its KV."""

from __future__ import annotations

import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from engine.cpu.backend import CpuBackend
from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.loader import load_engine, load_follower
from engine.parallel.ranks import Ranks
from protocol.layout import ALL_TOKENS
from scheduling.prompt_record import PromptRecord
from scheduling.scheduler import SchedulerConfig
from tests.rank_group import meet
from tests.sequences import greedy, sequence_of

DEADLINE_S = 120.0
MAX_TOKENS = 12
GROUPS = [(2, 1), (4, 1), (2, 2), (3, 3), (4, 2)]
"""Numbers of ranks, and of their stages."""
LOST = 17
"""The exit status of a rank that is lost on purpose."""
BLOCK = 4


@dataclass(frozen=True)
class Job:
    """Prompts for the checkpoint in `folder`, on the first `size` ranks, in stages; `loses_rank`:
    the last of them ends before the first step. In the kernels' `whole_steps`, or layer by layer
    with logits; `prompt_logprobs` are those of the first prompt."""

    folder: Path
    size: int
    prompts: tuple[tuple[int, ...], ...]
    num_stages: int = 1
    attention: str = "torch"
    loses_rank: bool = False
    dtype: str = "float32"
    whole_steps: bool = True
    prompt_logprobs: int | None = None
    kv_windows: str = ALL_TOKENS
    num_blocks: int = 64


def engine_config(
    folder: Path,
    attention: str = "torch",
    dtype: str = "float32",
    kv_windows: str = ALL_TOKENS,
    num_blocks: int = 64,
) -> EngineConfig:
    """Chunks so small that prompts are cut, and decodes run beside them."""
    scheduler = SchedulerConfig(
        block_size=BLOCK, max_batch_size=4, chunk_min_tokens=8, chunk_max_tokens=8
    )
    return EngineConfig(
        folder,
        scheduler,
        dtype=dtype,
        device="cpu",
        num_blocks=num_blocks,
        attention=attention,
        kv_windows=kv_windows,
    )


def generate(
    engine: Engine, prompts: tuple[tuple[int, ...], ...], prompt_logprobs: int | None = None
) -> list[list[int]]:
    """Greedy tokens for each prompt; all run at once. With `prompt_logprobs` of the first one, the
    bytes that its record has follow."""
    told = [prompt_logprobs, *[None] * len(prompts)]
    sequences = [
        sequence_of(prompt, greedy(MAX_TOKENS, prompt_logprobs=log), BLOCK, request_id=f"r{index}")
        for index, (prompt, log) in enumerate(zip(prompts, told, strict=False))
    ]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    while engine.scheduler.has_work:
        engine.run(engine.plan())
    tokens = [sequence.tokens[sequence.num_prompt :] for sequence in sequences]
    record = sequences[0].prompt_record
    return tokens if record is None else [*tokens, *_numbers_of(record)]


def _numbers_of(record: PromptRecord) -> list[list[int]]:
    """The likeliest tokens before each position, and the ranks of those that came."""
    rows = record.whole()
    return [list(memoryview(rows.ranks).cast("i")), list(memoryview(rows.top_ids).cast("i"))]


def rank_main(conn: Connection, store: str, rank: int, size: int) -> None:
    """Join the group, then do one job after the other, as they come by the pipe."""
    torch.set_num_threads(1)
    groups = {
        (number, stages): meet(store, rank, number, DEADLINE_S, stages)
        for number, stages in GROUPS
        if rank < number
    }
    while (job := conn.recv()) is not None:
        group = (job.size, job.num_stages)
        conn.send(_work(job, groups[group]) if rank < job.size else None)


def _work(job: Job, ranks: Ranks) -> Any:
    """A follower's layout and KV pool; the leader's, and the tokens."""
    config = engine_config(job.folder, job.attention, job.dtype, job.kv_windows, job.num_blocks)
    if job.whole_steps:
        return _run(job, ranks, config)
    with mock.patch.object(CpuBackend, "fuse", return_value=None):
        return _run(job, ranks, config)


def _run(job: Job, ranks: Ranks, config: EngineConfig) -> Any:
    rank = ranks.shard.number
    if rank:
        follower, pool = load_follower(config, ranks)
        if job.loses_rank and rank == job.size - 1:
            os._exit(LOST)
        follower.run()
        return pool.layout, _numbers(pool.tensor), None
    loaded = load_engine(config, lambda: 0.0, ranks=ranks)
    try:
        tokens = generate(loaded.engine, job.prompts, job.prompt_logprobs)
    except RuntimeError as error:
        return None, str(error), None
    ranks.announce(None)
    return loaded.pool.layout, _numbers(loaded.pool.tensor), tokens


def _numbers(pool: torch.Tensor) -> Any:
    return pool.float().numpy()
