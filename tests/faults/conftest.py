"""What the tests with dying processes share."""

from __future__ import annotations

import pytest

from tests.integration.reference import Reference, make_references


@pytest.fixture(scope="session")
def references() -> list[Reference]:
    """Prompts of many lengths, and their greedy continuations by transformers."""
    return make_references()


@pytest.fixture(scope="session")
def long_prompts(references: list[Reference]) -> list[Reference]:
    """Those of many chunks."""
    return [each for each in references if len(each.prompt) >= 500]


@pytest.fixture(scope="session")
def one_chunk_prompts(references: list[Reference]) -> list[Reference]:
    """Those that faulty fleets compute, and send, in one go: several blocks, at most 64 tokens."""
    return [each for each in references if 47 <= len(each.prompt) <= 64]
