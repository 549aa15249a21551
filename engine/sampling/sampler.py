"""Choosing the next token of every sequence in a batch.

A choice is a function of (seed, index, logits) and the sequence's own parameters and tokens, bit
for bit. No other row, no padding and no thread count changes it, so any worker and any attempt
that computes the same logits continues a text identically. Whether logits are the same is the
model's part: our kernels on CPUs give the same bits whatever else is in a batch, a card does not
(docs/gpu.md). Hence sums over the vocabulary are sums of integers (exact in any
order), and filters cut at a value, never at a rank (tokens with equal logits stay together).

The order follows OpenAI, vLLM and Hugging Face: the mask of allowed tokens, repetition penalty,
frequency and presence penalties, logit bias, forbidden words, `min_tokens` mask. Greedy sampling
ends here; otherwise follow temperature, top-k, top-p, min-p, and the choice by inverse CDF with
one uniform number per row. Log-probabilities are those of the raw logits, before all of these steps
(vLLM's default).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from engine.device import to_device
from engine.sampling.chosen_tokens import Choices, ChosenLogprobs, SampledToken, read_tokens
from engine.sampling.grammar_matcher import TokenMask
from engine.sampling.row_argmax import largest
from engine.sampling.token_history import TokenHistory
from engine.sampling.top_p import FindCut, lowest_kept
from protocol.errors import GenerationFailed
from protocol.sampling import GREEDY_BELOW, MAX_LOGPROBS, SamplingParams

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST_CANDIDATES = 256  # how many of the most likely tokens top-p looks at first


class SampleRow(msgspec.Struct, frozen=True, gc=False):
    """The sampling parameters of one sequence's row of logits, and the output index to choose.

    `history` holds the tokens so far; rows with penalties need it. `allowed` is the mask of tokens
    that may come next (from a grammar or a list of tokens). `forbidden` are ids that must not come
    next, because they would complete a forbidden word.
    """

    params: SamplingParams
    index: int
    history: TokenHistory | None = None
    allowed: TokenMask | None = None
    forbidden: Sequence[int] = ()

    @property
    def greedy(self) -> bool:
        """Whether to take the most likely token."""
        return self.params.temperature < GREEDY_BELOW


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
    top-p on a card.
    """

    def __init__(
        self,
        vocab_size: int,
        kernels: ctypes.CDLL | None = None,
        find_cut: FindCut = lowest_kept,
    ) -> None:
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
        adjusted = _adjust(logits, rows)
        highest, chosen = largest(adjusted, self._kernels)
        _check_finite(highest, logits)
        chosen = self._with_draws(chosen, adjusted, highest, rows)
        return read_tokens(chosen, _logprobs(logits, rows, chosen))

    @torch.inference_mode()
    def choose(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Choices:
        """The same choices as `sample`, without waiting for a card. Does not raise: `is_chosen` is
        False for rows from which no token can be chosen."""
        assert logits.shape == (len(rows), self._vocab_size), logits.shape
        adjusted = _adjust(logits, rows)
        highest, chosen = largest(adjusted, self._kernels)
        chosen = self._with_draws(chosen, adjusted, highest, rows)
        is_chosen = highest.isfinite()
        is_finite = is_chosen if adjusted is logits else logits.amax(dim=-1).isfinite()
        chosen = chosen.masked_fill(~is_chosen, 0)
        return Choices(chosen, is_chosen, is_finite, _logprobs(logits, rows, chosen))

    def _with_draws(
        self,
        greedy: torch.Tensor,
        adjusted: torch.Tensor,
        highest: torch.Tensor,
        rows: Sequence[SampleRow],
    ) -> torch.Tensor:
        """`greedy` choices [R], with random draws in the rows that are not greedy; `highest` [R] is
        the largest value in each row of `adjusted` [R, vocab]."""
        random = [position for position, row in enumerate(rows) if not row.greedy]
        if not random:
            return greedy
        where = _tensor(random, torch.int64, adjusted.device)
        centered = adjusted[where].sub_(highest[where, None])
        drawn = self._draw(centered, [rows[position] for position in random])
        return greedy.index_copy(0, where, drawn)

    def _draw(self, centered: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
        """Draw ids [R] from logits [R, vocab] whose largest is 0 in every row; overwrites them."""
        device = centered.device
        temperatures = _tensor([row.params.temperature for row in rows], torch.float32, device)
        scaled = centered.div_(temperatures[:, None])
        for cut in (self._top_k_cut, self._top_p_cut, self._min_p_cut):
            lowest = cut(scaled, rows)  # [R, 1]
            if lowest is not None:
                scaled.masked_fill_(scaled < lowest, -torch.inf)
        cumulative = self._weights(scaled).cumsum(dim=-1)
        totals = cumulative[:, -1:].to(torch.float64)
        uniforms = [uniform(row.params.seed, row.index) for row in rows]
        targets = _tensor(uniforms, torch.float64, device)[:, None] * totals
        # The first token whose cumulative weight exceeds the target; its own weight is not 0.
        return torch.searchsorted(cumulative, targets.to(torch.int64), right=True).squeeze(-1)

    def _weights(self, scaled: torch.Tensor) -> torch.Tensor:
        """Probabilities relative to the most likely token's, as integers (int64)."""
        return scaled.exp().mul_(self._weight_one).to(torch.int64)

    # Filters: each returns the lowest value to keep per row [R, 1], or None if no row filters

    def _top_k_cut(self, scaled: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor | None:
        sizes = [min(row.params.top_k or self._vocab_size, self._vocab_size) for row in rows]
        if min(sizes) == self._vocab_size:
            return None
        most = max(size for size in sizes if size < self._vocab_size)
        values = scaled.topk(most, dim=-1).values
        ranks = _tensor([min(size, most) - 1 for size in sizes], torch.int64, scaled.device)
        lowest = values.gather(-1, ranks[:, None])
        unfiltered = [size == self._vocab_size for size in sizes]
        off = _tensor(unfiltered, torch.bool, scaled.device)[:, None]
        return lowest.masked_fill(off, -torch.inf)

    def _top_p_cut(self, scaled: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor | None:
        shares = [row.params.top_p for row in rows]
        if min(shares) >= 1.0:
            return None
        share = _tensor(shares, torch.float64, scaled.device)[:, None]
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

    def _min_p_cut(self, scaled: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor | None:
        shares = [row.params.min_p for row in rows]
        if max(shares) <= 0.0:
            return None
        return _tensor(shares, torch.float32, scaled.device)[:, None].log()


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on `seed` and `index` alone, with 53 random bits.

    Counter-based: output `index` of the SplitMix64 generator (Steele, Lea, Flood 2014,
    https://doi.org/10.1145/2714064.2660195), which starts from the mixed seed.
    """
    start = _mix64(seed & _MASK64)
    return float(_mix64((start + (index + 1) * _GOLDEN) & _MASK64) >> 11) * 2.0**-53


def _mix64(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _adjust(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """`logits` after masks, penalties, bias, forbidden words and the `min_tokens` mask. Returns a
    copy if any row changes, else `logits` itself."""
    if not any(map(_needs_adjusting, rows)):
        return logits
    masked = [position for position, row in enumerate(rows) if row.allowed is not None]
    repeated, penalties = _flat(rows, logits, _repetition_penalties)
    added, amounts = _flat(rows, logits, _additions)
    forbidden, _ = _flat(rows, logits, _forbidden)
    adjusted = logits.clone()
    if masked:
        _apply_masks(adjusted, masked, [row.allowed for row in rows if row.allowed is not None])
    flat = adjusted.view(-1)
    values = flat[repeated]
    flat[repeated] = torch.where(values < 0, values * penalties, values / penalties)
    flat.index_add_(0, added, amounts)
    flat.index_fill_(0, forbidden, -torch.inf)
    return adjusted


def _needs_adjusting(row: SampleRow) -> bool:
    """Whether the row's parameters change its logits."""
    params = row.params
    return (
        row.allowed is not None
        or params.penalizes
        or bool(params.logit_bias)
        or bool(row.forbidden)
        or row.index < params.min_tokens
    )


def _apply_masks(adjusted: torch.Tensor, positions: list[int], masks: Sequence[TokenMask]) -> None:
    """Set the logits that `masks` forbid to -inf, in the rows `positions` of `adjusted`
    [R, vocab_size]."""
    device = adjusted.device
    packed = to_device(torch.from_numpy(np.stack(masks).view(np.uint8)), device)  # [M, bytes]
    bits = torch.arange(8, dtype=torch.uint8, device=device)
    allowed = (packed[:, :, None] >> bits & 1).flatten(1)[:, : adjusted.shape[-1]]  # [M, vocab]
    where = _tensor(positions, torch.int64, device)
    adjusted[where] = adjusted[where].masked_fill_(allowed == 0, -torch.inf)


_Adjustment = tuple[npt.ArrayLike, npt.ArrayLike]  # token ids, and numbers that change them
_UNCHANGED: _Adjustment = ((), ())


def _flat(
    rows: Sequence[SampleRow],
    logits: torch.Tensor,
    adjustment: Callable[[SampleRow], _Adjustment],
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows' adjustments: indices into the flattened logits, and the numbers to apply."""
    vocab_size = logits.shape[-1]
    indices, numbers = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for position, row in enumerate(rows):
        ids, changes = (np.asarray(each) for each in adjustment(row))
        if len(ids):
            known = (ids >= 0) & (ids < vocab_size)  # other ids cannot be chosen anyway
            indices.append(ids[known].astype(np.int64) + position * vocab_size)
            numbers.append(np.broadcast_to(changes, ids.shape)[known].astype(np.float32))
    return (
        to_device(torch.from_numpy(np.concatenate(indices)), logits.device),
        to_device(torch.from_numpy(np.concatenate(numbers)), logits.device),
    )


def _repetition_penalties(row: SampleRow) -> _Adjustment:
    """Hugging Face's repetition penalty, for all tokens seen in prompt or output: divides positive
    logits, multiplies negative ones."""
    penalty = row.params.repetition_penalty
    if penalty == 1.0:
        return _UNCHANGED
    return _history_of(row).seen_ids, penalty


def _additions(row: SampleRow) -> _Adjustment:
    """Logit bias, and OpenAI's presence and frequency penalties, over the output alone."""
    params = row.params
    bias = params.logit_bias or {}
    if params.presence_penalty == 0.0 and params.frequency_penalty == 0.0:
        return list(bias.keys()), list(bias.values())
    history = _history_of(row)
    penalties = params.presence_penalty + params.frequency_penalty * history.output_counts
    amounts = -penalties
    places = [(token_id, history.output_place(token_id)) for token_id in bias]
    for token_id, place in places:
        if place is not None:
            amounts[place] = bias[token_id] - penalties[place]
    fresh = [token_id for token_id, place in places if place is None]
    ids = np.concatenate((history.output_ids, np.array(fresh, dtype=np.int64)))
    return ids, np.concatenate((amounts, [bias[token_id] for token_id in fresh]))


def _forbidden(row: SampleRow) -> _Adjustment:
    """Tokens that would complete a forbidden word; and, while the output is shorter than
    `min_tokens`, the stop tokens."""
    ids = list(row.forbidden)
    if row.index < row.params.min_tokens:
        ids += row.params.stop_token_ids
    return ids, -np.inf


def _history_of(row: SampleRow) -> TokenHistory:
    assert row.history is not None, "a row with penalties comes with its tokens"
    return row.history


def _check_finite(highest: torch.Tensor, logits: torch.Tensor) -> None:
    """Raises InvalidLogits unless the `highest` adjusted logit of each row [R] is finite."""
    if all(map(math.isfinite, highest.tolist())):
        return
    finite = highest.isfinite()
    is_forbidden = ~finite & logits.amax(dim=-1).isfinite()
    rows = (~finite & ~is_forbidden).nonzero().flatten().tolist()
    raise InvalidLogits(rows, is_forbidden.nonzero().flatten().tolist())


def _logprobs(
    logits: torch.Tensor, rows: Sequence[SampleRow], chosen: torch.Tensor
) -> ChosenLogprobs | None:
    """Log-probabilities for the rows that want them; `chosen` [R] are the ids chosen from `logits`
    [R, vocab]."""
    asked = [position for position, row in enumerate(rows) if row.params.logprobs is not None]
    if not asked:
        return None
    where = _tensor(asked, torch.int64, logits.device)
    logprobs = logits[where].log_softmax(dim=-1)
    best = logprobs.topk(min(MAX_LOGPROBS, logits.shape[-1]), dim=-1)
    return ChosenLogprobs(
        asked,
        [rows[position].params.logprobs or 0 for position in asked],
        logprobs.gather(-1, chosen[where, None]).squeeze(-1),
        best.indices,
        best.values,
    )


def _tensor(
    values: Sequence[float] | Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=dtype), device)
