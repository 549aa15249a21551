"""Choosing the next token of every sequence in a batch.

A choice is a function of (seed, index, logits) and the sequence's own parameters and tokens, bit
for bit. No other row, no padding and no thread count changes it, so any worker and any attempt that
computes the same logits continues a text identically. Equal logits are the model's part: our
kernels on CPUs give the same bits whatever else is in a batch, a card only in batch-invariant mode
(docs/gpu.md). Hence sums over the vocabulary are sums of integers (exact in any order), and filters
cut at a value, never at a rank (tokens with equal logits stay together).

The order follows OpenAI, vLLM and Hugging Face: the mask of allowed tokens, repetition penalty,
frequency and presence penalties, logit bias, forbidden words, `min_tokens` mask. Greedy sampling
ends here; otherwise follow temperature, top-k, top-p, min-p, and the choice by inverse CDF with one
uniform number per row. Log-probabilities are those of the raw logits, before all of these steps
(vLLM's default).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch

from engine.runner import SampledToken
from engine.sampling.chosen_tokens import Choices, ChosenLogprobs, LogTotals, read_tokens
from engine.sampling.penalties import Adjustments
from engine.sampling.row_argmax import largest
from engine.sampling.row_parameters import Draws, RowNumbers
from engine.sampling.sample_row import SampleRow
from engine.sampling.top_p import FindCut, lowest_kept
from protocol.errors import GenerationFailed
from protocol.sampling import MAX_LOGPROBS

_FIRST_CANDIDATES = 256  # how many of the most likely tokens top-p examines first


class InvalidLogits(GenerationFailed):
    """The largest logit of some rows is not finite (NaN or infinite), so they give no token.

    `rows` are the batch positions of rows whose logits the model returned like this;
    `forbidden_rows` are those of rows whose own parameters or grammar leave no token. The other
    rows can be sampled separately.
    """

    def __init__(self, rows: list[int], forbidden_rows: list[int]) -> None:
        super().__init__(
            f"the model returned logits that are not finite for rows {rows}; "
            f"nothing is allowed in rows {forbidden_rows}"
        )
        self.rows = rows
        self.forbidden_rows = forbidden_rows


class Sampler:
    """Samples from logits over a vocabulary of `vocab_size`; holds no state between calls.

    `kernels` (see engine.native) find the largest logits in host memory, `find_cut` the cut of
    top-p on a card. `log_totals`, if given, computes the log-sum-exp of the rows whose
    log-probabilities are reported.
    """

    def __init__(
        self,
        vocab_size: int,
        kernels: ctypes.CDLL | None = None,
        find_cut: FindCut = lowest_kept,
        log_totals: LogTotals | None = None,
    ) -> None:
        self.log_totals = log_totals
        self._vocab_size = vocab_size
        self._kernels = kernels
        self._find_cut = find_cut
        # Integer weights of a row sum to less than 2^52: exact as int64 and as float64.
        self._weight_one = 2.0 ** (52 - vocab_size.bit_length())

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """One token per row of `logits` [R, vocab_size], fp32; does not change `logits`.

        Raises InvalidLogits, which names the rows from which no token can be chosen.
        """
        if not rows:
            return []
        assert logits.shape == (len(rows), self._vocab_size), logits.shape
        numbers = RowNumbers.of(rows, self._vocab_size, logits.device)
        adjusted = adjust(logits, numbers.adjustments)
        highest, chosen = largest(adjusted, self._kernels)
        _check_finite(highest, logits)
        chosen = self._with_draws(chosen, adjusted, highest, numbers.draws)
        return read_tokens(chosen, _logprobs(logits, rows, numbers.asked, chosen, self.log_totals))

    @torch.inference_mode()
    def choose(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Choices:
        """Make the same choices as `sample`, without waiting for a card. Does not raise:
        `is_chosen` is False for rows from which no token can be chosen."""
        assert logits.shape == (len(rows), self._vocab_size), logits.shape
        numbers = RowNumbers.of(rows, self._vocab_size, logits.device)
        adjusted = adjust(logits, numbers.adjustments)
        highest, chosen = largest(adjusted, self._kernels)
        chosen = self._with_draws(chosen, adjusted, highest, numbers.draws)
        is_chosen = highest.isfinite()
        is_finite = is_chosen if adjusted is logits else logits.amax(dim=-1).isfinite()
        chosen = chosen.masked_fill(~is_chosen, 0)
        logprobs = _logprobs(logits, rows, numbers.asked, chosen, self.log_totals)
        return Choices(chosen, is_chosen, is_finite, logprobs)

    def _with_draws(
        self,
        greedy: torch.Tensor,
        adjusted: torch.Tensor,
        highest: torch.Tensor,
        draws: Draws | None,
    ) -> torch.Tensor:
        """`greedy` choices [R], with random draws in the rows that are not greedy; `highest` [R] is
        the largest value in each row of `adjusted` [R, vocab]."""
        if draws is None:
            return greedy
        centered = adjusted[draws.rows].sub_(highest[draws.rows, None])
        return greedy.index_copy(0, draws.rows, self._draw(centered, draws))

    def _draw(self, centered: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Draw ids [D] from logits [D, vocab] whose largest is 0 in every row; overwrites them."""
        scaled = centered.div_(draws.temperatures[:, None])
        for cut in (_top_k_cut, self._top_p_cut, _min_p_cut):
            lowest = cut(scaled, draws)  # [D, 1]
            if lowest is not None:
                scaled.masked_fill_(scaled < lowest, -torch.inf)
        cumulative = self._weights(scaled).cumsum(dim=-1)
        totals = cumulative[:, -1:].to(torch.float64)
        targets = draws.uniforms[:, None] * totals
        # The first token whose cumulative weight exceeds the target; its own weight is not 0.
        return torch.searchsorted(cumulative, targets.to(torch.int64), right=True).squeeze(-1)

    def _weights(self, scaled: torch.Tensor) -> torch.Tensor:
        """Probabilities relative to the most likely token's, as integers (int64)."""
        return scaled.exp().mul_(self._weight_one).to(torch.int64)

    def _top_p_cut(self, scaled: torch.Tensor, draws: Draws) -> torch.Tensor | None:
        """The lowest value to keep in each row, [D, 1], as of the other cuts; None if no row
        filters."""
        if draws.top_p is None:
            return None
        share = draws.top_p[:, None]
        weights = self._weights(scaled)
        needed = weights.sum(dim=-1, keepdim=True).to(torch.float64) * share
        off = share >= 1.0
        if scaled.device.type != "cpu":
            return self._find_cut(scaled, weights, needed).masked_fill(off, -torch.inf)
        del weights
        size = min(_FIRST_CANDIDATES, self._vocab_size)
        while True:  # sorting the whole vocabulary is slow and seldom needed
            values = scaled.topk(size, dim=-1).values
            cumulative = self._weights(values).cumsum(dim=-1)
            enough = (cumulative[:, -1:] >= needed) | off
            if size == self._vocab_size or bool(enough.all()):
                break
            size = min(size * 8, self._vocab_size)
        ranks = (cumulative < needed).sum(dim=-1, keepdim=True).clamp(max=size - 1)
        return values.gather(-1, ranks).masked_fill(off, -torch.inf)


def _top_k_cut(scaled: torch.Tensor, draws: Draws) -> torch.Tensor | None:
    if draws.top_ranks is None or draws.no_top_k is None:
        return None
    values = scaled.topk(draws.num_top, dim=-1).values
    lowest = values.gather(-1, draws.top_ranks[:, None])
    return lowest.masked_fill(draws.no_top_k[:, None], -torch.inf)


def _min_p_cut(scaled: torch.Tensor, draws: Draws) -> torch.Tensor | None:
    return None if draws.min_p is None else draws.min_p[:, None].log()


def adjust(logits: torch.Tensor, changes: Adjustments | None) -> torch.Tensor:
    """`logits` after masks, penalties, bias, forbidden words and the `min_tokens` mask. Returns a
    copy if any row changes, else `logits` itself."""
    if changes is None:
        return logits
    adjusted = logits.clone()
    if changes.masked is not None and changes.masks is not None:
        _apply_masks(adjusted, changes.masked, changes.masks)
    flat = adjusted.view(-1)
    values = flat[changes.repeated]
    penalties = changes.penalties
    flat[changes.repeated] = torch.where(values < 0, values * penalties, values / penalties)
    flat.index_add_(0, changes.added, changes.amounts)
    flat.index_fill_(0, changes.forbidden, -torch.inf)
    return adjusted


def _apply_masks(adjusted: torch.Tensor, masked: torch.Tensor, masks: torch.Tensor) -> None:
    """Set the logits that `masks` [M, bytes] forbid to -inf, in the rows `masked` [M] of `adjusted`
    [R, vocab_size]."""
    bits = torch.arange(8, dtype=torch.uint8, device=masks.device)
    allowed = (masks[:, :, None] >> bits & 1).flatten(1)[:, : adjusted.shape[-1]]  # [M, vocab]
    adjusted[masked] = adjusted[masked].masked_fill_(allowed == 0, -torch.inf)


def _check_finite(highest: torch.Tensor, logits: torch.Tensor) -> None:
    """Raises InvalidLogits unless the `highest` adjusted logit of each row [R] is finite."""
    if all(map(math.isfinite, highest.tolist())):
        return
    finite = highest.isfinite()
    is_forbidden = ~finite & logits.amax(dim=-1).isfinite()
    rows = (~finite & ~is_forbidden).nonzero().flatten().tolist()
    raise InvalidLogits(rows, is_forbidden.nonzero().flatten().tolist())


def _logprobs(
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    asked: torch.Tensor | None,
    chosen: torch.Tensor,
    log_totals: LogTotals | None,
) -> ChosenLogprobs | None:
    """Log-probabilities for the rows `asked` [L]; `chosen` [R] are the ids chosen from `logits`
    [R, vocab]."""
    if asked is None:
        return None
    wanted = [(position, row.params.logprobs) for position, row in enumerate(rows)]
    raw = logits[asked]
    logprobs = raw.log_softmax(dim=-1) if log_totals is None else raw - log_totals(raw)
    best = logprobs.topk(min(MAX_LOGPROBS, logits.shape[-1]), dim=-1)
    return ChosenLogprobs(
        [position for position, count in wanted if count is not None],
        [count for _, count in wanted if count is not None],
        logprobs.gather(-1, chosen[asked, None]).squeeze(-1),
        best.indices,
        best.values,
    )
