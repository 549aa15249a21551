"""The interface between latent attention and the backends that compute it over the paged KV pool.

The pool has one plane of one head: a token's row is its latent, which serves as key and value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from engine.attention.base import AttentionBackend


@dataclass(frozen=True)
class UpProjection:
    """One layer's projection from latents to each head's keys and values.

    `weight` is [num_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank], keys' rows first;
    `product` multiplies latents by all of its rows, at once.
    """

    weight: torch.Tensor
    key_dim: int  # qk_nope_head_dim
    product: Callable[[torch.Tensor], torch.Tensor]

    @property
    def value_dim(self) -> int:
        """Numbers of a head's value."""
        return self.weight.shape[1] - self.key_dim

    @property
    def rank(self) -> int:
        """Numbers of a latent, without the rotated ones."""
        return self.weight.shape[2]

    def absorbed(self, q: torch.Tensor) -> torch.Tensor:
        """Queries [num_heads, N, qk_nope_head_dim + rotated] as queries of latents, [num_heads, N,
        rank + rotated]."""
        plain, rotated = q[:, :, : self.key_dim], q[:, :, self.key_dim :]
        return torch.cat((plain @ self.weight[:, : self.key_dim], rotated), dim=2)

    def values_of(self, mixed: torch.Tensor) -> torch.Tensor:
        """Weighted sums of latents [num_heads, N, rank] as sums of values, [num_heads, N,
        v_head_dim]."""
        return mixed @ self.weight[:, self.key_dim :].transpose(1, 2)

    def expanded(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [num_heads, N, qk_nope_head_dim + rotated] and values [num_heads, N, v_head_dim] of
        latents [N, rank + rotated]."""
        heads = self.product(latents[:, : self.rank].contiguous())
        heads = heads.unflatten(1, self.weight.shape[:2]).transpose(0, 1)
        keys, values = heads.split([self.key_dim, self.value_dim], dim=2)
        rotated = latents[:, self.rank :].expand(len(keys), -1, -1)
        return torch.cat((keys, rotated), dim=2), values


@runtime_checkable
class LatentBackend(AttentionBackend, Protocol):
    """Causal attention of a batch's tokens to their sequences' latents."""

    def run_latents(
        self, layer: int, q: torch.Tensor, latents: torch.Tensor, up: UpProjection
    ) -> torch.Tensor:
        """Writes `latents` to the pool, then attends.

        `q` is [N, num_heads, qk_nope_head_dim + rotated] and `latents` [N, rank + rotated], with
        rotated parts last, and N the query tokens of all planned segments, in their order. Returns
        [N, num_heads, v_head_dim].
        """
