"""Choosing a transport, and the helpers that all of them share."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.transports import nixl_module
from kv_transfer.transports.interface import check_blocks, runs
from kv_transfer.transports.registry import chosen_transport, create_transport
from protocol.errors import ConfigError, PoolMismatch


def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host where the packages are not installed."""
    for module in nixl_module.NIXL_MODULES:
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize(
    ("device", "is_one_host", "has_nixl", "chosen"),
    [
        ("cpu", True, True, "shm"),
        ("cpu", True, False, "shm"),
        ("cpu", False, True, "nixl"),
        ("cpu", False, False, "shm"),
        ("cuda:0", True, True, "nixl"),
        ("cuda:0", True, False, "nixl"),  # its error says what is missing
        ("cuda:0", False, True, "nixl"),
    ],
)
def test_auto_is_shared_memory_on_one_host_else_nixl(
    monkeypatch: pytest.MonkeyPatch, device: str, is_one_host: bool, has_nixl: bool, chosen: str
) -> None:
    if has_nixl:
        nixl_module.load_nixl("cpu")
    else:
        without_nixl(monkeypatch)
    assert chosen_transport("auto", device, is_one_host) == chosen


@pytest.mark.parametrize("name", ["nixl", "shm", "rdma"])
def test_a_transport_that_is_named_is_taken(name: str) -> None:
    assert chosen_transport(name, "cpu", True) == name
    assert chosen_transport(name, "cuda:0", False) == name


def test_a_gpu_needs_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    without_nixl(monkeypatch)
    with pytest.raises(ConfigError, match=r"nixl_cu13: .*nixl_cu12: "):
        create_transport("nixl", "cuda:0")
    with pytest.raises(ConfigError, match="use nixl"):
        create_transport("shm", "cuda:0")


@pytest.mark.parametrize(
    ("cuda", "first"), [("12.8", "nixl_cu12"), ("13.0", "nixl_cu13"), (None, "nixl_cu13")]
)
def test_a_card_takes_the_nixl_of_torchs_cuda(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, first: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    loaded = {name: ModuleType(name) for name in nixl_module.NIXL_MODULES}
    for name, module in loaded.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert nixl_module.load_nixl("cuda:0") is loaded[first]
    monkeypatch.setitem(sys.modules, first, None)
    [other] = loaded.keys() - {first}
    assert nixl_module.load_nixl("cuda:0") is loaded[other]


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
    with pytest.raises(PoolMismatch, match=match):
        check_blocks(source, target, 4, 8)
    check_blocks([3], [7], 4, 8)
