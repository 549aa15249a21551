"""The backend of a model on a CUDA card in batch-invariant mode: our own Triton kernels only.

A row's results have the same bits whatever else is in its step. The kernels decide the bits, so
what depends on them (compute capability, versions) is part of `numerics`, which workers compare
before they hand over to each other.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.attention.invariant_attention import (
    Attend,
    FixedInvariantDecodes,
    InvariantAttention,
    InvariantBuffers,
)
from engine.attention.tiles import Partials
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.quantized_blocks import Matrix
from engine.gpu.invariant_linear import InvariantLinear, Multiply
from engine.gpu.triton_backend import TritonBackend
from engine.kv_pool import KvPool
from engine.layers.linear import LinearLayer
from engine.sampling.chosen_tokens import LogTotals
from protocol.errors import ConfigError

logger = logging.getLogger(__name__)

_KERNELS_VERSION = 1
"""Increase this with every change of the kernels that changes a bit of their results."""
_MIN_CAPABILITY = (8, 0)  # the first cards that multiply bf16
_HEAD_DIMS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class InvariantKernels:
    """The kernels' launches, and a name for everything that determines their bits."""

    attend_tiles: Attend
    multiply: Multiply
    log_totals: LogTotals
    numerics: str

    @classmethod
    def on(cls, device: torch.device) -> InvariantKernels:
        """The kernels for `device`, a card. Raises ConfigError."""
        capability = torch.cuda.get_device_capability(device)
        card = ".".join(map(str, capability))
        if capability < _MIN_CAPABILITY:
            raise ConfigError(
                f"batch_invariant needs a card of compute capability 8.0 or more, not {card}"
            )
        try:
            triton = importlib.import_module("triton")
        except (ImportError, OSError) as error:
            raise ConfigError(f"batch_invariant needs Triton on a card: {error}") from error
        from engine.gpu.invariant_ops import attend_tiles, log_totals, multiply  # needs Triton

        triton_version, torch_version = (
            v.split("+")[0] for v in (triton.__version__, torch.__version__)
        )
        numerics = (
            f"invariant{_KERNELS_VERSION}-card{card}-triton{triton_version}-torch{torch_version}"
        )
        return cls(attend_tiles, multiply, log_totals, numerics)


class InvariantBackend(TritonBackend):
    """The kernels for one model. Raises ConfigError if they do not support it."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        *,
        kernels: InvariantKernels | None = None,
    ) -> None:
        super().__init__(config, device, dtype, kv_dtype or dtype)
        if dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f"batch_invariant on a card needs dtype bfloat16 or float16, not {dtype}"
            )
        if config.scoring.cap is not None:
            raise ConfigError("batch_invariant on a card has no attention with capped scores")
        if config.has_sinks:
            raise ConfigError("batch_invariant on a card has no attention with sinks")
        if config.experts is not None:
            raise ConfigError("batch_invariant on a card has no product for mixtures of experts")
        if config.head_dim not in _HEAD_DIMS:
            sizes = ", ".join(map(str, _HEAD_DIMS))
            raise ConfigError(
                f"batch_invariant takes heads of {sizes} on a card, not of {config.head_dim}"
            )
        self._kernels = kernels or InvariantKernels.on(device)
        self._partials = Partials.empty(config.num_heads, config.head_dim, device)
        self.numerics = self._kernels.numerics
        logger.info("batch-invariant: attention and products by our own kernels, %s", self.numerics)

    def linear(self, weight: Matrix, bias: torch.Tensor | None) -> LinearLayer:
        """A layer for `weight` [outputs, inputs]."""
        assert isinstance(weight, torch.Tensor)
        return InvariantLinear(weight, bias, self._kernels.multiply)

    def logits_linear(self, weight: Matrix) -> LinearLayer:
        """See Backend."""
        return self.linear(weight, None)

    def log_totals(self) -> LogTotals:
        """Computes the log-sum-exp of the rows whose log-probabilities are reported."""
        return self._kernels.log_totals

    def over(self, view: KvPool) -> InvariantAttention:
        """Attention for any batch over the layers of one group."""
        return InvariantAttention(self.layers(view), self._partials, self._kernels.attend_tiles)

    def fixed_decodes(
        self, pool: KvPool, max_sequences: int, max_blocks: int
    ) -> Callable[[int], FixedInvariantDecodes]:
        """A factory of attention for a fixed number of decodes, for capture in graphs. All share
        buffers for `max_sequences` contexts with `max_blocks` blocks in total."""
        layers = self.layers(pool)
        buffers = InvariantBuffers(layers, max_sequences, max_blocks)
        attend_tiles = self._kernels.attend_tiles

        def make(size: int) -> FixedInvariantDecodes:
            return FixedInvariantDecodes(layers, size, buffers, self._partials, attend_tiles)

        return make
