"""Blocks leave the pools of a worker's ranks for host memory as one rank would have them, and come
back to any others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from kv_transfer.tiers.rank_copies import RankCopies
from kv_transfer.transports.interface import PoolMemory, PoolPart
from protocol.layout import KvLayout
from tests.layouts import part_of

NUM_BLOCKS = 5
RANKS = [(1, 1, 0), (2, 1, 0), (4, 1, 1), (8, 1, 0), (1, 2, 3), (2, 3, 0)]
"""Ranks of a layer, more than heads, too; stages, of one or two layers; and those of peers whose
ranks the order of blocks is for."""
LAYOUT = KvLayout(
    model_fingerprint="model",
    dtype="bfloat16",
    num_layers=3,
    num_kv_heads=4,
    block_size=2,
    head_dim=4,
)


class Worker:
    """A worker's pools, and slots below them."""

    def __init__(self, ranks: tuple[int, int, int]) -> None:
        size, stages, peer_stages = ranks
        layout = msgspec.structs.replace(LAYOUT, peer_stages=peer_stages)
        self.layout = layout.shard(0, size, stages - 1, stages)
        self.parts = [
            np.zeros((NUM_BLOCKS, math.prod(each.block_shape)), np.uint16)
            for each in self.layout.ranks
        ]
        places = [
            PoolPart(part.ctypes.data, each.block_bytes, "cpu")
            for each, part in zip(self.layout.ranks, self.parts, strict=True)
        ]
        first, *others = places
        pool = PoolMemory(first.address, first.block_bytes, NUM_BLOCKS, "cpu", tuple(others))
        self.copies = RankCopies(pool, self.layout, NUM_BLOCKS)

    def fill(self, blocks: np.ndarray) -> None:
        """Let the pools hold `blocks` of the whole cache."""
        for each, part in zip(self.layout.ranks, self.parts, strict=True):
            part[:] = part_of(each, blocks)

    def holds(self, numbers: Sequence[int], blocks: np.ndarray) -> bool:
        """Whether these blocks of the pools are `blocks`, and the others are empty."""
        expected = np.zeros((NUM_BLOCKS, *LAYOUT.block_shape), np.uint16)
        expected[numbers] = blocks
        layout = self.layout
        found = Worker((layout.tp_size, layout.num_stages, layout.peer_stages))
        found.fill(expected)
        return all(map(np.array_equal, self.parts, found.parts))

    def slots(self, numbers: Sequence[int]) -> np.ndarray:
        data = [np.frombuffer(self.copies.slot(each), np.uint16) for each in numbers]
        return np.stack(data).reshape(len(numbers), *LAYOUT.block_shape)


def some_blocks() -> np.ndarray:
    return np.random.default_rng(1).integers(
        1, 1 << 16, (NUM_BLOCKS, *LAYOUT.block_shape), np.uint16
    )


@pytest.mark.parametrize("source", RANKS, ids=str)
@pytest.mark.parametrize("target", RANKS, ids=str)
def test_what_some_ranks_have_saved_others_load(
    source: tuple[int, int, int], target: tuple[int, int, int]
) -> None:
    blocks, former, later = some_blocks(), Worker(source), Worker(target)
    former.fill(blocks)
    former.copies.save([4, 1], [0, 3])
    assert np.array_equal(former.slots([0, 3]), blocks[[4, 1]])
    for slot in (0, 3):
        later.copies.slot(slot)[:] = former.copies.slot(slot)
    later.copies.load([3, 0], [2, 0])
    assert later.holds([2, 0], blocks[[1, 4]])


@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_blocks_move_within_the_pools(ranks: tuple[int, int, int]) -> None:
    blocks, worker = some_blocks(), Worker(ranks)
    worker.fill(blocks)
    worker.copies.move([0, 3], [2, 1])
    assert worker.holds(range(NUM_BLOCKS), blocks[[0, 3, 0, 3, 4]])
