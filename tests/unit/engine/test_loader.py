"""Loading an engine: the limits that it takes from settings, checkpoint and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.loader import EngineConfig, LoadedEngine, load_engine
from engine.scheduler import SchedulerConfig
from protocol.errors import ConfigError

CONTEXT = 64
"""max_position_embeddings of the tiny checkpoints."""


@pytest.fixture
def load(make_tiny: Callable[..., Any]) -> Callable[..., LoadedEngine]:
    folder: Path = make_tiny("Qwen3ForCausalLM").folder
    scheduler = SchedulerConfig(block_size=4, max_batch_size=3)

    def load(**fields: Any) -> LoadedEngine:
        return load_engine(
            EngineConfig(folder=folder, scheduler=scheduler, device="cpu", **fields),
            time.monotonic,
        )

    return load


@pytest.mark.parametrize("fraction", [None, 0.01])
def test_pool_is_no_larger_than_a_full_batch_at_full_context(
    load: Callable[..., LoadedEngine], fraction: float | None
) -> None:
    loaded = load(memory_fraction=fraction)
    assert loaded.pool.num_blocks == 3 * CONTEXT // 4


def test_pool_has_as_many_blocks_as_are_asked_for(load: Callable[..., LoadedEngine]) -> None:
    assert load(num_blocks=100).pool.num_blocks == 100


def test_context_is_what_is_asked_for_up_to_the_models(
    load: Callable[..., LoadedEngine],
) -> None:
    assert load().engine.limits.max_context == CONTEXT
    assert load(max_context=CONTEXT).engine.limits.max_context == CONTEXT
    assert load(max_context=10).engine.limits.max_context == 10


def test_context_beyond_the_models_is_refused_with_both_numbers(
    load: Callable[..., LoadedEngine],
) -> None:
    with pytest.raises(ConfigError, match=r"max_context 65 .* 64"):
        load(max_context=CONTEXT + 1)
