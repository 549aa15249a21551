"""Checkpoints in published formats, served by prefill and decode apart: one engine's tokens."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from engine.engine_config import EngineConfig
from engine.loader import load_engine
from scheduling.scheduler import SchedulerConfig
from tests.effort import some
from tests.integration.fleets import complete, counters, running_fleet
from tests.integration.reference import DEMO_MODEL
from tests.published_formats import FORMATS_IN_PANELS, publish
from tests.sequences import greedy, sequence_of

PROMPTS = [[(7 * i + n) % 1800 + 3 for i in range(n)] for n in (16, 65, 130)]
NUM_TOKENS = 16


def together(folder: Path) -> list[list[int]]:
    """Greedy tokens of each prompt, by one engine."""
    scheduler = SchedulerConfig(block_size=16, max_batch_size=4, chunk_max_tokens=64)
    config = EngineConfig(folder, scheduler, device="cpu", num_blocks=64)
    engine = load_engine(config, time.monotonic).engine
    answers = []
    for prompt in PROMPTS:
        sequence = sequence_of(tuple(prompt), greedy(NUM_TOKENS), 16)
        engine.scheduler.add(sequence)
        while engine.scheduler.has_work:
            engine.run(engine.plan())
        answers.append(sequence.tokens[len(prompt) :])
    return answers


@pytest.mark.parametrize("name", some(FORMATS_IN_PANELS, 2))
def test_apart_and_together_give_the_same_tokens(tmp_path: Path, name: str) -> None:
    folder = tmp_path / DEMO_MODEL.name
    shutil.copytree(DEMO_MODEL, folder)
    publish(folder, FORMATS_IN_PANELS[name])
    with running_fleet(model=str(folder)) as fleet:
        apart = [complete(fleet, prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
        assert counters(fleet, "decode-1")["handoffs"] > 0
    assert [answer["choices"][0]["token_ids"] for answer in apart] == together(folder)
