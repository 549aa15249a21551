"""Links that are closed after a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.worker.inbound.source_pair import Pair


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()
