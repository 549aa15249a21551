"""How a sequence's parameters change its logits: penalties, biases, forbidden words, masks.

Knows the parameters of each row, and nothing of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.packed_copy import Array
from engine.sampling.sample_row import SampleRow
from engine.sampling.token_history import TokenHistory

_Adjustment = tuple[npt.ArrayLike, npt.ArrayLike]  # token ids, and numbers that change them
_UNCHANGED: _Adjustment = ((), ())


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


def needs_adjusting(row: SampleRow) -> bool:
    """Whether the row's parameters change its logits."""
    params = row.params
    return (
        row.allowed is not None
        or params.penalizes
        or bool(params.logit_bias)
        or bool(row.forbidden)
        or row.index < params.min_tokens
    )


def changes_of(rows: Sequence[SampleRow], vocab_size: int) -> dict[str, Array]:
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
            known = (ids >= 0) & (ids < vocab_size)  # ids outside the vocabulary cannot be chosen
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
