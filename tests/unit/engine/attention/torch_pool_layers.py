"""`PoolLayers` for machines without a card."""

from __future__ import annotations

import torch

from engine.attention.paging import NO_SLOT
from engine.attention.pool_layers import PoolLayers


class TorchPoolLayers(PoolLayers):
    """Stores by torch, where the card's kernel cannot run."""

    def store(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """See PoolLayers."""
        target = self.target(layer, slots)
        is_kept = slots != NO_SLOT
        blocks, offsets = slots[is_kept] // self.block_size, slots[is_kept] % self.block_size
        for cache, new in ((target.keys, k), (target.values, v)):
            cache[blocks, :, offsets] = new[is_kept].to(cache.dtype)
