"""What one engine in this process answers, to be compared with the answers of a fleet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.engine_config import EngineConfig
from engine.loader import load_engine
from scheduling.scheduler import SchedulerConfig
from tests.integration.reference import BLOCK
from tests.sequences import greedy, sequence_of


def tokens_of_one_engine(
    folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int, **config: Any
) -> list[list[int]]:
    """The greedy tokens after each prompt, one prompt after the other in one pool."""
    scheduler = SchedulerConfig(block_size=BLOCK, max_batch_size=4, chunk_max_tokens=64)
    settings: dict[str, Any] = {"device": "cpu", "num_blocks": 64, **config}
    engine = load_engine(EngineConfig(folder, scheduler, **settings), time.monotonic).engine
    answers = []
    for prompt in prompts:
        sequence = sequence_of(prompt, greedy(num_tokens), BLOCK)
        engine.scheduler.add(sequence)
        while engine.scheduler.has_work:
            engine.run(engine.plan())
        answers.append(sequence.tokens[len(prompt) :])
    return answers
