"""The average length of outputs, which placements assume for the next one. Pure."""

from __future__ import annotations

from router.routing.placement import USUAL_OUTPUT_TOKENS

_WEIGHT = 0.05
"""The weight of a new output in the average length."""


class OutputLengths:
    """A moving average of finished outputs."""

    def __init__(self) -> None:
        self._tokens = float(USUAL_OUTPUT_TOKENS)

    def observe(self, num_tokens: int) -> None:
        """An output of `num_tokens` has finished."""
        self._tokens += _WEIGHT * (num_tokens - self._tokens)

    def expected(self, most: int) -> int:
        """The expected length, in tokens, of an output of at most `most`."""
        return max(1, min(most, round(self._tokens)))
