"""What the tests with dying processes share."""

from __future__ import annotations

import pytest

from tests.faults.faulty_fleet import FaultyFleet
from tests.integration.fleets import assert_idle
from tests.integration.reference import Reference, load_references


@pytest.fixture(scope="session")
def references() -> list[Reference]:
    """Prompts of many lengths, and their greedy continuations by transformers."""
    return load_references()


@pytest.fixture(scope="session")
def long_prompts(references: list[Reference]) -> list[Reference]:
    """The references whose prompts have many chunks."""
    return [each for each in references if len(each.prompt) >= 500]


@pytest.fixture(scope="session")
def one_chunk_prompts(references: list[Reference]) -> list[Reference]:
    """The references whose prompts faulty fleets compute and send in one chunk: several blocks, at
    most 64 tokens."""
    return [each for each in references if 47 <= len(each.prompt) <= 64]


@pytest.fixture(autouse=True)
def _whole_and_idle(request: pytest.FixtureRequest) -> None:
    """Each test finds its fleet whole and at rest, and reports that say so, whatever the one before
    it left."""
    if "fleet" in request.fixturenames:
        fleet: FaultyFleet = request.getfixturevalue("fleet")
        fleet.revive()
        assert_idle(fleet.fleet)
