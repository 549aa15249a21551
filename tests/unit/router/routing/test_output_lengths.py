"""The expected length of an output follows those that have finished."""

from __future__ import annotations

from router.routing.output_lengths import OutputLengths
from router.routing.placement import USUAL_OUTPUT_TOKENS


def test_lengths_are_learnt_and_bounded() -> None:
    lengths = OutputLengths()
    assert lengths.expected(10_000) == USUAL_OUTPUT_TOKENS
    assert lengths.expected(3) == 3
    for _ in range(300):
        lengths.observe(40)
    assert lengths.expected(10_000) == 40
    for _ in range(300):
        lengths.observe(0)
    assert lengths.expected(10_000) == 1
