"""Engines of quantized checkpoints: their dtype, what is refused, and what the log says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.config import load_model_config
from engine.checkpoint.stored_tensors import FileTensors
from engine.checkpoint.weights import load_weights
from engine.engine_config import EngineConfig
from engine.loader import load_engine
from protocol.errors import ModelLoadError
from scheduling.scheduler import SchedulerConfig
from tests.published_formats import FORMATS, FORMATS_IN_PANELS, publish
from worker.weights.choice import can_send

SCHEDULER = SchedulerConfig(block_size=16, max_batch_size=2, chunk_max_tokens=32)


@pytest.fixture
def folder(make_tiny) -> Path:
    """A checkpoint in fp16 with GPTQ's weights."""
    tiny = make_tiny(hidden_size=96, intermediate_size=160, dtype=torch.float16)
    publish(tiny.folder, FORMATS["gptq"])
    return tiny.folder


def config(folder: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(
        **{"folder": folder, "scheduler": SCHEDULER, "device": "cpu", "num_blocks": 4, **fields}
    )


def test_checkpoints_in_fp16_are_computed_in_bf16_on_a_cpu(folder, caplog):
    with caplog.at_level("INFO"):
        loaded = load_engine(config(folder, weights="exact16"), lambda: 0.0)
    assert loaded.pool.tensor.dtype == torch.bfloat16
    assert "0 quantized matrices are multiplied as they are, 21 are dequantized" in caplog.text
    loaded = load_engine(config(folder, dtype="float16"), lambda: 0.0)
    assert loaded.pool.tensor.dtype == torch.float16


def test_quantized_weights_are_multiplied_as_they_are(kernels, make_tiny, caplog):
    """KV of packed weights is not that of their rounded values."""
    if not kernels.baton_has_linear():
        pytest.skip("this CPU has no bf16 products")
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8}
    tiny = make_tiny(**sizes, dtype=torch.bfloat16)
    publish(tiny.folder, FORMATS_IN_PANELS["awq"])
    with caplog.at_level("INFO"):
        auto = load_engine(config(tiny.folder), lambda: 0.0).engine
    assert "21 quantized matrices are multiplied as they are, 0 are dequantized" in caplog.text
    auto.warm_up()
    exact = load_engine(config(tiny.folder, weights="exact16"), lambda: 0.0).engine
    assert auto.layout.fingerprint != exact.layout.fingerprint


def test_quantized_weights_are_neither_sent_nor_received(folder):
    assert not can_send(folder)

    class Theirs(FileTensors):
        """As if another worker's."""

    with pytest.raises(ModelLoadError, match="quantized weights are read from files only"):
        load_weights(Theirs(folder), load_model_config(folder))
