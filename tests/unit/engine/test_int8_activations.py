"""`activations int8` of an engine: where it is refused or left off; batches change no bit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.checkpoint.config import load_model_config
from engine.cpu.backend import cpu_backend
from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.gpu.choice import card_backend
from engine.loader import load_engine
from protocol.errors import ConfigError
from scheduling.scheduler import SchedulerConfig
from tests.paths import DEMO_MODEL
from tests.sequences import greedy, sequence_of

BLOCK = 16
CPU = torch.device("cpu")


def config(chunk: int = 64, **fields: Any) -> EngineConfig:
    scheduler = SchedulerConfig(
        block_size=BLOCK, max_batch_size=8, chunk_min_tokens=16, chunk_max_tokens=chunk
    )
    values = {"dtype": "bfloat16", "device": "cpu", "num_blocks": 64, "activations": "int8"}
    return EngineConfig(DEMO_MODEL, scheduler, **(values | fields))


@pytest.fixture
def has_int8(kernels) -> None:
    if not kernels.baton_has_int8():
        pytest.skip("the kernels multiply no integers on this CPU")


def answers(engine: Engine, prompts: Sequence[list[int]]) -> list[tuple[int, ...]]:
    """The tokens of prompts that run together."""
    sequences = [
        sequence_of(prompt, greedy(12), BLOCK, request_id=str(i))
        for i, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    while engine.scheduler.has_work:
        engine.run(engine.plan())
    return [tuple(each.tokens[each.num_prompt :]) for each in sequences]


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_neither_batch_nor_chunks_nor_cached_prefixes_change_a_token(has_int8, weights):
    chance = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 400, (n,), generator=chance).tolist() for n in (3, 70, 41, 100)]
    engine = load_engine(config(weights=weights), time.monotonic).engine
    alone = [answers(engine, [prompt])[0] for prompt in prompts]
    assert answers(engine, prompts) == alone  # from the cache
    chunked = load_engine(config(16, weights=weights), time.monotonic).engine
    assert answers(chunked, prompts) == alone


def backend_of(**fields: Any):
    settings = config(**fields)
    return cpu_backend(settings, load_model_config(DEMO_MODEL), CPU, settings.dtype)


@pytest.mark.parametrize("has_it", [0, 1])
def test_a_cpu_without_fast_integers_keeps_bf16_and_says_so(monkeypatch, caplog, has_it):
    kernels = SimpleNamespace(baton_has_linear=lambda: 1, baton_has_int8=lambda: has_it)
    monkeypatch.setattr("engine.cpu.backend.load_library", lambda prebuilt: kernels)
    assert backend_of().numerics == ("int8_activations" if has_it else "")
    assert ("activations stay bfloat16" in caplog.text) is not bool(has_it)


def test_a_cpu_that_is_not_told_so_keeps_bf16(kernels, caplog):
    assert backend_of(activations="auto").numerics == ""
    assert not caplog.text


@pytest.mark.parametrize("fields", [{"dtype": "float32"}, {"attention": "torch"}])
def test_it_needs_our_kernels(kernels, fields):
    with pytest.raises(ConfigError, match="activations int8 needs dtype bfloat16 and our own"):
        backend_of(**fields)


def test_a_card_refuses_it():
    with pytest.raises(ConfigError, match=r"activations int8 is for .* a CPU; on a card use auto"):
        card_backend(config(), load_model_config(DEMO_MODEL), torch.device("cuda"), "bfloat16")
