"""The look-up of tokens in an embedding that torch holds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import embedding

Embedding = Callable[[torch.Tensor], torch.Tensor]
"""From tokens [N], int64, to their rows [N, hidden]."""


class TorchEmbedding:
    """Rows of `weight` [vocab, hidden]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The rows of `token_ids` [N], int64, [N, hidden]."""
        return embedding(token_ids, self.weight)


class ScaledEmbedding:
    """The rows of `plain` times `scale`, which is rounded to their dtype first."""

    def __init__(self, plain: Embedding, scale: float, dtype: torch.dtype) -> None:
        self.plain = plain
        self.scale = torch.tensor(scale, dtype=dtype).item()

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The scaled rows of `token_ids` [N], int64, [N, hidden]."""
        return self.plain(token_ids) * self.scale


def scaled(embedding: Embedding, scale: float, dtype: torch.dtype) -> Embedding:
    """`embedding`, scaled if `scale` is not 1."""
    return embedding if scale == 1.0 else ScaledEmbedding(embedding, scale, dtype)
