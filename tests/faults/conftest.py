"""What the tests with dying processes share."""

from __future__ import annotations

import pytest

from tests.integration.reference import Reference, make_references


@pytest.fixture(scope="session")
def long_prompts() -> list[Reference]:
    """Prompts of many chunks, and their greedy continuations by transformers."""
    return [each for each in make_references() if len(each.prompt) >= 500]
