"""Head slices between pools of any two tensor-parallel sizes, against the heads' own numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.head_slices import HeadSlices, Pieces, plan_head_slices
from protocol.errors import ConfigError
from protocol.layout import KvLayout


def rank(heads: int, tp_size: int, tp_rank: int, **changed: int) -> KvLayout:
    parts = {"num_layers": 3, "block_size": 2, "head_dim": 2} | changed
    return KvLayout(
        model_fingerprint="x",
        dtype="bfloat16",
        num_kv_heads=heads // tp_size,
        tp_rank=tp_rank,
        tp_size=tp_size,
        **parts,
    )


def block(layout: KvLayout, whole: np.ndarray) -> np.ndarray:
    """The part of `whole` [layers, 2, all heads, block_size, head_dim] that the rank holds."""
    first = layout.tp_rank * layout.num_kv_heads
    return np.ascontiguousarray(whole[:, :, first : first + layout.num_kv_heads])


sizes = st.sampled_from([1, 2, 3, 4, 6, 12])


@given(sizes, sizes, st.integers(1, 3))
def test_every_target_rank_gets_its_block_whole_and_once(source_size, target_size, num_layers):
    heads = 12
    shape = (num_layers, 2, heads, 2, 2)
    whole = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    for target_rank in range(target_size):
        target = rank(heads, target_size, target_rank, num_layers=num_layers)
        received = np.zeros(target.block_bytes, np.uint8)
        written = np.zeros(target.block_bytes, int)
        for source_rank in range(source_size):
            source = rank(heads, source_size, source_rank, num_layers=num_layers)
            sent = block(source, whole).view(np.uint8).reshape(-1)
            slices = plan_head_slices(source, target)
            for at, to in slices.pieces() if slices else ():
                size = slices.source.size
                assert at + size <= source.block_bytes
                received[to : to + size] = sent[at : at + size]
                written[to : to + size] += 1
        assert (written == 1).all()
        assert received.tobytes() == block(target, whole).tobytes()


def test_equal_sizes_move_whole_blocks():
    layout = rank(12, 2, 1)
    slices = plan_head_slices(layout, layout)
    assert slices.source == slices.target == Pieces.whole(layout.block_bytes)
    assert list(slices.pieces()) == [(0, 0)]


def test_ranks_without_a_common_head_share_nothing():
    assert plan_head_slices(rank(12, 2, 0), rank(12, 3, 2)) is None


def test_pools_of_different_caches_are_refused():
    with pytest.raises(ConfigError, match="differ in more"):
        plan_head_slices(rank(12, 2, 0), rank(12, 3, 0, block_size=4))


@pytest.mark.parametrize(
    "outside", [(16, 17), (16, 4, 5, 0, 4), (16, 4, 1, -4), (16, 0), (16, 4, 0)]
)
def test_pieces_cannot_leave_their_block(outside):
    with pytest.raises(ValueError, match="leaves its block"):
        Pieces(*outside)


def test_what_is_read_is_what_is_written():
    with pytest.raises(ValueError, match="differ"):
        HeadSlices(Pieces(16, 4, 4, 0, 4), Pieces(16, 4, 2, 0, 8))
