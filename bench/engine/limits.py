"""The machine's limits, and the memory traffic and arithmetic that a model's step needs.

The limits are measured, not looked up: the rate at which a prepacked bf16 matrix-vector product
streams weights that fit in no cache, and the arithmetic rate of a large bf16 product. If the
machine's speed drifts, they are valid only for the run in which they were measured. CPU only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.checkpoint.config import ModelConfig
from engine.layers.linear import TorchLinear

_WIDTH = 2048
_NUM_WEIGHTS = 48  # 400 MB in bf16
_GEMM_ROWS = 2048


@dataclass(frozen=True)
class StepNeeds:
    """The bytes that decode reads and the operations that prefill computes, for a bf16 model."""

    layer_weights: int
    head_weights: int
    kv_bytes_per_token: int
    attention_flops_per_pair: int  # per query and key, over all layers and heads

    def decode_bytes(self, batch: int, context: int) -> int:
        """Bytes read by one step: every weight once, and the batch's KV."""
        weights = 2 * (self.layer_weights + self.head_weights)
        return weights + batch * context * self.kv_bytes_per_token

    def prefill_flops(self, num_tokens: int) -> int:
        """Operations for a prompt with logits for its last token only; causal pairs only."""
        pairs = num_tokens * (num_tokens + 1) // 2
        linear = 2 * (self.layer_weights * num_tokens + self.head_weights)
        return linear + self.attention_flops_per_pair * pairs


def step_needs(config: ModelConfig) -> StepNeeds:
    """The needs of a model with the shapes of `config`, for weights and KV of 2 bytes."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    per_layer = config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)
    return StepNeeds(
        layer_weights=config.num_layers * per_layer,
        head_weights=config.vocab_size * config.hidden_size,
        kv_bytes_per_token=2 * 2 * config.num_layers * kv,
        attention_flops_per_pair=4 * config.num_layers * q,
    )


class MachineLimits:
    """Measures the two limits, once per turn of a benchmark."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._layers = [
            TorchLinear(torch.randn((_WIDTH, _WIDTH), generator=generator).bfloat16())
            for _ in range(_NUM_WEIGHTS)
        ]
        self._row = torch.randn((1, _WIDTH), generator=generator).bfloat16()
        self._rows = torch.randn((_GEMM_ROWS, _WIDTH), generator=generator).bfloat16()
        self._bandwidths: list[float] = []
        self._flops: list[float] = []

    @torch.inference_mode()
    def measure(self) -> None:
        """Take one more sample of each limit."""
        streamed = 2 * _WIDTH * _WIDTH * _NUM_WEIGHTS
        self._bandwidths.append(
            streamed / _seconds(lambda: [layer(self._row) for layer in self._layers])
        )
        computed = 2 * _GEMM_ROWS * _WIDTH * _WIDTH * 4
        self._flops.append(
            computed / _seconds(lambda: [layer(self._rows) for layer in self._layers[:4]])
        )

    @property
    def bytes_per_s(self) -> float:
        """Median over the samples."""
        return statistics.median(self._bandwidths)

    @property
    def flops_per_s(self) -> float:
        """Median over the samples."""
        return statistics.median(self._flops)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
