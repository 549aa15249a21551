"""Choosing a transport, and the helpers that all of them share."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.transports import nixl as nixl_transport
from kv_transfer.transports.interface import check_blocks, runs
from kv_transfer.transports.registry import create_transport
from protocol.errors import ConfigError, TransferError


def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host where the packages are not installed."""
    for module in nixl_transport.NIXL_MODULES:
        monkeypatch.setitem(sys.modules, module, None)


def test_auto_takes_nixl_where_it_loads() -> None:
    pytest.importorskip("nixl_cu12")
    transport = create_transport("auto", "cpu")
    assert transport.name == "nixl"
    transport.close()


def test_auto_takes_shared_memory_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    without_nixl(monkeypatch)
    transport = create_transport("auto", "cpu")
    assert transport.name == "shm"
    transport.close()


def test_a_gpu_needs_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    without_nixl(monkeypatch)
    with pytest.raises(ConfigError, match=r"nixl_cu13: .*nixl_cu12: "):
        create_transport("auto", "cuda:0")
    with pytest.raises(ConfigError, match="use nixl"):
        create_transport("shm", "cuda:0")


def test_nixl_is_for_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="Linux only"):
        create_transport("nixl", "cpu")


def test_an_unknown_name_lists_the_known_and_why_nixl_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_nixl(monkeypatch)
    with pytest.raises(ConfigError, match=r"'rdma' is unknown; available: auto, nixl, shm \(nixl"):
        create_transport("rdma", "cpu")


def test_incarnations_have_different_names() -> None:
    one, other = create_transport("shm", "cpu"), create_transport("shm", "cpu")
    assert one.agent != other.agent
    one.close()
    other.close()


pairs = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20)


@given(pairs)
def test_runs_cover_all_pairs_in_order_and_are_as_long_as_can_be(
    blocks: list[tuple[int, int]],
) -> None:
    source, target = [pair[0] for pair in blocks], [pair[1] for pair in blocks]
    found = list(runs(source, target))
    assert [(s + i, t + i) for s, t, count in found for i in range(count)] == blocks
    for (s, t, count), (next_s, next_t, _) in pairwise(found):
        assert (s + count, t + count) != (next_s, next_t)


@pytest.mark.parametrize(
    ("source", "target", "match"),
    [
        ([], [], "0 source blocks"),
        ([1], [1, 2], "1 source blocks for 2"),
        ([4], [0], "source block is outside of a pool of 4"),
        ([0], [-1], "target block is outside of a pool of 8"),
        ([0], [8], "target block is outside of a pool of 8"),
    ],
)
def test_blocks_outside_of_a_pool(source: list[int], target: list[int], match: str) -> None:
    with pytest.raises(TransferError, match=match):
        check_blocks(source, target, 4, 8)
    check_blocks([3], [7], 4, 8)
