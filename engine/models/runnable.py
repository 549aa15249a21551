"""What runners, graphs and profiles ask of a model, whole or the shard of a rank."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.attention.base import AttentionBackend
from engine.checkpoint.config import ModelConfig


class RunnableModel(Protocol):
    """A model that turns planned batches into hidden states, and hidden states into logits."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layers' output for the tokens at `rows` [W] (None: for all), [W, hidden]."""

    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [R, vocab], fp32, of hidden states [R, hidden]; written to `out` where given."""
