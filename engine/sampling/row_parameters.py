"""The parameters of a batch's rows as numbers on the device of their logits.

All of a step's numbers, of any dtype, go to a card by one copy. Knows what the sampler needs of
each row, and nothing of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from engine.packed_copy import Array, on_device
from engine.sampling.grammar_matcher import TokenMask
from engine.sampling.token_history import TokenHistory
from protocol.sampling import GREEDY_BELOW, SamplingParams

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


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


@dataclass(frozen=True)
class Adjustments:
    """Changes of logits. Indices are those of the flattened logits of all rows."""

    repeated: torch.Tensor  # [P] int64: tokens with a repetition penalty
    penalties: torch.Tensor  # [P] fp32
    added: torch.Tensor  # [A] int64: tokens with a bias, or another penalty
    amounts: torch.Tensor  # [A] fp32
    forbidden: torch.Tensor  # [F] int64
    masked: torch.Tensor | None = None  # [M] int64: rows with a mask
    masks: torch.Tensor | None = None  # [M, bytes] uint8: a bit for each token, set if allowed


@dataclass(frozen=True)
class Draws:
    """The numbers with which the D rows that are not greedy draw. Filters that no row uses are
    None."""

    rows: torch.Tensor  # [D] int64
    temperatures: torch.Tensor  # [D] fp32
    uniforms: torch.Tensor  # [D] fp64
    num_top: int = 0  # the largest top-k of a row that has one
    top_ranks: torch.Tensor | None = None  # [D] int64: each row's top-k - 1, at most `num_top` - 1
    no_top_k: torch.Tensor | None = None  # [D] bool: rows without top-k
    top_p: torch.Tensor | None = None  # [D] fp64
    min_p: torch.Tensor | None = None  # [D] fp32


@dataclass(frozen=True)
class RowNumbers:
    """The numbers of R rows; None where no row needs any. `asked` are the rows, [L] int64, whose
    log-probabilities are wanted."""

    adjustments: Adjustments | None
    draws: Draws | None
    asked: torch.Tensor | None

    @classmethod
    def of(cls, rows: Sequence[SampleRow], vocab_size: int, device: torch.device) -> RowNumbers:
        """Copy what `rows` need to `device`, at once."""
        changes = _changes(rows, vocab_size) if any(map(_needs_adjusting, rows)) else {}
        random = [position for position, row in enumerate(rows) if not row.greedy]
        drawn = [rows[position] for position in random]
        sizes = [min(row.params.top_k or vocab_size, vocab_size) for row in drawn]
        num_top = max((size for size in sizes if size < vocab_size), default=0)
        draws = _draws(drawn, random, sizes, num_top) if random else {}
        asked = [position for position, row in enumerate(rows) if row.params.logprobs is not None]
        wanted = {"asked": np.array(asked, dtype=np.int64)} if asked else {}
        numbers = on_device(changes | draws | wanted, device)
        return cls(
            Adjustments(**{name: numbers[name] for name in changes}) if changes else None,
            Draws(num_top=num_top, **{name: numbers[name] for name in draws}) if random else None,
            numbers.get("asked"),
        )


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


def _changes(rows: Sequence[SampleRow], vocab_size: int) -> dict[str, Array]:
    """The fields of `Adjustments`."""
    repeated, penalties = _flat(rows, vocab_size, _repetition_penalties)
    added, amounts = _flat(rows, vocab_size, _additions)
    forbidden, _ = _flat(rows, vocab_size, _forbidden)
    changes: dict[str, Array] = {
        "repeated": repeated,
        "penalties": penalties,
        "added": added,
        "amounts": amounts,
        "forbidden": forbidden,
    }
    masked = [position for position, row in enumerate(rows) if row.allowed is not None]
    if masked:
        changes["masked"] = np.array(masked, dtype=np.int64)
        masks = np.stack([row.allowed for row in rows if row.allowed is not None])
        changes["masks"] = masks.view(np.uint8)
    return changes


def _draws(
    rows: Sequence[SampleRow], positions: list[int], sizes: list[int], num_top: int
) -> dict[str, Array]:
    """The tensors of `Draws` for these rows, which are at `positions` in the batch. `sizes`: the
    number of tokens that top-k leaves each row, more than `num_top` without top-k."""
    params = [row.params for row in rows]
    draws: dict[str, Array] = {
        "rows": np.array(positions, dtype=np.int64),
        "temperatures": np.array([each.temperature for each in params], dtype=np.float32),
        "uniforms": np.array([uniform(row.params.seed, row.index) for row in rows]),
    }
    if num_top:
        draws["top_ranks"] = np.array([min(size, num_top) - 1 for size in sizes], dtype=np.int64)
        draws["no_top_k"] = np.array([size > num_top for size in sizes])
    if min(each.top_p for each in params) < 1.0:
        draws["top_p"] = np.array([each.top_p for each in params], dtype=np.float64)
    if max(each.min_p for each in params) > 0.0:
        draws["min_p"] = np.array([each.min_p for each in params], dtype=np.float32)
    return draws


_Adjustment = tuple[npt.ArrayLike, npt.ArrayLike]  # token ids, and numbers that change them
_UNCHANGED: _Adjustment = ((), ())


def _flat(
    rows: Sequence[SampleRow],
    vocab_size: int,
    adjustment: Callable[[SampleRow], _Adjustment],
) -> tuple[Array, Array]:
    """All rows' adjustments: indices into the flattened logits, and the numbers to apply."""
    indices, numbers = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for position, row in enumerate(rows):
        ids, changes = (np.asarray(each) for each in adjustment(row))
        if len(ids):
            known = (ids >= 0) & (ids < vocab_size)  # other ids cannot be chosen anyway
            indices.append(ids[known].astype(np.int64) + position * vocab_size)
            numbers.append(np.broadcast_to(changes, ids.shape)[known].astype(np.float32))
    return np.concatenate(indices), np.concatenate(numbers)


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
