"""Blocks leave the pools of a worker's ranks for host memory as one rank would have them, and come
back to any others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from engine.kv_pool import KvPool
from kv_transfer.tiers.rank_copies import RankCopies
from kv_transfer.tiers.units import Units
from kv_transfer.transports.interface import PoolMemory, PoolPart
from protocol.layout import KvGroup, KvLayout
from scheduling.pool_sizes import blocks_with
from tests.layouts import part_of
from worker.ranks.pool_memory import pool_memory

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
        units = Units.of(LAYOUT, NUM_BLOCKS * LAYOUT.block_bytes)
        self.copies = RankCopies(pool, self.layout, units, NUM_BLOCKS)

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


WINDOWED = msgspec.structs.replace(
    LAYOUT, num_layers=5, grouping=(KvGroup((0, 3)), KvGroup((1, 2, 4), 5))
)
HYBRID = msgspec.structs.replace(
    WINDOWED,
    dtype="float32",
    grouping=(KvGroup((0, 3)), KvGroup((1, 2, 4), 2, state_numbers=1000, state_parts=4)),
)
PAGES = 8


class Pools:
    """The pools of a worker with layers in groups, and slots below them."""

    def __init__(self, whole: KvLayout, ranks: tuple[int, int, int]) -> None:
        size, stages, peer_stages = ranks
        layout = msgspec.structs.replace(whole, peer_stages=peer_stages)
        layout = layout.shard(0, size, stages - 1, stages)
        first, *others = layout.ranks
        num_blocks = blocks_with(layout, PAGES * layout.blocks_per_page(0))
        self.pool = KvPool(first, num_blocks, others=[KvPool(each, num_blocks) for each in others])
        pool_bytes = self.pool.groups[0].num_blocks * whole.block_stride(0)
        self._units = Units.of(whole, pool_bytes)
        self.copies = RankCopies(pool_memory(self.pool), layout, self._units, 64)

    def units(self, *blocks: tuple[int, int]) -> list[int]:
        return [unit for group, block in blocks for unit in self._units.of_block(group, block)]

    def digests(self, *blocks: tuple[int, int]) -> list[bytes]:
        return [self.pool.groups[group].digest(block) for group, block in blocks]


@pytest.mark.parametrize("whole", [HYBRID, WINDOWED], ids=["states", "windows"])
@pytest.mark.parametrize("ranks", [(2, 1, 0), (1, 2, 0), (4, 2, 0), (2, 5, 0), (1, 2, 3)], ids=str)
def test_blocks_of_all_groups_leave_some_ranks_and_come_back_to_others(
    whole: KvLayout, ranks: tuple[int, int, int]
) -> None:
    """In units, of which a block may have several; then they move within the pools."""
    former, later = Pools(whole, (1, 1, 0)), Pools(whole, ranks)
    former.pool.tensor.view(torch.uint8).random_(0, 100)
    in_page = whole.blocks_per_page(1)
    kept, moved = [(0, 1), (1, 2 * in_page), (0, 0)], (1, 3 * in_page)
    digests = former.digests(*kept)
    slots = list(range(len(former.units(*kept))))
    former.copies.save(former.units(*kept), slots)
    for slot in slots:
        later.copies.slot(slot)[:] = former.copies.slot(slot)
    later.copies.load(slots, later.units(*kept))
    assert later.digests(*kept) == digests
    later.copies.save(later.units(*kept), slots[::-1])
    for slot in slots:
        assert later.copies.slot(slots[-1 - slot]) == former.copies.slot(slot)
    later.copies.move(later.units(kept[1]), later.units(moved))
    assert later.digests(moved) == digests[1:2]


def test_a_part_of_a_block_leaves_the_rest_as_it_was() -> None:
    """As when a later unit of the block was spoilt in its slot."""
    worker = Pools(HYBRID, (2, 2, 0))
    first, *rest = worker.units((1, 2))
    worker.copies.slot(0)[:] = bytes([7]) * len(worker.copies.slot(0))
    for unit in rest:
        worker.copies.slot(1)[:] = bytes([3]) * len(worker.copies.slot(1))
        worker.copies.load([1], [unit])
    worker.copies.load([0], [first])
    worker.copies.save([first, rest[0]], [2, 3])
    assert worker.copies.slot(2) == worker.copies.slot(0)
    assert worker.copies.slot(3) == worker.copies.slot(1)
