"""Processes that run one engine together, for tests of its tokens and its KV."""

from __future__ import annotations

import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.loader import load_engine, load_follower
from engine.parallel.ranks import Ranks
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
    the last of them ends before the first step."""

    folder: Path
    size: int
    prompts: tuple[tuple[int, ...], ...]
    num_stages: int = 1
    attention: str = "torch"
    loses_rank: bool = False


def engine_config(folder: Path, attention: str = "torch") -> EngineConfig:
    """Chunks so small that prompts are cut, and decodes run beside them."""
    scheduler = SchedulerConfig(
        block_size=BLOCK, max_batch_size=4, chunk_min_tokens=8, chunk_max_tokens=8
    )
    return EngineConfig(
        folder, scheduler, dtype="float32", device="cpu", num_blocks=64, attention=attention
    )


def generate(engine: Engine, prompts: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """Greedy tokens for each prompt; all run at once."""
    sequences = [
        sequence_of(prompt, greedy(MAX_TOKENS), BLOCK, request_id=f"r{index}")
        for index, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    while engine.scheduler.has_work:
        engine.run(engine.plan())
    return [sequence.tokens[sequence.num_prompt :] for sequence in sequences]


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
    rank = ranks.shard.number
    config = engine_config(job.folder, job.attention)
    if rank:
        follower, pool = load_follower(config, ranks)
        if job.loses_rank and rank == job.size - 1:
            os._exit(LOST)
        follower.run()
        return pool.layout, pool.tensor.numpy(), None
    loaded = load_engine(config, lambda: 0.0, ranks=ranks)
    try:
        tokens = generate(loaded.engine, job.prompts)
    except RuntimeError as error:
        return None, str(error), None
    ranks.announce(None)
    return loaded.pool.layout, loaded.pool.tensor.numpy(), tokens
