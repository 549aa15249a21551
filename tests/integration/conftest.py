"""What the tests with real processes share."""

from __future__ import annotations

import pytest

from tests.integration.reference import Reference, make_references


@pytest.fixture(scope="session")
def references() -> list[Reference]:
    """Prompts, and their greedy continuations by transformers."""
    return make_references()
