"""A pool's layers as views that kernels on a card read and write, and the attention over them.

A layer's keys and values are strided views of the block-major pool, `[num_blocks, num_kv_heads,
block_size, head_dim]`, so nothing is copied or rearranged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from engine.attention.base import KvTarget
from engine.checkpoint.attention_config import Scoring
from engine.kv_pool import KvPool


class PoolLayers:
    """A pool's layers as views for FlashInfer and our kernels, and their common parameters.

    `windows[i]` is layer i's sliding window in tokens, the token itself included, or None.
    """

    def __init__(
        self,
        pool: KvPool,
        windows: Sequence[int | None],
        num_heads: int,
        dtype: torch.dtype,
        scoring: Scoring | None = None,
    ) -> None:
        assert len(windows) == len(pool.layout.layers)
        self.windows = tuple(windows)
        self.num_heads = num_heads
        self.dtype = dtype  # of queries and results
        _, _, self.num_kv_heads, self.block_size, self.head_dim = pool.layout.block_shape
        self.scoring = scoring or Scoring(1 / math.sqrt(self.head_dim))
        self.kv_dtype = pool.tensor.dtype
        self.device = pool.device
        # [num_blocks, num_kv_heads, block_size, head_dim] each
        layers = [pool.layer(index) for index in range(len(windows))]
        self.caches = [(layer[:, 0], layer[:, 1]) for layer in layers]

    def target(self, layer: int, slots: torch.Tensor) -> KvTarget:
        """Where to store the tokens of these slots in `layer`."""
        keys, values = self.caches[layer]
        return KvTarget(keys, values, slots)

    def store(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [N, num_kv_heads, head_dim] without rotation."""
        from engine.gpu.ops import store  # needs Triton

        store(torch.cat((k, v), dim=1), self.target(layer, slots))

    def host(self, array: np.ndarray) -> torch.Tensor:
        """`array` as a tensor, for a card in pinned memory, so that copies are asynchronous."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor


class PoolAttention:
    """The common part of attention backends over a pool on a card: where a step's tokens are
    stored. Subclasses set `_slots` when they plan, and compute `attend`."""

    def __init__(self, layers: PoolLayers) -> None:
        self._layers = layers
        self._slots = torch.empty(0, dtype=torch.int64)

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See GroupedBackend."""
        self._layers.store(layer, self._slots, k, v)
        return self.attend(layer, q, sinks)

    def target(self, layer: int) -> KvTarget:
        """See StoringAttention."""
        return self._layers.target(layer, self._slots)

    def attend(
        self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See StoringAttention."""
        raise NotImplementedError
