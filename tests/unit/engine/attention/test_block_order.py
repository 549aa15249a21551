"""Pools whose blocks lie for peers of other ranks, beside pools that lie layer by layer."""

from __future__ import annotations

import msgspec
import pytest
import torch

from engine.attention.base import Segment
from engine.attention.pool_layers import PoolLayers
from engine.attention.torch_attention import TorchAttention
from engine.kv_pool import KvPool
from protocol.block_order import cells
from protocol.layout import KvLayout

PLAIN = KvLayout(
    model_fingerprint="x",
    dtype="float32",
    num_layers=5,
    num_kv_heads=3,
    block_size=4,
    head_dim=8,
)
NUM_BLOCKS = 6


def pool_for(peer_stages: int) -> KvPool:
    """A pool for peers with so many stages, with other numbers everywhere."""
    pool = KvPool(msgspec.structs.replace(PLAIN, peer_stages=peer_stages), NUM_BLOCKS)
    generator = torch.Generator().manual_seed(4)
    for layer in range(PLAIN.num_layers):
        shape = (NUM_BLOCKS, *PLAIN.block_shape[1:])
        pool.layer(layer).copy_(torch.randn(shape, generator=generator))
    return pool


def test_cells_are_what_stages_of_both_have_in_common() -> None:
    layout = msgspec.structs.replace(PLAIN, peer_stages=3)
    assert cells(layout) == [range(2), range(2, 4), range(4, 5)]
    assert cells(layout.shard(0, 1, 0, 2)) == [range(2), range(2, 3)]
    assert cells(layout.shard(0, 1, 1, 2)) == [range(3, 4), range(4, 5)]


@pytest.mark.parametrize("peer_stages", [1, 2, 8])
def test_heads_of_a_cell_lie_together(peer_stages: int) -> None:
    pool, plain = pool_for(peer_stages), pool_for(0)
    parts = [
        plain.tensor[:, cell.start : cell.stop].permute(0, 3, 1, 2, 4, 5).flatten(1)
        for cell in cells(pool.layout)
    ]
    assert torch.equal(pool.tensor, torch.cat(parts, dim=1))


@pytest.mark.parametrize("peer_stages", [1, 2, 8])
def test_torchs_attention_and_digests_are_the_same(peer_stages: int) -> None:
    pools = [pool_for(peer_stages), pool_for(0)]
    backends = [TorchAttention(pool, (None, 3, None, 3, None)) for pool in pools]
    generator = torch.Generator().manual_seed(1)
    segments = [Segment(1, 9, [4, 0, 2]), Segment(5, 7, [1, 5])]
    for backend in backends:
        backend.plan(segments)
    for layer in range(PLAIN.num_layers):
        q, k, v = torch.randn((6, 12, 8), generator=generator).split([6, 3, 3], dim=1)
        assert torch.equal(*(backend.run(layer, q, k, v) for backend in backends))
    for block in range(NUM_BLOCKS):
        assert pools[0].digest(block) == pools[1].digest(block)


def test_kernels_on_a_card_find_each_layer() -> None:
    pools = [pool_for(2), pool_for(0)]
    layers = [PoolLayers(pool, (None,) * 5, 3, torch.float32) for pool in pools]
    for ours, plain in zip(layers[0].caches, layers[1].caches, strict=True):
        for one, other in zip(ours, plain, strict=True):
            assert torch.equal(one, other)
        assert ours[0].stride() == ours[1].stride()
        assert ours[0].stride(3) == 1
