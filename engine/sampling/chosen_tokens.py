"""Tokens that a device chooses and the host has not read yet.

On a card the choice is asynchronous: the next step reads the tokens on the card (`LateTokens`), and
the host reads copies once the card has passed a fence. On a CPU the tokens are available at once.
Knows neither sequences nor why a token was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.device import to_host
from engine.runner import SampledToken

LogTotals = Callable[[torch.Tensor], torch.Tensor]
"""log(sum(exp(row))) of each row of logits [R, vocab], fp32, as [R, 1]."""


@dataclass(frozen=True)
class ChosenLogprobs:
    """Log-probabilities of the chosen token and of the K best, for the A rows that want them."""

    positions: list[int]  # the rows' positions in the batch
    counts: list[int]  # how many of the best tokens each row wants
    of_chosen: torch.Tensor  # [A] fp32
    best_ids: torch.Tensor  # [A, K] int64
    best: torch.Tensor  # [A, K] fp32, descending

    def on_host(self) -> ChosenLogprobs:
        """See `Choices.on_host`."""
        tensors = map(to_host, (self.of_chosen, self.best_ids, self.best))
        return ChosenLogprobs(self.positions, self.counts, *tensors)


@dataclass(frozen=True)
class Choices:
    """The tokens chosen from R rows of logits. Rows from which none can be chosen have the id 0,
    because the next step may use the id before the host has read the choice."""

    ids: torch.Tensor  # [R] int64
    is_chosen: torch.Tensor  # [R] bool
    is_finite: torch.Tensor  # [R] bool: whether the model's logits, before any mask, are finite
    logprobs: ChosenLogprobs | None

    def on_host(self) -> Choices:
        """Copies in host memory; read them only behind a fence that is set after this call."""
        logprobs = None if self.logprobs is None else self.logprobs.on_host()
        ids, is_chosen, is_finite = map(to_host, (self.ids, self.is_chosen, self.is_finite))
        return Choices(ids, is_chosen, is_finite, logprobs)


def read_tokens(ids: torch.Tensor, logprobs: ChosenLogprobs | None) -> list[SampledToken]:
    """The tokens of `ids` [R], with the requested log-probabilities; waits for the card unless the
    tensors are in host memory."""
    numbers: list[int] = ids.tolist()
    tokens = [SampledToken(token_id) for token_id in numbers]
    if logprobs is None:
        return tokens
    best_ids, best = logprobs.best_ids.tolist(), logprobs.best.tolist()
    for position, count, logprob, top_ids, top_logprobs in zip(
        logprobs.positions,
        logprobs.counts,
        logprobs.of_chosen.tolist(),
        best_ids,
        best,
        strict=True,
    ):
        top = tuple(zip(top_ids, top_logprobs, strict=True))[:count]
        tokens[position] = SampledToken(numbers[position], logprob, top)
    return tokens


@dataclass(frozen=True)
class LateTokens:
    """Tokens of a batch that only the device knows: those at the rows `index[1]` [L] of `chosen`
    [R], for the positions `index[0]` [L]."""

    index: npt.NDArray[np.int64]  # [2, L], to be copied to the device with the batch's inputs
    chosen: torch.Tensor

    @classmethod
    def of(cls, places: Sequence[int], rows: Sequence[int], chosen: torch.Tensor) -> LateTokens:
        """The tokens at `rows` [L] of `chosen` [R], for `places` [L] in a batch."""
        return cls(np.array([places, rows], dtype=np.int64), chosen)

    def put(self, tokens: torch.Tensor, index: torch.Tensor) -> None:
        """Write the ids to their positions in `tokens` [N] int64. `index` is a copy of
        `self.index` on the device."""
        tokens.index_copy_(0, index[0], self.chosen.index_select(0, index[1]))
