"""Blocks of groups of layers on the ranks of a worker: their layers, their places in a page."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.layout import KvLayout, group_layers

GEMMA_3_4B = ([1024] * 5 + [None]) * 5 + [1024] * 4


def layout_of(windows: list[int | None], heads: int = 4, head_dim: int = 8) -> KvLayout:
    return KvLayout(
        model_fingerprint="m",
        dtype="bfloat16",
        num_layers=len(windows),
        num_kv_heads=heads,
        block_size=16,
        head_dim=head_dim,
        grouping=group_layers(windows, 10**6),
    )


@given(
    st.lists(st.sampled_from([None, 32, 512]), min_size=4, max_size=12),
    st.sampled_from([1, 2, 8]),
    st.integers(1, 4),
)
def test_blocks_of_all_groups_fit_into_the_pages_of_each_rank(
    windows: list[int | None], size: int, num_stages: int
) -> None:
    whole = layout_of(windows)
    groups = range(len(whole.groups))
    found: list[list[int]] = [[] for _ in groups]
    for rank in whole.shard(0, size, 0, num_stages).ranks:
        assert rank.unsharded == whole
        parts = [rank.of_group(index) for index in groups]
        assert sum(part.block_bytes for part in parts) == rank.block_bytes
        for index, part in enumerate(parts):
            count = rank.blocks_per_page(index)
            assert count == whole.blocks_per_page(index), "the same on all ranks"
            assert part.block_bytes <= rank.block_stride(index)
            assert rank.block_stride(index) % part.block_size == 0
            if whole.grouping:
                assert count * rank.block_stride(index) == rank.page_bytes
            if rank.tp_rank == 0:
                own = whole.groups[index].layers[part.layers.start : part.layers.stop]
                assert set(own) <= set(rank.layers)
                found[index] += own
    for index, group in enumerate(whole.groups):
        assert sorted(found[index]) == list(group.layers), "each layer in one stage"


@pytest.mark.parametrize("num_stages", [1, 2, 3, 6])
def test_pages_of_stages_waste_little(num_stages: int) -> None:
    """Where stages have layers of all groups in equal parts, nothing."""
    whole = layout_of(GEMMA_3_4B, head_dim=256)
    even = layout_of(([512] * 5 + [None]) * 6, head_dim=256)
    for layout, most in ((whole, 1.25), (even, 1)):
        page_bytes = layout.page_bytes
        ranks = layout.shard(0, 2, 0, num_stages).ranks
        assert sum(each.page_bytes for each in ranks) <= most * page_bytes


def test_the_pages_of_one_rank_are_blocks_without_gaps() -> None:
    layout = layout_of(GEMMA_3_4B)
    assert [layout.blocks_per_page(index) for index in (0, 1)] == [29, 5]
    for index in (0, 1):
        assert layout.block_stride(index) == layout.of_group(index).block_bytes


def test_the_fingerprint_does_not_depend_on_ranks() -> None:
    layout = layout_of([None, 32, 32])
    for rank in layout.shard(0, 2, 0, 2).ranks:
        assert rank.unsharded.fingerprint == layout.fingerprint
        assert rank.of_group(1).unsharded == layout.of_group(1)
    fields = msgspec.to_builtins(layout)
    assert msgspec.convert(fields, KvLayout) == layout
