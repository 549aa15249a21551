"""The entries of NIXL's lists that a write names; NIXL itself is tried by the integration tests."""

from __future__ import annotations

import pytest

from kv_transfer.transports.nixl import _entries


@pytest.mark.parametrize(("count", "entries"), [(1, [4, 5, 2]), (2, [4, 5, 2, 14, 15, 12])])
def test_adjacent_blocks_are_adjacent_entries_of_each_piece(count: int, entries: list[int]) -> None:
    assert _entries([4, 5, 2], 10, count).tolist() == entries
