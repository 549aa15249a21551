"""Tokens that a device was told to choose, before anybody has read them.

On a card they are still to come: the next step takes them from there (`LateTokens`), and copies on
their way to the host are read once the card has passed a fence. On a CPU all of it is there at
once. Knows neither sequences nor why a token was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from engine.device import to_device, to_host


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """The token chosen; `logprob` None and `top` empty where the row asked for none."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class ChosenLogprobs:
    """Log-probabilities of A rows that asked for them: of the token chosen, and of the K best."""

    positions: list[int]  # among the batch's rows
    counts: list[int]  # how many of the best each row wants
    of_chosen: torch.Tensor  # [A] fp32
    best_ids: torch.Tensor  # [A, K] int64
    best: torch.Tensor  # [A, K] fp32, descending

    def on_host(self) -> ChosenLogprobs:
        """As `Choices.on_host`."""
        tensors = map(to_host, (self.of_chosen, self.best_ids, self.best))
        return ChosenLogprobs(self.positions, self.counts, *tensors)


@dataclass(frozen=True)
class Choices:
    """What was chosen from R rows of logits. Where nothing could be, the id is 0: it is computed
    on with by who has not read that yet, and has to be a token."""

    ids: torch.Tensor  # [R] int64
    is_chosen: torch.Tensor  # [R] bool
    is_finite: torch.Tensor  # [R] bool: of the model's logits, before anything was forbidden
    logprobs: ChosenLogprobs | None

    def on_host(self) -> Choices:
        """Copies in host memory; to be read behind a fence that comes after this call."""
        logprobs = None if self.logprobs is None else self.logprobs.on_host()
        ids, is_chosen, is_finite = map(to_host, (self.ids, self.is_chosen, self.is_finite))
        return Choices(ids, is_chosen, is_finite, logprobs)


def read_tokens(ids: torch.Tensor, logprobs: ChosenLogprobs | None) -> list[SampledToken]:
    """The tokens of `ids` [R], with the log-probabilities that were asked for; waits for a card
    unless the tensors are in host memory."""
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
    """Tokens of a batch that only the device knows: `ids` [L] belong to the places `where` [L]."""

    where: torch.Tensor  # int64, as `ids` on the device
    ids: torch.Tensor

    @classmethod
    def of(cls, places: Sequence[int], rows: Sequence[int], chosen: torch.Tensor) -> LateTokens:
        """Those of the `rows` [L] of `chosen` [R], for `places` [L] in a batch."""
        index = to_device(torch.tensor([places, rows], dtype=torch.int64), chosen.device)
        return cls(index[0], chosen.index_select(0, index[1]))

    def put(self, tokens: torch.Tensor) -> None:
        """Write them to their places in `tokens` [N] int64."""
        tokens.index_copy_(0, self.where, self.ids)
