"""The machine's limits, and the memory traffic and arithmetic that a model's step needs.

The limits are measured, not looked up: the rate at which a prepacked bf16 matrix-vector product
streams weights that fit in no cache, and the arithmetic rate of a large bf16 product, each by the
fastest product that this machine has. If the
machine's speed drifts, they are valid only for the run in which they were measured. CPU only.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint.files import read_tensor_entries, weight_files
from engine.checkpoint.model_config import ModelConfig
from engine.cpu.native_linear import NativeLinear
from engine.layers.linear import LinearLayer, TorchLinear, has_bf16_products
from engine.native.library import KernelsUnavailable, load_library

_WIDTH = 2048
_NUM_WEIGHTS = 48  # 400 MB in bf16
_GEMM_ROWS = 2048


@dataclass(frozen=True)
class StepNeeds:
    """The bytes that decode reads and the operations that prefill computes, for a model with KV in
    bf16."""

    layer_weights: int
    head_weights: int
    kv_bytes_per_token: int
    attention_flops_per_pair: int  # per query and key, over all layers and heads
    weight_bits: float = 16.0
    expert_weights: int = 0  # of one expert, over all layers that are mixtures
    num_experts: int = 1
    experts_per_token: int = 0

    def decode_bytes(self, batch: int, context: int) -> int:
        """Bytes read by one step: every weight once, and the batch's KV. Of the experts, only the
        chosen ones count: as many as if all tokens chose evenly and independently."""
        idle = (1 - self.experts_per_token / self.num_experts) ** batch
        used = self.expert_weights * self.num_experts * (1 - idle)
        weights = int((self.layer_weights + self.head_weights + used) * self.weight_bits / 8)
        return weights + batch * context * self.kv_bytes_per_token

    def prefill_flops(self, num_tokens: int) -> int:
        """Operations for a prompt with logits for its last token only; causal pairs only."""
        pairs = num_tokens * (num_tokens + 1) // 2
        of_token = self.layer_weights + self.experts_per_token * self.expert_weights
        linear = 2 * (of_token * num_tokens + self.head_weights)
        return linear + self.attention_flops_per_pair * pairs


def bits_per_weight(folder: Path) -> float:
    """Bits of a number in the matrices of a checkpoint's files, on average."""
    entries = [
        entry
        for file in weight_files(folder)
        for entry in read_tensor_entries(file).values()
        if len(entry.shape) > 1
    ]
    return 8 * sum(e.num_bytes for e in entries) / sum(math.prod(e.shape) for e in entries)


def step_needs(config: ModelConfig, weight_bits: float = 16.0) -> StepNeeds:
    """The needs of a model with the shapes of `config`, for KV of 2 bytes."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, experts = config.hidden_size, config.experts
    num_mixtures = sum(kinds.feed_forward == "experts" for kinds in config.layer_kinds)
    num_dense = config.num_layers - num_mixtures
    weights = config.num_layers * hidden * (2 * q + 2 * kv)
    weights += num_dense * hidden * 3 * config.intermediate_size
    if experts is not None:
        weights += num_mixtures * hidden * (3 * experts.shared_inner + experts.count)
    return StepNeeds(
        layer_weights=weights,
        head_weights=config.vocab_size * hidden,
        kv_bytes_per_token=2 * 2 * config.num_layers * kv,
        attention_flops_per_pair=4 * config.num_layers * q,
        weight_bits=weight_bits,
        expert_weights=0 if experts is None else num_mixtures * hidden * 3 * experts.inner,
        num_experts=1 if experts is None else experts.count,
        experts_per_token=0 if experts is None else experts.per_token,
    )


class MachineLimits:
    """Measures the two limits, once per turn of a benchmark: the fastest of the kinds of products
    that this machine has counts, because a slower one is no limit."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        weights = [
            torch.randn((_WIDTH, _WIDTH), generator=generator).bfloat16()
            for _ in range(_NUM_WEIGHTS)
        ]
        self._products = {
            name: [make(weight) for weight in weights] for name, make in _products().items()
        }
        self._row = torch.randn((1, _WIDTH), generator=generator).bfloat16()
        self._rows = torch.randn((_GEMM_ROWS, _WIDTH), generator=generator).bfloat16()
        self._bandwidths: dict[str, list[float]] = {name: [] for name in self._products}
        self._flops: dict[str, list[float]] = {name: [] for name in self._products}

    @torch.inference_mode()
    def measure(self) -> None:
        """Take one more sample of each limit and product."""
        for name, layers in self._products.items():
            self._bandwidths[name].append(
                2 * _WIDTH * _WIDTH * _NUM_WEIGHTS / _seconds(layers, self._row)
            )
            computed = 2 * _GEMM_ROWS * _WIDTH * _WIDTH * 4
            self._flops[name].append(computed / _seconds(layers[:4], self._rows))

    @property
    def fastest_stream(self) -> str:
        """The product that reads weights fastest."""
        return max(self._bandwidths, key=lambda name: statistics.median(self._bandwidths[name]))

    @property
    def fastest_product(self) -> str:
        """The product that computes fastest."""
        return max(self._flops, key=lambda name: statistics.median(self._flops[name]))

    @property
    def bytes_per_s(self) -> float:
        """Median over the samples."""
        return statistics.median(self._bandwidths[self.fastest_stream])

    @property
    def flops_per_s(self) -> float:
        """Median over the samples."""
        return statistics.median(self._flops[self.fastest_product])


def _products() -> dict[str, Callable[[torch.Tensor], LinearLayer]]:
    """The ways in which this machine may multiply a bf16 weight, by name."""
    found: dict[str, Callable[[torch.Tensor], LinearLayer]] = {}
    with contextlib.suppress(KernelsUnavailable):
        kernels = load_library()
        if kernels.baton_has_linear():
            found["our kernels"] = lambda weight: NativeLinear(weight, None, kernels)
    if has_bf16_products() or not found:
        found["oneDNN" if has_bf16_products() else "torch"] = TorchLinear
    return found


def _seconds(layers: Sequence[LinearLayer], x: torch.Tensor) -> float:
    started = time.perf_counter()
    for layer in layers:
        layer(x)
    return time.perf_counter() - started
