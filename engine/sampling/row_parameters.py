"""The parameters of a batch's rows as numbers on the device of their logits.

All of a step's numbers, of any dtype, go to a card by one copy. Knows which numbers the sampler
needs for each row, and nothing of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.packed_copy import Array, on_device
from engine.sampling.penalties import Adjustments, changes_of, needs_adjusting
from engine.sampling.sample_row import SampleRow

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


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
        changes = changes_of(rows, vocab_size) if any(map(needs_adjusting, rows)) else {}
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
