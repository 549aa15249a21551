"""What the tests with real processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.control_bench import Bench
from tests.integration.reference import Reference, make_references


@pytest.fixture(scope="session")
def references() -> list[Reference]:
    """Prompts, and their greedy continuations by transformers."""
    return make_references()


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Control servers and whatever connects to them."""
    made = Bench()
    yield made
    made.close()
