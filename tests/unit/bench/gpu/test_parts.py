"""Parts of bench.gpu whole, on a CPU: small, by a stand-in for FlashInfer, their figures without
meaning. What a card would be the first to run is run here before."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import card as gpu_card
from bench.gpu import numerics as gpu_numerics
from bench.gpu import parts as gpu_parts
from bench.gpu import steps as gpu_steps
from bench.gpu.card import Row, check_builds
from bench.gpu.latents import LatentLoad, check_latents
from checkpoint.json_keys import JsonKeys
from engine.attention.flashinfer_attention import FlashInferChoice
from engine.attention.pool_layers import PoolLayers
from engine.checkpoint.config import parse_model_config
from engine.checkpoint.latent_config import LatentConfig
from engine.checkpoint.model_config import ModelConfig
from engine.gpu.backend import CardBackend
from engine.gpu.flashinfer_backend import FlashInferBackend
from engine.gpu.tuning import MixedStep
from engine.kv_pool import KvPool
from engine.layers.ops import LayerOps
from tests.unit.engine.attention import fake_flashinfer
from tests.unit.engine.attention.torch_pool_layers import TorchPoolLayers
from tests.unit.engine.fake_invariant_kernels import KERNELS, StandIn

CPU = torch.device("cpu")
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 128,
}


class FakeBackend(FlashInferBackend):
    """FlashInfer's stand-in where the library would be, and torch's operations between."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        max_sequences: int = 256,
        weight_bits: int = 16,
    ) -> None:
        CardBackend.__init__(self, config, device, dtype, kv_dtype, weight_bits)
        self._library = fake_flashinfer
        self.choice = FlashInferChoice("fa3", decode_on_tensor_cores=True)
        self._workspace = torch.zeros(16, dtype=torch.uint8)

    def ops(self) -> LayerOps:
        """torch's."""
        return CardBackend.ops(self)

    def layers(self, pool: KvPool) -> PoolLayers:
        windows = self._config.sliding_windows
        return TorchPoolLayers(pool, windows, self._config.num_heads, self._dtype)


class Capture:
    """No graph: the same pass again."""

    def __call__(self, run):
        run()
        return run


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The parts' sizes, in a folder where traces may be left."""
    monkeypatch.chdir(tmp_path)
    changed = {
        "FlashInferBackend": FakeBackend,
        "CudaCapture": Capture,
        "InvariantBackend": partial(StandIn, kernels=KERNELS),
        "LLAMA_8B": gpu_parts.LLAMA_8B | SMALL,
        "DECODE_BATCHES": (1, 3),
        "GRAPH_BATCHES": (3,),
        "CONTEXTS": (16, 96),
        "CHUNKS": (17, 32),
        "PROMPTS": (17,),
        "_POOL_BYTES": 1 << 18,
        "_MIXED_BLOCKS": 64,
        "measure_card": lambda device: gpu_card.measure_card(device, 1 << 16, 32),
    }
    for name, value in changed.items():
        monkeypatch.setattr(gpu_parts, name, value)
    monkeypatch.setattr(gpu_parts._llama, "__defaults__", (2,))
    monkeypatch.setattr(gpu_card.seconds, "__defaults__", (1,))
    monkeypatch.setattr(gpu_card.check_overhead, "__defaults__", (2, 16))
    monkeypatch.setattr(gpu_steps, "MIXED_STEPS", (MixedStep(2, 20, 18),))
    monkeypatch.setattr(gpu_steps.check_kernels, "__defaults__", (((17, 40),),))
    bits = gpu_numerics.Bits(length=40, num_compared=6, chunks=(7,), batches=(1, 3))
    monkeypatch.setattr(gpu_numerics.Bits.__init__, "__defaults__", tuple(vars(bits).values()))
    monkeypatch.setattr(gpu_numerics, "DECODES", (1, 3))
    monkeypatch.setattr(gpu_numerics, "COST_CONTEXT", 96)
    monkeypatch.setattr(gpu_numerics.check_cost, "__defaults__", ((1, 3), (17,)))
    load = gpu_steps.Decodes(batch=2, context=32, num_steps=2, num_traced=1)
    monkeypatch.setattr(gpu_steps.Decodes.__init__, "__defaults__", tuple(vars(load).values()))
    monkeypatch.setattr(gpu_steps.Prefills.__init__, "__defaults__", (17, 2, 1))


EXPECTED = {
    "build": ["8B: kernels, and a first step"],
    "mixed": [
        "2 decodes of 20 beside a chunk of 18: two calls over one",
        "chunk of 17 in 40: the other kernel's time over the chosen one's",
    ],
    "decode": [
        "batch 1 at 16",
        "batch 3 at 16",
        "batch 1 at 96",
        "batch 3 at 96",
        "batch 2 at 16",
        "batch 3 at 16: eager over graphs",
    ],
    "ahead": [
        "batch 2 at 32, greedy: step, over one by one",
        "batch 2 at 32, top-p: step, over one by one",
        "prompts of 17, one a step: step, over one by one",
    ],
    "prefill": ["chunk of 17", "chunk of 32"],
    "overlap": [
        "chunk of 17: copy hidden",
        "chunk of 17: slower beside a copy",
        "chunk of 32: copy hidden",
        "chunk of 32: slower beside a copy",
    ],
    "tiers": [
        "blocks to host memory, alone",
        "blocks to host memory, beside chunks",
        "chunks beside copies to host memory",
        "blocks from host memory, alone",
        "blocks from host memory, beside chunks",
        "chunks beside copies from host memory",
        "blocks that came back",
    ],
}


@pytest.mark.parametrize("part", EXPECTED)
def test_a_part_gives_its_rows(small: None, part: str) -> None:
    rows: list[Row] = list(gpu_parts.PARTS[part](CPU))
    assert [row.name for row in rows] == EXPECTED[part]
    assert {row.part for row in rows} <= {part, "overhead"}


def by_batch(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> None:
    """A product whose order of sums depends on the number of rows."""
    order = torch.arange(x.shape[1]).roll(len(x))
    KERNELS.multiply(x[:, order], weight[:, order], *rest)


def test_bits_and_cost_of_the_batch_invariant_mode(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(gpu_parts.invariant(CPU))
    assert [row.name for row in rows] == [
        "chunks of 7, alone: logits that differ",
        "chunks of 7, beside 2: logits that differ",
        "decodes, batch 1: logits that differ",
        "decodes, batch 3: logits that differ",
        "decode, batch 1 at 96: time over that without the mode",
        "decode, batch 3 at 96: time over that without the mode",
        "chunk of 17: time over that without the mode",
    ]
    assert [(row.value, row.unit, row.goal) for row in rows[:4]] == 4 * [(0, "of 6", "= 0")]
    wrong = partial(StandIn, kernels=replace(KERNELS, multiply=by_batch))
    monkeypatch.setattr(gpu_parts, "InvariantBackend", wrong)
    assert all(row.value > 0 for row in gpu_parts.invariant(CPU) if row.goal)


def test_a_model_gets_the_attention_that_was_found_faster():
    config = parse_model_config(JsonKeys(gpu_parts.LLAMA_8B | SMALL, "test"))
    backend = FakeBackend(config, CPU, torch.bfloat16, torch.bfloat16)
    pool = KvPool(config.kv_layout("test", 16, "bfloat16"), 8)
    attention = backend.tuned_for(pool, MixedStep(2, 20, 18))
    assert attention.choice.prefill in ("fa3", "fa2")
    backend.choice = FlashInferChoice("fa3", decode_on_tensor_cores=False)
    attention = backend.tuned_for(pool, MixedStep(2, 20, 18))
    assert attention.choice.prefill == "fa3"  # fa2 would have to be built for the trial


def test_a_pool_takes_what_the_card_has():
    assert gpu_parts.fitting_blocks(num_blocks=100, block_bytes=10, room=4000) == 100
    assert gpu_parts.fitting_blocks(num_blocks=100, block_bytes=10, room=309) == 30
    assert gpu_parts.fitting_blocks(num_blocks=100, block_bytes=10, room=-5) == 1


def test_a_build_that_fails_says_why(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "include").mkdir()
    (tmp_path / "include/cuda_runtime.h").touch()
    nvcc = tmp_path / "bin/nvcc"
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    nvcc.chmod(0o755)
    row = check_builds({"CUDA_HOME": str(tmp_path)})
    assert (row.part, row.value, row.goal) == ("limits", 1, "= 0")
    assert "curand_kernel.h" in row.note
    assert str(tmp_path) in row.note


NOT_FOR_ALL = ("zmq", "redis", "fastapi", "starlette", "transformers", "flashinfer", "triton")


def test_the_program_starts_where_only_some_parts_can_run():
    code = f"import sys; sys.modules.update(dict.fromkeys({NOT_FOR_ALL})); import bench.gpu"
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=100)
    assert done.returncode == 0


def test_gains_of_fp8_are_measured_with_both_models(small, monkeypatch):
    """Weights and KV in fp8 through the emulation of their products."""
    monkeypatch.setattr(gpu_numerics, "check_accuracy", lambda folder: ())
    monkeypatch.setattr(gpu_numerics, "check_error", lambda card, folder, name: ())
    monkeypatch.setattr(gpu_parts, "benchmark_checkpoint", lambda name: None)
    monkeypatch.setattr(gpu_numerics.check_gain, "__defaults__", (((1, 20),), 17))
    monkeypatch.setattr(gpu_numerics.check_fast_accum, "__defaults__", (((3, 32, 48),),))
    rows = list(gpu_parts.fp8(CPU))
    product = "3 x 32 x 48, without fast accumulation over with"
    assert [row.name for row in rows] == [
        "batch 1 at 20: bf16's time over fp8's",
        "chunk of 17: bf16's time over fp8's",
        f"{product}: time",
        f"{product}: error",
    ]
    assert rows[-1].value == 1.0  # a CPU sums in fp32 either way


def test_latents_are_compared_with_fp32() -> None:
    config = LatentConfig(None, 32, 16, 8, 16, 0.2)
    load = LatentLoad(config, 4, [(30, 1), (3, 40), (70, 90)], {"decode": [(50, 1)] * 3})
    error, decode = check_latents(CPU, load)
    assert 0 < error.value < 0.02
    assert decode.unit == "ms"
