"""One row of logits to choose a token from: its parameters and the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.sampling.grammar_matcher import TokenMask
from engine.sampling.token_history import TokenHistory
from protocol.sampling import GREEDY_BELOW, SamplingParams


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
