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
