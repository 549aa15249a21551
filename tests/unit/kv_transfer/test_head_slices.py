"""The pieces that move between pools of any ranks, against the blocks' own numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kv_transfer.head_slices import HeadSlices, Pieces, Share, plan_head_slices, plan_shares
from protocol.errors import ConfigError
from protocol.layout import KvLayout, group_layers
from tests.layouts import part_of


def rank(heads: int, tp_size: int, tp_rank: int, **changed: Any) -> KvLayout:
    parts: dict[str, Any] = {"num_layers": 3, "block_size": 2, "head_dim": 2} | changed
    return KvLayout(
        model_fingerprint="x",
        dtype="bfloat16",
        num_kv_heads=heads,
        tp_rank=tp_rank,
        tp_size=tp_size,
        **parts,
    )


sizes = st.sampled_from([1, 2, 3, 4, 6, 12, 24])
stages = st.integers(1, 4)
peers = st.integers(0, 5)


windows = st.lists(st.sampled_from([None, 4, 8]), min_size=4, max_size=9)


@given(st.tuples(sizes, stages, peers), st.tuples(sizes, stages, peers), windows)
@example((1, 1, 0), (1, 3, 2), [None] * 6)  # a series could run backwards on one side
@example((1, 2, 0), (2, 3, 0), [4, None] * 4)  # ranks whose blocks do not fill their pages
def test_every_rank_gets_its_block_whole_and_once(
    one: tuple[int, int, int], other: tuple[int, int, int], windows: list[int | None]
) -> None:
    """Whatever the ranks, with more of them than heads, stages of different sizes and without
    layers of a group, too, and in whatever order each side keeps its blocks."""
    own = {"num_layers": len(windows), "grouping": group_layers(windows, 99)}
    source, target = (
        rank(12, size, 0, num_stages=count, peer_stages=of_peers, **own)
        for size, count, of_peers in (one, other)
    )
    by_group = plan_shares(source, target)
    assert len(by_group) == len(source.groups)
    for group, shares in enumerate(by_group):
        writers, readers = (
            [each.of_group(group) for each in layout.ranks] for layout in (source, target)
        )
        shape = (1, *source.unsharded.of_group(group).block_shape)
        whole = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
        sent = [part_of(each, whole).view(np.uint8).reshape(-1) for each in writers]
        received = [np.zeros(each.block_bytes, np.uint8) for each in readers]
        written = [np.zeros(each.block_bytes, int) for each in readers]
        for share in shares:
            ends = (
                (share.slices.source, source, share.source),
                (share.slices.target, target, share.target),
            )
            for pieces, layout, number in ends:
                assert pieces.block_bytes == layout.ranks[number].block_stride(group)
            for at, to in share.slices.pieces():
                size = share.slices.source.size
                piece = sent[share.source][at : at + size]
                assert len(piece) == size
                received[share.target][to : to + size] = piece
                written[share.target][to : to + size] += 1
        for each in readers:
            assert (written[each.rank] == 1).all()
            assert received[each.rank].tobytes() == part_of(each, whole).tobytes()


@pytest.mark.parametrize("num_stages", [1, 2])
def test_equal_ranks_move_whole_blocks(num_stages: int) -> None:
    layout = rank(12, 2, 1, num_stages=num_stages)
    assert all(each.is_whole for each in plan_shares(layout, layout)[0])
    assert len(plan_shares(layout, layout)[0]) == 2 * num_stages


def test_layers_move_in_one_piece_between_ranks_with_the_same_heads() -> None:
    (shares,) = plan_shares(rank(12, 2, 0, num_stages=2), rank(12, 2, 0))
    assert [(share.source, share.target) for share in shares] == [(0, 0), (2, 0), (1, 1), (3, 1)]
    assert all(share.slices.source.count == 1 for share in shares)


def test_pieces_that_cannot_be_joined_are_few_series() -> None:
    """One for each head, in whichever order there are fewer."""
    layer_by_layer, in_cells = (rank(4, 1, 0, num_layers=6, peer_stages=each) for each in (0, 1))
    assert len(plan_head_slices(layer_by_layer, in_cells)) == 4
    assert len(plan_head_slices(in_cells, layer_by_layer)) == 4


def test_copies_of_a_head_share_the_work() -> None:
    """Two heads on four ranks: each of the other side's four ranks has a sender of its own, and
    fewer ranks get theirs from one copy."""

    def senders(shares: tuple[tuple[Share, ...], ...]) -> list[int]:
        return [share.source for share in shares[0]]

    assert senders(plan_shares(rank(2, 4, 0), rank(2, 4, 0))) == [0, 1, 2, 3]
    assert senders(plan_shares(rank(2, 4, 0), rank(2, 2, 0))) == [0, 3]
    assert senders(plan_shares(rank(2, 2, 0), rank(2, 4, 0))) == [0, 0, 1, 1]


def test_ranks_without_a_common_head_or_layer_share_nothing() -> None:
    assert plan_head_slices(rank(12, 2, 0), rank(12, 3, 2)) == ()
    first, second = (rank(12, 1, 0, stage=stage, num_stages=2) for stage in (0, 1))
    assert plan_head_slices(first, second) == ()


def test_pools_of_different_caches_are_refused() -> None:
    with pytest.raises(ConfigError, match="differ in more"):
        plan_shares(rank(12, 2, 0), rank(12, 3, 0, block_size=4))


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (rank(12, 5, 0), "12 KV heads have no rank 0 of 5"),
        (rank(12, 1 << 30, 0), "no rank 0 of"),
        (rank(12, 1, 0, num_stages=4), "3 layers have no stage 0 of 4"),
        (rank(12, 1, 0, peer_stages=65), "no worker has 65 stages, only up to 64"),
    ],
)
def test_ranks_that_a_cache_cannot_have_are_refused(layout: KvLayout, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan_shares(rank(12, 1, 0), layout)


@pytest.mark.parametrize(
    "outside", [(16, 17), (16, 4, 5, 0, 4), (16, 4, 1, -4), (16, 4, 2, 8, -4), (16, 0), (16, 4, 0)]
)
def test_pieces_cannot_leave_their_block(outside):
    with pytest.raises(ValueError, match="leaves its block"):
        Pieces(*outside)


def test_what_is_read_is_what_is_written():
    with pytest.raises(ValueError, match="differ"):
        HeadSlices(Pieces(16, 4, 4, 0, 4), Pieces(16, 4, 2, 0, 8))
