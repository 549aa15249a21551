"""The kept continuations are those that transformers generates."""

from __future__ import annotations

from tests.effort import some
from tests.integration.reference import MIN_MARGIN, GreedyGeneration, Reference, load_references


def test_transformers_generates_what_the_file_holds() -> None:
    generate = GreedyGeneration()
    for reference in some(load_references()[:60], 6):
        output, margin = generate(reference.prompt)
        assert Reference(reference.prompt, tuple(output)) == reference
        assert margin >= MIN_MARGIN
