"""Layers of which a rank has a part: the ranks' partial results are added up.

Products over a split dimension (o's over the heads, down's over the intermediate width) give
partial sums. A rank's part of an embedding has the rows of some tokens, and gives zeros for others.
All ranks call a layer together. `Sums` is how they meet; `engine.parallel.sums` implements it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.layers.embedding import Embedding
from engine.layers.experts import Experts
from engine.layers.linear import LinearLayer
from engine.layers.ops import LayerOps


class Sums(Protocol):
    """Adds up and passes on what the ranks of a stage computed. All ranks call the same methods in
    the same order. Each raises RuntimeError if that is impossible."""

    rank: int
    """This rank's number in its stage."""
    address: int | None
    """Of the structure by which our kernels add up themselves; None if they do not."""

    def add_up(self, part: torch.Tensor) -> None:
        """Replace a rank's part, contiguous, by the sum of all ranks' parts."""

    def share(self, x: torch.Tensor) -> None:
        """Replace `x`, contiguous and of equal size on all ranks, by the first rank's."""

    def gather(self, part: torch.Tensor, bounds: Sequence[int], whole: torch.Tensor | None) -> None:
        """Put the ranks' parts of rows side by side: rank r has the columns from `bounds[r]` to
        `bounds[r + 1]`. `part` [rows, columns of the rank] and `whole` [rows, all columns] are
        contiguous and of one type; only the first rank has `whole`, and gets them."""

    def meet(self) -> None:
        """Wait until all ranks have called this, and have finished what they began before."""

    def check(self) -> None:
        """Raise if the kernels could not add up."""

    @property
    def waited_ns(self) -> int:
        """The time for which this rank's host has waited for other ranks so far."""


class SummedLinear:
    """A linear layer whose inputs are split over the ranks; `part` is this rank's."""

    def __init__(self, part: LinearLayer, sums: Sums) -> None:
        self.part = part
        self._sums = sums

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [N, the rank's inputs] to [N, outputs], plus `add`, which is equal on all ranks."""
        return _summed(self.part(x, add if self._sums.rank == 0 else None), self._sums)

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute `x` to [N, outputs] in fp32. The result is written to `out` if it is given."""
        return _summed(self.part.in_float32(x, out), self._sums)


class SummedExperts:
    """Experts whose inner numbers are split over the ranks: all choose the same ones, and their
    partial results are added. `part` are this rank's."""

    def __init__(self, part: Experts, sums: Sums) -> None:
        self.part = part
        self._sums = sums
        self.tally = part.tally

    @property
    def products(self) -> Sequence[LinearLayer]:
        """See Experts."""
        return self.part.products

    def __call__(self, x: torch.Tensor, ops: LayerOps, add: torch.Tensor | None) -> torch.Tensor:
        """See Experts; `add` is equal on all ranks."""
        return _summed(self.part(x, ops, add if self._sums.rank == 0 else None), self._sums)


class SummedEmbedding:
    """An embedding of which each rank has the rows of some tokens: `part` those of `tokens`."""

    def __init__(self, part: Embedding, tokens: range, sums: Sums) -> None:
        self.part = part
        self._tokens = tokens
        self._sums = sums

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The rows of `token_ids` [N], int64, [N, hidden]."""
        tokens = self._tokens
        is_own = (token_ids >= tokens.start) & (token_ids < tokens.stop)
        rows = self.part((token_ids - tokens.start) * is_own)
        return _summed(rows * is_own[:, None], self._sums)


def part_of(layer: object) -> object:
    """This rank's part of a layer; of one that is not summed the layer itself."""
    if isinstance(layer, SummedLinear | SummedExperts | SummedEmbedding):
        return layer.part
    return layer


def _summed(y: torch.Tensor, sums: Sums) -> torch.Tensor:
    sums.add_up(y)
    return y
