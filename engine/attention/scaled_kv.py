"""Keys and values that are stored divided by a checkpoint's scales, as fp8 needs them.

The queries are multiplied by the scales of the keys, and the results by the scales of the values,
so that backends know no scales. Each product is rounded to the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.attention.base import GroupedBackend


class KvScales:
    """The scales of one layer's keys and values, by head."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, group_size: int) -> None:
        """`k` and `v` are [num_kv_heads], fp32; each KV head serves `group_size` query heads."""
        self._k, self._v = k.unsqueeze(1), v.unsqueeze(1)
        self._of_queries = self._k.repeat_interleave(group_size, 0)
        self._of_output = self._v.repeat_interleave(group_size, 0)

    @classmethod
    def of(cls, vectors: Mapping[str, torch.Tensor], num_heads: int) -> KvScales | None:
        """The scales among an attention's weights; None if there are none, or all are 1."""
        if "k_scale" not in vectors and "v_scale" not in vectors:
            return None
        some = vectors["k_scale" if "k_scale" in vectors else "v_scale"]
        k, v = (vectors.get(name, torch.ones_like(some)) for name in ("k_scale", "v_scale"))
        if bool((k == 1).all()) and bool((v == 1).all()):
            return None
        return cls(k, v, num_heads // len(k))

    def run(
        self,
        backend: GroupedBackend,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`backend.run`, with keys and values stored divided by the scales."""
        dtype = q.dtype
        q = (q * self._of_queries).to(dtype)
        k, v = (k / self._k).to(dtype), (v / self._v).to(dtype)
        return (backend.run(layer, q, k, v, sinks) * self._of_output).to(dtype)
