"""The interface of a model, or of a rank's shard, for runners, graphs and profiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.base import AttentionBackend
from engine.checkpoint.model_config import ModelConfig


@dataclass(frozen=True)
class Likeliest:
    """The largest logit in each of R rows, NaN if the row has one, and its first token."""

    logits: Sequence[float]
    ids: Sequence[int]

    def finite_ids(self) -> list[int | None]:
        """The tokens; None for rows whose largest logit is not finite."""
        pairs = zip(self.logits, self.ids, strict=True)
        return [token_id if math.isfinite(logit) else None for logit, token_id in pairs]


class WholeStep(Protocol):
    """A step in one call, from tokens to the likeliest next tokens."""

    def __call__(
        self, token_ids: Sequence[int], positions: Sequence[int], rows: Sequence[int] | None
    ) -> Likeliest:
        """The likeliest next tokens at `rows`, the planned segments' wanted rows (None: all rows).
        `token_ids` and `positions` are in the segments' order. Raises IndexError for a token
        outside the vocabulary."""


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

    def whole_step(self, attention: AttentionBackend) -> WholeStep | None:
        """The whole step as one call, over this backend's pool; None if the machine has none for
        this model."""
