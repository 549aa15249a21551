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
from engine.gpu.choice import card_backend
from engine.loader import load_engine
from protocol.errors import ConfigError, ModelLoadError
from scheduling.scheduler import SchedulerConfig
from tests.published_formats import FORMATS, publish
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
    assert "quantized weights are dequantized to bfloat16 at load" in caplog.text
    loaded = load_engine(config(folder, dtype="float16"), lambda: 0.0)
    assert loaded.pool.tensor.dtype == torch.float16


def test_a_card_takes_dequantized_weights_only(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    arguments = (load_model_config(folder), torch.device("cuda"), "bfloat16")
    with pytest.raises(ConfigError, match=r"multiplies gptq weights; use exact16"):
        card_backend(config(folder, attention="torch"), *arguments)
    card_backend(config(folder, attention="torch", weights="exact16"), *arguments)


def test_quantized_weights_are_neither_sent_nor_received(folder):
    assert not can_send(folder)

    class Theirs(FileTensors):
        """As if another worker's."""

    with pytest.raises(ModelLoadError, match="quantized weights are read from files only"):
        load_weights(Theirs(folder), load_model_config(folder))
