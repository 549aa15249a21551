"""Paged latent attention on a CPU, by our own C++ kernel where queries attend to latents.

For the kernel, latents are keys and values of one head that all query heads share, so each row is
read once for all heads. The kernel's sums of the rotated part, which belongs to no value, are
dropped. Attention with keys and values that are computed from latents is left to torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from engine.attention.cpu_attention import KernelAttention
from engine.attention.latents import UpProjection
from engine.attention.torch_latents import PlannedSegment, TorchLatentAttention
from engine.checkpoint.attention_config import Scoring
from engine.checkpoint.latent_config import LatentConfig
from engine.kv_pool import KvPool

_SPLIT_KEYS = 256
"""Tokens of a piece of a context. With only one KV head, pieces are what keeps the threads busy."""


class KernelLatentAttention(TorchLatentAttention):
    """`LatentBackend` over `pool`, by the kernels in `library`."""

    def __init__(
        self, pool: KvPool, config: LatentConfig, num_heads: int, library: ctypes.CDLL
    ) -> None:
        super().__init__(pool, config)
        windows = (None,) * len(pool.layout.layers)
        self._kernel = KernelAttention(
            pool, windows, num_heads, library, _SPLIT_KEYS, Scoring(config.softmax_scale)
        )
        self._tokens: torch.Tensor | None = None

    def plan_absorbed(self, parts: Sequence[PlannedSegment]) -> None:
        """See TorchLatentAttention."""
        self._tokens = None
        if parts:
            spans = [(part.start, part.start + part.segment.query_len) for part in parts]
            self._tokens = torch.from_numpy(np.concatenate([np.arange(*span) for span in spans]))
            self._kernel.plan([part.segment for part in parts])

    def run_absorbed(
        self,
        layer: int,
        q: torch.Tensor,
        latents: torch.Tensor,
        up: UpProjection,
        out: torch.Tensor,
    ) -> None:
        """See TorchLatentAttention."""
        if self._tokens is None:
            return
        queries = up.absorbed(q.index_select(1, self._tokens)).transpose(0, 1).contiguous()
        rows = latents.index_select(0, self._tokens).unsqueeze(1)
        sums = self._kernel.run(layer, queries, rows, rows)[:, :, : up.rank]
        out.index_copy_(1, self._tokens, up.values_of(sums.transpose(0, 1)))
