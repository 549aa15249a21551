"""A worker whose pool has ends on two hosts."""

from __future__ import annotations

import pytest

from tests.unit.kv_transfer.transports.joined_ends import Worker


@pytest.fixture
def worker() -> Worker:
    return Worker()
